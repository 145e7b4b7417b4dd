"""Petridish, efficient forward architecture search, for people who use NNI.

The names below load what they need on first use, so that importing the package costs nothing. The
packages inside (`nni_petridish.core`, `nni_petridish.search`, ...) export further names likewise.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from nni_petridish._support.lazy import attach

if sys.version_info < (3, 11):  # noqa: UP036 - before any syntax or module of a later Python
    raise ImportError(
        "nni_petridish needs Python 3.11 or newer but this is"
        f" {sys.version_info.major}.{sys.version_info.minor} ({sys.executable})."
    )

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Gallery": ".gallery.gallery",
        "Genotype": ".core.genotype",
        "Grower": ".core.grower",
        "GrowingCallback": ".nni_adapter",
        "GrowingClassifier": ".estimators.estimators",
        "GrowingRegressor": ".estimators.estimators",
        "L1Schedule": ".core.l1",
        "Petridish": ".nni_adapter",
        "PetridishError": ".errors",
        "PetridishTuner": ".nni_adapter",
        "Search": ".search.search",
        "SearchConfig": ".running.config",
        "Site": ".core.site",
        "ablate": ".studies.ablations",
        "alpha_tables": ".core.grow",
        "attach_candidates": ".core.grow",
        "count_multiply_adds": ".core.complexity",
        "count_parameters": ".core.complexity",
        "detach_candidates": ".core.grow",
        "extra_loss": ".core.grow",
        "finalize_candidates": ".core.grow",
        "load_data": ".tasks.vision.data",
        "load_model": ".gallery.saved_model",
        "make_growable": "search_spaces.any_model.growable",
        "register_op": "search_spaces.vision.op_registry",
        "run_search": ".running.runner",
        "sites": ".core.grow",
        "tune": ".studies.tuning",
    },
    defined=["__version__"],
)

if TYPE_CHECKING:
    from nni_petridish.core.complexity import count_multiply_adds, count_parameters
    from nni_petridish.core.genotype import Genotype
    from nni_petridish.core.grow import (
        alpha_tables,
        attach_candidates,
        detach_candidates,
        extra_loss,
        finalize_candidates,
        sites,
    )
    from nni_petridish.core.grower import Grower
    from nni_petridish.core.l1 import L1Schedule
    from nni_petridish.core.site import Site
    from nni_petridish.errors import PetridishError
    from nni_petridish.estimators.estimators import GrowingClassifier, GrowingRegressor
    from nni_petridish.gallery.gallery import Gallery
    from nni_petridish.gallery.saved_model import load_model
    from nni_petridish.nni_adapter.lightning import GrowingCallback
    from nni_petridish.nni_adapter.strategy import Petridish
    from nni_petridish.nni_adapter.tuner import PetridishTuner
    from nni_petridish.running.config import SearchConfig
    from nni_petridish.running.runner import run_search
    from nni_petridish.search.search import Search
    from nni_petridish.studies.ablations.work import ablate
    from nni_petridish.studies.tuning.study import tune
    from nni_petridish.tasks.vision.data import load_data
    from search_spaces.any_model.growable import make_growable
    from search_spaces.vision.op_registry import register_op
