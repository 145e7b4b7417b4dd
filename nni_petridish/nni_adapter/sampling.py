"""NNI's strategies that sample one architecture after the other, on our spaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import nni

from nni_petridish.core.genotype import Genotype
from nni_petridish.errors import ConfigError
from nni_petridish.nni_adapter.compat.nas import (
    Evaluator,
    SequentialExecutionEngine,
    SimplifiedModelSpace,
    strategies,
)
from nni_petridish.nni_adapter.space import GrowableModelSpace, NamedSpace, model_space

__all__ = ["search_with_strategy"]


def search_with_strategy(
    name: str,
    space: NamedSpace,
    evaluate: Callable[[Genotype], float],
    proceed: Callable[[], bool],
    *,
    seed: int = 0,
    max_learners: int = 3,
    max_shortcuts: int = 3,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Run a strategy of NNI in this process, without an experiment.

    Parameters
    ----------
    name
        The name of the class in ``nni.nas.strategy``: Random, RegularizedEvolution or TPE.
    space
        The space.
    evaluate
        Called with every architecture that the strategy proposes; returns a number, the larger the
        better. What it raises ends the search.
    proceed
        Asked before every architecture; false ends the search.
    seed
        Random seed of the strategy.
    max_learners, max_shortcuts
        Bounds of the architectures, see `GrowableModelSpace`.
    options
        Further arguments of the strategy.
    """
    known = {"seed": seed, **_DEFAULTS.get(name, {}), **(options or {})}
    try:
        strategy = getattr(strategies, name)(**known)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"options of NNI's {name}: {str(error).removesuffix('.')}.") from None
    samples = model_space(space, max_learners, max_shortcuts)
    evaluator = _GenotypeEvaluator(samples, evaluate)
    engine = _Engine(proceed)
    strategy.initialize(SimplifiedModelSpace.from_model(samples, evaluator), engine)
    strategy.run()


#: TPE minimizes by default, whatever the strategies around it do.
_DEFAULTS: dict[str, dict[str, Any]] = {"TPE": {"optimize_mode": "maximize"}}


class _GenotypeEvaluator(Evaluator):
    """An evaluator that is given the architecture; NNI builds no network."""

    def __init__(self, samples: GrowableModelSpace, evaluate: Callable[[Genotype], float]) -> None:
        self._samples, self._evaluate = samples, evaluate

    def _execute(self, model: Any) -> float:
        number = self._evaluate(self._samples.genotype(model.sample))
        nni.report_final_result(number)
        return number


class _Engine(SequentialExecutionEngine):
    """NNI's engine for one process, with a budget of ours."""

    def __init__(self, proceed: Callable[[], bool]) -> None:
        super().__init__()
        self._proceed = proceed

    def budget_available(self) -> bool:
        return self._proceed()
