"""``nnictl``, with the token of the manager in its requests; run as ``python -m``.

It ends processes without the program ``kill``, which slim images of Linux do not have: nnictl would
leave the manager of a finished search behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import requests

from nni_petridish.nni_adapter.compat.guard import TOKEN_HEADER, TOKEN_VARIABLE


def show_token(token: str) -> None:
    """Add a token to all requests of this process, for good; nnictl's go to the manager only."""
    request = requests.Session.request

    def request_with_token(session: Any, method: str, url: str, **options: Any) -> Any:
        headers = {**(options.pop("headers", None) or {}), TOKEN_HEADER: token}
        return request(session, method, url, headers=headers, **options)

    requests.Session.request = request_with_token  # type: ignore[method-assign,assignment]


def call(command: Sequence[str], **options: Any) -> int:
    """Run a command as `subprocess.call` does; ``kill PID`` without the program."""
    if command[0] != "kill":
        return subprocess.call(command, **options)
    try:
        os.kill(int(command[1]), signal.SIGTERM)
    except (ProcessLookupError, PermissionError):
        return 1
    return 0


if __name__ == "__main__":
    if os.environ.get(TOKEN_VARIABLE):
        show_token(os.environ[TOKEN_VARIABLE])
    from nni.tools.nnictl import command_utils
    from nni.tools.nnictl.nnictl import parse_args

    command_utils.call = call

    sys.exit(parse_args())
