"""The contract of a growable network: Algorithms 1 and 2 on every space."""

from __future__ import annotations

import copy

import torch
from torch import nn

from nni_petridish import attach_candidates, detach_candidates, extra_loss, finalize_candidates
from nni_petridish.core import candidate_parameters, has_candidates
from tests.contracts.conftest import Subject, alphas


def attached(net: nn.Module, l1: float = 0.001) -> nn.Module:
    torch.manual_seed(2)
    return attach_candidates(copy.deepcopy(net), l1)


def test_candidates_change_no_prediction_and_no_gradient(subject: Subject, net: nn.Module) -> None:
    wider = attached(net)
    for training in (False, True):
        assert torch.equal(subject.prediction(wider, training), subject.prediction(net, training))
    expected, found = subject.gradients(net), subject.gradients(wider)
    assert expected
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_training_teaches_every_table(subject: Subject, net: nn.Module) -> None:
    wider = attached(net)
    before = {key: alpha.detach().clone() for key, alpha in alphas(wider).items()}
    assert before
    subject.train(wider)
    for key, alpha in alphas(wider).items():
        assert not torch.equal(alpha, before[key]), key


def test_training_with_candidates_trains_the_network_as_without(
    subject: Subject, net: nn.Module
) -> None:
    wider = detach_candidates(subject.train(attached(net)))
    subject.train(net)
    for name, value in net.state_dict().items():
        assert torch.equal(wider.state_dict()[name], value), name


def test_detaching_restores_the_network(subject: Subject, net: nn.Module) -> None:
    wider = attached(net)
    assert has_candidates(wider)
    assert candidate_parameters(wider)
    detach_candidates(wider)
    assert not has_candidates(wider)
    assert list(wider.state_dict()) == list(net.state_dict())
    assert wider.genotype == net.genotype
    assert torch.equal(subject.prediction(wider), subject.prediction(net))


def test_finalizing_changes_no_prediction(subject: Subject, net: nn.Module) -> None:
    wider = subject.train(attached(net))
    before = subject.prediction(wider)
    genotype = finalize_candidates(wider, subject.listed.i_max)
    assert genotype == wider.genotype == subject.space.check(genotype)
    assert genotype != net.genotype
    assert not has_candidates(wider)
    assert torch.equal(subject.prediction(wider), before)


def test_l1_counts_every_table_once(subject: Subject, net: nn.Module) -> None:
    gradients = []
    for l1 in (0.0, 0.5):
        wider = attached(net, l1)
        for alpha in alphas(wider).values():
            alpha.data.fill_(0.25)
        everything = torch.cat([alpha.detach() for alpha in alphas(wider).values()])
        torch.testing.assert_close(extra_loss(wider).double(), l1 * everything.sum().double())
        subject.loss(wider.train()).backward()
        gradients.append(torch.cat([alpha.grad for alpha in alphas(wider).values()]))
    torch.testing.assert_close(gradients[1] - gradients[0], torch.full_like(gradients[0], 0.5))


def test_the_state_dict_holds_the_candidates(subject: Subject, net: nn.Module) -> None:
    wider = subject.train(attached(net))
    again = attach_candidates(subject.space.build(net.genotype))
    again.load_state_dict(wider.state_dict())
    for a, b in zip(alphas(again).values(), alphas(wider).values(), strict=True):
        assert torch.equal(a, b)
    i_max = subject.listed.i_max
    assert finalize_candidates(again, i_max) == finalize_candidates(wider, i_max)
    for name, value in wider.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
