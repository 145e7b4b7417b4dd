"""The contract of a space, on every one."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from nni_petridish import Genotype
from nni_petridish.errors import GenotypeError
from tests.contracts.conftest import Subject
from tests.contracts.listed import GENOTYPES


def test_its_description_is_complete(subject: Subject) -> None:
    described = subject.space.describe()
    assert json.loads(json.dumps(described)) == described
    assert subject.listed.make().describe() == described
    if subject.listed.plain:
        again = type(subject.space)(**described)
        assert again == subject.space
        assert again.describe() == described


def test_its_seed_builds_and_has_not_grown(subject: Subject) -> None:
    seed = subject.space.seed()
    assert subject.space.check(seed) == seed
    assert seed.growths == 0
    assert subject.space.build(seed).genotype == seed


def test_building_draws_from_torchs_generator_only(subject: Subject, net: nn.Module) -> None:
    weights = []
    for _ in range(2):
        torch.manual_seed(5)
        weights.append(subject.space.build(net.genotype).state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_refuses_foreign_genotypes_in_one_line(subject: Subject) -> None:
    own = subject.space.seed().space
    for listed in GENOTYPES.values():
        if listed.seed.space != own:
            for refuses in (subject.space.check, subject.space.build):
                with pytest.raises(GenotypeError, match=f"^space: must be {own} but got [^\n]*$"):
                    refuses(listed.seed)


def test_building_a_grown_genotype_gives_the_grown_network(
    subject: Subject, net: nn.Module
) -> None:
    again = subject.space.build(Genotype.from_json(net.genotype.to_json()))
    assert {name: t.shape for name, t in again.state_dict().items()} == {
        name: t.shape for name, t in net.state_dict().items()
    }
    again.load_state_dict(net.state_dict())
    assert torch.equal(subject.prediction(again), subject.prediction(net))
    assert subject.space.size(again) == subject.space.size(net)


def test_growth_makes_a_network_larger(subject: Subject) -> None:
    before, after = map(subject.space.size, (subject.seed_net(), subject.grown_net()))
    assert 0 <= before[0] <= after[0]
    assert 0 < before[1] < after[1]


def test_its_networks_take_its_example(subject: Subject, net: nn.Module) -> None:
    subject.prediction(net)  # networks of NNI's spaces learn the shapes of their inputs
    with torch.no_grad():
        assert net.eval()(*subject.space.example(net)) is not None
