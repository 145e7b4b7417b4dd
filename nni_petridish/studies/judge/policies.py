"""The policies that are simulated, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nni_petridish.studies.judge.children import Chooser
from nni_petridish.studies.judge.growing import (
    by_accuracy,
    by_hull,
    by_upper_confidence,
    growing,
    paper,
)
from nni_petridish.studies.judge.rivals import (
    local_search,
    random_search,
    regularized_evolution,
    tpe,
)
from nni_petridish.studies.judge.scene import NamedPolicy

PAPER = "paper"
"""The name of the paper's policy, as `Search` runs it."""
WITHIN = "within limit"
"""The name of the paper's policy without children beyond the limit."""


def policies(taus: Sequence[float] = (0.3, 0.5, 0.7, 0.9)) -> dict[str, NamedPolicy]:
    """Return all policies by name; ``taus`` are the qualities of the score of children."""
    found = {
        "random search": NamedPolicy(random_search),
        "evolution": NamedPolicy(regularized_evolution()),
        "local search": NamedPolicy(local_search),
        "TPE": NamedPolicy(tpe, repetitions=60),
    }
    plain: dict[str, dict[str, Any]] = {
        "random child": {},
        "right half of the time": {"hits": 0.5},
        "best child": {"tau": 1.0},
    }
    for score, options in plain.items():
        found[f"{PAPER}, {score}"] = NamedPolicy(paper(Chooser(**options)))
        found[f"{WITHIN}, {score}"] = NamedPolicy(
            paper(Chooser(**options, within=True)), f"{PAPER}, {score}"
        )
    for tau in taus:
        score = f"τ {tau:g}"
        for base, chooser in ((PAPER, Chooser(tau)), (WITHIN, Chooser(tau, within=True))):
            name, before = f"{base}, {score}", None if base == PAPER else f"{PAPER}, {score}"
            rule = by_upper_confidence(width=0.5, weight=0.5)
            found[name] = NamedPolicy(paper(chooser), before)
            for change, policy in {
                "tolerance 2.5 %": paper(chooser, tolerance=0.025),
                "two children": growing(chooser, by_hull, children=2),
                "three children": growing(chooser, by_hull, children=3),
                "most accurate": growing(chooser, by_accuracy),
                "upper confidence": growing(chooser, rule),
            }.items():
                found[f"{base}, {change}, {score}"] = NamedPolicy(policy, name)
    return found
