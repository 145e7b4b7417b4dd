"""`GrowingClassifier` and `GrowingRegressor` beyond scikit-learn's own checks."""

from __future__ import annotations

import contextlib
import os
import pickle
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_digits, load_wine
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from nni_petridish import GrowingClassifier, GrowingRegressor
from nni_petridish.errors import ConfigError
from nni_petridish.estimators.pace import paced
from nni_petridish.tasks.arrays.recipe import ArrayRecipe
from nni_petridish.tasks.arrays.task import ArrayTask
from nni_petridish.tasks.arrays.training import Examples, fit
from search_spaces import VisionSpace


def classifier(**options: Any) -> GrowingClassifier:
    return GrowingClassifier(**{"max_models": 3, "epochs": 16, "random_state": 0, **options})


def wine() -> tuple[Any, Any]:
    X, y = load_wine(return_X_y=True)
    return X, y


@pytest.fixture(scope="module")
def fitted() -> GrowingClassifier:
    """A classifier of wines with several models."""
    return classifier(max_models=4).fit(*wine())


def same(one: Any, other: Any, X: Any) -> bool:
    return bool(np.array_equal(one.predict_proba(X), other.predict_proba(X)))


def test_the_same_random_state_gives_the_same_model(fitted: GrowingClassifier) -> None:
    state = torch.random.get_rng_state()
    again = clone(fitted).fit(*wine())
    assert same(fitted, again, wine()[0])
    assert torch.equal(torch.random.get_rng_state(), state)
    other = clone(fitted).set_params(random_state=1).fit(*wine())
    assert not same(fitted, other, wine()[0])


def test_a_grown_network_learns(fitted: GrowingClassifier) -> None:
    X, y = wine()
    assert fitted.score(X, y) > 0.95
    assert len(fitted.models_) == 4
    assert any(model.growth["parent"] for model in fitted.models_)


def test_the_order_of_the_examples_does_not_matter(fitted: GrowingClassifier) -> None:
    X, y = wine()
    order = np.random.default_rng(0).permutation(len(X))
    assert same(fitted, clone(fitted).fit(X[order], y[order]), X)


@pytest.mark.parametrize("limit", [60, 200, 1000, 5000])
def test_no_model_exceeds_the_limit(limit: int) -> None:
    model = classifier(max_multiply_adds=limit, max_models=4, epochs=4).fit(*wine())
    assert all(found.multiply_adds <= limit for found in model.models_)
    assert model.model_.multiply_adds <= limit


def test_a_limit_below_every_network_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^max_multiply_adds must be at least [^\n]* got 5\.$"):
        classifier(max_multiply_adds=5).fit(*wine())


@pytest.mark.parametrize(
    ("complexity", "limit", "unit"), [("parameters", 900, "parameters"), ("latency", 50.0, "ms")]
)
def test_other_complexities_limit_and_order_models(
    complexity: str, limit: float, unit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"complexity": complexity, f"max_{complexity}": limit, "verbose": 1}
    model = classifier(max_models=3, epochs=4, **options).fit(*wine())
    sizes = [found.size(complexity) for found in model.hull_]
    assert sizes == sorted(sizes)
    assert all(found.size(complexity) <= limit for found in model.models_)
    assert model.hull_.at(sizes[0]).model_ is model.hull_[0]
    with pytest.raises(ConfigError, match=f"^{complexity} must be at least "):
        model.hull_.at(sizes[0] / 2)
    assert capsys.readouterr().out.splitlines()[0].endswith(f" {unit}")
    assert "latency (ms)" in model._html_repr() or complexity != "latency"


def test_the_time_limit_returns_a_model() -> None:
    model = classifier(max_seconds=0, epochs=1000, max_models=50).fit(*wine())
    assert len(model.models_) == 1
    assert model.predict(wine()[0]).shape == (178,)
    began = time.monotonic()
    model = classifier(max_seconds=1, epochs=20, max_models=10_000).fit(*wine())
    assert len(model.models_) >= 1
    assert time.monotonic() - began < 30  # it would take hours


def array_task(n: int) -> ArrayTask:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(n, 1, 8, 8, generator=generator), torch.arange(n) % 3
    examples = Examples(inputs, targets, torch.ones(n))
    space = VisionSpace((1, 8, 8), 3, cells_per_stage=1, filters=4, stages=2)
    return ArrayTask(space, examples, examples, ArrayRecipe(batch_size=32))


