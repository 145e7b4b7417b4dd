from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nni_petridish import attach_candidates, sites
from nni_petridish.core import candidate_parameters
from nni_petridish.errors import ConfigError, DataError, Interrupted, TrainingError
from nni_petridish.tasks.checkpoint import FILE, load_checkpoint, unique_state
from nni_petridish.tasks.loop import History
from nni_petridish.tasks.optim import clip_groups, make_optimizer, take_step
from nni_petridish.tasks.vision.augment import Augmentation, cutout, shift_and_flip
from nni_petridish.tasks.vision.data import load_data
from nni_petridish.tasks.vision.recipe import DIFFERENCES, Recipe
from nni_petridish.tasks.vision.splits import TensorSplit, pixel_statistics
from nni_petridish.tasks.vision.training import evaluate, fit
from search_spaces import VisionSpace

QUICK = Recipe(epochs=4, batch_size=8, cutout=3, crop_padding=1, drop_path_keep=0.8, device="cpu")


class Small(nn.Module):
    """A small CNN with what the real ones have: batch norm, dropout, one table shared by two."""

    no_weight_decay = ("table",)

    def __init__(self, seed: int = 0, channels: int = 1, width: int = 8) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(width)
            self.conv = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
            self.drop = nn.Dropout(0.1)
            self.head = nn.Linear(2 * width, 10)
        self.table = nn.Parameter(torch.full((width,), 0.5))
        self.shared = nn.ParameterDict({"again": self.table})

    def features(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(images))) * self.table[:, None, None]
        x = x + self.shared["again"][:, None, None]
        return self.drop(F.relu(self.conv(x)).mean((2, 3)))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


def random_split(
    n: int = 40, shape: tuple[int, int, int] = (1, 8, 8), seed: int = 0
) -> TensorSplit:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=generator)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (n,), generator=generator)
    return TensorSplit(images, labels, *pixel_statistics(images))


def train(net: nn.Module, recipe: Recipe = QUICK, **more: object) -> History:
    split = more.pop("split") if "split" in more else random_split()
    return fit(net, split, recipe, **{"seed": 3, "progress": False, **more})  # type: ignore


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def without_seconds(history: History) -> list[dict[str, float]]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in history.records]


# The schedule


@pytest.mark.parametrize("lr_min", [0.0, 0.001])
def test_the_cosine_is_torchs_stepped_per_step(lr_min: float) -> None:
    recipe = replace(QUICK, lr_min=lr_min)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=recipe.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60, lr_min)
    for step in range(61):
        rate = recipe.learning_rate(step, 60, 5)
        assert rate == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_the_exponential_is_torchs_stepped_per_epoch() -> None:
    recipe = Recipe.named("image_folder")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    for step in range(40):
        rate = recipe.learning_rate(step, 2500, 10)
        assert rate == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12)
        if step % 10 == 9:
            optimizer.step()
            scheduler.step()


def test_records_hold_the_learning_rate_of_the_last_step() -> None:
    records = train(Small()).records
    assert [r["epoch"] for r in records] == [1, 2, 3, 4]
    wanted = [0.0125 * (1 + math.cos(math.pi * (5 * e + 4) / 20)) for e in range(4)]
    assert [r["lr"] for r in records] == pytest.approx(wanted)


# The update


def test_fit_makes_the_steps_of_a_loop_written_out_with_torchs_own_parts() -> None:
    recipe = replace(
        QUICK, epochs=3, cutout=0, crop_padding=0, flip=False, clip=0.2, label_smoothing=0.1
    )
    net, reference = Small(), Small()
    net.drop.p = reference.drop.p = 0.0
    split = random_split(8)  # one batch, so that its order does not matter to the result
    train(net, recipe, split=split)
    plain = [reference.table]
    decayed = [p for p in reference.parameters() if p is not reference.table]
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": 2e-4}, {"params": plain, "weight_decay": 0}],
        lr=0.025,
        momentum=0.9,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    for _ in range(3):
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        optimizer.zero_grad()
        loss(reference(split.normalize(split.images)), split.labels).backward()
        assert nn.utils.clip_grad_norm_(reference.parameters(), 0.2) > 0.2
        optimizer.step()
        scheduler.step()
    for (name, a), b in zip(net.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6), name
    assert not torch.allclose(net.head.weight, Small().head.weight, atol=1e-3)


