"""Keep NNI's manager, which has no login, off the network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_PRELOADED = Path(__file__).with_name("loopback.cjs")


def on_loopback_only(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a manager listens on the loopback address only.

    Parameters
    ----------
    environment
        Environment variables of the process that starts the manager. Options for node that they
        contain are kept.
    """
    options = f'{environment.get("NODE_OPTIONS", "")} --require "{_PRELOADED}"'.strip()
    return {**environment, "NODE_OPTIONS": options}
