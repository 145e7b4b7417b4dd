"""A server of the report of a gallery, which browsers refresh while a search runs.

The server listens on the loopback address only, answers GET and HEAD, and writes nothing. A request
whose Host header does not name the loopback address is refused, so that no web page can read the
report through a name of its own that points to 127.0.0.1.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from nni_petridish.errors import ConfigError, PetridishError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.select import open_search

_ADDRESS = "127.0.0.1"
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}

_log = logging.getLogger(__name__)


class LiveReport:
    """The page of a gallery, rendered again only when the gallery has changed.

    Parameters
    ----------
    folder
        The folder of the gallery.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._page: tuple[str, bytes] | None = None
        Gallery(folder)  # raises if there is none

    def version(self) -> str:
        """Return a string that changes with the journal."""
        try:
            status = (self.folder / "journal.jsonl").stat()
        except FileNotFoundError:
            return "empty"
        text = f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def page(self) -> tuple[str, bytes]:
        """Return the version and the page that shows it, or a newer state."""
        from nni_petridish.results.report.page import report_html

        with self._lock:
            # Before the journal is read: a line that comes in between shows at the next refresh.
            version = self.version()
            if self._page is None or self._page[0] != version:
                _, search = open_search(self.folder)
                html = report_html(search, self.folder, version=version)
                self._page = (version, html.encode())
            return self._page


class ReportServer(ThreadingHTTPServer):
    """A server of the report of one gallery on the loopback address.

    Parameters
    ----------
    folder
        The folder of the gallery.
    port
        The port; 0 picks a free one.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.report = LiveReport(folder)
        if not 0 <= port < 2**16:
            raise ConfigError(f"--port must be from 0 to 65535 but got {port}.")
        try:
            super().__init__((_ADDRESS, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"Cannot listen on {_ADDRESS}:{port}: {error.strerror}; --port 0 picks a free port."
            ) from error

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{_ADDRESS}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version, sys_version = "nni-petridish", ""
    timeout = 30

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        if not self._is_loopback():
            self.send_error(HTTPStatus.FORBIDDEN, "The Host header must name the loopback address")
            return
        answer = self._answers().get(urlsplit(self.path).path)
        if answer is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            kind, version, body = answer()
        except PetridishError as error:
            _log.warning("%s", error)
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
            return
        self._send(kind, version, body, with_body)

    def _answers(self) -> dict[str, Callable[[], tuple[str, str, bytes]]]:
        return {"/": self._page, "/state.json": self._state}

    def _page(self) -> tuple[str, str, bytes]:
        version, page = self.server.report.page()
        return "text/html; charset=utf-8", version, page

    def _state(self) -> tuple[str, str, bytes]:
        version = self.server.report.version()
        return "application/json", version, json.dumps({"version": version}).encode()

    def _send(self, kind: str, version: str, body: bytes, with_body: bool) -> None:
        tag = f'"{version}"'
        if self.headers.get("If-None-Match") == tag:
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self.end_headers()
            return
        self.send_response(HTTPStatus.OK)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "ETag": tag,
            "Cache-Control": "no-cache",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _is_loopback(self) -> bool:
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname in _LOOPBACK
        except ValueError:
            return False

    def log_message(self, format: str, *arguments: object) -> None:
        """Keep the terminal quiet."""
