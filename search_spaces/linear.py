"""Linear regression as a network that can grow: the bridge from FSLR and LARS to Petridish.

There is one layer x_k, the prediction ŷ. Its eligible inputs are the standardized features, and the
only operation is the identity. Then Eq. 5 is x_c = Σ_j α_j z_j, the gradient of α_j is minus the
correlation of feature j with the residual, and a growth adds features to ŷ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from nni_petridish.core.complexity import count_parameters
from nni_petridish.core.genotype import Genotype, Learner, Shortcut, as_list
from nni_petridish.core.site import Site
from nni_petridish.core.weak_learner import WeakLearner, WeightedSum
from nni_petridish.errors import ConfigError, GenotypeError

KEY = "prediction"
OP = "identity"


def feature_name(index: int) -> str:
    """Return the name of a feature as an input: ``x0``, ``x1``, ..."""
    return f"x{index}"


def feature_index(name: str) -> int:
    """Return the column of the feature with this name."""
    return int(name[1:])


@dataclass(frozen=True)
class LinearGenotype(Genotype):
    """The features that each weak learner of the prediction merges.

    Parameters
    ----------
    learners
        The weak learners in the order of growth, each a list of ``("x<column>", "identity")``.

    Examples
    --------
    >>> genotype = LinearGenotype.seed().grown({"prediction": (("x2", "identity"),)})
    >>> genotype.features
    (2,)
    >>> genotype.to_json()
    '{"version": 1, "space": "linear", "learners": [[["x2", "identity"]]]}'
    """

    learners: Sequence[Learner]

    space: ClassVar[str] = "linear"
    table: ClassVar[str] = "learners"

    def __post_init__(self) -> None:
        if as_list(self.learners) is None:
            raise GenotypeError(f"learners: must be a list but got {self.learners!r}.")
        checked = tuple(_check_learner(i, learner) for i, learner in enumerate(self.learners))
        object.__setattr__(self, "learners", checked)

    @classmethod
    def seed(cls) -> LinearGenotype:
        """Return the model without features, which predicts a constant."""
        return cls(())

    @property
    def features(self) -> tuple[int, ...]:
        """The columns in use, in the order in which they were added."""
        names = [source for learner in self.learners for source, _ in learner]
        return tuple(feature_index(name) for name in dict.fromkeys(names))

    def learners_by_key(self) -> Mapping[str, Sequence[Learner]]:
        """Return the weak learners of the prediction."""
        return {KEY: self.learners}

    def _with_learners(
        self, learners: Mapping[str, Sequence[Learner]], merge: str | None
    ) -> LinearGenotype:
        """Return the genotype with these weak learners; every merge is a weighted sum here."""
        return LinearGenotype(learners[KEY])


class Prediction(Site):
    """The layer x_k = ŷ, which starts as a constant.

    Parameters
    ----------
    n_features
        The number of features to choose from.
    """

    def __init__(self, n_features: int) -> None:
        super().__init__(KEY, [feature_name(j) for j in range(n_features)], [OP])
        self.intercept = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.identity = nn.Identity()

    def make_op(self, source: str, op: str) -> nn.Module:
        """Return the identity: the network standardizes the features."""
        return self.identity

    def eligible_shortcuts(self) -> list[Shortcut]:
        """Return the features; outputs of weak learners are sums of them and add nothing new."""
        return [(source, OP) for source in self.sources]

    def single(self, feature: int) -> WeakLearner:
        """Return a weak learner h = z_feature with η = 0."""
        learner = WeakLearner([(feature_name(feature), OP)], [self.identity], WeightedSum([1.0]))
        return learner.to(self.intercept).train(self.training)

    def inputs(self, features: Tensor) -> dict[str, Tensor]:
        """Return In(x_k): the columns of the standardized features."""
        return dict(zip(self.sources, features.unbind(1), strict=True))

    def forward(self, features: Tensor) -> Tensor:
        """Return ŷ."""
        return self.boost(self.intercept.expand(len(features)), self.inputs(features))

    def finished(self) -> list[WeakLearner]:
        """Return the finished weak learners in the order of growth."""
        return [learner for learner in self.learners if isinstance(learner, WeakLearner)]

    def learner_outputs(self, features: Tensor) -> Tensor:
        """Return the h of every weak learner, shape (n_samples, n_learners)."""
        inputs = self.inputs(features)
        return torch.stack([learner(inputs, self.drop) for learner in self.learners], dim=1)


class LinearNetwork(nn.Module):
    """A linear model ŷ = b + Σ η h, built by `LinearSpace.build`."""

    genotype: LinearGenotype
    mean: Tensor
    scale: Tensor

    def __init__(self, space: LinearSpace, genotype: LinearGenotype) -> None:
        super().__init__()
        self.genotype = genotype
        self.register_buffer("mean", torch.tensor(space.mean, dtype=torch.float64))
        self.register_buffer("scale", torch.tensor(space.scale, dtype=torch.float64))
        self.prediction = Prediction(space.n_features)
        for learner in genotype.learners:
            self.prediction.add_learner(learner, "weighted_sum")
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Return ŷ, shape (n_samples,), for raw features of shape (n_samples, n_features)."""
        return self.prediction(self.standardized(x))

    def standardized(self, x: Tensor) -> Tensor:
        """Return the features minus the space's mean, divided by its scale."""
        return (x - self.mean) / self.scale

    def coefficients(self) -> Tensor:
        """Return the weight of every standardized feature, the sum over all weak learners."""
        result = [0.0] * len(self.mean)
        for learner in self.prediction.finished():
            for feature, coefficient in _terms(learner):
                result[feature] += coefficient
        return torch.tensor(result, dtype=self.mean.dtype, device=self.mean.device)

    @torch.no_grad()
    def fold(self) -> LinearGenotype:
        """Merge the weak learners into one per feature, and return the genotype.

        The function does not change: terms η·α·z of the same feature add up to one coefficient. A
        path of thousands of growths remains a small network.
        """
        folded: dict[int, WeakLearner] = {}
        for learner in self.prediction.finished():
            terms = _terms(learner)
            if len(terms) == 1 and terms[0][0] not in folded and _weights(learner) == [1.0]:
                folded[terms[0][0]] = learner
                continue
            for feature, coefficient in terms:
                if feature not in folded:
                    folded[feature] = self.prediction.single(feature)
                folded[feature].eta.add_(coefficient)
        self.prediction.learners = nn.ModuleList(folded.values())
        self.genotype = LinearGenotype([((feature_name(j), OP),) for j in folded])
        return self.genotype


