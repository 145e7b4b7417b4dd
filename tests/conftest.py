"""One thread per test process: `make test` runs as many of them as there are cores."""

from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # before torch is imported
    os.environ[name] = "1"