def test_trainings_are_as_long_as_the_time_allows() -> None:
    task = array_task(320)
    assert paced(task, 8, None) == (task, 40)  # 400 steps
    assert paced(task, 8, 1e6) == (task, 40)
    shorter, epochs = paced(task, 8, 2.0)
    longer, _ = paced(task, 1, 2.0)  # nothing to grow
    assert 20 <= shorter.steps(epochs) <= longer.steps(epochs) <= 400
    assert shorter.steps(epochs) < 400
    shortest, epochs = paced(task, 8, 0.0)
    assert shortest.steps(epochs) == 40  # one for each epoch
    net = task.space.build(task.space.seed())
    recipe = replace(task.recipe, epochs=2)
    history = fit(net, task.training, recipe, seed=0, epoch_steps=shortest.epoch_steps)
    assert len(history.records) == 2


def test_large_sets_are_fitted_within_the_time_limit() -> None:
    X = np.random.default_rng(0).normal(size=(6000, 14, 14))
    state = torch.random.get_rng_state()
    began = time.monotonic()
    options = {"max_multiply_adds": 1e6, "max_seconds": 8, "epochs": "auto", "max_models": 1}
    model = classifier(**options).fit(X, X[:, 3:7, 3:7].mean(axis=(1, 2)) > 0)
    assert time.monotonic() - began < 60
    assert model.score(X, X[:, 3:7, 3:7].mean(axis=(1, 2)) > 0) > 0.6
    assert torch.equal(torch.random.get_rng_state(), state)


def test_ctrl_c_returns_the_best_model_so_far() -> None:
    before = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(1.0, signal.raise_signal, [signal.SIGINT])
    timer.start()
    model = classifier(epochs=20, max_models=10_000).fit(*wine())
    timer.join()
    assert model.predict(wine()[0]).shape == (178,)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_hull_gives_models_of_other_sizes(fitted: GrowingClassifier) -> None:
    hull = fitted.hull_
    sizes = [model.multiply_adds for model in hull]
    assert sizes == sorted(sizes)
    assert fitted.model_ is hull[-1]
    smallest = hull.at(sizes[0])
    assert smallest.model_.multiply_adds == sizes[0]
    assert smallest.predict(wine()[0]).shape == (178,)
    assert fitted.model_ is hull[-1]
    with pytest.raises(ConfigError, match=r"^multiply_adds must be at least"):
        hull.at(sizes[0] - 1)


def test_a_warm_start_grows_on() -> None:
    model = classifier(max_models=2, warm_start=True).fit(*wine())
    first = [found.outcome["id"] for found in model.models_]
    weights = model.models_[0].state
    model.fit(*wine())
    assert [found.outcome["id"] for found in model.models_[:2]] == first
    assert len(model.models_) == 4
    for name, value in model.models_[0].state.items():
        assert np.array_equal(value, weights[name])
    with pytest.raises(ValueError, match="warm_start needs the same classes"):
        model.fit(wine()[0], wine()[1] % 2)


def test_it_pickles(fitted: GrowingClassifier) -> None:
    again = pickle.loads(pickle.dumps(fitted))
    assert same(fitted, again, wine()[0])


def test_labels_of_any_type_and_data_frames() -> None:
    X, y = wine()
    frame = pd.DataFrame(X, columns=[f"column {i}" for i in range(X.shape[1])])
    names = np.array(["red", "white", "rosé"], dtype=object)[y]
    model = classifier(max_models=1).fit(frame, pd.Series(names))
    assert set(model.classes_) == {"red", "white", "rosé"}
    assert list(model.feature_names_in_) == list(frame.columns)
    assert np.mean(model.predict(frame) == names) > 0.9


@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 8), (2, 4, 8), (64,)])
def test_the_space_follows_from_the_shape(shape: tuple[int, ...]) -> None:
    X, y = load_digits(return_X_y=True)
    X, y = X[:200].reshape(200, *shape), y[:200]
    model = classifier(max_models=2, epochs=3).fit(X, y)
    is_image = shape in ((8, 8), (1, 8, 8))
    assert model.model_.space["space"] == ("vision" if is_image else "vector")
    assert model.predict_proba(X[:7]).shape == (7, 10)
    with pytest.raises(ValueError, match=r"features|shape"):
        model.predict(X.reshape(200, 16, 4))


