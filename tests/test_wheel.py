"""The wheel: what a user without the repository gets."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import which

import pytest

from nni_petridish.kernels.native.compiler import LEVELS, REALS, built_name, levels_of

ROOT = Path(__file__).parent.parent
PACKAGES = ("nni_petridish", "search_spaces")


def built_wheel(folder: Path, levels: str = "") -> Path:
    """Build a wheel of the sources, in a copy so that the repository stays clean."""
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / "source" / package, ignore=skipped)
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(folder), str(folder / "source")]
    environment = os.environ | {"NNI_PETRIDISH_KERNELS": levels}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel without compiled kernels."""
    return built_wheel(tmp_path_factory.mktemp("wheel"))


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


USE_KERNELS = """
import copy, sys, torch
sys.path.insert(0, {site!r})
from nni_petridish.kernels.native.library import native_library
from nni_petridish.kernels.switch import plain_ops
from search_spaces.vision.ops import make_op
x = torch.randn(4, 8, 6, 6).contiguous(memory_format=torch.channels_last)
op = make_op("sep_conv_3x3", 8)
with plain_ops():
    expected = copy.deepcopy(op)(x)
torch.testing.assert_close(op(x), expected)
print(*(native_library(dtype)._name for dtype in (torch.float32, torch.float64)))
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.machine() != "x86_64" or not which("gcc"),
    reason="the kernels of a wheel are built by gcc for Linux on x86-64",
)
@pytest.mark.slow
@pytest.mark.parametrize("levels", ["x86-64-v2", " ".join(LEVELS)])
def test_a_wheel_with_kernels_needs_no_compiler(levels: str, tmp_path: Path) -> None:
    built = built_wheel(tmp_path, levels)
    assert built.name.endswith("py3-none-linux_x86_64.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(built) as archive:
        archive.extractall(site)
    folder = site / "nni_petridish" / "kernels" / "native" / "built"
    names = {built_name(real, level) for real in REALS for level in levels.split()}
    assert {path.name for path in folder.iterdir()} == names
    done = subprocess.run(
        [sys.executable, "-c", USE_KERNELS.format(site=str(site))],
        cwd=tmp_path,
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},  # neither a compiler nor a cache
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "no C compiler" not in done.stderr
    flags = next(x for x in Path("/proc/cpuinfo").read_text().splitlines() if "flags" in x)
    best = next(level for level in levels_of(flags.split()) if level in levels)
    chosen = [str(folder / built_name(real, best)) for real in REALS]
    assert done.stdout.split() == chosen
    assert not list(tmp_path.glob(".cache/**/*.so"))


def test_a_processor_has_a_level_if_it_has_all_below_whole() -> None:
    v2, v3, v4 = (LEVELS[f"x86-64-v{i}"] for i in (2, 3, 4))
    assert levels_of(v2 | v3 | v4 | {"sse2"}) == ["x86-64-v4", "x86-64-v3", "x86-64-v2"]
    assert levels_of(v2 | v3 | v4 - {"avx512vl"}) == ["x86-64-v3", "x86-64-v2"]
    assert levels_of(v2 | v4) == ["x86-64-v2"]
    assert levels_of(v3 | v4) == []
