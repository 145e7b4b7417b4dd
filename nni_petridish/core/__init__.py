"""Algorithms 1 and 2 of the paper, on any network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nni_petridish._support.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "AlphaTable": ".alpha_table",
        "Candidates": ".weak_learner",
        "Genotype": ".genotype",
        "Grower": ".grower",
        "GrowthSchedule": ".grower",
        "L1Schedule": ".l1",
        "Site": ".site",
        "WeakLearner": ".weak_learner",
        "alpha_tables": ".grow",
        "attach_candidates": ".grow",
        "can_grow": ".grow",
        "candidate_parameters": ".grow",
        "count_multiply_adds": ".complexity",
        "count_parameters": ".complexity",
        "detach_candidates": ".grow",
        "evaluation_mode": ".modes",
        "extra_loss": ".grow",
        "finalize_candidates": ".grow",
        "has_candidates": ".grow",
        "sites": ".grow",
        "stop_forward": ".weak_learner",
        "stop_gradient": ".weak_learner",
    },
)

if TYPE_CHECKING:
    from nni_petridish.core.alpha_table import AlphaTable
    from nni_petridish.core.complexity import count_multiply_adds, count_parameters
    from nni_petridish.core.genotype import Genotype
    from nni_petridish.core.grow import (
        alpha_tables,
        attach_candidates,
        can_grow,
        candidate_parameters,
        detach_candidates,
        extra_loss,
        finalize_candidates,
        has_candidates,
        sites,
    )
    from nni_petridish.core.grower import Grower, GrowthSchedule
    from nni_petridish.core.l1 import L1Schedule
    from nni_petridish.core.modes import evaluation_mode
    from nni_petridish.core.site import Site
    from nni_petridish.core.weak_learner import (
        Candidates,
        WeakLearner,
        stop_forward,
        stop_gradient,
    )
