"""One thread per test process, and fixtures of several rooms."""

from __future__ import annotations

import os

# `make test` runs as many processes as there are cores.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # before torch is imported
    os.environ[name] = "1"

pytest_plugins = ["tests.support.browser", "tests.support.search_process"]
