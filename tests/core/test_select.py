from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish import attach_candidates, finalize_candidates, sites
from nni_petridish.core import readout
from nni_petridish.core.alpha_table import largest_first
from nni_petridish.core.held_out import Observation, observe
from nni_petridish.core.line_search import line_score
from nni_petridish.core.pursuit import METHODS, explained, selection_order
from nni_petridish.core.readout import Readout, residual_gain, residual_mixture_gain
from nni_petridish.core.select import SCORES, alpha_score, gain_score, score_named
from nni_petridish.core.site import Site
from nni_petridish.errors import ConfigError, GrowthError
from search_spaces.linear import LinearSpace
from tests.support.networks import batch, small_space, train


def linear_problem() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 4, generator=generator).double() * torch.tensor([1.0, 1.0, 30.0, 0.1])
    y = 2 * x[:, 0] + 9 * x[:, 3] + torch.randn(50, generator=generator).double()
    space = LinearSpace(4)  # not standardized: the scale of a feature must not matter
    return attach_candidates(space.build(space.seed()), l1=0.0), x, y


def test_the_gain_is_the_criterion_of_forward_regression() -> None:
    net, x, y = linear_problem()

    def losses(net: nn.Module) -> list[Tensor]:
        return [(net(x[i : i + 10]) - y[i : i + 10]).square().sum() / 2 for i in range(0, 50, 10)]

    expected = (x.T @ y).square() / x.square().sum(0)  # the intercept, the residual's mean, is 0
    assert gain_score(net, losses)["prediction"] == pytest.approx(expected.tolist())


def test_the_gain_of_a_shared_table_sums_over_its_sites_and_changes_nothing() -> None:
    torch.manual_seed(0)
    space = small_space()
    net = attach_candidates(space.build(space.seed()))
    images, labels = batch(space, 8)
    train(net, images, labels, steps=2)
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def losses(net: nn.Module) -> list[Tensor]:
        return [F.cross_entropy(net(images), labels, reduction="sum")]

    found = gain_score(net, losses)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    # Independently: B is minus the gradient of α, U a sum over the outputs of the ops.
    norms = {site.key: torch.zeros(len(site.weak_learner.ops)) for site in sites(net)}

    def hook(key: str, i: int) -> Callable[..., None]:
        def add(module: nn.Module, z: tuple[Tensor], u: Tensor) -> None:
            norms[key][i] += u.detach().square().sum()

        return add

    handles = [
        op.register_forward_hook(hook(site.key, i))
        for site in sites(net)
        for i, op in enumerate(site.weak_learner.ops)
    ]
    net.eval()
    tables = {site.key: site.weak_learner.table for site in sites(net)}
    for table in tables.values():
        table.l1_came_with_loss = True
    slopes = torch.autograd.grad(losses(net)[0], [t.alpha for t in tables.values()])
    for handle in handles:
        handle.remove()
    for (key, _), slope in zip(tables.items(), slopes, strict=True):
        expected = slope.square() / norms[key]
        assert found[key] == pytest.approx(expected.tolist(), rel=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_pursuits_select_features_as_in_linear_regression(method: str) -> None:
    net, x, y = linear_problem()

    def losses(net: nn.Module) -> list[Tensor]:
        return [(net(x[i : i + 10]) - y[i : i + 10]).square().sum() / 2 for i in range(0, 50, 10)]

    scores = SCORES[method](net, losses)
    expected = selection_order(x.T @ x, x.T @ y, method)
    assert largest_first(torch.tensor(scores["prediction"])) == expected
    left = explained(x.T @ x, x.T @ y, range(4))
    assert max(scores["prediction"]) == pytest.approx(left)
    assert finalize_candidates(net, i_max=2, scores=scores).features == tuple(expected[:2])


def test_scores_replace_alpha_in_the_selection() -> None:
    net, _, _ = linear_problem()
    assert alpha_score(net, lambda net: []) == {"prediction": [0.25] * 4}
    scores = {"prediction": [0.0, 3.0, -1.0, 5.0]}
    assert finalize_candidates(net, i_max=2, scores=scores).features == (3, 1)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({}, "scores must have 4 numbers for 'prediction' but got 0."),
        ({"prediction": [1.0, float("nan"), 0.0, 0.0]}, "scores of 'prediction' must be finite"),
    ],
)
def test_unusable_scores_are_refused(scores: dict[str, list[float]], message: str) -> None:
    net, _, _ = linear_problem()
    with pytest.raises(GrowthError, match=message):
        finalize_candidates(net, scores=scores)


