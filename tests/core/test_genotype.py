from __future__ import annotations

import copy
import json
import pickle
import random
import subprocess
import sys

import pytest

from nni_petridish import Genotype, PetridishError
from nni_petridish.errors import GenotypeError
from search_spaces.vision.genotype import VisionGenotype, macro_key
from search_spaces.vision.op_registry import VISION_OPS


def vision(**changes: object) -> dict:
    document = {
        "version": 1,
        "space": "vision",
        "mode": "cell",
        "cells": {
            "normal": [
                [["prev", "identity"], ["prev_prev", "sep_conv_3x3"]],
                [["h0", "max_pool_3x3"]],
            ],
            "reduce": [[["prev", "dil_conv_5x5"]]],
        },
    }
    document.update(changes)
    return {key: value for key, value in document.items() if value is not ...}


def random_genotype(rng: random.Random) -> VisionGenotype:
    mode = rng.choice(["cell", "macro"])
    keys = (
        ["normal", "reduce"] if mode == "cell" else [macro_key(i) for i in range(rng.randint(1, 5))]
    )

    def learner(index: int) -> list:
        sources = ["prev_prev", "prev", *(f"h{i}" for i in range(index))]
        return [(rng.choice(sources), rng.choice(VISION_OPS)) for _ in range(rng.randint(1, 4))]

    cells = {key: [learner(i) for i in range(rng.randint(0, 3))] for key in keys}
    return VisionGenotype(mode, cells, rng.choice(["concat_project", "weighted_sum"]))


@pytest.mark.parametrize("seed", range(50))
def test_round_trips_through_json(seed: int) -> None:
    genotype = random_genotype(random.Random(seed))
    again = Genotype.from_json(genotype.to_json())
    assert again == genotype
    assert hash(again) == hash(genotype)
    assert again.to_json() == genotype.to_json()
    for copied in (copy.deepcopy(genotype), pickle.loads(pickle.dumps(genotype))):
        assert copied == genotype


def test_json_has_the_documented_form() -> None:
    document = vision()
    assert Genotype.from_json(json.dumps(document)).to_dict() == document


def test_different_genotypes_differ() -> None:
    rng = random.Random(1)
    genotypes = [random_genotype(rng) for _ in range(200)]
    texts = {g.to_json() for g in genotypes}
    assert len(set(genotypes)) == len(texts)


FAMILIES = {
    "vision": vision(),
    "recurrent": {"version": 1, "space": "recurrent", "nodes": [["relu", 0]]},
    "model": {
        "version": 1,
        "space": "model",
        "sources": {"a": ["input"]},
        "ops": ["identity"],
        "learners": {"a": []},
    },
    "nni": {"version": 1, "space": "nni", "choices": {}},
    "linear": {"version": 1, "space": "linear", "learners": []},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_reading_a_genotype_loads_the_module_of_its_family_alone(name: str) -> None:
    code = f"""
import json
from nni_petridish.core.genotype import Genotype
document = json.loads({json.dumps(FAMILIES[name])!r})
assert Genotype.from_dict(document).to_dict() == document
print(*Genotype._families)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    others = {"model", "nni", "linear"} - {name}  # `search_spaces` itself loads the other two
    loaded = set(done.stdout.split())
    assert name in loaded
    assert not loaded & others


def test_an_unknown_family_is_answered_with_all_known_ones() -> None:
    code = """
from nni_petridish.errors import GenotypeError
from nni_petridish.core.genotype import Genotype
try:
    Genotype.from_dict({"version": 1, "space": "audio"})
except GenotypeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        "must be one of vision, recurrent, model, nni, linear, vector but got 'audio'"
        in done.stdout
    )


MALFORMED = {
    "not JSON": ("{", "not JSON"),
    "empty": ("", "not JSON"),
    "a list": ("[]", "must be an object"),
    "no version": (vision(version=...), "version"),
    "wrong version": (vision(version=2), "version: must be 1 but got 2"),
    "version true": (vision(version=True), "version"),
    "version text": (vision(version="1"), "version"),
    "no space": (vision(space=...), "space"),
    "unknown space": (vision(space="audio"), "space: must be"),
    "no mode": (vision(mode=...), "mode: is missing"),
    "unknown mode": (vision(mode="meso"), "mode: must be one of cell, macro but got 'meso'"),
    "mode not text": (vision(mode=["cell"]), "mode"),
    "wrong mode for keys": (vision(mode="macro"), "cells: macro mode"),
    "no cells": (vision(cells=...), "cells: is missing"),
    "cells a list": (vision(cells=[]), "cells: must be an object"),
    "missing reduce": (vision(cells={"normal": []}), "cells.reduce: is missing"),
    "extra cell": (vision(cells={"normal": [], "reduce": [], "x": []}), "got 'x'"),
    "macro gap": (vision(mode="macro", cells={"cell_00": [], "cell_02": []}), "got 'cell_02'"),
    "macro empty": (vision(mode="macro", cells={}), "cell_00"),
    "unknown key": (vision(colour="red"), "colour: is not a key"),
    "unknown merge": (vision(merge="max"), "merge: must be one of"),
    "learners not a list": (
        vision(cells={"normal": 3, "reduce": []}),
        "cells.normal: must be a list",
    ),
    "empty learner": (vision(cells={"normal": [[]], "reduce": []}), "cells.normal[0]"),
    "learner text": (vision(cells={"normal": ["abc"], "reduce": []}), "cells.normal[0]"),
    "shortcut of three": (
        vision(cells={"normal": [[["prev", "identity", 1]]], "reduce": []}),
        "cells.normal[0][0]: must be [source, op]",
    ),
    "unknown op": (
        vision(cells={"normal": [[["prev", "identity"], ["prev", "conv_7x7"]]], "reduce": []}),
        "cells.normal[0][1]: op must be one of",
    ),
    "none op": (vision(cells={"normal": [[["prev", "none"]]], "reduce": []}), "op must be one of"),
    "op not text": (vision(cells={"normal": [[["prev", 3]]], "reduce": []}), "op must be one of"),
    "forward reference": (
        vision(cells={"normal": [], "reduce": [[["prev", "identity"]], [["h1", "identity"]]]}),
        "cells.reduce[1][0]: source must be one of prev_prev, prev, h0 but got 'h1' (a forward",
    ),
    "unknown source": (
        vision(cells={"normal": [[["next", "identity"]]], "reduce": []}),
        "cells.normal[0][0]: source must be one of prev_prev, prev but got 'next'",
    ),
    "source list": (
        vision(cells={"normal": [[[["h"], "identity"]]], "reduce": []}),
        "source must be",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_genotype_raises_one_line_naming_the_place(name: str) -> None:
    document, place = MALFORMED[name]
    text = document if isinstance(document, str) else json.dumps(document)
    with pytest.raises(GenotypeError) as caught:
        Genotype.from_json(text)
    assert isinstance(caught.value, PetridishError)
    assert place in str(caught.value)
    assert "\n" not in str(caught.value)


def test_grown_appends_and_refuses_what_it_does_not_know() -> None:
    seed = VisionGenotype.seed("cell")
    grown = seed.grown({"normal": (("prev", "identity"),)})
    assert grown.cells["normal"] == ((("prev", "identity"),),)
    assert grown.cells["reduce"] == ()
    assert seed.growths == 0
    assert grown.growths == 1
    with pytest.raises(GenotypeError, match="normal, reduce"):
        seed.grown({"stem": (("prev", "identity"),)})
    with pytest.raises(GenotypeError, match="forward"):
        seed.grown({"normal": (("h0", "identity"),)})
    with pytest.raises(GenotypeError, match="merge"):
        grown.grown({"normal": (("h0", "identity"),)}, merge="weighted_sum")
