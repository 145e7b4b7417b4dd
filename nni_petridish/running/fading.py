"""The schedule of a fade-in: how much of the new weak learners is held back at each step.

It depends on the epoch and the step within it alone, so that a growth that is continued from a
checkpoint goes on with the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from nni_petridish.core.site import sites
from nni_petridish.core.weak_learner import WeakLearner
from nni_petridish.errors import ConfigError
from nni_petridish.tasks.checkpoint import load_checkpoint
from nni_petridish.tasks.task import Callbacks, Record


class FadeIn:
    """New weak learners that fade in during the first epochs of a training, step by step.

    Parameters
    ----------
    learners
        The weak learners.
    epochs
        The length of the fade-in; a fraction of an epoch is possible.
    epoch_steps
        The number of steps of an epoch.
    checkpoint
        The checkpoint of the training, which tells the epochs that are done.
    """

    def __init__(
        self, learners: Sequence[WeakLearner], epochs: float, epoch_steps: int, checkpoint: Path
    ) -> None:
        self._learners, self._epochs, self._epoch_steps = learners, epochs, epoch_steps
        found = load_checkpoint(checkpoint)
        self._epoch = 0 if found is None else len(found[1].get("records", ()))
        self._step = 0

    def watch(self, callbacks: Callbacks) -> Callbacks:
        """Return callbacks that set the fade before every step."""

        def should_stop() -> bool:
            within = min(1.0, self._step / self._epoch_steps)
            self._set(max(0.0, 1 - (self._epoch + within) / self._epochs))
            self._step += 1
            return callbacks.should_stop()

        def on_epoch(phase: str, record: Record) -> None:
            self._epoch, self._step = int(record["epoch"]), 0
            callbacks.on_epoch(phase, record)

        return replace(callbacks, should_stop=should_stop, on_epoch=on_epoch)

    def end(self) -> None:
        """Leave the plain architecture."""
        self._set(0.0)

    def _set(self, fade: float) -> None:
        for learner in self._learners:
            learner.fade = fade


def check_fading(net: nn.Module) -> None:
    """Raise `ConfigError` if the weak learners of a network cannot fade in."""
    for site in sites(net):
        if not site.fades:
            raise ConfigError(f"eta_fade must be 0: {type(site).__name__} cannot fade in.")
