"""Size of the seed of a vision space by formulas, in a millisecond and without torch."""

from __future__ import annotations

from search_spaces.vision.space import VisionSpace


def seed_size(space: VisionSpace) -> tuple[int, int]:
    """Return (multiply-adds of one image, parameters) of the space's seed.

    Examples
    --------
    >>> seed_size(VisionSpace((3, 32, 32), 10, cells_per_stage=6, filters=32))  # paper: 0.4M
    (60671232, 371754)
    """
    colors, height, width = space.image_shape

    def pixels(level: int) -> int:
        # Every halving rounds odd sizes up.
        return -(-height // 2**level) * -(-width // 2**level)

    stem = space.stem_shape()
    kernel = 9 * colors * stem.channels
    multiply_adds, parameters = kernel * pixels(stem.level), kernel + 2 * stem.channels
    prev = stem
    for out in space.shapes():
        c = out.channels
        if prev.channels != c:  # ReLU, 1x1 conv, batch norm to the cell's width
            multiply_adds += prev.channels * c * pixels(prev.level)
            parameters += prev.channels * c + 2 * c
        separable = 2 * (9 * c + c * c)  # depthwise and pointwise, twice, each with a batch norm
        multiply_adds += separable * pixels(out.level)
        parameters += separable + 4 * c
        if out.level > prev.level:  # the skip is a factorized reduce
            multiply_adds += c * c * pixels(out.level)
            parameters += c * c + 2 * c
        prev = out
    head = prev.channels * space.num_classes
    return multiply_adds + head, parameters + 2 * prev.channels + head + space.num_classes
