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
        "AlphaTable": ".weak_learner",
        "ConfigError": ".errors",
        "Coordinator": ".coordinator",
        "DataError": ".errors",
        "Gallery": ".gallery",
        "GalleryError": ".errors",
        "Genotype": ".genotype",
        "GenotypeError": ".errors",
        "Growth": ".records",
        "GrowthError": ".errors",
        "Interrupted": ".errors",
        "L1Schedule": ".schedules",
        "LanguageRecipe": ".language_recipe",
        "Limits": ".settings",
        "ModelGenotype": ".model_genotype",
        "Outcome": ".records",
        "Petridish": ".strategy",
        "PetridishError": ".errors",
        "PetridishTuner": ".tuner",
        "Plan": ".settings",
        "Recipe": ".recipe",
        "RecipeEvaluator": ".recipe_evaluator",
        "RecurrentGenotype": ".recurrent_genotype",
        "Search": ".search",
        "SearchConfig": ".config",
        "SearchError": ".errors",
        "SearchSettings": ".settings",
        "Site": ".weak_learner",
        "TrainingError": ".errors",
        "VisionGenotype": ".genotype",
        "VisionTask": ".task",
        "Watcher": ".growth",
        "ablate": ".ablations",
        "alpha_tables": ".grow",
        "attach_candidates": ".grow",
        "candidate_parameters": ".grow",
        "count_multiply_adds": ".complexity",
        "count_parameters": ".complexity",
        "detach_candidates": ".grow",
        "evaluate": ".training",
        "extra_loss": ".grow",
        "finalize_candidates": ".grow",
        "fit": ".training",
        "has_candidates": ".grow",
        "load_data": ".data",
        "load_model": ".saved_model",
        "load_network": ".growth",
        "make_growable": "search_spaces.any_model",
        "run_growth": ".growth",
        "run_search": ".runner",
        "sites": ".grow",
        "stop_forward": ".weak_learner",
        "stop_gradient": ".weak_learner",
        "tune": ".tuning",
    },
    defined=["__version__"],
)

if TYPE_CHECKING:
    from nni_petridish.ablations.work import ablate
    from nni_petridish.complexity import count_multiply_adds, count_parameters
    from nni_petridish.config import SearchConfig
    from nni_petridish.coordinator import Coordinator
    from nni_petridish.data import load_data
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
    from nni_petridish.gallery import Gallery
    from nni_petridish.genotype import Genotype, VisionGenotype
    from nni_petridish.grow import (
        alpha_tables,
        attach_candidates,
        candidate_parameters,
        detach_candidates,
        extra_loss,
        finalize_candidates,
        has_candidates,
        sites,
    )
    from nni_petridish.growth import Watcher, load_network, run_growth
    from nni_petridish.language_recipe import LanguageRecipe
    from nni_petridish.model_genotype import ModelGenotype
    from nni_petridish.recipe import Recipe
    from nni_petridish.recipe_evaluator import RecipeEvaluator
    from nni_petridish.records import Growth, Outcome
    from nni_petridish.recurrent_genotype import RecurrentGenotype
    from nni_petridish.runner import run_search
    from nni_petridish.saved_model import load_model
    from nni_petridish.schedules import L1Schedule
    from nni_petridish.search import Search
    from nni_petridish.settings import Limits, Plan, SearchSettings
    from nni_petridish.strategy import Petridish
    from nni_petridish.task import VisionTask
    from nni_petridish.training import evaluate, fit
    from nni_petridish.tuner import PetridishTuner
    from nni_petridish.tuning.study import tune
    from nni_petridish.weak_learner import AlphaTable, Site, stop_forward, stop_gradient
    from search_spaces.any_model import make_growable
