"""Requests of the tuner to the NNI manager that started it.

NNI passes a search space on without reading it, but its web UI expects every entry to be a choice
such as ``{"_type": "choice", "_value": [8]}``: the page with the trials stays blank otherwise. The
tuner therefore gives the manager the space of its configuration in that form once it runs.
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Mapping
from typing import Any

from nni_petridish._support.reading import parse_json
from nni_petridish.nni_adapter.compat.guard import TOKEN_HEADER

_ANSWER_SECONDS = 10
_CHANNEL = re.compile(r"ws://([^/]+)(/.*)?/tuner(?:\?token=(.*))?")


def to_nni_space(space: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a space as NNI's choices, each with a single value.

    Lists and mappings become JSON: the web UI takes them for nested choices.

    >>> to_nni_space({"filters": 8, "ops": ["identity"]})["ops"]
    {'_type': 'choice', '_value': ['["identity"]']}
    """
    return {
        name: {"_type": "choice", "_value": [_as_text(value)]}
        for name, value in from_nni_space(space).items()
    }


def from_nni_space(space: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain options of a space in NNI's form; those that are plain stay as they are.

    >>> from_nni_space(to_nni_space({"filters": 8, "ops": ["identity"]}))
    {'filters': 8, 'ops': ['identity']}
    """
    return {name: _plain(value) for name, value in space.items()}


def show_space(space: Mapping[str, Any]) -> bool:
    """Give the manager the space in NNI's form; return True once it has it."""
    api = _api()
    if api is None:
        return True
    profile = _get(api, "experiment")
    shown = to_nni_space(space)
    if profile["params"]["searchSpace"] != shown:
        profile["params"]["searchSpace"] = shown
        _update(api, profile, "SEARCH_SPACE")
    return True


def end_experiment() -> bool:
    """Make the manager end the experiment once its trials are done; return True once it will.

    NNI has no command for it, so the largest number of trials is lowered to the present number. For
    an experiment without trials, which NNI would not resume, the duration is lowered instead.
    """
    api = _api()
    if api is None:
        return True
    profile, trials = _get(api, "experiment"), len(_get(api, "trial-jobs"))
    if trials:
        limit, profile["params"]["maxTrialNumber"] = "MAX_TRIAL_NUM", trials
    else:
        limit, profile["params"]["maxExperimentDuration"] = "MAX_EXEC_DURATION", "1s"
    _update(api, profile, limit)
    return True


def _as_text(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _plain(value: Any) -> Any:
    if not isinstance(value, Mapping) or set(value) != {"_type", "_value"}:
        return value
    if value["_type"] != "choice" or not isinstance(value["_value"], list):
        return value
    if len(value["_value"]) != 1:
        return value  # a choice among several is not an option of a space, and is refused as such
    (only,) = value["_value"]
    if not isinstance(only, str) or only[:1] not in ("[", "{"):
        return only
    try:
        return parse_json(only)
    except ValueError:
        return only


def _api() -> str | None:
    """Return the address of the manager's REST API; None outside of an experiment."""
    match = _channel()
    return None if match is None else f"http://{match[1]}{match[2] or ''}/api/v1/nni"


def _get(api: str, what: str) -> Any:
    with _opener().open(f"{api}/{what}", timeout=_ANSWER_SECONDS) as answer:
        return json.load(answer)


def _update(api: str, profile: Mapping[str, Any], kind: str) -> None:
    request = urllib.request.Request(
        f"{api}/experiment?update_type={kind}",
        json.dumps(profile).encode(),
        {"Content-Type": "application/json"},
        method="PUT",
    )
    with _opener().open(request, timeout=_ANSWER_SECONDS):
        return


def _opener() -> urllib.request.OpenerDirector:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    match = _channel()
    if match is not None and match[3]:
        opener.addheaders.append((TOKEN_HEADER, match[3]))
    return opener


def _channel() -> re.Match[str] | None:
    """Match the address of the tuner's channel: machine and port, prefix, and token."""
    return _CHANNEL.fullmatch(os.environ.get("NNI_TUNER_COMMAND_CHANNEL", ""))
