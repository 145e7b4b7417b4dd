"""`GrowingCallback` in real trainings by Lightning."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

from nni_petridish import GrowingCallback, make_growable, sites
from nni_petridish.errors import GrowthError

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's, on loaders without workers


class Lit(LightningModule):
    """A user's module: nothing in it knows of growth."""

    def __init__(self, scheduler: str = "cosine") -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(8, 3)
        self.scheduler = scheduler
        self.val_losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss)
        self.val_losses.append(float(loss))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)
        schedulers = {
            "cosine": lambda: CosineAnnealingLR(optimizer, 12),
            "one cycle": lambda: OneCycleLR(optimizer, 0.02, 40),
            "sequence": lambda: SequentialLR(
                optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, 9)], [3]
            ),
        }
        return [optimizer], [schedulers[self.scheduler]()]


def growable(scheduler: str = "cosine") -> Lit:
    module = Lit(scheduler)
    make_growable(module.body, torch.zeros(1, 6), sites=["2"], sources=["0"])
    return module


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
    return DataLoader(TensorDataset(x, y), batch_size=16)


def trainer(folder: Path, epochs: int, *callbacks: Any, **options: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, **options}
    checkpoints = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    if checkpoints:
        options["enable_checkpointing"] = True
    return Trainer(
        default_root_dir=folder, max_epochs=epochs, callbacks=list(callbacks), **quiet, **options
    )


@pytest.mark.parametrize("scheduler", ["cosine", "one cycle", "sequence"])
def test_three_lines_grow_a_module(tmp_path: Path, scheduler: str) -> None:
    module = Lit(scheduler)
    make_growable(module.body, torch.zeros(1, 6), sites=["2"], sources=["0"])
    growing = GrowingCallback(wait=2, weak=2, growths=2, i_max=2)
    trainer(tmp_path, 10, growing).fit(module, data(), data())
    assert module.body.genotype.growths == 2
    assert not growing.grower.is_learning
    optimizer = growing.grower.optimizer
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in module.parameters())
    assert len({group["lr"] for group in optimizer.param_groups}) == 1
    assert module.val_losses[-1] < module.val_losses[0]


def test_the_network_trains_as_without_the_callback(tmp_path: Path) -> None:
    module, plain = growable(), Lit()
    # It ends in the middle of weak learning, so that the network itself is the parent's.
    trainer(tmp_path, 5, GrowingCallback(wait=2, weak=20)).fit(module, data())
    trainer(tmp_path, 5).fit(plain, data())
    found = module.state_dict()
    for key, value in plain.state_dict().items():
        assert torch.equal(found[key], value), key
    assert not any("petridish" in name for name, _ in module.named_parameters())  # dropped


