"""The last words of a study that was stopped."""

from __future__ import annotations

import argparse
import shlex
import sys

from nni_petridish.running.process import INTERRUPTED


def tell_study_stopped(options: argparse.Namespace) -> int:
    """Say what is kept of a study that was stopped and how to go on; return the exit code."""
    command = shlex.join(["nni-petridish", *options.line])
    print(
        f"Stopped: what is finished is kept; go on from the last epoch with\n  {command}",
        file=sys.stderr,
    )
    return INTERRUPTED
