"""Petridish on linear regression: the same weak learning and finalizing, one growth at a time.

A growth finds the feature that correlates most with the residual (weak learning), adds it with
step η = 0 (finalizing), and trains. How much is trained decides which classic it is:

====================  =========================  ===========================
share of training     all weights                only the new weak learner
====================  =========================  ===========================
little (→ 0)          least angle regression     forward stagewise (boosting)
full (1)              orthogonal matching        matching pursuit
                      pursuit (a refit)
====================  =========================  ===========================
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import _fit_context
from sklearn.utils._param_validation import Interval, StrOptions
from torch import Tensor

from nni_petridish.core.grow import attach_candidates, detach_candidates, finalize_candidates
from nni_petridish.core.l1 import L1Schedule
from search_spaces.linear import LinearNetwork, LinearSpace

from ._linear import LinearPathRegressor

# α starts at 1/p and should be ranked by how it grew: this lets even a correlation of 1e-3 outgrow
# its start by far. Nothing diverges, because sf hides x_c from the loss: α's gradient is constant.
_ALPHA_LEARNING_RATE = 1e4
# The first pass, where λ is still 0, gives every α the sign of its correlation c; in the second λ
# pulls at it. So |α| ∝ |2|c| − λ|, largest for the largest |c| as soon as that exceeds λ. (More
# passes at this rate would let the α below λ swing around 0 as far as the others have come.)
_WEAK_LEARNING_STEPS = 2
# What is left of the first correlation after full training; smaller ones are none.
_ROUNDING = 1e-12


class PetridishRegressor(LinearPathRegressor):
    """Linear regression grown by Petridish, feature by feature.

    Each growth is ``attach_candidates``, weak learning, ``finalize_candidates`` and training on a
    `LinearSpace`, exactly as for neural networks. By default little is trained after each
    growth, and features enter in the order of least angle regression; ``training=1.0`` is full
    training, and the order is that of orthogonal matching pursuit.

    Parameters
    ----------
    l1 : float, default=0.001
        λ of the weak learning. Candidates whose correlation with the residual does not exceed it
        are held at α = 0, and growth ends when all are: it is the `alpha` of lasso and LARS, for
        standardized X and y.
    i_max : int, default=1
        I_max: how many features one growth adds.
    training : float, default=0.05
        Which share of the way to the fully trained weights is trained after each finalizing.
    trained : {"all", "new"}, default="all"
        Whether all weights are trained or only the new weak learner's η.
    max_growths : int, default=1000
        The largest number of growths. A growth may pick a feature that is in the model already.
    n_nonzero_coefs : int, optional
        Stop when this many features have entered.
    fit_intercept : bool, default=True
        Whether to center X and y.
    standardize : bool, default=True
        Whether to bring the features and y to variance 1 first. `coef_` is always for X as given.

    Attributes
    ----------
    coef_ : ndarray of shape (n_features,)
        Coefficients.
    intercept_ : float
        Intercept.
    active_ : list of int
        Features in the order in which they entered.
    alphas_ : ndarray of shape (n_growths + 1,)
        Largest absolute correlation with the residual before each growth and at the end.
    coef_path_ : ndarray of shape (n_features, n_growths + 1)
        Coefficients before each growth and at the end.
    n_iter_ : int
        Number of growths.
    n_features_in_ : int
        Number of features seen during `fit`.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> PetridishRegressor().fit(X, y).active_  # least angle regression's order
    [2, 8, 3, 6, 1, 9, 4, 7, 5, 0]
    >>> PetridishRegressor(training=1.0).fit(X, y).active_  # orthogonal matching pursuit's
    [2, 8, 3, 6, 1, 5, 9, 4, 7, 0]
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "l1": [Interval(Real, 0, None, closed="left")],
        "i_max": [Interval(Integral, 1, None, closed="left")],
        "training": [Interval(Real, 0, 1, closed="right")],
        "trained": [StrOptions({"all", "new"})],
        "max_growths": [Interval(Integral, 0, None, closed="left")],
        "n_nonzero_coefs": [Interval(Integral, 1, None, closed="left"), None],
        "fit_intercept": ["boolean"],
        "standardize": ["boolean"],
    }

    def __init__(
        self,
        *,
        l1: float = 0.001,
        i_max: int = 1,
        training: float = 0.05,
        trained: str = "all",
        max_growths: int = 1000,
        n_nonzero_coefs: int | None = None,
        fit_intercept: bool = True,
        standardize: bool = True,
    ) -> None:
        self.l1 = l1
        self.i_max = i_max
        self.training = training
        self.trained = trained
        self.max_growths = max_growths
        self.n_nonzero_coefs = n_nonzero_coefs
        self.fit_intercept = fit_intercept
        self.standardize = standardize

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: ArrayLike, y: ArrayLike) -> PetridishRegressor:
        """Grow a linear network on X and y.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Training data.
        y : array-like of shape (n_samples,)
            Target.

        Returns
        -------
        self : PetridishRegressor
            The fitted estimator.
        """
        data = self._standardized(*self._validated(X, y))
        features, target = torch.from_numpy(data.X), torch.from_numpy(data.y)
        space = LinearSpace(data.X.shape[1])
        net = space.build(space.seed())
        path, alphas = [net.coefficients().numpy()], []
        while True:
            correlation = learn_candidates(net, features, target, float(self.l1))
            alphas.append(correlation)
            if correlation <= max(self.l1, _ROUNDING * alphas[0]) or self._full(net, len(path)):
                detach_candidates(net)
                break
            finalize_candidates(net, int(self.i_max))
            train(net, features, target, float(self.training), trained=self.trained)
            path.append(net.coefficients().numpy())
        self.alphas_ = np.array(alphas)
        self.active_ = list(net.genotype.features)
        self.coef_path_ = data.coefficients(np.column_stack(path))
        self.coef_ = self.coef_path_[:, -1].copy()
        self.intercept_ = float(data.intercept(self.coef_))
        self.n_iter_ = len(path) - 1
        return self

    def _full(self, net: LinearNetwork, n_points: int) -> bool:
        enough = self.n_nonzero_coefs is not None and (
            len(net.genotype.features) >= self.n_nonzero_coefs
        )
        return enough or n_points > self.max_growths


