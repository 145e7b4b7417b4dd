"""The guard of NNI's manager: who is answered, and what its messages may say."""

from __future__ import annotations

import base64
import http.client
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nni_node
import pytest

from nni_petridish.nni_adapter.compat.guard import TOKEN_HEADER, guarded
from nni_petridish.nni_adapter.compat.plain_json import load
from nni_petridish.nni_adapter.nnictl import Experiment, free_port
from nni_petridish.running.config import SearchConfig
from tests.nni_adapter.test_nnictl import wait_for
from tests.support import chaos

TOKEN = "right-token"
#: Answers with what the guard lets through; starts a child, as the manager starts a trial.
SERVER = """
const http = require("http"), { spawn } = require("child_process");
const server = http.createServer((q, a) => a.end(JSON.stringify([q.method, q.url])));
server.on("upgrade", (q, s) => s.end("HTTP/1.1 101 Switching Protocols\\r\\n\\r\\n" + q.url));
server.listen(0, () => {
  const env = { ...process.env, NNI_TRIAL_COMMAND_CHANNEL: "http://localhost/env/x" };
  const child = spawn(process.execPath, ["-p",
    "JSON.stringify([process.env.NNI_TRIAL_COMMAND_CHANNEL, process.env.NNI_PETRIDISH_TOKEN])"],
    { env: { ...env, NODE_OPTIONS: "" } });
  child.stdout.on("data", (text) => console.log(JSON.stringify(server.address()) + "\\n" + text));
});
"""
PAGE = {"Accept": "text/html"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, list[Any]]]:
    """A plain server of node under the guard; yields its port and what its child was given."""
    script = tmp_path_factory.mktemp("node") / "server.js"
    script.write_text(SERVER)
    node = Path(nni_node.__path__[0]) / "node"
    process = subprocess.Popen(
        [node, script], env=guarded(os.environ, TOKEN), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address, child = (json.loads(process.stdout.readline()) for _ in range(2))
        assert address["address"] == "127.0.0.1"
        yield address["port"], child
    finally:
        process.kill()
        process.wait()


def ask(
    port: int, method: str = "GET", path: str = "/", **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=named)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.getheaders())


WRITES = [
    ("POST", "/api/v1/nni/experiment/import-data"),
    ("POST", "/api/v1/nni/trial-jobs"),
    ("PUT", "/api/v1/nni/experiment"),
    ("DELETE", "/api/v1/nni/experiment"),
    ("PUT", "/env/x/trial"),
    ("OPTIONS", "/"),
]
READS = [
    ("GET", "/api/v1/nni/experiment"),
    ("GET", "/api/v1/nni/trial-jobs"),
    ("GET", "/logs/dispatcher.log"),
    ("GET", "/"),
    ("HEAD", "/api/v1/nni/check-status"),
    ("POST", "/api/v1/nni/check-status"),
    ("GET", "/api/v1/nni/check-status/../experiment"),
    ("GET", "/x?/api/v1/nni/check-status"),
    ("GET", "/logs/api/v1/nni/check-status"),
    ("GET", "/api/v1/nni/trial-file/x/manifest.json"),
]


@pytest.mark.parametrize(("method", "path"), [*WRITES, *READS])
def test_without_the_token_nothing_is_answered(
    server: tuple[int, Any], method: str, path: str
) -> None:
    port, _ = server
    for headers in ({}, {TOKEN_HEADER: "wrong"}, {"Cookie": f"nni_petridish_{port}=wrong"}):
        status, text, _ = ask(port, method, path, **headers)
        assert status == 403
        assert TOKEN not in text
    with_token = f"{path}{'&' if '?' in path else '?'}token=wrong"
    assert ask(port, method, with_token)[0] == 403
    status, text, _ = ask(port, method, path, **{TOKEN_HEADER: TOKEN})
    assert status == 200
    assert not text or json.loads(text) == [method, path]


def test_the_status_can_be_read_without_the_token(server: tuple[int, Any]) -> None:
    assert ask(server[0], path="/api/v1/nni/check-status")[0] == 200
    assert ask(server[0], path="/manifest.json")[0] == 200  # asked for without cookies


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Host": "localhost@evil.example"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "https://localhost"},
    ],
)
def test_foreign_hosts_and_origins_are_refused_even_with_the_token(
    server: tuple[int, Any], headers: dict[str, str]
) -> None:
    port, _ = server
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    for path in ("/api/v1/nni/check-status", "/api/v1/nni/experiment", "/tuner"):
        assert ask(port, path=path, **headers, **{TOKEN_HEADER: TOKEN})[0] == 403
        assert ask(port, path=path, **headers, **{TOKEN_HEADER: TOKEN}, **upgrade)[0] == 403


