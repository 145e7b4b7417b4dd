"""A user's space of NNI's cells and choices, such as those of ``nni.nas.hub``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nni_petridish.core.complexity import count_for_inputs, count_parameters
from nni_petridish.core.genotype import Genotype
from nni_petridish.core.grow import lay_out, sites
from nni_petridish.errors import GenotypeError
from nni_petridish.nni_adapter.compat.nas import model_context
from nni_petridish.nni_adapter.user_spaces.creation import build_growable
from nni_petridish.nni_adapter.user_spaces.decisions import Decision, Sample
from nni_petridish.nni_adapter.user_spaces.first_pass import FirstPass
from nni_petridish.nni_adapter.user_spaces.genotype import ChoiceGenotype
from nni_petridish.nni_adapter.user_spaces.reading import read_base, read_decisions
from nni_petridish.nni_adapter.user_spaces.sites import DepthSite, UserSite
from nni_petridish.search.records import plain


class _Parsed(NamedTuple):
    decisions: dict[str, Decision]
    base: Sample
    choices: dict[str, str]


@dataclass(frozen=True)
class UserSpace:
    """A user's model space, with the decisions in it that can grow.

    Parameters
    ----------
    symbol
        The class of the model space.
    args, kwargs
        Arguments of the class.
    fixed
        Labels of the space and their values, which do not grow.

    Raises
    ------
    ConfigError
        If nothing in the space can grow, or ``fixed`` is not part of a sample of it.
    """

    symbol: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    name = "nni"

    def __post_init__(self) -> None:
        _ = self._parsed

    def __reduce__(self) -> Any:
        return _unread, (self.symbol, self.args, self.kwargs, self.fixed)

    def __hash__(self) -> int:
        return hash(self.symbol)

    @functools.cached_property
    def _parsed(self) -> _Parsed:
        # The space as NNI makes it, with no choice made, is needed only here.
        space = self._make()
        decisions = read_decisions(space, self.fixed)
        choices = {label: repr(mutable) for label, mutable in space.simplify().items()}
        return _Parsed(decisions, read_base(space, decisions, self.fixed), choices)

    @property
    def decisions(self) -> dict[str, Decision]:
        """The decisions that can grow, by label."""
        return self._parsed.decisions

    @property
    def base(self) -> Sample:
        """The sample of the architecture that growth starts from."""
        return self._parsed.base

    def seed(self) -> ChoiceGenotype:
        """Return the architecture in which nothing has grown."""
        return ChoiceGenotype()

    def build(self, genotype: Genotype) -> nn.Module:
        """Build a network of the user's class that can grow, with fresh weights."""
        own = self.check(genotype)
        net = build_growable(self._make, self.decisions, self.base)
        done: set[int] = set()
        # A chosen layer may contain further cells and choices.
        while new := [s for s in sites(net) if isinstance(s, UserSite) and id(s) not in done]:
            for site in new:
                done.add(id(site))
                for learner in own.learners(site.key):
                    site.add_learner(learner, "weighted_sum")
        for module in list(net.modules()):
            if isinstance(module, DepthSite):
                module.hide_unused_blocks()
        lay_out(net)  # the same memory format as in growth
        net.first_pass = FirstPass(net)  # type: ignore[assignment]
        net.genotype = own  # type: ignore[assignment]
        return net

    def check(self, genotype: Genotype) -> ChoiceGenotype:
        """Return the genotype if it fits this space, else raise `GenotypeError`."""
        own = ChoiceGenotype.require(genotype)
        for label, learners in own.choices.items():
            if label not in self.decisions:
                known = ", ".join(self.decisions)
                raise GenotypeError(f"choices: must be among {known} but got {label!r}.")
            decision = self.decisions[label]
            for i, learner in enumerate(learners):
                before = learners[:i]
                foreign = set(learner) - set(decision.eligible(before))
                if foreign or len(learner) > decision.room(before):
                    raise GenotypeError(f"choices.{label}[{i}]: {learner!r} is not of the space.")
        return own

    def sample(self, genotype: Genotype) -> Sample:
        """Return NNI's sample of an architecture, which freezes the user's space."""
        own = self.check(genotype)
        grown = [decision.sample(own.learners(label)) for label, decision in self.decisions.items()]
        return functools.reduce(lambda a, b: a | b, grown, dict(self.base))

    def frozen(self, genotype: Genotype) -> nn.Module:
        """Build the network that NNI makes of an architecture, with fresh weights."""
        with model_context(self.sample(genotype)):
            made: nn.Module = self._make()
        return made

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds of one example, parameters) of the network as NNI makes it."""
        first_pass: Any = net.first_pass
        inputs = list(first_pass.examples())
        with torch.random.fork_rng(devices=[]):  # weights do not matter here
            frozen = self.frozen(net.genotype)  # type: ignore[arg-type]
        return count_for_inputs(frozen, inputs), count_parameters(frozen)

    def example(self, net: nn.Module) -> tuple[Tensor, ...]:
        """Return zeros in the shape of one example of every input."""
        first_pass: Any = net.first_pass
        return tuple(first_pass.examples())

    def describe(self) -> dict[str, Any]:
        """Return the class, the choices and the fixed values, as plain data."""
        return {
            "class": f"{self.symbol.__module__}.{self.symbol.__qualname__}",
            "choices": self._parsed.choices,
            "settled": plain(dict(self.fixed)),  # the key that galleries have always had
        }

    def _make(self) -> Any:
        return self.symbol(*self.args, **self.kwargs)


def _unread(symbol: Any, args: Any, kwargs: Any, fixed: Any) -> UserSpace:
    """Return a space that is parsed on first use: NNI loads parameters that it does not use."""
    space = object.__new__(UserSpace)
    space.__dict__.update(symbol=symbol, args=args, kwargs=kwargs, fixed=fixed)
    return space
