from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import nni_petridish
from nni_petridish.__main__ import main
from nni_petridish.core.complexity import count_parameters
from nni_petridish.errors import ConfigError, DataError, GalleryError, Interrupted
from nni_petridish.results.retrain.preparation import prepare_retraining
from nni_petridish.results.retrain.repetitions import run_repetitions
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.runner import run_search
from nni_petridish.tasks.distributed import World
from nni_petridish.tasks.language.text import load_text
from nni_petridish.tasks.language.training import evaluate_language
from nni_petridish.tasks.task import Callbacks
from tests.support.small_gallery import vision_gallery

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL: dict[str, Any] = {"epochs": 2, "changes": {"lr": 5.0, "patience": 1}}


def write_text(folder: Path) -> None:
    """A text in which a word depends on the one before."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part, n in (("train", 600), ("valid", 200), ("test", 200)):
        word, words = 0, []
        for _ in range(n):
            word = (word + int(random.integers(1, 3))) % 12
            words.append(f"w{word}")
        lines = [" ".join(words[i : i + 20]) for i in range(0, n, 20)]
        (folder / f"{part}.txt").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gallery of a real search for the example's cell, made as small as possible."""
    folder = tmp_path_factory.mktemp("language")
    write_text(folder / "text")
    document = yaml.safe_load((CONFIGS / "petridish_rnn.yml").read_text())
    document["tuner"]["codeDirectory"] = "."
    document["searchSpace"]["embedding"] = 8
    document["tuner"]["classArgs"] |= {
        "data": {"name": "text_folder", "root": "text", "limit": 300},
        "gallery": "gallery",
        "limits": {"max_models": 2},
        "recipe": {"batch_size": 4, "bptt": 8, "evaluation_batch": 2, "dropout_outputs": 0.1},
        **dict.fromkeys(("seed_epochs", "weak_epochs", "final_epochs"), 1),
    }
    (folder / "config.yml").write_text(yaml.safe_dump(document))
    search = run_search(SearchConfig.from_yaml(folder / "config.yml"))
    assert [len(model.genotype.nodes) for model in _models(folder / "gallery", search)] == [1, 2]
    return folder / "gallery"


def _models(folder: Path, search: Any) -> list[Any]:
    return [nni_petridish.load_model(folder, record.id) for record in search.models()]


def test_the_defaults_are_the_papers_on_the_searchs_recipe(gallery: Path) -> None:
    training = prepare_retraining(gallery, "g00001")
    recipe = training.recipe
    assert (recipe.epochs, recipe.lr) == (4500, 10.0)
    assert (recipe.batch_size, recipe.bptt, recipe.dropout_outputs) == (4, 8, 0.1)
    assert training.data == {"name": "text_folder", "root": training.data["root"]}  # no limit
    assert training.space.embedding == 8
    wide = prepare_retraining(gallery, "g00001", embedding=12)
    assert (wide.space.embedding, wide.space.hidden) == (12, 12)


def test_its_size_is_that_of_the_network(gallery: Path) -> None:
    training = prepare_retraining(gallery, "g00001", embedding=12)
    net = training.space.build(training.genotype)
    assert training.size() == (net.multiply_adds(), count_parameters(net))


def test_all_text_is_trained_on_and_the_model_is_as_good_as_reported(
    gallery: Path, tmp_path: Path
) -> None:
    training = prepare_retraining(gallery, "g00001", **SMALL)
    results = run_repetitions(training, tmp_path / "a", 2)
    corpus = load_text("text_folder", training.data["root"])
    for result in results:
        home = tmp_path / "a" / f"run-{result['repetition']}"
        net = nni_petridish.load_model(home / "model.safetensors")
        tested = evaluate_language(net, corpus.test, training.recipe)
        assert tested.perplexity == pytest.approx(result["test_perplexity"], rel=1e-5)
        assert result["words"] == len(corpus.train) > 300
        assert net.cell.average().tolist() == pytest.approx([1 / 2] * 2)  # DARTS's mean
        assert not (home / "checkpoint").exists()
        assert len(result["history"]) == 2
    assert results[0]["test_loss"] != results[1]["test_loss"]


