"""A saved model is ready for inference: it takes raw pixels, or words, wherever it comes from."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from sklearn.datasets import load_digits

import nni_petridish
from nni_petridish.__main__ import main
from nni_petridish.errors import ConfigError, DataError, GalleryError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.saved_model import SavedModel, from_gallery, write_model
from nni_petridish.gallery.select import open_search
from nni_petridish.results.commands import finish_search
from nni_petridish.results.export import export_model
from nni_petridish.results.retrain.preparation import prepare_retraining
from nni_petridish.results.retrain.repetitions import run_repetitions
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.runner import run_search
from nni_petridish.tasks.vision.class_names import CIFAR100
from tests.support.chaos import write_config
from tests.support.small_gallery import recurrent_gallery

STORED = Path(__file__).parents[1] / "data" / "galleries"
DIGITS = load_digits()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the gallery of a short search on digits: its seed alone."""
    config = SearchConfig.from_yaml(write_config(tmp_path_factory.mktemp("trained"), models=1))
    plan = replace(config.plan, seed_epochs=8)
    run_search(replace(config, plan=plan, data={"name": "digits", "limit": 500}))
    return config.gallery


def logits_of(net: torch.nn.Module, raw: np.ndarray) -> torch.Tensor:
    """Compute logits from raw pixels by hand."""
    statistics = net.facts["normalisation"]
    mean, std = (torch.tensor(statistics[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        result: torch.Tensor = net((torch.from_numpy(raw).float()[:, None] - mean) / std)
    return result


def test_a_model_of_a_search_predicts_raw_pixels_of_any_form(trained: Path) -> None:
    net = nni_petridish.load_model(trained)
    raw = DIGITS.images[:64]  # floats of 0 to 16, (n, h, w)
    expected = logits_of(net, raw).argmax(1)
    for images in (
        raw,
        raw.astype(np.uint8),
        raw[:, None],
        torch.from_numpy(raw).float(),
        torch.from_numpy(raw.astype(np.uint8))[:, None],
        raw.tolist(),
    ):
        assert torch.equal(net.predict(images), expected)
    assert torch.equal(net.predict(raw[0]), expected[:1])
    assert net.predict(raw, names=True) == [str(int(label)) for label in expected]
    assert len(set(expected.tolist())) > 1


def test_its_error_on_raw_pixels_is_the_one_that_was_measured(trained: Path) -> None:
    net = nni_petridish.load_model(trained)
    data = nni_petridish.load_data("digits").validation
    errors = net.predict(data.images) != data.labels  # type: ignore[attr-defined]
    assert float(errors.float().mean()) == pytest.approx(net.facts["error"], abs=1e-6)


def test_predicting_keeps_mode_and_copies(trained: Path) -> None:
    net = nni_petridish.load_model(trained)
    expected = net.predict(DIGITS.images[:8])
    other = copy.deepcopy(net)
    with torch.no_grad():
        for weight in net.parameters():
            weight.zero_()
    assert torch.equal(other.predict(DIGITS.images[:8]), expected)
    assert not torch.equal(net.predict(DIGITS.images[:8]), expected)
    net.train()
    net.predict(DIGITS.images[:8])
    assert net.training
    assert not expected.requires_grad


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (DIGITS.images[:4] / 16, "from 0 to 16 but the largest is 1"),
        (DIGITS.images[:4] - 5, "from 0 to 16 but got -5"),
        (DIGITS.images[:4] * 16, "from 0 to 16 but got 2"),
        (DIGITS.images[:4] + np.nan, "from 0 to 16 but got nan"),
        (np.zeros((4, 3, 8, 8)), r"shape \(n, 1, 8, 8\) or \(n, 8, 8\) but got \(4, 3, 8, 8\)"),
        (np.zeros((4, 64)), r"but got \(4, 64\)"),
        (["a"], "images must be numbers"),
    ],
)
def test_images_that_are_not_raw_pixels_are_refused(
    trained: Path, images: object, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        nni_petridish.load_model(trained).predict(images)


def test_no_image_gives_no_prediction(trained: Path) -> None:
    assert nni_petridish.load_model(trained).predict(np.zeros((0, 8, 8))).shape == (0,)


def test_every_way_out_of_a_gallery_carries_the_facts(trained: Path, tmp_path: Path) -> None:
    expected = nni_petridish.load_model(trained).predict(DIGITS.images[:32])
    file = tmp_path / "model.safetensors"
    assert main(["export", str(trained), "--out", str(file)]) == 0
    net = nni_petridish.load_model(file)
    assert torch.equal(net.predict(DIGITS.images[:32]), expected)
    assert net.facts["classes"] == [str(digit) for digit in range(10)]
    assert net.facts["pixel_range"] == [0, 16]
    training = prepare_retraining(trained, "g00000", cells_per_stage=1, filters=4, epochs=1)
    run_repetitions(training, tmp_path / "final")
    final = nni_petridish.load_model(tmp_path / "final" / "run-0" / "model.safetensors")
    assert final.facts["classes"] == net.facts["classes"]
    assert final.predict(DIGITS.images[:2]).shape == (2,)


def test_a_model_needs_its_data_no_more(trained: Path, tmp_path: Path) -> None:
    gallery = tmp_path / "gallery"
    shutil.copytree(trained, gallery)
    (gallery / "config.json").unlink()
    net = nni_petridish.load_model(gallery)
    assert torch.equal(
        net.predict(DIGITS.images[:32]),
        nni_petridish.load_model(trained).predict(DIGITS.images[:32]),
    )


def test_models_of_earlier_versions_take_the_facts_from_their_data(tmp_path: Path) -> None:
    assert not (STORED / "vision" / "models" / "g00001" / "facts.json").exists()
    net = nni_petridish.load_model(STORED / "vision")
    assert torch.equal(net.predict(DIGITS.images[:9]), logits_of(net, DIGITS.images[:9]).argmax(1))
    words = nni_petridish.load_model(STORED / "recurrent").facts["words"]
    assert len(words) == 50
    gallery = tmp_path / "gallery"
    shutil.copytree(STORED / "vision", gallery)
    (gallery / "config.json").unlink()
    with pytest.raises(GalleryError, match=r"config\.json cannot be read"):
        nni_petridish.load_model(gallery)
    bare = replace(from_gallery(STORED / "vision"), facts={})
    with pytest.raises(DataError, match="normalization of the images is unknown"):
        bare.build().predict(DIGITS.images[:9])
    with pytest.raises(ConfigError, match="normalization of the images is unknown"):
        export_model(bare, tmp_path / "x.onnx", "onnx")


def test_language_models_carry_their_words(tmp_path: Path) -> None:
    model = from_gallery(recurrent_gallery(tmp_path).folder)
    words = ["<eos>", "<unk>", *(f"w{i}" for i in range(18))]
    model = SavedModel(model.space, model.genotype, model.weights, {**model.facts, "words": words})
    write_model(model, tmp_path / "model.safetensors")
    net = nni_petridish.load_model(tmp_path / "model.safetensors")
    numbers = torch.tensor([[2], [1], [0], [3]])
    with torch.no_grad():
        best = net(numbers)[0][-1, 0].topk(3).indices.tolist()
    assert net.predict("w0 other\nw1", count=3) == [words[number] for number in best]
    assert net.predict(["w0", "other", "<eos>", "w1"]) == [words[best[0]]]
    path = tmp_path / "model.onnx"
    export_model(model, path, "onnx")
    facts = json.loads({e.key: e.value for e in onnx.load(str(path)).metadata_props}["facts"])
    assert facts["words"] == words
    bare = recurrent_gallery(tmp_path / "bare").folder
    with pytest.raises(DataError, match="words of the text are unknown"):
        nni_petridish.load_model(bare).predict("w0")


def test_the_class_names_of_cifar_are_complete() -> None:
    assert len(CIFAR100) == len(set(CIFAR100)) == 100
    assert sorted(CIFAR100) == list(CIFAR100)


def test_facts_are_part_of_a_model_and_checked(trained: Path) -> None:
    documents = Gallery(trained).load_documents("g00000")
    assert documents["facts"]["pixel_range"] == [0, 16]
    assert documents["facts"]["version"] == 1


def test_perplexity_is_not_called_error_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gallery, file = str(recurrent_gallery(tmp_path).folder), str(tmp_path / "file")
    assert main(["show", gallery, "--best"]) == 0
    assert main(["export", gallery, "--best", "--out", file]) == 0
    assert finish_search(open_search(Path(gallery))[1], Path(gallery)) == 0
    printed = capsys.readouterr().out
    assert printed.count("perplexity") >= 3
    assert "error" not in printed


def test_show_tells_all_about_a_model(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(trained), "g00000"]) == 0
    printed = capsys.readouterr().out
    for text in ("lineage:    g00000", "seed:       8 epochs", "pixels from 0 to 16", "accuracy"):
        assert text in printed
    assert f'load_model("{trained}", "g00000")' in printed
    assert main(["show", str(STORED / "vision"), "g00002"]) == 0
    printed = capsys.readouterr().out
    assert "g00000 > g00001 > g00002" in printed
    assert "growth 2: " in printed


def test_show_tells_all_about_an_exported_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "model.safetensors")
    assert main(["export", str(STORED / "vision"), "g00002", "--out", file]) == 0
    capsys.readouterr()
    assert main(["show", file]) == 0
    printed = capsys.readouterr().out
    for text in ("model:      g00002", "growth 2: ", "parameters:", "filters:", f'"{file}"'):
        assert text in printed
    assert main(["show", file, "g00002"]) == 2
    assert "there is none to choose" in capsys.readouterr().err
