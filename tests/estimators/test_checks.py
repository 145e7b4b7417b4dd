"""The checks of scikit-learn on the estimators, all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from nni_petridish import GrowingClassifier, GrowingRegressor

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataConversionWarning")
ARRAY_API = "SCIPY_ARRAY_API"
"""The variable without which a check skips itself; SciPy reads it when it is imported."""


@parametrize_with_checks(
    [
        GrowingClassifier(max_models=2, epochs=8, batch_size=16),
        GrowingRegressor(max_models=2, epochs=8, batch_size=16),
    ]
)
def test_scikit_learns_checks(estimator: Any, check: Any, request: pytest.FixtureRequest) -> None:
    if "array_api" in check.func.__name__ and ARRAY_API not in os.environ:
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", request.node.nodeid]
        environment = {**os.environ, ARRAY_API: "1"}
        root = request.config.rootpath
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert "1 passed" in done.stdout, done.stdout
        return
    check(estimator)