def test_the_test_text_is_looked_at_once(
    gallery: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nni_petridish.tasks.language import task as recurrent_task

    seen: list[int] = []

    def counted(net: Any, text: Any, recipe: Any) -> Any:
        seen.append(len(text))
        return evaluate_language(net, text, recipe)

    monkeypatch.setattr(recurrent_task, "evaluate_language", counted)
    training = prepare_retraining(gallery, "g00000", **SMALL)
    first = run_repetitions(training, tmp_path / "a")
    assert seen == [len(training.load().test)]
    assert run_repetitions(training, tmp_path / "a") == first
    assert len(seen) == 1


def test_an_interrupted_training_ends_as_if_it_had_not_been(gallery: Path, tmp_path: Path) -> None:
    training = prepare_retraining(gallery, "g00001", **{**SMALL, "epochs": 3})
    (straight,) = run_repetitions(training, tmp_path / "a")
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == 50  # of about 60 steps in 3 epochs

    with pytest.raises(Interrupted, match="epoch 3"):
        run_repetitions(training, tmp_path / "b", callbacks=Callbacks(should_stop=stop))
    (resumed,) = run_repetitions(training, tmp_path / "b")
    assert resumed["test_loss"] == straight["test_loss"]
    one, other = (
        nni_petridish.load_model(tmp_path / name / "run-0" / "model.safetensors").state_dict()
        for name in "ab"
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_cannot_be_trained_is_refused_in_one_line(gallery: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"id": "g00099"}, "no model 'g00099'"),
        ({"embedding": 0}, "embedding must be"),
        ({"epochs": 0}, "epochs must be"),
        ({"changes": {"learning_rate": 1}}, "but got 'learning_rate'"),
        ({"changes": {"clip": 0}}, "clip must be"),
        ({"seed": -1}, "seed must be"),
    ):
        with pytest.raises((ConfigError, GalleryError), match=message):
            prepare_retraining(gallery, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="embedding is for recurrent but the space is vision"):
        prepare_retraining(vision_gallery(tmp_path).folder, embedding=8)
    training = prepare_retraining(gallery)
    with pytest.raises(ConfigError, match="in one process but there are 2"):
        training.check_world(World(0, 2))
    other = replace(training, space=replace(training.space, vocabulary=99))
    with pytest.raises(DataError, match="had 99"):
        run_repetitions(other, tmp_path / "other")


def test_the_command_trains_and_goes_on(gallery: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", str(gallery), "g00001", "--epochs", "1", "--embedding", "6"]
    arguments += ["--set", "lr=5.0"]
    assert main(arguments) == 0
    first = capsys.readouterr().out.splitlines()
    assert "g00001 with embedding 6" in first[0]
    folder = gallery / "final" / "g00001-E6-1epochs"
    assert main([*arguments, "--repetitions", "2"]) == 0
    second = capsys.readouterr().out.splitlines()
    assert second[0] == first[0]
    assert [first[1], second[1]] == ["0 of 1 repetitions", "1 of 2 repetitions"]
    assert second[2] == first[2]  # the first repetition, told again instead of trained again
    numbers = [
        yaml.safe_load((folder / f"run-{i}" / "result.json").read_text())["test_perplexity"]
        for i in range(2)
    ]
    mean, spread = statistics.fmean(numbers), statistics.stdev(numbers)
    shown = f"{min(numbers):.2f} | {mean:.2f} ± {spread:.2f}"
    assert second[-1] == f"test perplexity {shown}  (2 runs)"
    assert main([*arguments, "--cells", "2"]) == 2
    assert "--cells is for vision" in capsys.readouterr().err