def _weights(learner: WeakLearner) -> list[float]:
    assert isinstance(learner.merge, WeightedSum)
    weights: list[float] = learner.merge.weight.tolist()
    return weights


def _terms(learner: WeakLearner) -> list[tuple[int, float]]:
    """Return (feature, coefficient) for each shortcut of a weak learner: η times its weight."""
    eta = float(learner.eta.detach())
    return [
        (feature_index(source), eta * weight)
        for (source, _), weight in zip(learner.shortcuts, _weights(learner), strict=True)
    ]


@dataclass(frozen=True)
class LinearSpace:
    """The space of linear models over a set of features.

    Parameters
    ----------
    n_features
        The number of columns.
    mean, scale
        The mean and scale to standardize each column with. By default, columns are not changed.

    Examples
    --------
    >>> from nni_petridish import attach_candidates, finalize_candidates
    >>> space = LinearSpace(3)
    >>> net = space.build(space.seed())
    >>> net = attach_candidates(net, l1=0.0)
    >>> x = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, 1.0], [-1.0, 1.0, 1.0], [-1.0, -1.0, 1.0]])
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    >>> (net(x) - 2 * x[:, 1]).square().mean().backward()
    >>> optimizer.step()
    >>> finalize_candidates(net, i_max=1).features
    (1,)
    """

    n_features: int
    mean: Sequence[float] = field(default=())
    scale: Sequence[float] = field(default=())

    name = "linear"

    def __post_init__(self) -> None:
        n = self.n_features
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ConfigError(f"n_features must be a whole number of at least 1 but got {n!r}.")
        for name, default in (("mean", 0.0), ("scale", 1.0)):
            values = tuple(float(v) for v in getattr(self, name)) or (default,) * n
            if len(values) != n:
                raise ConfigError(f"{name} must have {n} entries but got {len(values)}.")
            object.__setattr__(self, name, values)
        if not min(self.scale) > 0:
            raise ConfigError(f"scale must be positive but got {min(self.scale)}.")

    @classmethod
    def of(cls, x: Tensor) -> LinearSpace:
        """Return the space that standardizes the columns of ``x``; constant ones become 0."""
        scale = x.std(dim=0, correction=0)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        return cls(x.shape[1], x.mean(dim=0).tolist(), scale.tolist())

    def seed(self) -> LinearGenotype:
        """Return the model without features, where growth starts."""
        return LinearGenotype.seed()

    def build(self, genotype: Genotype) -> LinearNetwork:
        """Build a network, in double precision, with fresh weights."""
        return LinearNetwork(self, self.check(genotype))

    def check(self, genotype: Genotype) -> LinearGenotype:
        """Return the genotype if it fits this space, else raise `GenotypeError`."""
        own = LinearGenotype.require(genotype)
        for feature in own.features:
            if feature >= self.n_features:
                raise GenotypeError(
                    f"learners: the space has {self.n_features} features but got"
                    f" {feature_name(feature)!r}."
                )
        return own

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds of one example, parameters) of a network of this space.

        After `LinearNetwork.fold`, each feature in use is multiplied by one coefficient.
        """
        return len(self.check(cast(LinearNetwork, net).genotype).features), count_parameters(net)

    def example(self, net: nn.Module) -> tuple[Tensor, ...]:
        """Return a row of features for a network of this space."""
        return (torch.zeros(1, self.n_features, dtype=torch.float64),)

    def describe(self) -> dict[str, Any]:
        """Return the space as plain data; ``LinearSpace(**data)`` is an equal space."""
        return {
            "n_features": self.n_features,
            "mean": list(self.mean),
            "scale": list(self.scale),
        }


def _check_learner(index: int, learner: Any) -> Learner:
    if not as_list(learner):
        raise GenotypeError(
            f"learners[{index}]: must be a list of at least one [feature, {OP!r}] but got"
            f" {learner!r}."
        )
    for shortcut in learner:
        fits = as_list(shortcut) is not None and len(shortcut) == 2 and shortcut[1] == OP
        name = shortcut[0] if fits else None
        if not isinstance(name, str) or not re.fullmatch(r"x(0|[1-9]\d*)", name):
            raise GenotypeError(
                f"learners[{index}]: must be ['x<column>', {OP!r}] but got {shortcut!r}."
            )
    return tuple((shortcut[0], shortcut[1]) for shortcut in learner)
