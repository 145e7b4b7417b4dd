"""Averaged weights: one mechanism for images, text and tables."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nni_petridish.errors import ConfigError, Interrupted
from nni_petridish.running.growth import load_network, run_growth
from nni_petridish.running.trunk import load_trunk
from nni_petridish.search.settings import GrowthSettings
from nni_petridish.tasks.arrays.recipe import ArrayRecipe
from nni_petridish.tasks.arrays.training import Examples
from nni_petridish.tasks.arrays.training import evaluate as evaluate_arrays
from nni_petridish.tasks.arrays.training import fit as fit_arrays
from nni_petridish.tasks.averaging import first_averaged_epoch
from nni_petridish.tasks.checkpoint import load_checkpoint
from nni_petridish.tasks.language.recipe import LanguageRecipe
from nni_petridish.tasks.language.training import evaluate_language, fit_language
from nni_petridish.tasks.loop import History
from nni_petridish.tasks.recipes import recipe_identity
from nni_petridish.tasks.task import Callbacks, Phase
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.training import evaluate, fit
from tests.running.test_growth import CHILD, SEED, digits_task, new_gallery, same_models
from tests.tasks.test_language import RECIPE as LANGUAGE
from tests.tasks.test_language import network as recurrent_network
from tests.tasks.test_language import text
from tests.tasks.test_training import QUICK, Small, random_split

Fit = Callable[..., History]


def fit_images(net: nn.Module, average: float, **options: Any) -> History:
    recipe = replace(QUICK, average=average)
    validation = random_split(20, seed=1)
    return fit(net, random_split(), recipe, seed=3, validation=validation, **options)


def examples(n: int = 60, seed: int = 0) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 6, generator=generator)
    return Examples(inputs, (inputs[:, 0] > inputs[:, 1]).long(), torch.ones(n))


def dense_network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def fit_tables(net: nn.Module, average: float, **options: Any) -> History:
    recipe = ArrayRecipe(epochs=4, batch_size=12, average=average)
    return fit_arrays(net, examples(), recipe, seed=3, validation=examples(30, 1), **options)


def fit_text(net: nn.Module, average: float, **options: Any) -> History:
    # A patience that never ends: nothing else begins to average.
    recipe = replace(LANGUAGE, epochs=4, patience=99, average=average)
    return fit_language(net, text(), recipe, seed=3, validation=text(150, 1), **options)


KINDS: dict[str, tuple[Callable[[int], nn.Module], Fit]] = {
    "images": (lambda seed: Small(seed), fit_images),
    "tables": (dense_network, fit_tables),
    "text": (lambda seed: recurrent_network(2, seed), fit_text),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def weights(net: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def test_the_last_epochs_are_averaged_and_none_at_the_full_rate() -> None:
    assert first_averaged_epoch(10, 0.0) is None
    assert [first_averaged_epoch(epochs, 0.25) for epochs in (1, 4, 10)] == [0, 3, 7]
    assert first_averaged_epoch(10, 0.5, held=8) == 8


@kinds
def test_the_network_ends_with_the_mean_of_the_weights_after_the_last_steps(kind: str) -> None:
    make, train = KINDS[kind]
    raw: list[list[Tensor]] = []
    starts: list[int] = []
    plain, averaged = make(0), make(0)

    def note(net: nn.Module) -> bool:
        raw.append(weights(net))
        return False

    train(
        plain,
        0.0,
        progress=False,
        stop=lambda: note(plain),
        on_epoch=lambda record: starts.append(len(raw)),
    )
    raw.append(weights(plain))
    last = raw[starts[1] + 1 :]  # after the steps of the last two of four epochs
    train(averaged, 0.5, progress=False)
    for i, parameter in enumerate(averaged.parameters()):
        mean = torch.stack([state[i].double() for state in last]).mean(0)
        torch.testing.assert_close(parameter.detach().double(), mean, rtol=1e-5, atol=1e-6)
    assert not same(plain, averaged)


@kinds
def test_averaging_does_not_change_the_training_itself(kind: str) -> None:
    make, train = KINDS[kind]
    losses = [
        [record["loss"] for record in train(make(0), average, progress=False).records]
        for average in (0.0, 0.5)
    ]
    assert losses[0] == losses[1]


@kinds
def test_what_is_validated_is_what_is_kept(kind: str) -> None:
    make, train = KINDS[kind]
    net = make(0)
    last = train(net, 0.5, progress=False).records[-1]
    if kind == "images":
        assert last["validation_loss"] == evaluate(net, random_split(20, seed=1), QUICK).loss
    elif kind == "tables":
        assert last["validation_loss"] == evaluate_arrays(net, examples(30, 1))["loss"]
    else:
        assert last["validation_loss"] == evaluate_language(net, text(150, 1), LANGUAGE).loss


def test_batch_norms_get_the_statistics_of_the_averaged_weights() -> None:
    net, split = Small(), random_split()
    fit_images(net, 0.5, progress=False)
    seen = []
    for raw, _ in split.batches(QUICK.batch_size, torch.Generator().manual_seed(0)):
        with torch.no_grad():
            values = net.stem(split.normalize(raw)).transpose(0, 1).flatten(1).double()
        seen.append((values.mean(1), values.var(1)))
    mean, variance = (torch.stack(part).mean(0) for part in zip(*seen, strict=True))
    torch.testing.assert_close(net.norm.running_mean.double(), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.norm.running_var.double(), variance, rtol=1e-4, atol=1e-5)
    assert net.norm.momentum == 0.1


@kinds
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_stopped_and_continued_is_the_same_as_never_stopped(
    kind: str, epochs: int, tmp_path: Path
) -> None:
    make, train = KINDS[kind]
    whole = make(0)
    wanted = train(whole, 0.5, progress=False)
    done = 0

    def stop() -> bool:
        nonlocal done
        return done == epochs  # at the first step of an epoch, two of which are averaged

    def count(record: dict[str, float]) -> None:
        nonlocal done
        done += 1

    with pytest.raises(Interrupted):
        train(make(0), 0.5, progress=False, checkpoint=tmp_path, stop=stop, on_epoch=count)
    resumed = make(9)
    history = train(resumed, 0.5, progress=False, checkpoint=tmp_path)
    assert history.resumed_at == epochs
    assert same(resumed, whole)
    for one, other in zip(history.records, wanted.records, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


@kinds
def test_a_finished_checkpoint_gives_the_averaged_weights(kind: str, tmp_path: Path) -> None:
    make, train = KINDS[kind]
    done, again = make(0), make(9)
    train(done, 0.5, progress=False, checkpoint=tmp_path)
    train(again, 0.5, progress=False, checkpoint=tmp_path, stop=lambda: pytest.fail("a step"))
    assert same(done, again)


@kinds
def test_without_an_average_checkpoints_are_those_of_earlier_versions(
    kind: str, tmp_path: Path
) -> None:
    make, train = KINDS[kind]
    net = make(0)
    train(net, 0.0, progress=False, checkpoint=tmp_path)
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert not any("average" in name for name in found[0])
    assert "average" not in found[1]["recipe"]
    assert ("averaged_steps" in found[1]) == (kind == "text")


def test_a_text_with_an_average_cannot_be_prolonged(tmp_path: Path) -> None:
    recipe = replace(LANGUAGE, epochs=2, average=0.5)
    fit_language(recurrent_network(), text(), recipe, seed=3, checkpoint=tmp_path, progress=False)
    longer = replace(recipe, epochs=3)
    with pytest.warns(UserWarning, match="another run"):
        fit_language(
            recurrent_network(), text(), longer, seed=3, checkpoint=tmp_path, progress=False
        )


def test_weak_learning_is_not_averaged() -> None:
    nets = []
    for average in (0.0, 0.5):
        task = digits_task()
        task = replace(task, recipe=replace(task.recipe, average=average))
        torch.manual_seed(0)
        nets.append(task.build(task.seed()))
        task.train(nets[-1], Phase("weak", 2))
    assert same(*nets)


def test_a_recipe_without_an_average_is_that_of_earlier_versions() -> None:
    for recipe in (Recipe(), LanguageRecipe(), ArrayRecipe()):
        assert "average" not in recipe_identity(recipe)
        assert recipe_identity(replace(recipe, average=0.5))["average"] == 0.5  # type: ignore
    with pytest.raises(ConfigError, match="average"):
        Recipe(average=1.5)


def test_growths_with_a_trunk_and_an_average_go_on_to_the_same_models(tmp_path: Path) -> None:
    plan = GrowthSettings(seed_epochs=4, weak_epochs=1, final_epochs=4, anneal=0.5)
    task = digits_task()
    task = replace(task, recipe=replace(task.recipe, average=0.9))
    whole, broken = new_gallery(tmp_path / "a"), new_gallery(tmp_path / "b")
    for growth in (SEED, CHILD):
        outcome = run_growth(growth, task, plan, whole)
        for last in (2, 3):  # at the trunk, and where the average is under way

            def stop(phase: str, record: dict[str, Any], last: int = last) -> None:
                if phase != "weak" and record["epoch"] == last:
                    raise Interrupted("stop")

            with pytest.raises(Interrupted):
                run_growth(growth, task, plan, broken, Callbacks(stop))
        run_growth(growth, task, plan, broken)
        assert same_models(whole, broken, growth.id)
        saved = load_network(task, whole, growth.id)
        assert task.evaluate(saved)["error"] == outcome.error
        trunk = copy.deepcopy(saved)
        assert load_trunk(whole, growth.id, trunk)
        assert not same(saved, trunk)
