"""A guard for NNI's manager, which has no login: this machine only, and with a token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_PRELOADED = Path(__file__).with_name("guard.cjs")
TOKEN_VARIABLE = "NNI_PETRIDISH_TOKEN"
TOKEN_HEADER = "X-Petridish-Token"


def guarded(environment: Mapping[str, str], token: str) -> dict[str, str]:
    """Return an environment in which a manager answers to this machine and to a token only.

    Parameters
    ----------
    environment
        Environment variables of the process that starts the manager. Options for node that they
        contain are kept.
    token
        The token, for `TOKEN_HEADER`, or for ``?token=`` in an address.
    """
    options = f'{environment.get("NODE_OPTIONS", "")} --require "{_PRELOADED}"'.strip()
    return {**environment, "NODE_OPTIONS": options, TOKEN_VARIABLE: token}
