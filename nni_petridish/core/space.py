"""The contract of a search space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nni_petridish.core.genotype import Genotype


class Space(Protocol):
    """A set of architectures, and how to build their networks."""

    def seed(self) -> Genotype:
        """Return the simplest architecture of the space, where growth starts."""
        ...

    def build(self, genotype: Genotype) -> nn.Module:
        """Build a network that can grow, with fresh weights and the genotype as an attribute.

        Building draws from torch's default generator only.
        """
        ...

    def check(self, genotype: Genotype) -> Genotype:
        """Return the genotype if it fits this space, else raise `GenotypeError`."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return the space as plain data, ready for JSON.

        If the space is made from plain data, the description is complete: ``Space(**data)`` is an
        equal space.
        """
        ...

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds of one example, parameters) of a network of this space."""
        ...

    def example(self, net: nn.Module) -> tuple[Tensor, ...]:
        """Return inputs of a network for one example, for measurements of latency."""
        ...


@runtime_checkable
class Widening(Protocol):
    """A space whose architectures can become wider."""

    def widened(self, genotype: Genotype, factor: float) -> Genotype:
        """Return the architecture with so many times the channels, and at least one more."""
        ...

    def place_channels(
        self, name: str, module: nn.Module, inputs: bool, old: int, new: int
    ) -> Tensor:
        """Return the place of every old channel in a module of a wider network."""
        ...