def test_growth_waits_until_validation_stalls(tmp_path: Path) -> None:
    changes: dict[int, str | None] = {}

    class Told(GrowingCallback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            before = (self.grower.is_learning, self.grower.growths)
            super().on_train_epoch_start(trainer, pl_module)
            if (self.grower.is_learning, self.grower.growths) != before:
                changes[trainer.current_epoch] = "attached" if self.grower.is_learning else "grown"

    class Stalling(Lit):
        def validation_step(self, batch: Any, index: int) -> None:
            losses = [5.0, 4.0, 3.0, 3.0, 3.5, 3.5, 3.5, 3.5]
            self.log("accuracy", -losses[self.trainer.current_epoch])

    module = Stalling()
    make_growable(module.body, torch.zeros(1, 6), sites=["2"], sources=["0"])
    told = Told(wait=0, weak=2, patience=2, monitor="accuracy", mode="max")
    trainer(tmp_path, 8, told).fit(module, data(), data())
    # The third and fourth epoch after the best bring nothing: candidates from epoch 5 on.
    assert changes == {5: "attached", 7: "grown"}


@pytest.mark.parametrize("on_train_epoch_end", [True, False])
@pytest.mark.parametrize("stop", [2, 4, 6, 7])
def test_a_checkpoint_goes_on_at_any_time(
    tmp_path: Path, stop: int, on_train_epoch_end: bool
) -> None:
    def growing() -> GrowingCallback:
        return GrowingCallback(
            wait=1, weak=2, growths=2, i_max=2, patience=1, monitor="val_loss", mode="max"
        )

    def saving() -> ModelCheckpoint:
        return ModelCheckpoint(
            tmp_path,
            filename="{epoch}",
            save_top_k=-1,
            save_on_train_epoch_end=on_train_epoch_end,
        )

    whole = growable()
    trainer(tmp_path, 9, growing(), saving()).fit(whole, data(), data())
    again = growable()
    path = tmp_path / f"epoch={stop}.ckpt"
    trainer(tmp_path, 9, growing()).fit(again, data(), data(), ckpt_path=path, weights_only=True)
    assert again.body.genotype == whole.body.genotype
    assert again.body.genotype.growths == 2
    expected, found = whole.state_dict(), again.state_dict()
    assert list(expected) == list(found)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert "on_load_checkpoint" not in vars(again)


def test_a_checkpoint_is_tested_on_a_fresh_module(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, filename="last")
    module = growable()
    trainer(tmp_path, 4, GrowingCallback(wait=1, weak=1, i_max=1), saving).fit(module, data())
    fresh = growable()
    path = tmp_path / "last.ckpt"
    one = trainer(tmp_path, 1, GrowingCallback())
    one.validate(fresh, data(), ckpt_path=path, weights_only=True, verbose=False)
    x = data().dataset.tensors[0]
    with torch.no_grad():
        assert torch.equal(fresh.eval()(x), module.eval()(x))


def test_a_compiled_module_grows(tmp_path: Path) -> None:
    module = growable()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager")
    growing = GrowingCallback(wait=1, weak=2, i_max=2)
    trainer(tmp_path, 5, growing).fit(compiled, data())
    plain = growable()
    trainer(tmp_path, 5, GrowingCallback(wait=1, weak=2, i_max=2)).fit(plain, data())
    assert module.body.genotype == plain.body.genotype
    assert module.body.genotype.growths == 1
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[key], value, msg=key)


def test_mixed_precision_works(tmp_path: Path) -> None:
    module = growable()
    growing = GrowingCallback(wait=1, weak=1, i_max=1)
    trainer(tmp_path, 4, growing, precision="bf16-mixed").fit(module, data())
    assert module.body.genotype.growths == 1
    assert all(bool(p.isfinite().all()) for p in module.parameters())


class Two(Lit):
    def configure_optimizers(self) -> Any:
        parts = list(self.body.parameters())
        return [torch.optim.SGD(parts[:2], lr=0.1), torch.optim.SGD(parts[2:], lr=0.1)]

    def training_step(self, batch: Any, index: int) -> None:
        raise AssertionError("not reached")

    @property
    def automatic_optimization(self) -> bool:
        return False


def two_networks() -> Lit:
    module = growable()
    module.other = copy.deepcopy(module.body)
    return module


def two_optimizers() -> Lit:
    module = Two()
    make_growable(module.body, torch.zeros(1, 6), sites=["2"], sources=["0"])
    return module


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Lit, {}, r"there is none: call make_growable on one\.$"),
        (two_networks, {}, r"^network must name a growable network .* there is body, other\.$"),
        (growable, {"network": "head"}, r"^network 'head' must name .* there is body\.$"),
        (two_optimizers, {}, r"^one optimizer must have the parameters .* but 2 have some\.$"),
        (
            growable,
            {"monitor": "loss", "patience": 1},
            r"^monitor 'loss' was not logged; val_loss was\.$",
        ),
        (growable, {"patience": 1}, "patience and monitor must be given together"),
        (growable, {"mode": "up"}, "mode must be min or max but got 'up'"),
    ],
)
def test_misuse_is_told_in_one_line(
    tmp_path: Path, make: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(GrowthError, match=message):
        trainer(tmp_path, 3, GrowingCallback(**options)).fit(make(), data(), data())


def test_trainers_that_hold_parameters_apart_are_refused(tmp_path: Path) -> None:
    averaging = StochasticWeightAveraging(0.1)
    with pytest.raises(GrowthError, match="does not work with StochasticWeightAveraging"):
        trainer(tmp_path, 3, GrowingCallback(), averaging).fit(growable(), data())
    with pytest.raises(GrowthError, match="needs a Trainer with one device but got DDPStrategy"):
        trainer(tmp_path, 3, GrowingCallback(), strategy="ddp").fit(growable(), data())
    torch.distributed.destroy_process_group()


def test_sites_are_where_they_were_named() -> None:
    assert [site.key for site in sites(growable().body)] == ["2"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GrowingCallback()
