"""`GrowingClassifier` and `GrowingRegressor`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets

from nni_petridish.estimators.base import Growing
from nni_petridish.estimators.data import Floats
from nni_petridish.tasks.arrays.task import ArrayRegression, ArrayTask


class GrowingClassifier(ClassifierMixin, Growing):
    """A classifier that grows its network, within a limit of multiply-adds.

    Tables are classified by dense networks, images by convolutional ones. See `Growing` for the
    parameters.

    Attributes
    ----------
    classes_ : ndarray
        The class labels.
    model_ : GrownModel
        The model that predicts.
    models_ : list of GrownModel
        All models of the search.
    hull_ : FoundModels
        The best models of all sizes.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from nni_petridish import GrowingClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = GrowingClassifier(max_multiply_adds=4000, max_models=2, random_state=0).fit(X, y)
    >>> model.model_.multiply_adds <= 4000, model.score(X, y) > 0.9
    (True, True)
    """

    _task_type = ArrayTask
    classes_: NDArray[Any]

    def predict_proba(self, X: ArrayLike) -> Floats:
        """Return the probability of each class, shape (n, classes)."""
        logits = self._outputs(X)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities: Floats = powers / powers.sum(axis=1, keepdims=True)
        return probabilities

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the most probable class of each example."""
        chosen = self._outputs(X).argmax(axis=1)
        labels: NDArray[Any] = self.classes_[chosen]
        return labels

    def _read_targets(self, y: Any, goes_on: bool) -> NDArray[Any]:
        check_classification_targets(y)
        classes, labels = np.unique(y, return_inverse=True)
        if goes_on and not np.array_equal(classes, self.classes_):
            raise ValueError("warm_start needs the same classes as the last fit.")
        self.classes_ = classes
        return labels.astype(np.int64)

    def _num_outputs(self) -> int:
        return len(self.classes_)


class GrowingRegressor(RegressorMixin, Growing):
    """A regressor that grows its network, within a limit of multiply-adds.

    See `Growing` for the parameters, and `GrowingClassifier` for the attributes.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from nni_petridish import GrowingRegressor
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = GrowingRegressor(max_models=2, epochs=10, random_state=0).fit(X, y)
    >>> model.score(X, y) > 0.4
    True
    """

    _task_type = ArrayRegression

    def predict(self, X: ArrayLike) -> Floats:
        """Return a number for each example."""
        outputs = self._outputs(X)[:, 0]
        numbers: Floats = outputs * self.scaling_.target_scale + self.scaling_.target_mean
        return numbers

    def _read_targets(self, y: Any, goes_on: bool) -> NDArray[Any]:
        return np.asarray(y, dtype=np.float64)
