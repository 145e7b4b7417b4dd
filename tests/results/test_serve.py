"""The served report: what it answers, what it refuses, and that it follows a search."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from nni_petridish.__main__ import main
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.results.server import ReportServer
from nni_petridish.search.events import ask_event, fail_event
from nni_petridish.search.records import Growth
from tests.support.small_gallery import vision_gallery


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    with ReportServer(vision_gallery(tmp_path).folder) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.05,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server: ReportServer, path: str, method: str = "GET", **headers: str) -> tuple[Any, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=names)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_only_this_machine_can_connect(server: ReportServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    port = server.server_address[1]
    for host in (f"127.0.0.1:{port}", "localhost", "[::1]:80", "LOCALHOST:1"):
        assert ask(server, "/state.json", Host=host)[0].status == 200, host
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "",
        "[",
        "0.0.0.0",
    ):
        answer, text = ask(server, "/", Host=host)
        assert answer.status == 403, host
        assert "g00001" not in text


def test_the_page_is_there_and_nothing_else(server: ReportServer) -> None:
    answer, text = ask(server, "/")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert 'id="g00003"' in text
    assert "connect-src 'self'" in unescape(text)
    for path in ("/gallery.json", "/../../etc/passwd", "/%2e%2e/gallery.json", "/models"):
        assert ask(server, path)[0].status == 404, path
    assert ask(server, "/", "POST")[0].status == 501
    answer, text = ask(server, "/", "HEAD")
    assert (answer.status, text) == (200, "")
    tag = answer.headers["ETag"]
    assert ask(server, "/", If_None_Match=tag)[0].status == 304


def test_it_follows_the_search_and_writes_nothing(server: ReportServer) -> None:
    gallery = Gallery(server.report.folder)
    before = sorted(path for path in gallery.folder.rglob("*"))
    first = json.loads(ask(server, "/state.json")[1])["version"]
    assert f'data-version="{first}"' in ask(server, "/")[1]
    assert sorted(path for path in gallery.folder.rglob("*")) == before
    gallery.journal.append(ask_event(Growth("g00004", "g00001", 4, 0.001, 2), 9.0))
    second = json.loads(ask(server, "/state.json")[1])["version"]
    assert second != first
    text = ask(server, "/")[1]
    assert f'data-version="{second}"' in text
    assert "<b>g00004</b> from g00001" in text


@pytest.mark.browser
def test_a_browser_refreshes_the_page_and_keeps_the_choice(
    server: ReportServer, browser: Any
) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(f"{server.url}#g00001")
    assert browser.find_element("css selector", ".model.chosen").get_attribute("id") == "g00001"
    gallery = Gallery(server.report.folder)
    gallery.journal.append(ask_event(Growth("g00004", "g00001", 4, 0.001, 2), 9.0))
    gallery.journal.append(fail_event("g00004", 1, "out of memory"))
    WebDriverWait(browser, 20).until(lambda page: "out of memory" in page.page_source)
    assert browser.find_element("css selector", ".model.chosen").get_attribute("id") == "g00001"
    assert browser.find_element("css selector", ".live").text == "live"


def test_a_search_without_models_has_a_page(tmp_path: Path) -> None:
    folder = Gallery.create(tmp_path / "gallery", {"space": "vision"}, {}).folder
    with ReportServer(folder) as server:
        assert b"No model is finished yet." in server.report.page()[1]


def test_what_cannot_be_served_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path)]) == 2
    assert "gallery.json is missing" in capsys.readouterr().err
    folder = vision_gallery(tmp_path / "g").folder
    assert main(["serve", str(folder), "--port", "65536"]) == 2
    assert "--port must be from 0 to 65535 but got 65536." in capsys.readouterr().err
    with ReportServer(folder) as server:
        assert main(["serve", str(folder), "--port", str(server.server_address[1])]) == 2
    assert "Address already in use; --port 0 picks a free port." in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(tmp_path: Path, number: int) -> None:
    folder = vision_gallery(tmp_path).folder
    command = [sys.executable, "-m", "nni_petridish", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "is at http://127.0.0.1:" in line
        os.kill(process.pid, number)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert output.strip() == "The server has ended."
    assert errors == ""
