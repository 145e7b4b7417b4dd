"""Names of ``nni.nas``, imported without the warnings that NNI 3.0 gives with a newer torch.

NNI wraps every layer of torch when it is imported, and warns about each that it does not know. All
modules of this package import ``nni.nas`` from here, so that the order of imports does not matter.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"nni\.nas\.nn\.pytorch")
    import nni.nas.strategy as strategies
    from nni.nas.evaluator import Evaluator, FunctionalEvaluator, MutableEvaluator
    from nni.nas.evaluator.pytorch import Lightning, Trainer
    from nni.nas.evaluator.pytorch.lightning import RegressionModule, SupervisedLearningModule
    from nni.nas.execution import SequentialExecutionEngine
    from nni.nas.execution.event import (
        FinalMetricEvent,
        ModelEvent,
        ModelEventType,
        TrainingEndEvent,
    )
    from nni.nas.experiment import NasExperimentConfig
    from nni.nas.nn.pytorch import Cell, InputChoice, LayerChoice, ModelSpace, Repeat
    from nni.nas.nn.pytorch.base import MutableModule
    from nni.nas.nn.pytorch.cell import create_cell_op_candidates
    from nni.nas.nn.pytorch.choice import ChosenInputs
    from nni.nas.space import (
        ModelStatus,
        RawFormatModelSpace,
        SimplifiedModelSpace,
        model_context,
    )
    from nni.nas.strategy import Strategy
    from pytorch_lightning import Callback as TrainerCallback

__all__ = [
    "Cell",
    "ChosenInputs",
    "Evaluator",
    "FinalMetricEvent",
    "FunctionalEvaluator",
    "InputChoice",
    "LayerChoice",
    "Lightning",
    "ModelEvent",
    "ModelEventType",
    "ModelSpace",
    "ModelStatus",
    "MutableEvaluator",
    "MutableModule",
    "NasExperimentConfig",
    "RawFormatModelSpace",
    "RegressionModule",
    "Repeat",
    "SequentialExecutionEngine",
    "SimplifiedModelSpace",
    "Strategy",
    "SupervisedLearningModule",
    "Trainer",
    "TrainerCallback",
    "TrainingEndEvent",
    "create_cell_op_candidates",
    "model_context",
    "strategies",
]