def test_flagged_parameters_are_not_decayed() -> None:
    net = Small()
    decay = {
        id(p): group["weight_decay"]
        for group in make_optimizer(net, lr=0.1, weight_decay=2e-4).param_groups
        for p in group["params"]
    }
    assert {id(p) for p in net.parameters()} == decay.keys()
    assert [n for n, p in net.named_parameters() if decay[id(p)] == 0] == ["table"]


def with_candidates(alpha: float) -> tuple[nn.Module, nn.Module]:
    """A network, and the same with candidates; their gradients are proportional to alpha."""
    torch.manual_seed(0)
    space = VisionSpace((1, 8, 8), 10, cells_per_stage=1, filters=4, stages=2)
    alone = space.build(space.seed())
    parent = attach_candidates(copy.deepcopy(alone), l1=0.0)
    for site in sites(parent):
        assert site.weak_learner is not None
        nn.init.constant_(site.weak_learner.table.alpha, alpha)
    return alone, parent


@pytest.mark.parametrize("alpha", [1.0, 1e4])
def test_candidates_with_huge_gradients_do_not_change_the_networks_steps(alpha: float) -> None:
    recipe = replace(QUICK, clip=0.1, epochs=1)  # the clip is active, else this shows nothing
    alone, parent = with_candidates(alpha)
    for net in (alone, parent):
        train(net, recipe)
    for name, tensor in alone.state_dict().items():
        assert torch.equal(tensor, parent.state_dict()[name]), name
    own, candidates = clip_groups(parent)
    assert len(own) == len(list(alone.parameters()))
    assert {id(p) for p in candidates} == {id(p) for p in candidate_parameters(parent)}


def test_candidates_are_clipped_too() -> None:
    recipe = replace(QUICK, clip=0.1, epochs=1, batch_size=40, weight_decay=0.0)
    _, net = with_candidates(1e4)
    parameters = candidate_parameters(net)
    before = [p.detach().clone() for p in parameters]
    train(net, recipe)
    moved = [p.detach() - old for p, old in zip(parameters, before, strict=True)]
    norm = nn.utils.get_total_norm(moved).item()
    assert norm == pytest.approx(recipe.lr * recipe.clip, rel=1e-2)


class WithDropPath(Small):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[float, float]] = []

    def set_drop_path(self, keep: float, progress: float) -> None:
        self.calls.append((keep, progress))


def test_drop_path_is_told_keep_and_progress_before_every_step() -> None:
    net = WithDropPath()
    train(net)
    assert net.calls == [(0.8, step / 20) for step in range(20)]


@pytest.mark.parametrize("seed", [True, -1, 1.0, "1"])
def test_a_seed_is_a_whole_number_of_at_least_0(seed: object) -> None:
    with pytest.raises(ConfigError, match=f"seed must be a whole number .* but got {seed!r}"):
        train(Small(), seed=seed)


