from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nni_petridish.nni_adapter.tuner import find_manager
from nni_petridish.running.config import CONFIG_FILE, SearchConfig
from tests.support.chaos import write_config

START = """
import sys, yaml
from nni_petridish.nni_adapter.tuner import PetridishTuner

document = yaml.safe_load(open(sys.argv[1]))
PetridishTuner(**document["tuner"]["classArgs"]).update_search_space(document["searchSpace"])
"""


def test_a_tuner_ends_with_one_line_whatever_keeps_it_from_starting(tmp_path: Path) -> None:
    path = write_config(tmp_path, 2)
    gallery = SearchConfig.from_yaml(path).open_gallery()
    # The configuration cannot be replaced.
    (gallery.folder / CONFIG_FILE).unlink()
    (gallery.folder / CONFIG_FILE).mkdir()
    done = subprocess.run(
        [sys.executable, "-c", START, str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "nni_petridish: " in line]
    assert len(said) == 1
    assert "Is a directory" in said[0]


def test_processes_of_other_users_are_not_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: psutil.Process) -> list[str]:
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "cmdline", denied)
    assert find_manager() is None
    monkeypatch.setattr(psutil.Process, "parents", denied)
    assert find_manager() is None