def test_a_websocket_needs_the_token_which_the_manager_does_not_see(
    server: tuple[int, Any],
) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    assert ask(server[0], path="/tuner", **upgrade)[0] == 403
    assert ask(server[0], path="/tuner?token=wrong", **upgrade)[0] == 403
    assert ask(server[0], path=f"/tuner?token={TOKEN}", **upgrade)[0] == 101


def test_a_browser_gets_a_cookie_and_an_address_without_the_token(
    server: tuple[int, Any],
) -> None:
    port, _ = server
    status, _, headers = ask(port, path=f"//evil.example/x?a=1&token={TOKEN}", **PAGE)
    assert status == 303
    assert headers["Location"] == "/evil.example/x?a=1"
    assert TOKEN not in headers["Location"]
    cookie, *rest = headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Lax"} < set(rest)
    origin = {"Origin": f"http://127.0.0.1:{port}"}
    status, text, _ = ask(port, "PUT", "/x?b=2", Cookie=f"other=1; {cookie}", **origin)
    assert (status, json.loads(text)) == (200, ["PUT", "/x?b=2"])
    assert ask(port, "PUT", "/x", Cookie=cookie, Origin="http://evil.example")[0] == 403


def test_a_program_with_the_token_in_its_address_is_answered_at_once(
    server: tuple[int, Any],
) -> None:
    port, child = server
    assert child == [f"http://localhost/env/x?token={TOKEN}", None]
    status, text, _ = ask(port, path=f"/env/x?token={TOKEN}", Accept="*/*")
    assert (status, json.loads(text)) == (200, ["GET", "/env/x"])


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def hostile_messages() -> list[str]:
    pickled = base64.b64encode(pickle.dumps(Harmful())).decode()
    return [
        json.dumps({"__nni_type__": f"bytes:{pickled}"}),
        json.dumps({"__nni_obj__": f"bytes:{pickled}"}),
        json.dumps({"__symbol__": "path:os.mkdir", "__kwargs__": {"path": "harm"}}),
        json.dumps({"__instance_type__": ["os", "mkdir"], "attributes": {}}),
        json.dumps({"__enum__": {"__enum_instance_type__": ["os", "mkdir"], "name": "x"}}),
    ]


@pytest.mark.parametrize("message", hostile_messages())
def test_a_message_is_plain_data_in_tuner_and_trial(message: str, tmp_path: Path) -> None:
    assert load(message) == json.loads(message)
    code = (
        "import sys, nni\n"
        "from nni_petridish.nni_adapter.compat.plain_json import read_plain_json\n"
        "read_plain_json()\n"
        "import nni.runtime.msg_dispatcher as a, nni.runtime.msg_dispatcher_base as b\n"
        "import nni.runtime.trial_command_channel.local_legacy as c, nni.recoverable as d\n"
        "import nni.runtime.command_channel.websocket.connection as e\n"
        "for f in (nni.load, a.load, b.load, c.load, d.nni.load, e.nni.load):\n"
        "    assert isinstance(f(sys.argv[1]), dict)\n"
    )
    subprocess.run([sys.executable, "-c", code, message], cwd=tmp_path, check=True)
    assert list(tmp_path.iterdir()) == []


def test_the_harm_is_real_without_the_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nni

    monkeypatch.chdir(tmp_path)
    for message in hostile_messages():
        try:
            nni.load(message)
        except Exception:
            continue
    assert (tmp_path / "harm").is_dir()


def test_a_real_manager_is_closed_and_its_search_goes_on(tmp_path: Path) -> None:
    path = chaos.write_config(tmp_path, 2, concurrency=1)
    with Experiment(path, free_port()) as experiment:
        port = experiment.port
        assert ask(port, "DELETE", "/api/v1/nni/experiment")[0] == 403
        assert ask(port, "GET", "/api/v1/nni/experiment")[0] == 403
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
        assert ask(port, "GET", "/tuner", **upgrade)[0] == 403
        token = {TOKEN_HEADER: experiment.token}
        config = SearchConfig.from_yaml(path)
        wait_for(lambda: chaos.finished_models(config), 100)
        body = json.dumps([{"parameter": {}, "value": hostile_messages()[0]}])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        headers = {**token, "Content-Type": "application/json"}
        connection.request("POST", "/api/v1/nni/experiment/import-data", body, headers)
        assert connection.getresponse().status == 200
        status, text, _ = ask(port, path="/", **token)
        assert (status, "<title>Neural Network Intelligence" in text) == (200, True)
        wait_for(lambda: chaos.is_done(experiment), 120)
    assert not list(tmp_path.rglob("harm"))
    log = Path.home() / "nni-experiments" / experiment.id / "log"
    assert not any(experiment.token.encode() in file.read_bytes() for file in log.glob("*.log"))
