from __future__ import annotations

import contextlib
import copy
import math
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nni_petridish import PetridishError, alpha_tables, attach_candidates, finalize_candidates
from nni_petridish.errors import ConfigError, DataError, Interrupted, TrainingError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.kernels.cross_entropy import linear_cross_entropy
from nni_petridish.registry import kind_of
from nni_petridish.running.growth import load_network, run_growth
from nni_petridish.search.records import Growth
from nni_petridish.search.settings import GrowthSettings
from nni_petridish.tasks.language.recipe import LanguageRecipe
from nni_petridish.tasks.language.task import RecurrentTask
from nni_petridish.tasks.language.text import Corpus
from nni_petridish.tasks.language.training import evaluate_language, fit_language
from nni_petridish.tasks.task import Callbacks, Phase
from search_spaces import RecurrentSpace
from search_spaces.recurrent.genotype import RecurrentGenotype
from search_spaces.recurrent.network import RecurrentNetwork

WORDS = 17
RECIPE = LanguageRecipe(
    epochs=3, batch_size=4, evaluation_batch=3, bptt=8, lr=2.0, patience=1, device="cpu"
)


def text(n: int = 400, seed: int = 0) -> Tensor:
    """A text in which a word depends on the one before: there is something to learn."""
    random = np.random.default_rng(seed)
    words = [0]
    for _ in range(n - 1):
        words.append((words[-1] * 3 + 1 + int(random.random() < 0.3)) % WORDS)
    return torch.tensor(words)


def network(nodes: int = 1, seed: int = 0) -> RecurrentNetwork:
    torch.manual_seed(seed)
    genotype = RecurrentGenotype([("relu", 0), ("tanh", 1), ("sigmoid", 1)][:nodes])
    return RecurrentSpace(WORDS, 8).build(genotype)


def corpus() -> Corpus:
    return Corpus("made", tuple(map(str, range(WORDS))), text(), text(150, 1), text(150, 2))


def same(one: RecurrentNetwork, other: RecurrentNetwork) -> bool:
    own, its = one.state_dict(), other.state_dict()
    return own.keys() == its.keys() and all(torch.equal(own[name], its[name]) for name in own)


def without_time(records: tuple) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records]


@pytest.mark.parametrize("rows", [1, 256, 600])
def test_the_decoders_loss_is_cross_entropy(rows: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((rows, 5), (WORDS, 5), (WORDS,))
    )
    targets = torch.randint(WORDS, (rows,))
    found = linear_cross_entropy(x * 30, weight, bias, targets)
    expected = F.cross_entropy(F.linear(x * 30, weight, bias), targets)
    torch.testing.assert_close(found, expected)
    inputs = [x, weight, bias]
    for one, other in zip(
        torch.autograd.grad(3 * found, inputs),
        torch.autograd.grad(3 * expected, inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x * 30, weight, bias, targets), expected)


def test_training_learns_and_reports() -> None:
    net = network()
    before = evaluate_language(net, text(150, 1), RECIPE)
    seen: list[dict[str, float]] = []
    recipe = replace(RECIPE, epochs=8, lr=5.0, dropout_cell_inputs=0.1, dropout_outputs=0.1)
    history = fit_language(
        net,
        text(2000),
        recipe,
        seed=1,
        validation=text(150, 1),
        on_epoch=seen.append,
        progress=False,
    )
    after = evaluate_language(net, text(150, 1), RECIPE)
    assert after.perplexity < 0.5 * before.perplexity
    assert before.perplexity == pytest.approx(WORDS, rel=0.05)
    assert list(history.records) == seen
    assert [record["epoch"] for record in seen] == list(range(1, 9))
    assert seen[-1]["validation_error"] == pytest.approx(math.exp(seen[-1]["validation_loss"]))
    assert seen[-1]["validation_error"] == pytest.approx(after.perplexity)


def test_perplexity_is_that_of_the_whole_text_with_the_state_carried_over() -> None:
    net = network(3).eval()
    words = text(100, 3)
    logits, _ = net(words[:-1].unsqueeze(1))
    expected = F.cross_entropy(logits.flatten(0, 1), words[1:])
    found = evaluate_language(net, words, replace(RECIPE, evaluation_batch=1, bptt=7))
    assert found.loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.n == 99


def test_evaluation_leaves_modes_alone_and_uses_no_dropout() -> None:
    net = network()
    net.set_dropout(outputs=0.5, hidden=0.5)
    net.train()
    first = evaluate_language(net, text(150, 1), RECIPE)
    assert net.training
    assert evaluate_language(net, text(150, 1), RECIPE) == first


