"""Networks of the vector space: a linear stem, dense cells, batch norm and ReLU, a linear head."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish.core.site import Site
from search_spaces.any_model.vector_ops import ConcatProjectVector, make_vector_op, project_vector
from search_spaces.vector.genotype import VECTOR_SOURCES, VectorGenotype
from search_spaces.vector.space import VectorSpace
from search_spaces.vision.genotype import macro_key


class DenseCell(Site):
    """One cell: a site x_k whose seed is ``relu(prev) + skip(prev)``.

    Parameters
    ----------
    key
        The key of the α table: ``cell_00``, ...
    width
        The width of the inputs and of x_k.
    op_names
        The eligible operations.
    """

    def __init__(self, key: str, width: int, op_names: Sequence[str]) -> None:
        super().__init__(key, VECTOR_SOURCES, op_names)
        self.width = width
        self.seed = make_vector_op("relu", width)

    def make_op(self, source: str, op: str) -> nn.Module:
        """Make a candidate op; all sources have x_k's width."""
        return make_vector_op(op, self.width)

    def make_merge(self, merge: str, weights: Sequence[float] | None, n: int) -> nn.Module:
        """Make op_merge: concatenation and projection (the paper's choice), or a weighted sum."""
        if merge == "concat_project":
            return ConcatProjectVector(self.width, n, weights)
        return super().make_merge(merge, weights, n)

    def forward(self, prev_prev: Tensor, prev: Tensor) -> Tensor:
        """Return x_k, boosted by its weak learners."""
        z = {"prev_prev": prev_prev, "prev": prev}
        return self.boost(self.seed(prev) + prev, z)


class VectorNetwork(nn.Module):
    """A network of the vector space, built by `VectorSpace.build`."""

    genotype: VectorGenotype

    def __init__(self, space: VectorSpace, genotype: VectorGenotype) -> None:
        super().__init__()
        self.genotype = genotype
        self.stem = project_vector(space.num_features, space.width)
        self.cells = nn.ModuleList()
        for i in range(space.num_cells):
            cell = DenseCell(macro_key(i), space.width, space.ops)
            for learner in genotype.cells[cell.key]:
                cell.add_learner(learner, genotype.merge)
            self.cells.append(cell)
        self.norm = nn.BatchNorm1d(space.width)
        self.head = nn.Linear(space.width, space.num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of a batch of vectors, shape (n, num_outputs)."""
        prev_prev = prev = self.stem(x)
        for cell in self.cells:
            prev_prev, prev = prev, cell(prev_prev, prev)
        return self.head(F.relu(self.norm(prev)))
