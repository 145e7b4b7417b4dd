from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish import attach_candidates, finalize_candidates, sites
from nni_petridish.core.complexity import count_multiply_adds
from nni_petridish.core.consensus import consensus
from nni_petridish.core.held_out import Losses
from nni_petridish.core.readout import readouts, residual_gain
from nni_petridish.core.select import score_named
from nni_petridish.core.untrained import Promise, promises
from nni_petridish.core.zero_cost import nwot
from nni_petridish.errors import GrowthError
from search_spaces import RecurrentSpace
from search_spaces.vision.network import VisionNetwork
from tests.support.networks import batch, small_space, train

OPS = ("identity", "sep_conv_3x3", "max_pool_3x3")


def attached(mode: str = "cell") -> tuple[VisionNetwork, Losses]:
    torch.manual_seed(0)
    space = small_space(mode, stages=2, ops=OPS)
    net = attach_candidates(space.build(space.seed()))
    images, labels = batch(space, 8)
    train(net, images, labels, steps=2)

    def losses(net: nn.Module) -> Iterator[Tensor]:
        yield F.cross_entropy(net(images), labels, reduction="sum")
        raise AssertionError("one batch is enough")

    return net, losses


@pytest.mark.parametrize("mode", ["cell", "macro"])
def test_the_promise_is_that_of_the_network_with_one_more_shortcut(mode: str) -> None:
    net, losses = attached(mode)
    space = small_space(mode, stages=2, ops=OPS)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    found = promises(net, losses)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    tables = {site.key: site.weak_learner.table for site in sites(net)}
    assert {key: len(table) for key, table in found.items()} == {
        key: len(table.shortcuts) for key, table in tables.items()
    }
    key = list(tables)[-1]
    for place in (0, 4):
        scores = {other: [0.0] * len(table.shortcuts) for other, table in tables.items()}
        for values in scores.values():
            values[0] = 1.0
        scores[key][place] = 2.0
        child, _ = attached(mode)
        genotype = finalize_candidates(child, 1, scores=scores)
        expected = count_multiply_adds(space.build(genotype), space.image_shape)
        assert found[key][place].multiply_adds == expected


def test_weights_do_not_count_and_architectures_do() -> None:
    net, losses = attached()
    found = promises(net, losses)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.7).add_(0.1)
    assert promises(net, losses) == found
    for table in found.values():
        assert len({promise.nwot for promise in table}) > len(table) // 2
        assert len({promise.jacov for promise in table}) > len(table) // 2


def rivals(net: nn.Module) -> list[list[str]]:
    """The keys of α tables that compete, or stand alone."""
    pools = {site.key: site.pool or site.key for site in sites(net)}
    return [[key for key in pools if pools[key] == pool] for pool in dict.fromkeys(pools.values())]


def test_scores_are_the_sums_of_ranks_among_rivals() -> None:
    for together in (False, True):
        net, losses = attached("macro")
        for site in sites(net):
            site.pool = "all" if together else None
        assert len(rivals(net)) == (1 if together else 3)

        def endless(net: nn.Module, losses: Losses = losses) -> Iterator[Tensor]:
            yield next(iter(losses(net)))

        found = promises(net, endless)
        groups = rivals(net)
        alphas = {site.key: site.weak_learner.table.magnitudes().tolist() for site in sites(net)}
        gains = {
            key: [residual_gain(one) for one in table]
            for key, table in readouts(net, endless).items()
        }
        prior, both = score_named("prior")(net, endless), score_named("consensus")(net, endless)
        for group in groups:
            fields = [
                [promise[i] for key in group for promise in found[key]]
                for i in range(len(Promise._fields))
            ]
            learned = [[v for key in group for v in one[key]] for one in (alphas, gains)]
            assert [v for key in group for v in prior[key]] == consensus(fields)
            assert [v for key in group for v in both[key]] == consensus([*learned, *fields])


def test_patterns_of_functions_and_modules_count_alike() -> None:
    class Function(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 40)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.linear(x))

    torch.manual_seed(0)
    net, inputs = Function(), torch.randn(6, 5)
    as_modules = nn.Sequential(net.linear, nn.ReLU(inplace=True))
    on = (net(inputs) > 0).double()
    expected = torch.linalg.slogdet(on @ on.T + (1 - on) @ (1 - on).T).logabsdet
    assert nwot(net, inputs) == nwot(as_modules, inputs) == pytest.approx(float(expected))


def test_texts_are_refused_in_one_line() -> None:
    space = RecurrentSpace(vocabulary=10, embedding=4, hidden=4)
    net = attach_candidates(space.build(space.seed()))

    def losses(net: nn.Module) -> Iterator[Tensor]:
        logits, _ = net(torch.zeros(3, 2, dtype=torch.long))
        yield logits.sum()

    with pytest.raises(GrowthError, match=r"^the scores prior, [^\n]* standout need [^\n]*$"):
        score_named("prior")(net, losses)
