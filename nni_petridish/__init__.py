"""Petridish, efficient forward architecture search, for people who use NNI.

The names below load what they need on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nni_petridish._lazy import attach

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "AlphaTable": ".core.weak_learner",
        "ConfigError": ".errors",
        "Coordinator": ".running.coordinator",
        "DataError": ".errors",
        "Gallery": ".gallery.gallery",
        "GalleryError": ".errors",
        "Genotype": ".core.genotype",
        "GenotypeError": ".errors",
        "Growth": ".search.records",
        "GrowthError": ".errors",
        "Interrupted": ".errors",
        "L1Schedule": ".core.l1",
        "LanguageRecipe": ".tasks.language.recipe",
        "Limits": ".search.settings",
        "ModelGenotype": "search_spaces.any_model.genotype",
        "Outcome": ".search.records",
        "Petridish": ".nni_adapter.strategy",
        "PetridishError": ".errors",
        "PetridishTuner": ".nni_adapter.tuner",
        "Plan": ".search.settings",
        "Recipe": ".tasks.vision.recipe",
        "RecipeEvaluator": ".nni_adapter.evaluators.recipe",
        "RecurrentGenotype": "search_spaces.recurrent.genotype",
        "Search": ".search.search",
        "SearchConfig": ".running.config",
        "SearchError": ".errors",
        "SearchSettings": ".search.settings",
        "Site": ".core.weak_learner",
        "TrainingError": ".errors",
        "VisionGenotype": "search_spaces.vision.genotype",
        "VisionTask": ".tasks.task",
        "Watcher": ".running.growth",
        "ablate": ".studies.ablations",
        "alpha_tables": ".core.grow",
        "attach_candidates": ".core.grow",
        "candidate_parameters": ".core.grow",
        "count_multiply_adds": ".core.complexity",
        "count_parameters": ".core.complexity",
        "detach_candidates": ".core.grow",
        "evaluate": ".tasks.training",
        "extra_loss": ".core.grow",
        "finalize_candidates": ".core.grow",
        "fit": ".tasks.training",
        "has_candidates": ".core.grow",
        "load_data": ".tasks.vision.data",
        "load_model": ".gallery.saved_model",
        "load_network": ".running.growth",
        "make_growable": "search_spaces.any_model.growable",
        "run_growth": ".running.growth",
        "run_search": ".running.runner",
        "sites": ".core.grow",
        "stop_forward": ".core.weak_learner",
        "stop_gradient": ".core.weak_learner",
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
        candidate_parameters,
        detach_candidates,
        extra_loss,
        finalize_candidates,
        has_candidates,
        sites,
    )
    from nni_petridish.core.l1 import L1Schedule
    from nni_petridish.core.weak_learner import AlphaTable, Site, stop_forward, stop_gradient
    from nni_petridish.errors import (
        ConfigError,
        DataError,
        GalleryError,
        GenotypeError,
        GrowthError,
        Interrupted,
        PetridishError,
        SearchError,
        TrainingError,
    )
    from nni_petridish.gallery.gallery import Gallery
    from nni_petridish.gallery.saved_model import load_model
    from nni_petridish.nni_adapter.evaluators.recipe import RecipeEvaluator
    from nni_petridish.nni_adapter.strategy import Petridish
    from nni_petridish.nni_adapter.tuner import PetridishTuner
    from nni_petridish.running.config import SearchConfig
    from nni_petridish.running.coordinator import Coordinator
    from nni_petridish.running.growth import Watcher, load_network, run_growth
    from nni_petridish.running.runner import run_search
    from nni_petridish.search.records import Growth, Outcome
    from nni_petridish.search.search import Search
    from nni_petridish.search.settings import Limits, Plan, SearchSettings
    from nni_petridish.studies.ablations.work import ablate
    from nni_petridish.studies.tuning.study import tune
    from nni_petridish.tasks.language.recipe import LanguageRecipe
    from nni_petridish.tasks.task import VisionTask
    from nni_petridish.tasks.training import evaluate, fit
    from nni_petridish.tasks.vision.data import load_data
    from nni_petridish.tasks.vision.recipe import Recipe
    from search_spaces.any_model.genotype import ModelGenotype
    from search_spaces.any_model.growable import make_growable
    from search_spaces.recurrent.genotype import RecurrentGenotype
    from search_spaces.vision.genotype import VisionGenotype
