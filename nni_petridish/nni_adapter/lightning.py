"""Growth within a Lightning `Trainer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pytorch_lightning.callbacks
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from nni_petridish.core.alpha_table import Schedule
from nni_petridish.core.genotype import Genotype
from nni_petridish.core.grower import Grower, GrowthSchedule, restore_structure
from nni_petridish.core.optimizer_groups import group_of
from nni_petridish.errors import GrowthError

_STATE = "GrowingCallback"
_AVERAGING: tuple[type, ...] = tuple(
    vars(pytorch_lightning.callbacks)[name]
    for name in ("StochasticWeightAveraging", "WeightAveraging")  # the second from 2.6 on
    if name in vars(pytorch_lightning.callbacks)
)


class GrowingCallback(Callback):
    """Grows a network of a LightningModule by a schedule, or when validation stalls.

    The LightningModule stays as it is. Its optimizer is edited in place by a `Grower`, and its
    schedulers are told. Changes are made between epochs. Checkpoints of the Trainer hold all that
    is needed to go on, also in the middle of weak learning: build the module as at the start and
    pass ``ckpt_path``. Candidates that are still learning when training ends are dropped.

    The Trainer must use one device. ``gradient_clip_val`` clips the gradients of network and
    candidates together; without it the network trains as it would without candidates, to the bit.

    Parameters
    ----------
    wait, weak, growths, patience
        When to grow, in epochs; see `nni_petridish.core.GrowthSchedule`.
    monitor
        The logged number that ``patience`` goes by, such as ``"val_loss"``.
    mode
        Whether ``monitor`` is to be minimized (``"min"``) or maximized (``"max"``).
    network
        The name of the growable network in the module, such as ``"backbone"``; by default the only
        one there is.
    l1, i_max, seed
        As in `nni_petridish.Grower`.
    """

    def __init__(
        self,
        *,
        wait: int = 10,
        weak: int = 5,
        growths: int = 1,
        patience: int | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        network: str | None = None,
        l1: float | Schedule = 0.001,
        i_max: int = 3,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if mode not in ("min", "max"):
            raise GrowthError(f"mode must be min or max but got {mode!r}.")
        if (monitor is None) != (patience is None):
            raise GrowthError("patience and monitor must be given together or not at all.")
        self.schedule = GrowthSchedule(wait, weak, growths, patience)
        self.monitor, self.mode, self.network = monitor, mode, network
        self.l1, self.i_max, self.seed = l1, i_max, seed
        self.grower: Grower | None = None
        self._metric: float | None = None
        self._loaded: Mapping[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work, and prepare for a checkpoint."""
        net = _find(pl_module, self.network)
        if stage == "fit":
            _check(trainer)
        self._loaded = None
        on_load = pl_module.on_load_checkpoint

        def restore_and_load(checkpoint: dict[str, Any]) -> None:
            # Lightning calls this before it loads the weights, whose names must be there.
            saved = checkpoint.get("callbacks", {}).get(self.state_key)
            if saved is not None:
                restore_structure(net, saved["grower"], l1=self.l1, seed=self.seed)
                self._loaded = saved
            on_load(checkpoint)

        vars(pl_module)["on_load_checkpoint"] = restore_and_load

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the optimizer, after it is made and before its state is loaded."""
        net = _find(pl_module, self.network)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.grower = Grower(
            net,
            _optimizer_of(net, trainer.optimizers),
            l1=self.l1,
            i_max=self.i_max,
            schedule=self.schedule,
            seed=self.seed,
            schedulers=schedulers,
        )
        self._metric = None
        if self._loaded is not None:
            self.grower.load_state_dict(self._loaded["grower"])
            self._metric = self._loaded["metric"]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the monitored number; a checkpoint may be written before the epoch ends."""
        if self.monitor is None or trainer.sanity_checking:
            return
        found = trainer.callback_metrics.get(self.monitor)
        if found is None:
            known = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            raise GrowthError(f"monitor {self.monitor!r} was not logged; {known} was.")
        self._metric = float(found) if self.mode == "min" else -float(found)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the epoch that is over and grow when it is time."""
        if self.grower is None or trainer.current_epoch == 0:
            return
        if self.monitor is not None and self._metric is None:
            raise GrowthError(f"monitor {self.monitor!r} needs a validation in every epoch.")
        self.grower.step(self._metric)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave a plain network."""
        if self.grower is not None and self.grower.is_learning:
            rank_zero_warn(
                "training ended during weak learning: the candidates are dropped. A checkpoint has"
                " them, and goes on with more epochs."
            )
            self.grower.detach()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the module as it was."""
        vars(pl_module).pop("on_load_checkpoint", None)

    @property
    def state_key(self) -> str:
        """The key of the callback's state in checkpoints."""
        return _STATE

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, as plain data."""
        if self.grower is None:
            return {}
        return {"grower": self.grower.state_dict(), "metric": self._metric}


def _find(module: LightningModule, name: str | None) -> nn.Module:
    found = {
        path: part
        for path, part in module.named_modules()
        if isinstance(getattr(part, "genotype", None), Genotype)
    }
    if name is not None and name in found:
        return found[name]
    if len(found) != 1 or name is not None:
        shown = f" {name!r}" if name is not None else ""
        names = ", ".join(found) or "none: call make_growable on one"
        raise GrowthError(
            f"network{shown} must name a growable network of the module; there is {names}."
        )
    return next(iter(found.values()))


def _optimizer_of(net: nn.Module, optimizers: list[Optimizer]) -> Optimizer:
    own = {id(parameter) for parameter in net.parameters()}
    holding = [optimizer for optimizer in optimizers if own & group_of(optimizer).keys()]
    if len(holding) != 1:
        raise GrowthError(
            f"one optimizer must have the parameters of the network but {len(holding)} have some."
        )
    return holding[0]


def _check(trainer: Trainer) -> None:
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        name = type(trainer.strategy).__name__
        raise GrowthError(
            f"GrowingCallback needs a Trainer with one device but got {name}: it keeps parameters"
            " that come and go apart."
        )
    averaging = [callback for callback in trainer.callbacks if isinstance(callback, _AVERAGING)]
    if averaging:
        raise GrowthError(
            f"GrowingCallback does not work with {type(averaging[0]).__name__}, whose averages have"
            " the parameters of the start."
        )
