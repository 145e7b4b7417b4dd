"""The package without its extra ``nni``: what works, and what the fronts for NNI say."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nni_petridish.errors import EXTRAS, MissingPackageError, needing
from tests.support.chaos import write_config

ROOT = Path(__file__).parent.parent
BLOCKER = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("nni", "pytorch_lightning", "lightning", "pkg_resources"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""
"""Python runs this at its start, so that these packages are as good as not installed."""
ESTIMATOR = """
from sklearn.datasets import load_wine
from nni_petridish import GrowingClassifier
X, y = load_wine(return_X_y=True)
found = GrowingClassifier(max_models=2, epochs=2, random_state=0).fit(X, y)
print(len(found.models_), found.predict(X).shape)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where NNI and Lightning cannot be imported."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(BLOCKER)
    environment = {**os.environ, "PYTHONPATH": str(folder / "site")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_estimator_works_without_nni(tmp_path: Path) -> None:
    assert run(tmp_path, "-c", "import nni").returncode == 1  # the blocker blocks
    done = run(tmp_path, "-c", ESTIMATOR)
    assert (done.stdout.strip(), done.stderr) == ("2 (178,)", "")


def test_a_search_works_without_nni(tmp_path: Path) -> None:
    path = write_config(tmp_path, 2, concurrency=1)
    done = run(tmp_path, "-m", "nni_petridish", "search", str(path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "gallery" / "models" / "g00001").is_dir()


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("nni-petridish run", ["-m", "nni_petridish", "run", "none.yml"]),
        ("nni_petridish.trial", ["-m", "nni_petridish.trial"]),
        ("PetridishTuner", ["-c", "import nni_petridish.tuner"]),
        ("Petridish", ["-c", "import nni_petridish.strategy"]),
        ("Petridish", ["-c", "from nni_petridish import Petridish"]),
        (
            "model_space",
            [
                "-c",
                "from search_spaces import VisionSpace as V; V((1, 8, 8), 2).model_space()",
            ],
        ),
    ],
)
def test_fronts_for_nni_say_what_to_install(
    tmp_path: Path, what: str, arguments: list[str]
) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    said = f"{what} needs the package nni, which is missing: "
    assert last.endswith(f'{said}pip install "nni-petridish[nni]".')
    assert len(done.stderr.splitlines()) == 1 or arguments[0] == "-c"


def test_the_callback_says_what_to_install(tmp_path: Path) -> None:
    done = run(tmp_path, "-c", "from nni_petridish import GrowingCallback")
    said = "GrowingCallback needs the package pytorch_lightning, which is missing: "
    assert done.stderr.splitlines()[-1].endswith(f'{said}pip install "nni-petridish[lightning]".')


def test_an_extra_is_named_only_for_its_own_packages() -> None:
    with (
        pytest.raises(MissingPackageError, match=r'install "nni-petridish\[lightning\]"\.$'),
        needing("lightning", "this"),
    ):
        raise ModuleNotFoundError(name="pytorch_lightning.callbacks")
    with pytest.raises(ModuleNotFoundError, match="mistyped"), needing("nni", "this"):
        raise ModuleNotFoundError("mistyped", name="nni_petridish.mistyped")


def test_every_extra_that_is_named_is_declared_and_nni_is_no_requirement() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras, required = setup["options.extras_require"], setup["options"]["install_requires"]
    assert set(EXTRAS) <= set(extras)
    assert not re.search(r"^(nni|pytorch-lightning|setuptools|requests)\b", required, re.MULTILINE)
    assert "nni-petridish[nni]" in extras["test"]  # which make installs
