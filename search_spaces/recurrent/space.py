"""The recurrent space of the paper: language models whose cell belongs to DARTS's space.

The space is a description; torch is needed only to build one of its networks.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

from nni_petridish.core.genotype import Genotype
from nni_petridish.errors import ConfigError, GenotypeError
from nni_petridish.search.constraints import Count, Depth, OneOf, Width, check_fields
from search_spaces.recurrent.genotype import ACTIVATIONS, RECURRENT_PRIMITIVES, RecurrentGenotype

if TYPE_CHECKING:
    from torch import Tensor, nn

    from search_spaces.recurrent.network import RecurrentNetwork


@dataclass(frozen=True)
class RecurrentSpace:
    """The space of recurrent language models that Petridish grows.

    Parameters
    ----------
    vocabulary
        The number of words (Penn Treebank: 10,000).
    embedding
        Width of the embedding (paper: 850).
    hidden
        Width of the cell. By default, that of the embedding; otherwise a projection to the width of
        the embedding precedes the decoder.
    max_nodes
        The maximum number of nodes of a cell besides s0 (paper: 8, which is 23M parameters).
    ops
        The eligible primitives. ``none``, no connection, is allowed and never added.

    Examples
    --------
    >>> import torch
    >>> from search_spaces import RecurrentSpace
    >>> space = RecurrentSpace(vocabulary=50, embedding=8)
    >>> net = space.build(space.seed())
    >>> net.genotype.to_json()
    '{"version": 1, "space": "recurrent", "nodes": [["relu", 0]]}'
    >>> logits, state = net(torch.zeros(5, 2, dtype=torch.int64))
    >>> logits.shape, state.shape
    (torch.Size([5, 2, 50]), torch.Size([2, 8]))
    """

    vocabulary: Count
    embedding: Width = 850
    hidden: Width | None = None
    max_nodes: Depth = 8
    ops: Sequence[Annotated[str, OneOf(RECURRENT_PRIMITIVES)]] = RECURRENT_PRIMITIVES

    name = "recurrent"

    def __post_init__(self) -> None:
        if self.hidden is None:
            object.__setattr__(self, "hidden", self.embedding)
        object.__setattr__(self, "ops", tuple(self.ops))
        check_fields(self)
        if not self.activations():
            allowed = ", ".join(ACTIVATIONS)
            raise ConfigError(f"ops must be among {allowed} (and none) but got {self.ops!r}.")

    def activations(self) -> list[str]:
        """Return the eligible activations: the ops without ``none``."""
        return [op for op in self.ops if op != "none"]

    def seed(self) -> RecurrentGenotype:
        """Return the cell with one relu node on s0, where growth starts."""
        return RecurrentGenotype.seed()

    def build(self, genotype: Genotype, *, for_retraining: bool = False) -> RecurrentNetwork:
        """Build a network with fresh weights.

        Parameters
        ----------
        genotype
            The architecture.
        for_retraining
            Whether to fix the output at the mean of the nodes, as in DARTS, to train a found cell
            from scratch. Otherwise the shares of the nodes start at the mean and are trained.
        """
        from search_spaces.recurrent.network import RecurrentNetwork

        return RecurrentNetwork(self, self.check(genotype), for_retraining)

    def check(self, genotype: Genotype) -> RecurrentGenotype:
        """Return the genotype if it fits this space, else raise `GenotypeError`."""
        own = RecurrentGenotype.require(genotype)
        if len(own.nodes) > self.max_nodes:
            raise GenotypeError(
                f"nodes: the space has at most {self.max_nodes} but got {len(own.nodes)}."
            )
        return own

    def model_space(self, max_learners: int | None = None) -> Any:
        """Return this space for NNI's experiments and strategies, see `GrowableModelSpace`.

        Random architectures have at most ``max_learners`` nodes besides the first, by default as
        many as a cell can have.
        """
        adapter = importlib.import_module("nni_petridish.nni_adapter")  # a space needs no NNI
        most = max_learners or max(1, self.max_nodes - 1)
        return adapter.model_space(self, most, max_shortcuts=1)

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds of one word, parameters) of a network of this space."""
        from nni_petridish.core.complexity import count_parameters

        return cast("RecurrentNetwork", net).multiply_adds(), count_parameters(net)

    def example(self, net: nn.Module) -> tuple[Tensor, ...]:
        """Return one word, (steps, batch), for a network of this space."""
        import torch

        return (torch.zeros(1, 1, dtype=torch.int64),)

    def describe(self) -> dict[str, Any]:
        """Return the space as plain data; ``RecurrentSpace(**data)`` is an equal space."""
        return {
            "vocabulary": self.vocabulary,
            "embedding": self.embedding,
            "hidden": self.hidden,
            "max_nodes": self.max_nodes,
            "ops": list(self.ops),
        }
