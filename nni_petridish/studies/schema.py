"""The JSON schema of configuration files, by which editors complete and check them.

``python -m nni_petridish.studies.schema`` writes the shipped file anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nni_petridish import running
from nni_petridish.registry import DEFAULT_KIND, kind_names
from nni_petridish.results.retrain.file import file_part
from nni_petridish.running.schema import Part, keys_of, make_search_part, part, part_of
from nni_petridish.studies.ablations import section as ablations
from nni_petridish.studies.comparison import section as compare
from nni_petridish.studies.tuning import section as tuning

FILE = Path(running.__file__).with_name("petridish.schema.json")


def json_schema() -> dict[str, Any]:
    """Return the schema of every file that a command takes: a search's or a retraining's."""
    retraining = file_part()
    searches = {kind: make_search_part(kind, _sections()) for kind in kind_names()}
    parts = {**searches, "retraining": retraining}
    choice: dict[str, Any] = {"$ref": f"#/$defs/{DEFAULT_KIND}"}
    for kind in (kind for kind in searches if kind != DEFAULT_KIND):
        named = {"required": ["space"], "properties": {"space": {"const": kind}}}
        is_kind = {"required": ["searchSpace"], "properties": {"searchSpace": named}}
        choice = {"if": is_kind, "then": {"$ref": f"#/$defs/{kind}"}, "else": choice}
    is_retraining = {"anyOf": [{"required": [key]} for key in retraining.model_fields]}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A configuration of nni-petridish",
        "if": is_retraining,
        "then": {"$ref": "#/$defs/retraining"},
        "else": choice,
        "$defs": {
            name: model.model_json_schema(ref_template=f"#/$defs/{name}/$defs/{{model}}")
            for name, model in parts.items()
        },
    }


def to_text() -> str:
    """Return the content of the shipped file."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def _sections() -> dict[str, type[Part]]:
    method = part_of(compare.MethodSettings) | None
    methods = {"methods": (dict[str, method], ...)}  # type: ignore[valid-type]
    tables = {"tables": (dict[str, dict[str, Any]], ...)}  # in a file, not yet `Table`
    return {
        "tuning": part("Tuning", keys_of(tuning.TuningSettings)),
        "ablations": part("Ablations", {**keys_of(ablations.AblationSettings), **tables}),
        "compare": part("Comparison", {**keys_of(compare.CompareSettings), **methods}),
    }


if __name__ == "__main__":
    FILE.write_text(to_text(), encoding="utf-8")
