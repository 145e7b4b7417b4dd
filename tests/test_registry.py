from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nni_petridish import Genotype, registry
from nni_petridish.errors import ConfigError

THIRD_PARTY = """
from dataclasses import dataclass
from typing import ClassVar
from nni_petridish.core.genotype import LearnersGenotype

MEASURE = "a kind"

@dataclass(frozen=True)
class SoundGenotype(LearnersGenotype):
    layers: dict
    space: ClassVar[str] = "sound"
    table: ClassVar[str] = "layers"
"""


@pytest.fixture
def sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a third party's module, not yet registered."""
    (tmp_path / "sound_of_others.py").write_text(THIRD_PARTY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sound_of_others", raising=False)
    monkeypatch.setattr(registry, "_PROBLEMS", dict(registry._PROBLEMS))
    monkeypatch.setattr(Genotype, "_families", dict(Genotype._families))
    return "sound_of_others"


def test_a_third_partys_kind_is_found_once_it_is_registered(sound: str) -> None:
    document = {"version": 1, "space": "sound", "layers": {"a": [[["in", "echo"]]]}}
    wanted = "must be one of vision, recurrent, vector but got 'sound'"
    with pytest.raises(ConfigError, match=wanted):
        registry.kind_of({"space": "sound"})
    registry.register_kind("sound", genotype=sound, kind=sound)
    assert registry.kind_of({"space": "sound"}).MEASURE == "a kind"
    genotype = Genotype.from_dict(document)
    assert type(genotype).__name__ == "SoundGenotype"
    assert genotype.to_dict() == document


def test_a_name_is_given_once(sound: str) -> None:
    registry.register_kind("sound", genotype=sound)
    registry.register_kind("sound", genotype=sound)  # as when its module is imported again
    with pytest.raises(ConfigError, match="named 'sound' already"):
        registry.register_kind("sound", genotype="elsewhere")
    with pytest.raises(ConfigError, match="named 'vision' already"):
        registry.register_kind("vision", genotype=sound)
