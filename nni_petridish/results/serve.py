"""``nni-petridish serve``."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from types import FrameType

DEFAULT_PORT = 8642


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``serve``."""
    parser.add_argument("gallery", type=Path, metavar="GALLERY", help="a gallery's folder")
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        metavar="N",
        help=f"port on 127.0.0.1; 0 picks a free one (default: {DEFAULT_PORT})",
    )
    parser.set_defaults(command=_serve)


def _serve(options: argparse.Namespace) -> int:
    from nni_petridish.results.server import ReportServer

    with ReportServer(options.gallery, options.port) as server, _ended_by_sigterm():
        try:
            print(
                f"The report of {options.gallery} is at {server.url} (Ctrl-C ends it).", flush=True
            )
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("\nThe server has ended.", flush=True)
    return 0


class _ended_by_sigterm:
    """Context in which SIGTERM ends the process as Ctrl-C does."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, self._interrupt)

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    @staticmethod
    def _interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt
