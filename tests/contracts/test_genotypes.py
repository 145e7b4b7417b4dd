"""The contract of a genotype, on every family."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest

from nni_petridish import Genotype
from nni_petridish.errors import GenotypeError
from tests.contracts.listed import GENOTYPES, ListedGenotype

pytestmark = pytest.mark.parametrize("listed", GENOTYPES.values(), ids=GENOTYPES)


def grown(listed: ListedGenotype) -> Genotype:
    return listed.seed.grown(listed.additions)


def test_json_gives_the_same_genotype_back(listed: ListedGenotype) -> None:
    for genotype in (listed.seed, grown(listed)):
        again = Genotype.from_json(genotype.to_json())
        assert again == genotype
        assert hash(again) == hash(genotype)
        assert again.to_json() == genotype.to_json()
        assert json.loads(genotype.to_json()) == genotype.to_dict()


def test_copies_are_equal_and_what_has_grown_is_not(listed: ListedGenotype) -> None:
    genotype = grown(listed)
    assert copy.deepcopy(genotype) == genotype
    assert pickle.loads(pickle.dumps(genotype)) == genotype
    assert genotype != listed.seed
    assert len({genotype, grown(listed), listed.seed}) == 2


def test_is_frozen(listed: ListedGenotype) -> None:
    genotype = grown(listed)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(genotype, genotype.table, None)
    field = getattr(genotype, genotype.table)
    with pytest.raises(TypeError):
        field[next(iter(field))] = ()


def test_a_growth_adds_one_learner_to_its_keys_alone(listed: ListedGenotype) -> None:
    seed = listed.seed
    before = seed.to_json()
    once, twice = grown(listed), grown(listed).grown(listed.additions)
    assert seed.to_json() == before
    assert [g.growths for g in (seed, once, twice)] == [0, 1, 2]
    assert not any(seed.learners_by_key().values())
    found = {key: list(learners) for key, learners in twice.learners_by_key().items() if learners}
    assert found == {key: [learner, learner] for key, learner in listed.additions.items()}
    assert once.merge == seed.merge


def test_refuses_in_one_line_what_it_does_not_know(listed: ListedGenotype) -> None:
    for additions in listed.refused:
        with pytest.raises(GenotypeError) as caught:
            listed.seed.grown(additions)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["unknown key", "missing key", "unknown version"])
def test_refuses_in_one_line_what_is_not_its_form(listed: ListedGenotype, change: str) -> None:
    document = grown(listed).to_dict()
    if change == "unknown key":
        document["color"] = "red"
    elif change == "missing key":
        del document[listed.seed.table]
    else:
        document["version"] = 2
    place = {"unknown key": "color", "missing key": listed.seed.table}.get(change, "version")
    with pytest.raises(GenotypeError, match=f"^{place}: [^\n]*$"):
        Genotype.from_dict(document)


def test_a_family_reads_its_own_form_only(listed: ListedGenotype) -> None:
    own = type(listed.seed)
    assert own.from_dict(listed.seed.to_dict()) == listed.seed
    assert own.require(listed.seed) is listed.seed
    for other in (other.seed for other in GENOTYPES.values() if other.seed.space != own.space):
        with pytest.raises(GenotypeError, match=f"^space: must be {own.space} but got"):
            own.from_dict(other.to_dict())
        with pytest.raises(GenotypeError, match=f"^space: must be {own.space} but got"):
            own.require(other)