def test_a_regressor_predicts_in_the_unit_of_y() -> None:
    X, y = load_diabetes(return_X_y=True)
    model = GrowingRegressor(max_models=2, epochs=10, random_state=0).fit(X, 1000 * y + 5e6)
    assert model.score(X, 1000 * y + 5e6) > 0.4


@pytest.mark.parametrize("kind", ["classifier", "regressor"])
def test_the_exported_file_predicts_the_same(kind: str, tmp_path: Path) -> None:
    X, y = wine()
    model: Any = classifier(max_models=2, epochs=4)
    if kind == "regressor":
        model = GrowingRegressor(max_models=2, epochs=4, random_state=0)
    model.fit(X, y).export(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    (found,) = session.run(None, {"input": X.astype(np.float32)})
    expected = model.predict_proba(X) if kind == "classifier" else model.predict(X)
    np.testing.assert_allclose(found, expected, atol=1e-3)
    with pytest.raises(ConfigError, match="is there already"):
        model.export(tmp_path / "model.onnx")


def test_a_notebook_shows_the_hull(fitted: GrowingClassifier) -> None:
    picture = '<img alt="error versus multiply-adds" src="data:image/svg+xml'
    assert picture in fitted._repr_html_()
    assert picture not in clone(fitted)._repr_html_()


def test_it_tells_of_each_model(capsys: pytest.CaptureFixture[str]) -> None:
    classifier(max_models=2, epochs=2, verbose=1).fit(*wine())
    lines = capsys.readouterr().out.splitlines()
    assert [line[:6] for line in lines] == ["g00000", "g00001"]


def test_a_terminal_shows_the_progress_of_each_training() -> None:
    code = (
        "from sklearn.datasets import load_wine; from nni_petridish import GrowingClassifier;"
        "X, y = load_wine(return_X_y=True);"
        "GrowingClassifier(max_models=2, epochs=4, random_state=0, verbose=1).fit(X, y)"
    )
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 100))
    with subprocess.Popen([sys.executable, "-c", code], stdout=end, stderr=end) as process:
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # raised when the process has closed its end
            while part := os.read(terminal, 4096):
                shown += part
    os.close(terminal)
    assert process.returncode == 0
    for phase in (b"g00000 seed", b"g00001 weak", b"g00001 final"):
        assert phase in shown
    assert b"100%|" in shown


def test_heavy_examples_outvote_light_ones_and_those_without_weight_do_not_count() -> None:
    X, y = wine()
    X, y = np.concatenate([X, X]), np.concatenate([y, (y + 1) % 3])  # each wine with two labels
    first = np.arange(len(X)) < len(X) // 2
    for weights in (np.where(first, 10, 1), np.where(first, 1, 10)):
        model = classifier(max_models=2).fit(X, y, sample_weight=weights)
        assert model.score(X[weights == 10], y[weights == 10]) > 0.9
    ignored = classifier(max_models=2).fit(X, y, sample_weight=first)
    assert same(ignored, classifier(max_models=2).fit(*wine()), wine()[0])


def test_it_works_in_pipelines_and_grids() -> None:
    pipeline = make_pipeline(StandardScaler(), classifier(max_models=1, epochs=10))
    grid = GridSearchCV(pipeline, {"growingclassifier__learning_rate": [0.001, 0.1]}, cv=2)
    grid.fit(*wine())
    assert grid.best_score_ > 0.8


def test_threads_and_processes_give_the_scores_of_one() -> None:
    import joblib

    X, y = wine()
    model = classifier(max_models=2, epochs=4)
    expected = cross_val_score(model, X, y, cv=2)
    # Processes have fewer threads each, and another order of summation.
    for backend, tolerance in (("threading", 0.0), ("loky", 0.03)):
        with joblib.parallel_backend(backend):
            found = cross_val_score(model, X, y, cv=2, n_jobs=2)
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def test_it_needs_no_nni() -> None:
    code = """
import sys
import termios
sys.modules["nni"] = sys.modules["pytorch_lightning"] = None
import numpy as np
from nni_petridish import GrowingClassifier
X = np.random.default_rng(0).normal(size=(40, 3))
model = GrowingClassifier(max_models=2, epochs=2, random_state=0).fit(X, X[:, 0] > 0)
print(model.predict(X).dtype)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "bool"