class WithAuxiliary(Small):
    def __init__(self) -> None:
        super().__init__()
        self.auxiliary: nn.Module | None = nn.Linear(16, 10)

    def forward_with_auxiliary(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.features(images)
        assert self.auxiliary is not None
        return self.head(x), self.auxiliary(x)


def test_an_auxiliary_head_adds_its_weighted_loss() -> None:
    split = random_split(8)
    recipe = replace(QUICK, epochs=1, cutout=0, crop_padding=0, flip=False)
    net = WithAuxiliary()
    net.drop.p = 0.0
    with torch.no_grad():
        net.train()
        logits, side = net.forward_with_auxiliary(split.normalize(split.images))
        losses = [F.cross_entropy(x, split.labels).item() for x in (logits, side)]
    record = train(net, recipe, split=split).records[0]
    assert record["loss"] == pytest.approx(losses[0] + 0.4 * losses[1], rel=1e-5)
    net.auxiliary = None
    train(net, recipe, split=split)  # trained by `forward` alone


def test_a_parameter_without_a_gradient_at_first_is_trained_later() -> None:
    class Late(Small):
        def __init__(self) -> None:
            super().__init__()
            self.late = nn.Parameter(torch.ones(10))
            self.steps = 0

        def forward(self, images: Tensor) -> Tensor:
            self.steps += 1
            x = super().forward(images)
            return x * self.late if self.steps > 7 else x

    net = Late()
    train(net)
    assert not torch.equal(net.late, torch.ones(10))


# Randomness and resuming


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    a, b, c = Small(), Small(), Small()
    one, two, three = train(a), train(b), train(c, seed=4)
    assert same(a, b)
    assert without_seconds(one) == without_seconds(two)
    assert not same(a, c)
    assert without_seconds(one) != without_seconds(three)


def test_every_epoch_has_its_own_order_and_augmentation() -> None:
    class Watches(Small):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []

        def forward(self, images: Tensor) -> Tensor:
            self.seen.append(images.clone())
            return super().forward(images)

    def epochs(recipe: Recipe) -> tuple[list[list[Tensor]], tuple[Tensor, ...]]:
        net = Watches()
        train(net, recipe)
        seen = torch.cat(net.seen).flatten(1)
        return [sorted(part, key=Tensor.tolist) for part in seen.split(40)], seen.split(40)

    plain = replace(QUICK, cutout=0, crop_padding=0, flip=False)
    as_sets, in_order = epochs(plain)
    for epoch in range(1, 4):
        assert torch.equal(torch.stack(as_sets[0]), torch.stack(as_sets[epoch]))
        assert not torch.equal(in_order[0], in_order[epoch])
    for change in ({"cutout": 3}, {"crop_padding": 1}, {"flip": True}):
        as_sets, _ = epochs(replace(plain, **change))
        assert not torch.equal(torch.stack(as_sets[0]), torch.stack(as_sets[1]))


def test_the_callers_random_state_is_left_alone_and_has_no_influence() -> None:
    a, b = Small(), Small()
    torch.manual_seed(1)
    train(a)
    first = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(first, torch.rand(1))
    train(b)
    assert same(a, b)


def test_images_on_disk_train_and_continue_as_those_in_memory_do(tmp_path: Path) -> None:
    from PIL import Image

    for part in ("train", "val"):
        for label in range(3):
            (tmp_path / part / str(label)).mkdir(parents=True)
            for i in range(5):
                color = (80 * label, 20 * i, 100)
                Image.new("RGB", (12, 10), color).save(tmp_path / part / str(label) / f"{i}.png")
    split = load_data("image_folder", tmp_path, image_size=8, workers=0).train
    recipe = Recipe.named("image_folder", epochs=3, batch_size=5, device="cpu")
    state = torch.random.get_rng_state()
    whole, resumed = Small(channels=3), Small(channels=3)
    wanted = train(whole, recipe, split=split)
    assert torch.equal(state, torch.random.get_rng_state())
    polls = iter(range(100))
    with pytest.raises(Interrupted):
        train(resumed, recipe, split=split, checkpoint=tmp_path, stop=lambda: next(polls) == 4)
    history = train(resumed, recipe, split=split, checkpoint=tmp_path)
    assert history.resumed_at == 1
    assert same(resumed, whole)
    assert without_seconds(history) == without_seconds(wanted)


@pytest.mark.parametrize("steps", [3, 5, 13])
def test_stopped_and_continued_is_the_same_as_never_stopped(steps: int, tmp_path: Path) -> None:
    whole = Small()
    wanted = train(whole)
    polls = iter(range(1000))
    with pytest.raises(Interrupted, match=f"epoch {steps // 5 + 1}, step {steps % 5 + 1}"):
        train(Small(), checkpoint=tmp_path / "new", stop=lambda: next(polls) >= steps)
    resumed = Small(seed=9)  # everything must come from the checkpoint
    if steps < 5:
        resumed = Small()  # there is none yet
    seen: list[dict[str, float]] = []
    history = train(resumed, checkpoint=tmp_path / "new", on_epoch=seen.append)
    assert history.resumed_at == steps // 5
    assert [r["epoch"] for r in seen] == list(range(steps // 5 + 1, 5))
    assert same(resumed, whole)
    assert without_seconds(history) == without_seconds(wanted)


def test_a_finished_checkpoint_restores_and_trains_no_step(tmp_path: Path) -> None:
    done = Small()
    train(done, checkpoint=tmp_path)
    again = Small(seed=9)
    history = train(again, checkpoint=tmp_path, stop=lambda: pytest.fail("a step"))
    assert same(done, again)
    assert history.resumed_at == len(history.records) == 4


def test_an_exception_from_on_epoch_ends_training_after_its_checkpoint(tmp_path: Path) -> None:
    def refuse(record: dict[str, float]) -> None:
        if record["epoch"] == 2:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        train(Small(), checkpoint=tmp_path, on_epoch=refuse)
    assert train(Small(), checkpoint=tmp_path).resumed_at == 2


@pytest.mark.parametrize(
    "change", ["seed", "epochs", "lr", "images", "keys", "shape"], ids=lambda x: x
)
def test_a_checkpoint_of_another_run_is_not_continued(change: str, tmp_path: Path) -> None:
    train(Small(), replace(QUICK, epochs=1), checkpoint=tmp_path)
    recipe, more, net = replace(QUICK, epochs=1), {}, Small()
    if change == "seed":
        more["seed"] = 4
    elif change == "epochs":
        recipe = replace(recipe, epochs=2)
    elif change == "lr":
        recipe = replace(recipe, lr=0.01)
    elif change == "images":
        more["split"] = random_split(41)
    elif change == "keys":
        net.more = nn.Linear(1, 1)
    else:
        net = Small(width=4)
    with pytest.warns(UserWarning, match="another run"):
        history = train(net, recipe, checkpoint=tmp_path, **more)
    assert history.resumed_at == 0


def test_a_checkpoint_holds_each_shared_tensor_once_and_no_pickle(tmp_path: Path) -> None:
    net = Small()
    assert {"table", "shared.again"} <= net.state_dict().keys()
    assert "shared.again" not in unique_state(net)
    train(net, checkpoint=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [FILE]
    found = load_checkpoint(tmp_path)
    assert found is not None
    tensors, facts = found
    assert torch.equal(tensors["model.table"], net.table)
    names = {n.removeprefix("momentum.") for n in tensors if n.startswith("momentum.")}
    assert names == {n for n, _ in net.named_parameters()}
    assert json.loads(json.dumps(facts))["seed"] == 3


@pytest.mark.parametrize("damage", ["garbage", "payload", "facts", "truncated"])
def test_a_damaged_checkpoint_is_told_and_its_training_starts_anew(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = train(net := Small(), checkpoint=tmp_path)
    data = bytearray((tmp_path / FILE).read_bytes())
    match damage:
        case "garbage":
            data = bytearray(b"not a checkpoint")
        case "payload":
            data[-3] ^= 1
        case "facts":
            data[data.index(b"seed") + 9] ^= 1
        case "truncated":
            del data[len(data) // 2 :]
    (tmp_path / FILE).write_bytes(data)
    history = train(other := Small(), checkpoint=tmp_path)
    assert history.resumed_at == 0
    assert len(caplog.messages) == 1
    assert "is damaged" in caplog.messages[0]
    assert [r["loss"] for r in history.records] == [r["loss"] for r in expected.records]
    assert torch.equal(net.table, other.table)


KILLED = """
import sys
sys.path[:0] = {paths!r}
from test_training import QUICK, Small, train
from dataclasses import replace
def tell(record):
    print(int(record["epoch"]), flush=True)
train(Small(), replace(QUICK, epochs=60), checkpoint={folder!r}, on_epoch=tell)
"""


def test_killed_at_any_moment_it_continues_to_the_same_end(tmp_path: Path) -> None:
    recipe = replace(QUICK, epochs=60)
    here = Path(__file__).parent
    code = KILLED.format(paths=[str(here), str(here.parents[1])], folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 10:
            break
    time.sleep(0.007)  # somewhere within an epoch or a write
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    resumed, whole = Small(), Small()
    history = train(resumed, recipe, checkpoint=tmp_path)
    assert 10 <= history.resumed_at < 60
    assert [p.name for p in tmp_path.iterdir()] == [FILE]
    wanted = train(whole, recipe)
    assert same(resumed, whole)
    assert without_seconds(history) == without_seconds(wanted)


# Augmentation, each against one image at a time


def test_shift_and_flip_equal_padding_and_cutting_each_image() -> None:
    images = torch.randint(0, 256, (64, 3, 7, 9), dtype=torch.uint8)
    rows, columns = torch.randint(0, 5, (2, 64))
    flips = torch.rand(64) < 0.5
    got = shift_and_flip(images, rows, columns, flips, 2)
    for i in range(64):
        padded = torch.zeros(3, 11, 13, dtype=torch.uint8)
        padded[:, 2:9, 2:11] = images[i]
        wanted = padded[:, rows[i] : rows[i] + 7, columns[i] : columns[i] + 9]
        assert torch.equal(got[i], wanted.flip(2) if flips[i] else wanted)
    center = torch.full((64,), 2)
    assert torch.equal(shift_and_flip(images, center, center, None, 2), images)


@pytest.mark.parametrize("size", [1, 4, 5])
def test_cutout_equals_cutting_each_image(size: int) -> None:
    images = torch.rand(50, 2, 8, 6) + 1
    rows, columns = torch.randint(0, 8, (50,)), torch.randint(0, 6, (50,))
    got = cutout(images.clone(), rows, columns, size)
    for i in range(50):
        wanted = images[i].clone()
        top, left = int(rows[i]) - size // 2, int(columns[i]) - size // 2
        for y in range(top, top + size):
            for x in range(left, left + size):
                if 0 <= y < 8 and 0 <= x < 6:
                    wanted[:, y, x] = 0
        assert torch.equal(got[i], wanted)


def test_an_augmented_batch_is_crop_and_flip_then_normalized_then_cut() -> None:
    split = random_split(20, (3, 8, 8))
    augmentation = Augmentation(crop_padding=2, flip=True, cutout=4)
    draws = augmentation.draw(20, (8, 8), torch.Generator().manual_seed(0), torch.device("cpu"))
    assert draws.crops is not None
    assert draws.flips is not None
    assert draws.holes is not None
    assert (draws.crops.min(), draws.crops.max()) == (0, 4)
    got = augmentation.apply(split.images[12:], draws, 12, split.normalize)
    raw = shift_and_flip(
        split.images[12:], draws.crops[0, 12:], draws.crops[1, 12:], draws.flips[12:], 2
    )
    wanted = cutout(split.normalize(raw), draws.holes[0, 12:], draws.holes[1, 12:], 4)
    assert torch.equal(got, wanted)
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_no_augmentation_is_normalization_alone() -> None:
    split = random_split(4)
    draws = Augmentation().draw(4, (8, 8), torch.Generator(), torch.device("cpu"))
    got = Augmentation().apply(split.images, draws, 0, split.normalize)
    assert torch.equal(got, split.normalize(split.images))


def test_flips_alone_mirror_about_half_of_the_images() -> None:
    split = random_split(400)
    augmentation = Augmentation(flip=True)
    draws = augmentation.draw(400, (8, 8), torch.Generator().manual_seed(0), torch.device("cpu"))
    got = augmentation.apply(split.images, draws, 0, split.normalize)
    plain = split.normalize(split.images)
    same_, mirrored = [
        sum(torch.equal(a, b) for a, b in zip(got, other, strict=True))
        for other in (plain, plain.flip(3))
    ]
    assert same_ + mirrored == 400
    assert 160 < mirrored < 240


def test_training_leaves_the_data_untouched() -> None:
    split = random_split()
    train(Small(), split=split)
    assert torch.equal(split.images, random_split().images)


# Breakdown, evaluation, validation


def test_a_loss_that_is_not_finite_raises_at_once_and_updates_nothing() -> None:
    class Breaks(Small):
        steps = 0

        def forward(self, images: Tensor) -> Tensor:
            self.steps += 1
            x = super().forward(images)
            return x * math.nan if self.steps == 8 else x

    net = Breaks()
    with pytest.raises(TrainingError, match=r"^the loss is not finite at epoch 2, step 3\.$"):
        train(net)
    assert all(torch.isfinite(p).all() for p in net.parameters())


def test_evaluation_equals_a_computation_by_hand() -> None:
    net, split = Small(), random_split(600)
    train(net)
    net.train()
    net.norm.eval()  # a frozen part must stay frozen
    metrics = evaluate(net, split, QUICK)
    assert (net.training, net.norm.training, net.drop.training) == (True, False, True)
    net.eval()
    mean, std = split.mean[:, None, None], split.std[:, None, None]
    losses, wrong = [], 0
    with torch.no_grad():
        for image, label in zip(split.images, split.labels, strict=True):
            scores = net(((image - mean) / std)[None])[0].double()
            losses.append(float(scores.logsumexp(0) - scores[label]))
            wrong += int(scores.argmax() != label)
    assert metrics.loss == pytest.approx(sum(losses) / 600, rel=1e-5)
    assert (metrics.error, metrics.accuracy, metrics.n) == (wrong / 600, 1 - wrong / 600, 600)
    assert evaluate(net, split) == metrics
    assert not net.training


def test_evaluation_of_a_broken_network_raises() -> None:
    net = Small()
    nn.init.constant_(net.head.bias, math.nan)
    with pytest.raises(TrainingError, match="not finite"):
        evaluate(net, random_split())


def test_validation_is_recorded_and_does_not_change_training() -> None:
    a, b, held_out = Small(), Small(), random_split(20, seed=7)
    seen: list[dict[str, float]] = []
    history = train(a, validation=held_out, on_epoch=seen.append)
    train(b)
    assert same(a, b)
    assert seen == list(history.records)
    metrics = evaluate(a, held_out, QUICK)
    assert history.records[-1]["validation_loss"] == metrics.loss
    assert history.records[-1]["validation_error"] == metrics.error


def test_both_memory_orders_train_alike() -> None:
    a, b = Small(), Small()
    train(a)
    train(b, replace(QUICK, channels_last=False))
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.allclose(x, y, atol=1e-4)


def test_empty_data_and_networks_are_clear_errors() -> None:
    empty = random_split(0)
    for call in (lambda: train(Small(), split=empty), lambda: evaluate(Small(), empty)):
        with pytest.raises(DataError, match="at least 1 image but got 0"):
            call()
    with pytest.raises(TrainingError, match="no parameter"):
        train(nn.Flatten())


def test_a_bar_is_shown_on_a_terminal_only(capsys: pytest.CaptureFixture[str]) -> None:
    train(Small(), progress=True)
    assert capsys.readouterr() == ("", "")


# The recipe


def wrong(text: str, **values: object) -> object:
    return pytest.param(values, text, id=str(values))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        wrong("epochs must be a whole number of at least 1 but got 0.", epochs=0),
        wrong("epochs must be a whole number of at least 1 but got 2.5.", epochs=2.5),
        wrong("batch_size must be a whole number of at least 1 but got True.", batch_size=True),
        wrong("cutout must be a whole number of at least 0 but got -1.", cutout=-1),
        wrong("lr must be a number above 0 but got 0.", lr=0),
        wrong("lr must be a number above 0 but got nan.", lr=math.nan),
        wrong("lr must be a number above 0 but got '0.1'.", lr="0.1"),
        wrong("lr_min must be at most lr (0.025) but got 1.", lr_min=1),
        wrong("momentum must be a number in [0, 1) but got 1.", momentum=1),
        wrong("clip must be a number above 0 but got 0.", clip=0),
        wrong("drop_path_keep must be a number in (0, 1] but got 0.", drop_path_keep=0),
        wrong("label_smoothing must be a number in [0, 1) but got 1.", label_smoothing=1),
        wrong("schedule must be one of cosine, exponential but got 'step'.", schedule="step"),
        wrong("device must be one of auto, cpu, cuda but got 'tpu'.", device="tpu"),
        wrong("flip must be true or false but got 1.", flip=1),
    ],
)
def test_a_wrong_value_is_one_line(values: dict, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Recipe(**values)
    assert str(caught.value) == text


def test_the_named_recipes_fit_their_images() -> None:
    sides = {"digits": 8, "mnist": 28, "fashion_mnist": 28, "image_folder": 224}
    for name in DIFFERENCES:
        side = sides.get(name, 32)
        Recipe.named(name).check_image((3, side, side))
    with pytest.raises(ConfigError, match=r"cutout must be below the image's side \(8\) .*16"):
        train(Small(), Recipe(device="cpu"))
    with pytest.raises(ConfigError, match="got 'imagenet'"):
        Recipe.named("imagenet")
    with pytest.raises(ConfigError, match="got 'learning_rate'"):
        Recipe.named("digits", learning_rate=1)


def test_cuda_without_one_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="available on this machine but got 'cuda'"):
        train(Small(), replace(QUICK, device="cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("amp", [False, True])
def test_cuda_learns_as_the_cpu_does(amp: bool) -> None:
    data = load_data("digits")
    recipe = Recipe.named("digits", epochs=3, amp=amp, device="cuda")
    net = Small(width=16)
    fit(net, data.train, recipe, seed=0, progress=False)
    assert evaluate(net, data.test, recipe).accuracy > 0.9


def cnn() -> nn.Module:
    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    torch.manual_seed(0)
    pool: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*block(1, 32, 1), *block(32, 64, 2), *block(64, 64, 2), *pool)


def test_a_small_cnn_learns_the_digits() -> None:
    data = load_data("digits")
    recipe = Recipe.named("digits", epochs=6, device="cpu")
    net = cnn()
    start = evaluate(net, data.test, recipe).accuracy
    fit(net, data.train, recipe, seed=0, progress=False)
    assert start < 0.5
    assert evaluate(net, data.test, recipe).accuracy > 0.95


def test_small_parameters_are_updated_by_one_thread_with_the_same_bits() -> None:
    threads, seen, found = torch.get_num_threads(), [], []
    try:
        torch.set_num_threads(3)
        for is_apart in (False, True):
            torch.manual_seed(0)
            net = nn.ModuleList([nn.Linear(n, 41) for n in (3, 17, 130)])
            if is_apart:  # on average no longer small
                net.append(nn.Linear(1000, 1000))
            optimizer = make_optimizer(net, lr=0.1, weight_decay=1e-3, momentum=0.9)
            optimizer.register_step_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
            for _ in range(3):
                loss = torch.stack([p.sin().sum() for p in net.parameters()]).sum()
                take_step(optimizer, loss, (), 5.0, lambda group: 0.1)
            assert torch.get_num_threads() == 3
            found.append([*net[:3].parameters()])
    finally:
        torch.set_num_threads(threads)
    assert seen == [1] * 3 + [3] * 3
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
