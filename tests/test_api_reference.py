"""The API reference: it is built without warnings and has every public name."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zlib
from pathlib import Path

from docs.api_pages import PACKAGES

ROOT = Path(__file__).parent.parent


def test_the_api_reference_has_every_public_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    built = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    documented = _inventory(tmp_path / "site" / "objects.inv")
    for package in PACKAGES:
        for name in importlib.import_module(package).__all__:
            assert name.startswith("__") or f"{package}.{name}" in documented
    page = (tmp_path / "site" / "nni_petridish.core" / "index.html").read_text()
    assert "the weight of the L1 term on α (Eq. 6)" in page


def _inventory(path: Path) -> set[str]:
    """Return the names in an inventory of Sphinx's form: four lines, then compressed ones."""
    head, _, rest = path.read_bytes().partition(b"zlib.\n")
    assert head.startswith(b"# Sphinx inventory version 2")
    return {line.split()[0] for line in zlib.decompress(rest).decode().splitlines()}
