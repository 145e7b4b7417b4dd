"""Galleries of format 1 from earlier versions are read with the same results.

`tests/data/galleries/expected.json` has the results of the version that made them.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nni_petridish import Gallery, SearchConfig, load_model, run_search
from nni_petridish.__main__ import main
from nni_petridish.gallery.select import open_search

STORED = Path(__file__).parents[1] / "data" / "galleries"
EXPECTED: dict[str, dict[str, Any]] = json.loads((STORED / "expected.json").read_text())
INPUTS = {
    "vision": torch.linspace(-1, 1, 2 * 64).reshape(2, 1, 8, 8),
    "recurrent": (torch.arange(12) * 7 % 50).reshape(6, 2),
}


@pytest.fixture(params=list(EXPECTED))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    """Copy a stored gallery and set its folder."""
    folder = tmp_path / kind
    shutil.copytree(STORED / kind, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "gallery": str(folder)}))
    return folder


def outputs(net: nn.Module, kind: str) -> Tensor:
    """Return the first 10 logits of the last 2 images or words."""
    with torch.no_grad():
        result = net(INPUTS[kind])
    logits = result[0] if isinstance(result, tuple) else result
    return logits.reshape(-1, logits.shape[-1])[-2:, :10]


def test_the_journal_replays_to_the_same_models_and_hull(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, search = open_search(folder)
    assert {record.id: record.error for record in search.models()} == EXPECTED[kind]["models"]
    assert [record.id for record in search.hull()] == EXPECTED[kind]["hull"]
    assert main(["show", str(folder)]) == 0
    printed = capsys.readouterr().out
    for id in EXPECTED[kind]["hull"]:
        assert id in printed


def test_models_and_their_exports_compute_what_they_computed(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    for id, logits in EXPECTED[kind]["outputs"].items():
        wanted = torch.tensor(logits)
        torch.testing.assert_close(outputs(load_model(folder, id), kind), wanted, rtol=0, atol=1e-5)
        file = tmp_path / f"{id}.safetensors"
        assert main(["export", str(folder), id, "--out", str(file)]) == 0
        torch.testing.assert_close(outputs(load_model(file), kind), wanted, rtol=0, atol=1e-5)


def test_a_search_goes_on_with_the_growth_that_was_next(kind: str, folder: Path) -> None:
    config = SearchConfig.of_gallery(Gallery(folder))
    known = EXPECTED[kind]["models"]
    limits = replace(config.settings.limits, max_models=len(known) + 1)
    config = replace(config, settings=replace(config.settings, limits=limits))
    *before, grown = run_search(config, resume=True).models()
    assert {record.id: record.error for record in before} == known
    assert grown.growth.to_dict() == EXPECTED[kind]["next"]
    assert grown.id in Gallery(folder).model_ids()
