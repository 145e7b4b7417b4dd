"""A real browser for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Chromium as root in a container; it must not look for updates.
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--window-size=1400,1200",
]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    """A headless Chromium; only in CI it must be there."""
    if not _is_ci():
        pytest.importorskip("selenium")
    from selenium import webdriver

    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        reason = "Chromium and ChromeDriver are not installed (chromium, chromium-driver)"
        pytest.fail(reason) if _is_ci() else pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path / 'chromium'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield chromium
    finally:
        chromium.quit()


def _is_ci() -> bool:
    return bool(os.environ.get("CI"))
