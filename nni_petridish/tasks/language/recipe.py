"""DARTS's recipe for language models as one dataclass, and its differences per text."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from annotated_types import Ge, Gt

from nni_petridish.search.constraints import Count, Device, Share, check_fields
from nni_petridish.tasks.recipes import named_recipe


@dataclass(frozen=True)
class LanguageRecipe:
    """The recipe of DARTS's recurrent models, which the paper keeps; reasons beside the values.

    Examples
    --------
    >>> LanguageRecipe().batch_size
    64
    >>> LanguageRecipe.named("pydoc", epochs=2).dropout_outputs
    0.2
    """

    # "25 epochs" at each stage; 4500 in a retraining.
    epochs: Count = 25
    batch_size: Count = 64
    # Validation and test text is read in this many columns.
    evaluation_batch: Count = 10
    # Steps of backpropagation through time: normal around this (half of it with probability 0.05)
    # with deviation 5, at least 5 and at most 20 more; the learning rate follows the length.
    bptt: Annotated[int, Ge(5)] = 35
    lr: Annotated[float, Gt(0)] = 20.0
    # Learning rate of α and η. They are single numbers whose gradient is a sum over all units: at
    # lr = 20 they would jump from one side of zero to the other.
    scalar_lr: Annotated[float, Ge(0)] = 0.05
    weight_decay: Annotated[float, Ge(0)] = 8e-7
    # Largest norm of the gradient: of the network's weights, of the candidates', of α, and of η.
    clip: Annotated[float, Gt(0)] = 0.25
    # Locked dropout, see `RecurrentNetwork.set_dropout`.
    dropout_words: Share = 0.0
    dropout_inputs: Share = 0.2
    dropout_cell_inputs: Share = 0.75
    dropout_hidden: Share = 0.25
    dropout_outputs: Share = 0.75
    # Regularization of the cell's outputs: of their size (AR), of their change in time (TAR).
    activation: Annotated[float, Ge(0)] = 0.0
    temporal_activation: Annotated[float, Ge(0)] = 1e-3
    # SGD becomes averaged SGD once the validation loss is no better than it was so many epochs ago.
    patience: Count = 5
    # The share of a training, its last epochs, that is averaged in any case; 0 = none.
    average: Share = 0.0
    # auto = cuda if there is one.
    device: Device = "auto"

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def named(cls, text: str, **changes: Any) -> LanguageRecipe:
        """Return the recipe for a text (see `DIFFERENCES`), with `changes` made to it."""
        return named_recipe(cls, DIFFERENCES, text, changes)

    @classmethod
    def for_retraining(cls, text: str, **changes: Any) -> LanguageRecipe:
        """Return the recipe for a retraining (see `RETRAINING_DIFFERENCES`)."""
        return cls.named(text, **{**RETRAINING_DIFFERENCES.get(text, {}), **changes})

    def dropout(self) -> dict[str, float]:
        """Return the rates of dropout by the names that a network knows them by."""
        return {
            field.name.removeprefix("dropout_"): getattr(self, field.name)
            for field in fields(self)
            if field.name.startswith("dropout_")
        }


#: The differences from DARTS's recipe, by name of the text.
DIFFERENCES: dict[str, dict[str, Any]] = {
    "ptb": {},
    "text_folder": {},
    # A tenth of Penn Treebank and a few epochs: more steps in each, and little to overfit.
    "pydoc": {
        "epochs": 5,
        "batch_size": 16,
        "dropout_inputs": 0.0,
        "dropout_cell_inputs": 0.2,
        "dropout_hidden": 0.1,
        "dropout_outputs": 0.2,
    },
}

#: The differences in the retraining of a found cell, by name of the text.
RETRAINING_DIFFERENCES: dict[str, dict[str, Any]] = {
    # "trained from scratch for 4500 epochs, learning rate of 10 and batch size 64"
    "ptb": {"epochs": 4500, "lr": 10.0},
    "text_folder": {"epochs": 4500, "lr": 10.0},
    # For a CPU; averaged SGD may begin earlier, since there are fewer epochs.
    "pydoc": {"epochs": 30, "patience": 3},
}
