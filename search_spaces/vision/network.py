"""Networks of the vision space.

The layers are: stem, N normal cells, reduction, N normal, reduction, N normal, BN-ReLU, global
average pool, linear. A reduction halves the resolution and doubles the filters. A cell of the seed,
normal or reduction, is ``sep_conv_3x3(prev) + skip(prev)``; everything else is grown. For ImageNet
the stem is strided and followed by two transition cells, which are reductions too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish.core.genotype import Shortcut
from nni_petridish.core.site import Site
from nni_petridish.errors import ConfigError
from nni_petridish.kernels.moments import has_hooks
from nni_petridish.kernels.prepared import evaluated_sum, plus
from search_spaces.vision.genotype import VISION_SOURCES, VisionGenotype
from search_spaces.vision.ops import ConcatProject, DropPath, FactorizedReduce, make_op, project
from search_spaces.vision.space import TRANSITION, Shape, VisionSpace


class Cell(Site):
    """One cell: a site x_k whose seed is ``sep_conv_3x3(prev) + skip(prev)``.

    Parameters
    ----------
    key
        The key of the α table: ``normal``, ``reduce`` or ``cell_00``, ...
    prev_prev, prev
        The output shapes of the previous two cells.
    out
        The output shape of this cell.
    op_names
        The eligible operations.
    """

    def __init__(
        self, key: str, prev_prev: Shape, prev: Shape, out: Shape, op_names: Sequence[str]
    ) -> None:
        super().__init__(key, VISION_SOURCES, op_names)
        self.raw = {"prev_prev": prev_prev, "prev": prev}
        self.out = out
        # Ops expect the cell's width at the resolution of prev; in a reduction they are strided.
        self.level = prev.level
        self.need_adapter("prev")
        self.seed = make_op("sep_conv_3x3", out.channels, self._stride("prev"), affine=True)
        self.skip = (
            nn.Identity()
            if out.level == prev.level
            else FactorizedReduce(out.channels, out.channels)
        )
        self.drop_path = DropPath()

    def make_adapter(self, source: str) -> nn.Module | None:
        """Make a projection to the cell's width that halves a resolution higher than prev's."""
        raw = self.raw[source]
        if raw.level < self.level:
            return FactorizedReduce(raw.channels, self.out.channels)
        return None if raw.channels == self.out.channels else project(*self._widths(source))

    def make_op(self, source: str, op: str) -> nn.Module:
        """Make a candidate op; in a reduction, ops on the cell's inputs are strided."""
        return make_op(op, self.out.channels, self._stride(source))

    def make_merge(self, merge: str, weights: Sequence[float] | None, n: int) -> nn.Module:
        """Make op_merge: concatenation and projection (the paper's choice), or a weighted sum."""
        if merge == "concat_project":
            return ConcatProject(self.out.channels, n, weights)
        return super().make_merge(merge, weights, n)

    def drop_factors(self, shortcut: Shortcut, value: Tensor) -> Tensor | None:
        """Return the factors of drop-path for all shortcuts except identities."""
        return None if shortcut[1] == "identity" else self.drop_path.factors(value)

    def forward(self, prev_prev: Tensor, prev: Tensor) -> Tensor:
        """Return x_k, boosted by its weak learners."""
        z = self.adapt({"prev_prev": prev_prev, "prev": prev})
        return self.boost(self._x_k(z["prev"]), z)

    def _x_k(self, prev: Tensor) -> Tensor:
        """Return ``sep_conv_3x3(prev) + skip(prev)``."""
        if not (self.training or self.drop_path.training or has_hooks(self.drop_path)):
            x_k = evaluated_sum([self.seed, self.skip], prev)
            if x_k is not None:
                return x_k
        if self.drop_path.drops or has_hooks(self.drop_path):
            return self.drop_path(self.seed(prev)) + self.skip(prev)
        return plus(self.seed, prev, self.skip(prev))

    def _stride(self, source: str) -> int:
        return 2 if source in self.sources and self.out.level > self.level else 1

    def _widths(self, source: str) -> tuple[int, int]:
        return self.raw[source].channels, self.out.channels


class AuxiliaryHead(nn.Module):
    """A second classifier at two thirds of the depth, used in retraining only."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Conv2d(channels, 128, 1, bias=False),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            nn.Conv2d(128, 768, 2, bias=False),
            nn.BatchNorm2d(768),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(768, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the auxiliary logits."""
        return self.classifier(self.features(x).flatten(1))


class VisionNetwork(nn.Module):
    """A network of the vision space, built by `VisionSpace.build`."""

    genotype: VisionGenotype
    memory_format = torch.channels_last

    def __init__(self, space: VisionSpace, genotype: VisionGenotype, auxiliary: bool) -> None:
        super().__init__()
        self.genotype = genotype
        stem, colors = space.stem_shape(), space.image_shape[0]
        self.stem = nn.Sequential(
            nn.Conv2d(colors, stem.channels, 3, 2**stem.level, padding=1, bias=False),
            nn.BatchNorm2d(stem.channels),
        )
        self.cells = nn.ModuleList()
        prev_prev, prev = stem, stem
        for key, out in zip(space.keys(), space.shapes(), strict=True):
            # In macro mode the transitions stay those of the seed, as in the paper's transfers.
            fixed = key == TRANSITION
            cell = Cell(key, prev_prev, prev, out, () if fixed else space.ops)
            for learner in () if fixed else genotype.cells[key]:
                cell.add_learner(learner, genotype.merge)
            self.cells.append(cell)
            prev_prev, prev = prev, out
        self.norm = nn.BatchNorm2d(prev.channels)
        self.classifier = nn.Linear(prev.channels, space.num_classes)
        self.auxiliary_at = len(self.cells) - space.num_cells + 2 * space.num_cells // 3
        self.auxiliary = (
            AuxiliaryHead(space.shapes()[self.auxiliary_at].channels, space.num_classes)
            if auxiliary
            else None
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        return self._classify(self._run(images)[0])

    def forward_with_auxiliary(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and those of the auxiliary head."""
        if self.auxiliary is None:
            raise ConfigError("the network has no auxiliary head: build it with auxiliary=True.")
        features, middle = self._run(images)
        return self._classify(features), self.auxiliary(middle)

    def set_drop_path(self, keep: float, progress: float) -> None:
        """Set the keep probability of drop-path, which decreases linearly from 1 to ``keep``.

        It decreases both with depth and with training progress.
        """
        drop_paths = [m for m in self.cells.modules() if isinstance(m, DropPath)]
        for i, drop_path in enumerate(drop_paths):
            depth = (i + 1) / len(drop_paths)
            drop_path.keep = 1.0 - (1.0 - keep) * depth * progress

    def _run(self, images: Tensor) -> tuple[Tensor, Tensor]:
        # Depthwise and 1x1 convs preserve the layout of their input, so it is set once, here.
        prev_prev = prev = self.stem(images).contiguous(memory_format=self.memory_format)
        middle = prev
        for i, cell in enumerate(self.cells):
            prev_prev, prev = prev, cell(prev_prev, prev)
            if i == self.auxiliary_at:
                middle = prev
        return prev, middle

    def _classify(self, features: Tensor) -> Tensor:
        return self.classifier(_pixel_mean(F.relu(self.norm(features))))


def _pixel_mean(x: Tensor) -> Tensor:
    """Return the mean of each channel of each image."""
    # The gradient of x.mean((2, 3)) is laid out by channels, whatever x is. What is before then
    # reads two layouts, which takes four times as long.
    if torch.is_grad_enabled() and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1).mean((1, 2))
    return x.mean((2, 3))
