"""The space that fits an input and limits of size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nni_petridish.core.space import Space
from nni_petridish.errors import ConfigError
from nni_petridish.search.complexity import COMPLEXITIES
from nni_petridish.tasks.sizes import sizes_of
from search_spaces.vector.space import VectorSpace
from search_spaces.vision.space import MIN_IMAGE_SIZE, VisionSpace

_WIDTHS = (32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
_FILTERS = (16, 12, 8, 6, 4, 3, 2)
_DEFAULT_FILTERS = 8
_SHARE = 0.3
"""The largest share of the limit that a seed takes if it can, so that there is room to grow."""


def is_image(shape: tuple[int, ...]) -> bool:
    """Return whether inputs of this shape are images for the vision space."""
    return len(shape) == 3 and min(shape[1:]) >= MIN_IMAGE_SIZE


def choose_space(shape: tuple[int, ...], outputs: int, limits: Mapping[str, float]) -> Space:
    """Return the widest space whose seed leaves room to grow, or else one whose seed fits.

    Parameters
    ----------
    shape
        (features,) or (channels, height, width).
    outputs
        The number of outputs.
    limits
        The largest sizes, by the name of the complexity; none for a space of moderate size.
    """
    spaces = list(_spaces(shape, outputs))
    if not limits:
        return spaces[_FILTERS.index(_DEFAULT_FILTERS)] if is_image(shape) else spaces[0]
    sizes: dict[str, float] = {}
    fitting = None
    for space in spaces:  # from wide to narrow
        sizes = sizes_of(space, space.build(space.seed()), tuple(limits))
        if all(sizes[name] <= _SHARE * limit for name, limit in limits.items()):
            return space
        if all(sizes[name] <= limit for name, limit in limits.items()):
            fitting = space
    if fitting is None:
        name = max(limits, key=lambda name: sizes[name] / limits[name])
        least, limit = (COMPLEXITIES[name].text(value) for value in (sizes[name], limits[name]))
        raise ConfigError(
            f"max_{name} must be at least {least} for inputs of shape {shape} and {outputs} outputs"
            f" but got {limit}."
        )
    return fitting


def describe_space(space: Space) -> dict[str, Any]:
    """Return the space with its name, as plain data."""
    assert isinstance(space, VectorSpace | VisionSpace)
    return {"space": space.name, **space.describe()}


def make_space(described: Mapping[str, Any]) -> Space:
    """Return the space of `describe_space`."""
    options = {name: value for name, value in described.items() if name != "space"}
    return (VisionSpace if described["space"] == VisionSpace.name else VectorSpace)(**options)


def _spaces(shape: tuple[int, ...], outputs: int) -> Iterator[Space]:
    if is_image(shape):
        stages = 3 if min(shape[1:]) >= 16 else 2
        for filters in _FILTERS:
            yield VisionSpace(shape, outputs, cells_per_stage=1, filters=filters, stages=stages)
        return
    for width in _WIDTHS:
        yield VectorSpace(shape[0], outputs, width)
    yield VectorSpace(shape[0], outputs, 1, num_cells=1)