def learn_candidates(net: LinearNetwork, x: Tensor, y: Tensor, l1: float) -> float:
    """Attach candidates and train them (Algorithm 1); return the largest gradient that α saw.

    The loss is half the mean squared error, so that α_j's gradient is −x_jᵀr/n: a correlation, in
    the units of `lars_path`'s alphas, and λ is in the same units.
    """
    attach_candidates(net, L1Schedule("linear", l1, steps=1))
    weak_learner = net.prediction.weak_learner
    assert weak_learner is not None
    alpha = weak_learner.table.alpha
    largest = 0.0
    for step in range(_WEAK_LEARNING_STEPS):
        loss = 0.5 * (net(x) - y).square().mean()
        # Only α is trained here: the network's own weights get their share after finalizing.
        alpha.grad = None
        loss.backward(inputs=[alpha])
        assert alpha.grad is not None
        if step == 0:
            largest = float(alpha.grad.abs().max())
        alpha.data -= _ALPHA_LEARNING_RATE * alpha.grad
    return largest


@torch.no_grad()
def train(net: LinearNetwork, x: Tensor, y: Tensor, share: float, *, trained: str = "all") -> None:
    """Train the steps η by least squares, a share of the way to the minimum.

    The loss is quadratic in the weights, so full training ends in the least-squares fit whatever
    the optimizer; going a share of the way is one Newton step with that learning rate. It shrinks
    the correlations of all trained features by the same factor 1 − share, which is how least angle
    regression moves.
    """
    if trained == "all":
        net.fold()
    site, learners = net.prediction, net.prediction.finished()
    outputs = site.learner_outputs(net.standardized(x))
    eta = torch.stack([site.intercept, *(learner.eta for learner in learners)])
    design = torch.cat([torch.ones_like(outputs[:, :1]), outputs], dim=1)
    residual = y - design @ eta
    first = 0 if trained == "all" else len(eta) - 1
    # gelsd: of two equal features, the least-norm solution moves both alike.
    change = torch.linalg.lstsq(design[:, first:], residual[:, None], driver="gelsd").solution
    eta[first:] += share * change[:, 0]
    site.intercept.copy_(eta[0])
    for learner, value in zip(learners, eta[1:], strict=True):
        learner.eta.copy_(value)
    if trained == "new":
        net.fold()