def test_a_run_is_determined_by_its_seed_and_leaves_the_callers_random_state_alone() -> None:
    nets = [network() for _ in range(3)]
    torch.manual_seed(7)
    state = torch.get_rng_state()
    for net, seed in zip(nets, (5, 5, 6), strict=True):
        fit_language(net, text(), RECIPE, seed=seed, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(nets[0], nets[1])
    assert not same(nets[0], nets[2])


def grown(candidates: bool) -> RecurrentNetwork:
    net = network(2)
    torch.manual_seed(11)
    return attach_candidates(net, 0.01) if candidates else net


@pytest.mark.parametrize("candidates", [False, True])
def test_an_interrupted_run_goes_on_bit_by_bit(tmp_path: Path, candidates: bool) -> None:
    """Averaged SGD begins in between: patience 1 and a learning rate far too large see to it."""
    recipe = replace(RECIPE, epochs=7, lr=30.0)
    options = {"seed": 3, "validation": text(150, 1), "progress": False}
    whole = grown(candidates)
    history = fit_language(whole, text(), recipe, **options)
    averaged = [record["averaged"] for record in history.records]
    assert averaged[0] == 0
    assert averaged[-1] == 1

    class Killed(Exception):
        pass

    for last in (1, 3, 6):

        def kill(record: dict[str, float], last: int = last) -> None:
            if record["epoch"] == last:
                raise Killed

        with pytest.raises(Killed):
            fit_language(
                grown(candidates), text(), recipe, checkpoint=tmp_path, on_epoch=kill, **options
            )
    again = grown(candidates)
    resumed = fit_language(again, text(), recipe, checkpoint=tmp_path, **options)
    assert resumed.resumed_at == 6
    assert same(whole, again)
    assert without_time(resumed.records) == without_time(history.records)
    finished = grown(candidates)
    assert fit_language(finished, text(), recipe, checkpoint=tmp_path, **options).resumed_at == 7
    assert same(whole, finished)


def test_a_finished_run_can_go_on_for_more_epochs(tmp_path: Path) -> None:
    options = {"seed": 3, "validation": text(150, 1), "progress": False}
    whole, parts = network(), network()
    fit_language(whole, text(), replace(RECIPE, epochs=4), **options)
    fit_language(parts, text(), replace(RECIPE, epochs=2), checkpoint=tmp_path, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_language(parts, text(), replace(RECIPE, epochs=4), checkpoint=tmp_path, **options)
    assert same(whole, parts)


def test_a_checkpoint_of_another_run_is_not_used(tmp_path: Path) -> None:
    fit_language(network(), text(), RECIPE, seed=1, checkpoint=tmp_path, progress=False)
    expected = network()
    fit_language(expected, text(), RECIPE, seed=2, progress=False)
    found = network()
    with pytest.warns(UserWarning, match="of another run"):
        fit_language(found, text(), RECIPE, seed=2, checkpoint=tmp_path, progress=False)
    assert same(found, expected)


def test_in_the_end_the_network_holds_the_mean_of_the_averaged_steps() -> None:
    recipe = replace(RECIPE, epochs=9, lr=30.0)
    net = network()
    raw: list[Tensor] = []
    average_from: list[int] = []
    original = torch.optim.SGD.step

    def step(self: torch.optim.SGD, *args: object, **kwargs: object) -> object:
        result = original(self, *args, **kwargs)
        raw.append(net.cell.weight.detach().clone())
        return result

    def note(record: dict[str, float]) -> None:
        if record["averaged"] == 0:
            average_from[:] = [len(raw)]

    torch.optim.SGD.step = step  # type: ignore[method-assign]
    try:
        fit_language(
            net, text(), recipe, seed=3, validation=text(150, 1), progress=False, on_epoch=note
        )
    finally:
        torch.optim.SGD.step = original  # type: ignore[method-assign]
    (start,) = average_from
    assert 0 < start < len(raw)
    torch.testing.assert_close(net.cell.weight.detach(), torch.stack(raw[start:]).mean(0))


def test_candidates_do_not_change_the_training_of_their_parent() -> None:
    own, isolated = network(2), grown(True)
    fit_language(own, text(), RECIPE, seed=4, progress=False)
    fit_language(isolated, text(), RECIPE, seed=4, progress=False)
    for name, parameter in own.named_parameters():
        assert torch.equal(parameter, isolated.get_parameter(name)), name
    rows = alpha_tables(isolated)["cell"]
    assert len({row["alpha"] for row in rows}) == len(rows) == 12


def test_alpha_and_eta_have_their_own_learning_rate() -> None:
    frozen = replace(RECIPE, scalar_lr=0.0, epochs=1)
    net = grown(True)
    fit_language(net, text(), frozen, seed=4, progress=False)
    assert net.cell.weak_learner is not None
    assert net.cell.weak_learner.table.alpha.tolist() == pytest.approx([1 / 12] * 12)
    finalize_candidates(net, i_max=1)
    fit_language(net, text(), frozen, seed=4, progress=False)
    assert net.cell.learners[-1].eta.item() == 0.0
    fit_language(net, text(), replace(RECIPE, epochs=1), seed=4, progress=False)
    assert net.cell.learners[-1].eta.item() != 0.0


def test_regularization_of_the_outputs_is_what_it_says() -> None:
    words = text(9)
    net = network(2)
    recipe = LanguageRecipe(
        epochs=1,
        batch_size=1,
        bptt=40,
        lr=0.7,
        weight_decay=0.0,
        clip=1e9,
        activation=0.3,
        temporal_activation=0.2,
        device="cpu",
        **{f"dropout_{name}": 0.0 for name in LanguageRecipe().dropout()},
    )
    twin = copy.deepcopy(net)
    outputs, dropped = twin.features(words[:-1].unsqueeze(1))
    logits = twin.decode(dropped).flatten(0, 1)
    loss = F.cross_entropy(logits, words[1:])
    loss = loss + 0.3 * outputs.pow(2).mean() + 0.2 * (outputs[1:] - outputs[:-1]).pow(2).mean()
    (gradient,) = torch.autograd.grad(loss, [twin.cell.weight])
    fit_language(net, words, recipe, seed=0, progress=False)
    step = 0.7 * 8 / 40  # the stretch has 8 words of 40
    torch.testing.assert_close(net.cell.weight, twin.cell.weight - step * gradient)


def test_stop_interrupts_and_a_loss_that_is_not_finite_ends_training() -> None:
    with pytest.raises(Interrupted, match="epoch 1, word 0"):
        fit_language(network(), text(), RECIPE, seed=0, progress=False, stop=lambda: True)
    net = network()
    with torch.no_grad():
        net.bias[3] = math.nan
    with pytest.raises(TrainingError, match="not finite at epoch 1"):
        fit_language(net, text(), RECIPE, seed=0, progress=False)
    with pytest.raises(TrainingError, match="not finite in evaluation"):
        evaluate_language(net, text(), RECIPE)
    with pytest.raises(DataError, match="too short"):
        fit_language(network(), text(5), RECIPE, seed=0, progress=False)
    with pytest.raises(ConfigError, match="seed must be"):
        fit_language(network(), text(), RECIPE, seed=-1, progress=False)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"epochs": 0}, "epochs must be a whole number of at least 1 but got 0"),
        ({"bptt": 4}, "bptt must be"),
        ({"lr": 0}, "lr must be a number above 0"),
        ({"lr": math.nan}, "lr must be a number"),
        ({"scalar_lr": -1.0}, "scalar_lr must be a number of at least 0"),
        ({"dropout_hidden": 1.0}, "dropout_hidden must be a number in"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda"),
    ],
)
def test_bad_settings_are_named(options: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        LanguageRecipe(**options)
    with pytest.raises(ConfigError, match=r"a recipe has .* but got 'speed'"):
        LanguageRecipe.named("ptb", speed=1)
    with pytest.raises(ConfigError, match="a recipe must be one of"):
        LanguageRecipe.named("cifar10")


def test_a_task_grows_from_seed_to_child(tmp_path: Path) -> None:
    task = RecurrentTask(RecurrentSpace(WORDS, 8), corpus(), RECIPE)
    torch.manual_seed(0)
    net = task.build(task.seed())
    records = task.train(net, Phase("seed", 2, random_seed=1, checkpoint=tmp_path / "a"))
    assert len(records) == 2
    before = task.evaluate(net)
    attach_candidates(net, 0.01)
    task.train(net, Phase("weak", 1, random_seed=1))
    at_finalizing = task.evaluate(net)
    genotype = finalize_candidates(net, i_max=1)
    assert task.evaluate(net)["loss"] == pytest.approx(at_finalizing["loss"], abs=1e-6)
    task.train(net, Phase("final", 2, random_seed=1))
    after = task.evaluate(net)
    assert genotype.growths == 1
    assert after["error"] < before["error"]
    assert after["error"] == after["perplexity"] == pytest.approx(math.exp(after["loss"]))
    multiply_adds, parameters = task.size(net)
    assert multiply_adds == 16 * 16 + 2 * 8 * 16 + WORDS * 8
    assert parameters == multiply_adds + WORDS + 1
    assert task.test(net)["error"] > 1


def test_parts_of_the_validation_loss_add_up_and_have_gradients() -> None:
    task = RecurrentTask(RecurrentSpace(WORDS, 8), corpus(), RECIPE)
    net = task.build(task.seed()).eval()
    parts = list(task.validation_losses(net))
    assert len(parts) > 3
    assert sum(part.item() for part in parts) == pytest.approx(task.evaluate(net)["loss"])
    parts[1].backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_steps_are_about_what_training_takes() -> None:
    task = RecurrentTask(RecurrentSpace(WORDS, 8), corpus(), replace(RECIPE, bptt=20))
    taken = 0

    def count() -> bool:
        nonlocal taken
        taken += 1
        return False

    task.train(task.build(task.seed()), Phase("seed", 4), Callbacks(should_stop=count))
    assert task.steps(4) == pytest.approx(taken, rel=0.25)


def test_the_part_of_a_configuration_is_checked_and_makes_a_task(tmp_path: Path) -> None:
    kind = kind_of({"space": "recurrent"})
    space = {"embedding": 8, "max_nodes": 3, "ops": ["relu", "none"]}
    data = kind.read_data({"vocabulary": 50, "limit": 1000}, tmp_path)
    kind.check_space(space, data)
    recipe = kind.read_recipe({"batch_size": 7}, data)
    assert recipe == LanguageRecipe.named("pydoc", batch_size=7)
    task = kind.load_task({"space": "recurrent", **space}, data, recipe)
    assert isinstance(task, RecurrentTask)
    assert task.space == RecurrentSpace(50, **space)
    assert len(task.corpus.train) == 1000
    for call, problem in (
        (lambda: kind.read_data({"name": "wiki"}, tmp_path), "text must be one of pydoc"),
        (lambda: kind.read_data({"name": "ptb", "root": "no"}, tmp_path), "classArgs.data"),
        (lambda: kind.check_space({"ops": ["none"]}, data), "searchSpace.ops must be among"),
        (lambda: kind.read_recipe({"bptt": 3}, data), "recipe.bptt must be a whole number of at"),
    ):
        with pytest.raises(PetridishError, match=problem):
            call()


def test_the_recipe_of_a_retraining_is_the_papers() -> None:
    recipe = LanguageRecipe.for_retraining("ptb")
    assert (recipe.epochs, recipe.lr, recipe.batch_size, recipe.bptt) == (4500, 10.0, 64, 35)
    assert LanguageRecipe.for_retraining("pydoc", epochs=4).epochs == 4


def test_a_found_cell_trains_from_scratch_with_the_plain_mean() -> None:
    task = RecurrentTask(RecurrentSpace(WORDS, 8), corpus(), replace(RECIPE, lr=5.0))
    torch.manual_seed(0)
    genotype = RecurrentGenotype([("relu", 0), ("tanh", 1), ("sigmoid", 1)])
    net = task.space.build(genotype, for_retraining=True)
    before = task.evaluate(net)["error"]
    task.train(net, Phase("final", 5))
    assert task.evaluate(net)["error"] < before
    assert net.cell.average().tolist() == pytest.approx([1 / 3] * 3)


def test_growths_are_carried_out_resumably_like_any_other(tmp_path: Path) -> None:
    """Seed and child through the one function that all fronts call; a kill changes nothing."""
    task = RecurrentTask(RecurrentSpace(WORDS, 8), corpus(), RECIPE)
    plan = GrowthSettings(seed_epochs=2, weak_epochs=2, final_epochs=2)
    growths = [Growth("g00000", None, 1, 0.01, 1), Growth("g00001", "g00000", 2, 0.01, 1)]
    galleries = [
        Gallery.create(tmp_path / name, {"space": "recurrent"}, {}) for name in ("one", "two")
    ]
    outcomes = [run_growth(growth, task, plan, galleries[0]) for growth in growths]
    assert [outcome.multiply_adds for outcome in outcomes] == [
        16 * 16 + nodes * 8 * 16 + WORDS * 8 for nodes in (1, 2)
    ]

    class Killed(Exception):
        pass

    def kill(phase: str, record: dict[str, float]) -> None:
        assert record["error"] > 1
        if record["epoch"] == 1:
            raise Killed

    for growth in growths:
        while not galleries[1].has_model(growth.id):
            with contextlib.suppress(Killed):
                run_growth(growth, task, plan, galleries[1], Callbacks(on_epoch=kill))
    for growth in growths:
        (own, documents), (its, others) = (g.load_model(growth.id) for g in galleries)
        assert documents["genotype"] == others["genotype"]
        assert all(torch.equal(own[name], its[name]) for name in own)
    net = load_network(task, galleries[0], "g00001")
    assert task.evaluate(net)["error"] == pytest.approx(outcomes[1].error)
    assert len(net.genotype.nodes) == 2
