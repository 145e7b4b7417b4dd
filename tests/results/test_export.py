from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import nni_petridish
from nni_petridish.__main__ import main
from nni_petridish.errors import ConfigError, DamagedModelError, GalleryError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.saved_model import SavedModel, from_gallery, read_model, write_model
from nni_petridish.results.export import export_model
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.growth import load_network
from tests.support.small_gallery import recurrent_gallery, vision_gallery


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    return vision_gallery(tmp_path_factory.mktemp("vision"))


def outputs(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = net(x)
    return y[0] if isinstance(y, tuple) else y


def test_a_model_of_a_gallery_is_the_one_that_was_saved(gallery: Gallery) -> None:
    task = SearchConfig.of_gallery(gallery).load_task()
    images = torch.randn(3, 1, 8, 8)
    for id in (None, "g00001"):
        net = nni_petridish.load_model(gallery.folder, id)
        expected = load_network(task, gallery, id or "g00003").eval()
        assert not net.training
        assert torch.equal(outputs(net, images), outputs(expected, images))


def test_a_file_holds_all_that_is_needed(gallery: Gallery, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    arguments = ["export", str(gallery.folder), "--near", "21M", "--out", str(path)]
    assert main(arguments) == 0
    net = nni_petridish.load_model(path)
    images = torch.randn(3, 1, 8, 8)
    expected = nni_petridish.load_model(gallery.folder, "g00001")
    assert torch.equal(outputs(net, images), outputs(expected, images))
    assert net.facts["id"] == "g00001"
    data = SearchConfig.of_gallery(gallery).load_task().data  # type: ignore[attr-defined]
    assert net.facts["normalisation"]["mean"] == pytest.approx(data.train.mean.tolist())


def test_a_file_is_exported_like_a_gallery(
    gallery: Gallery, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = from_gallery(gallery.folder, "g00001")
    facts = {"id": "g00001", "test_error": 0.125, "normalisation": {"mean": [4.0], "std": [2.0]}}
    write_model(SavedModel(model.space, model.genotype, model.weights, facts), tmp_path / "final")
    arguments = ["export", str(tmp_path / "final"), "--out", str(tmp_path / "copy")]
    assert main(arguments) == 0
    assert "g00001 (test error 0.1250) is in" in capsys.readouterr().out
    copy, images = nni_petridish.load_model(tmp_path / "copy"), torch.randn(3, 1, 8, 8)
    assert copy.facts == facts
    assert torch.equal(outputs(copy, images), outputs(model.build(), images))
    assert main([*arguments, "--best"]) == 2
    assert "is one model" in capsys.readouterr().err
    (tmp_path / "final").write_text("nothing")
    assert main(["export", str(tmp_path / "final"), "--out", str(tmp_path / "other")]) == 2
    assert not (tmp_path / "other").exists()


def test_recurrent_models_load_too(tmp_path: Path) -> None:
    model = from_gallery(recurrent_gallery(tmp_path).folder)
    write_model(model, tmp_path / "model.safetensors")
    loaded = nni_petridish.load_model(tmp_path / "model.safetensors")
    words = torch.randint(20, (5, 2))
    assert outputs(loaded, words).shape == (5, 2, 20)
    assert torch.equal(outputs(loaded, words), outputs(model.build(), words))


def alone(code: str) -> str:
    """Run code where neither this package nor NNI can be imported."""
    block = (
        "import sys\n"
        "for name in ('nni', 'nni_petridish', 'search_spaces'):\n    sys.modules[name] = None\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", block + code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("pixels", [pytest.param(False, marks=pytest.mark.slow), True])
def test_torch_export_needs_nothing_of_this_package(
    gallery: Gallery, tmp_path: Path, pixels: bool
) -> None:
    path, images = tmp_path / "model.pt2", 255 * torch.rand(3, 1, 8, 8)
    arguments = ["export", str(gallery.folder), "--format", "torch_export", "--out", str(path)]
    assert main([*arguments, *([] if pixels else ["--normalized"])]) == 0
    torch.save(images, tmp_path / "x")
    alone(
        f"import torch; net = torch.export.load({str(path)!r}).module()\n"
        f"torch.save(net(torch.load({str(tmp_path / 'x')!r})).detach(), {str(tmp_path / 'y')!r})"
    )
    expected = images
    if pixels:
        data = SearchConfig.of_gallery(gallery).load_task().data  # type: ignore[attr-defined]
        expected = data.train.normalize(images)
    expected = outputs(nni_petridish.load_model(gallery.folder), expected)
    torch.testing.assert_close(torch.load(tmp_path / "y"), expected, atol=1e-4, rtol=1e-4)


def test_onnx_needs_nothing_of_this_package(gallery: Gallery, tmp_path: Path) -> None:
    path, images = tmp_path / "model.onnx", 16 * torch.rand(4, 1, 8, 8)
    arguments = ["export", str(gallery.folder), "--format", "onnx", "--out", str(path)]
    assert main(arguments) == 0
    torch.save(images, tmp_path / "x")
    alone(
        "import numpy, onnxruntime, torch\n"
        f"x = torch.load({str(tmp_path / 'x')!r}).numpy()\n"
        f"session = onnxruntime.InferenceSession({str(path)!r})\n"
        f"numpy.save({str(tmp_path / 'y')!r}, session.run(['logits'], {{'pixels': x}})[0])"
    )
    found = torch.from_numpy(np.load(tmp_path / "y.npy"))
    net = nni_petridish.load_model(gallery.folder)
    data = SearchConfig.of_gallery(gallery).load_task().data  # type: ignore[attr-defined]
    expected = outputs(net, data.train.normalize(images.clone()))
    assert float((found - expected).abs().max()) < 1e-4
    assert torch.equal(found.argmax(1), net.predict(images))
    facts = json.loads({e.key: e.value for e in onnx.load(str(path)).metadata_props}["facts"])
    assert (facts["inputs"], facts["pixel_range"]) == (["pixels"], [0, 16])
    assert facts["classes"][3] == "3"
    assert [p.name for p in tmp_path.iterdir() if "onnx" in p.name] == ["model.onnx"]


def test_a_language_model_is_exported_word_by_word(tmp_path: Path) -> None:
    model = from_gallery(recurrent_gallery(tmp_path).folder)
    export_model(model, tmp_path / "model.onnx", "onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    words = torch.randint(20, (6, 3))
    expected = outputs(model.build(), words)
    state = torch.zeros(3, 8).numpy()
    for word, wanted in zip(words, expected, strict=True):
        logits, state = session.run(None, {"word": word.numpy(), "state": state})
        assert float((torch.from_numpy(logits) - wanted).abs().max()) < 1e-4


@pytest.mark.slow
def test_an_onnx_file_that_computes_something_else_is_not_left(
    gallery: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nni_petridish.results.export.TOLERANCE", -1.0)
    with pytest.raises(nni_petridish.PetridishError, match="differ from PyTorch's"):
        export_model(from_gallery(gallery.folder), tmp_path / "model.onnx", "onnx")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(gallery: Gallery, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("mine")
    for format in ("state_dict", "onnx", "torch_export"):
        arguments = ["export", str(gallery.folder), "--format", format, "--out", str(path)]
        assert main(arguments) == 2
    assert path.read_text() == "mine"


def test_a_file_that_cannot_be_written_is_one_line(gallery: Gallery, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot write"):
        export_model(from_gallery(gallery.folder), tmp_path / ("x" * 300), "state_dict")
    with pytest.raises(ConfigError, match="not a folder"):
        export_model(from_gallery(gallery.folder), tmp_path / "no" / "file", "state_dict")


@pytest.mark.parametrize("where", [0.02, 0.3, 0.6, 0.9])
def test_a_changed_byte_is_noticed(gallery: Gallery, tmp_path: Path, where: float) -> None:
    path = tmp_path / "model.safetensors"
    write_model(from_gallery(gallery.folder), path)
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedModelError):
        read_model(path)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DamagedModelError, match="not a safetensors file"):
        nni_petridish.load_model(path)


def test_damaged_weights_of_a_gallery_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gallery = vision_gallery(tmp_path)
    weights = gallery.folder / "models" / "g00003" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    out = tmp_path / "out"
    assert main(["export", str(gallery.folder), "g00003", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "checksum" in error
    assert not out.exists()


def test_what_is_no_model_is_refused_in_one_line(gallery: Gallery, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    foreign = tmp_path / "foreign.safetensors"
    save_file({"w": torch.ones(1)}, foreign)
    for path, id, message in (
        (tmp_path / "nothing", None, "no model and no gallery"),
        (tmp_path, None, "gallery.json is missing"),
        (foreign, None, "not written by"),
        (foreign, "g00000", "not a gallery"),
        (gallery.folder, "g00042", "no model 'g00042'"),
    ):
        with pytest.raises(GalleryError, match=message):
            nni_petridish.load_model(path, id)
    with pytest.raises(ConfigError, match="format must be one of"):
        export_model(from_gallery(gallery.folder), tmp_path / "new", "pickle")


def test_weights_of_another_space_are_refused(gallery: Gallery) -> None:
    model = from_gallery(gallery.folder)
    wider = SavedModel({**model.space, "filters": 5}, model.genotype, model.weights)
    with pytest.raises(GalleryError, match="do not fit the genotype"):
        wider.build()
