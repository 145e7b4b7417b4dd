"""Patches of NNI."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from nni.nas.experiment import NasExperimentConfig
from nni.nas.strategy import Random
from nni.runtime.tuner_command_channel import TunerCommandChannel

from nni_petridish.nni_adapter.compat.guard import guarded
from nni_petridish.strategy import Petridish

PACKAGE = Path(__file__).parents[2] / "nni_petridish"
PATCHED = re.compile(
    r"^\s*(from|import) nni\.nas|NODE_OPTIONS|nni\.trial\._params|\._receive\b"
    r"|create_fixed_module =|set_default_trial_command_channel",
    re.MULTILINE,
)


def test_only_compat_patches_nni_and_imports_its_nas() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if PATCHED.search(path.read_text(encoding="utf-8"))
    }
    room = "nni_adapter/compat"
    assert found == {f"{room}/nas.py", f"{room}/patches.py", f"{room}/guard.py"}


def test_importing_the_strategy_shows_none_of_nnis_warnings() -> None:
    command = ["-W", "error::RuntimeWarning", "-c", "import nni_petridish.strategy"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_patches_are_made_once_and_other_strategies_keep_nnis_default(tmp_path: Path) -> None:
    strategies = [Petridish(tmp_path), Petridish(tmp_path)]
    patched = NasExperimentConfig.default.__func__, TunerCommandChannel._receive
    Petridish(tmp_path)
    assert (NasExperimentConfig.default.__func__, TunerCommandChannel._receive) == patched
    config = NasExperimentConfig.default(None, None, strategies[0])
    assert config.execution_engine.name == "sequential"
    assert NasExperimentConfig.default(None, None, Random()).execution_engine.name == "ts"


def test_options_for_node_are_kept() -> None:
    options = guarded({"NODE_OPTIONS": "--trace-warnings"}, "secret")["NODE_OPTIONS"]
    first, _, path = options.split(maxsplit=2)
    assert first == "--trace-warnings"
    assert Path(path.strip('"')).is_file()