def test_scores_have_names_and_need_candidates() -> None:
    net, _, _ = linear_problem()
    assert len(SCORES["random"](net, lambda net: [])["prediction"]) == 4
    assert score_named("gain") is gain_score
    with pytest.raises(ConfigError, match="score must be one of alpha, gain, random, line, "):
        score_named("b")
    with pytest.raises(GrowthError, match="the gain of 'prediction' is unknown"):
        gain_score(net, lambda net: [])
    space = LinearSpace(4)
    with pytest.raises(GrowthError, match="no candidates are attached"):
        alpha_score(space.build(space.seed()), lambda net: [])


def image_problem() -> tuple[nn.Module, Callable[[nn.Module], list[Tensor]]]:
    torch.manual_seed(0)
    space = small_space()
    net = attach_candidates(space.build(space.seed()))
    images, labels = batch(space, 8)
    train(net, images, labels, steps=2)
    return net, lambda net: [
        F.cross_entropy(net(images[i : i + 4]), labels[i : i + 4], reduction="sum") for i in (0, 4)
    ]


def test_mixture_gains_are_those_of_least_squares_on_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readout, "_RIDGE", 1e-9)
    net, losses = image_problem()
    rows: dict[Site, list[tuple[Tensor, Tensor, Tensor]]] = {}

    def keep(seen: Observation) -> None:
        flat = [t.movedim(1, -1).flatten(0, -2).double() for t in (seen.x_k, seen.g)]
        u = seen.candidates[0].movedim(1, -1).flatten(0, -2).double()
        rows.setdefault(seen.site, []).append((flat[0], -flat[1], u))

    observe(net, losses, keep)
    expected = {"mixture_gain": 0.0, "residual_mixture_gain": 0.0}
    key = next(iter(alpha_score(net, losses)))
    for site, parts in rows.items():
        if site.key == key:
            h, y, u = (torch.cat(part) for part in zip(*parts, strict=True))
            h = torch.cat([h, torch.ones_like(h[:, :1])], 1)
            left = [t - h @ torch.linalg.lstsq(h, t).solution for t in (y, u)]
            fits = [u @ torch.linalg.lstsq(u, y).solution]
            fits.append(left[1] @ torch.linalg.lstsq(left[1], left[0]).solution)
            for name, fit in zip(expected, fits, strict=True):
                expected[name] += float(fit.square().sum())
    for name, value in expected.items():
        assert SCORES[name](net, losses)[key][0] == pytest.approx(value, rel=0.01)
    assert 0 < expected["residual_mixture_gain"] < expected["mixture_gain"]


def test_a_candidate_that_repeats_the_own_features_has_no_residual_gain() -> None:
    generator = torch.Generator().manual_seed(0)
    own, g = (torch.randn(500, 3, generator=generator) for _ in range(2))
    h = torch.cat([own, torch.ones(500, 1)], 1)
    repeat = Readout.of(h, -g, own @ torch.randn(3, 3, generator=generator))
    fresh = Readout.of(h, -g, 0.3 * -g + torch.randn(500, 3, generator=generator))
    for score in (residual_gain, residual_mixture_gain):
        assert score([repeat]) < 0.02 * score([fresh])
    assert score([fresh]) > 0


def test_the_line_search_finds_the_true_decrease_and_changes_nothing() -> None:
    net, losses = image_problem()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = line_score(net, losses, shares=(0.01,))
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    # At a small step the decrease is |⟨g, û⟩|·η: it ranks the candidates like the gain does.
    gains = gain_score(net, losses)
    for key, decreases in found.items():
        best = max(range(len(decreases)), key=lambda i: gains[key][i])
        assert decreases[best] == pytest.approx(max(decreases), rel=0.2)
        assert max(decreases) > 0
