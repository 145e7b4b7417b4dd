"""The wheel: what a user without the repository gets."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("nni_petridish", "search_spaces")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the sources, built in a copy so that the repository stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / "source" / package, ignore=skipped)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(folder), str(folder / "source")]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted - packed == set()
    assert {"nni_petridish/py.typed", "search_spaces/py.typed"} <= packed
    assert not [name for name in packed if name.startswith(("tests/", "benchmarks/"))]


def test_the_wheel_makes_a_report_outside_of_the_repository(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    gallery = ROOT / "tests" / "data" / "galleries" / "vision"
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import pathlib, nni_petridish\n"
        "from nni_petridish.gallery.select import open_search\n"
        "from nni_petridish.results.report.page import report_html\n"
        f"folder = pathlib.Path({str(gallery)!r})\n"
        "page = report_html(open_search(folder)[1], folder)\n"
        "print(nni_petridish.__file__, 'id=\"g00002\"' in page)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / "site" / "nni_petridish" / "__init__.py"), "True"]
