"""One line for each thing that a machine lacks."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch

import nni_petridish
from nni_petridish.kernels.native import library

ROOT = Path(__file__).parents[1]
Version = namedtuple("Version", "major minor micro")


def test_an_older_python_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", Version(3, 10, 4))
    with pytest.raises(ImportError, match=r"needs Python 3\.11 or newer but this is 3\.10 \("):
        runpy.run_path(str(Path(nni_petridish.__file__)))


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        ("version_info", "Python 3.11 or newer is needed but"),
        ("ensurepip", "lacks the module venv"),
    ],
)
def test_make_says_in_one_line_what_it_lacks(tmp_path: Path, lacking: str, said: str) -> None:
    for name in ("Makefile", "setup.cfg", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *{lacking}*) exit 1;; -V) echo Python 3.10.4;; esac\n'
    )
    python.chmod(0o755)
    # A make that runs the tests would pass its own flags on, and name the folders it enters.
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", "search", f"PYTHON={python}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    (line,) = done.stdout.splitlines()
    assert said in line
    assert str(python) in line
    assert not (tmp_path / ".venv").exists()


def test_a_missing_compiler_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NNI_PETRIDISH_NATIVE", raising=False)
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    library._say_once_that_there_is_no_compiler.cache_clear()
    for dtype in (torch.float32, torch.float64):
        assert library.native_library.__wrapped__(dtype) is None
    assert [record.message for record in caplog.records] == [
        "there is no C compiler (gcc, clang or cc): training on the CPU works but takes two to"
        " three times as long; NNI_PETRIDISH_NATIVE=0 silences this."
    ]
