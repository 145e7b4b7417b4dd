import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nni_petridish.nni_adapter.warm import link
from nni_petridish.nni_adapter.warm.server import NEEDED, Server

SERVER = """
import os, signal, sys, time
from pathlib import Path
from nni_petridish.nni_adapter.warm.server import serve

def run():
    import json
    facts = {
        "pid": os.getpid(),
        "folder": os.getcwd(),
        "trial": os.environ.get("NNI_TRIAL_JOB_ID"),
        "path": sys.path[0],
        "imported": "decimal" in sys.modules,
    }
    print(json.dumps(facts), flush=True)
    print("a warning", file=sys.stderr, flush=True)
    wish = Path(os.environ["NNI_SYS_DIR"], "wish").read_text()
    if wish == "wait":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
        time.sleep(60)
    if wish == "fail":
        raise RuntimeError("no luck")
    return int(wish)

serve(Path(sys.argv[1]), 0, run, ["decimal", "no_such_module"])
"""
TRIAL = """
import sys
from nni_petridish.nni_adapter.warm.client import run_warm
code = run_warm()
sys.exit(99 if code is None else code)
"""
COLD = 99
SECONDS = 30.0


@pytest.fixture
def experiment(tmp_path):
    """Return the folder of an experiment with a server."""
    server = start_server(tmp_path)
    yield tmp_path
    server.stdin.close()
    assert server.wait(SECONDS) == 0
    assert not (tmp_path / link.FILE).exists()


def wait_for(condition):
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def same_environment():
    """Return the environment without what pytest changes between a fixture and its test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def start_server(experiment):
    script = experiment / "server.py"
    script.write_text(SERVER)
    command = [sys.executable, str(script), str(experiment / link.FILE)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, env=same_environment())
    wait_for((experiment / link.FILE).exists)
    return server


def start(experiment, wish, **environment):
    """Start a trial as NNI does: in a folder and with variables of its own."""
    folder = experiment / "trials" / f"trial{len(list(experiment.glob('trials/*')))}"
    folder.mkdir(parents=True)
    (folder / "wish").write_text(str(wish))
    own = {
        "NNI_SYS_DIR": str(folder),
        "NNI_EXP_ID": experiment.name,
        "NNI_TRIAL_JOB_ID": folder.name,
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, "-c", TRIAL],
        cwd=folder,
        env=same_environment() | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def facts_of(trial):
    """Return what the forked process of a trial says of itself."""
    return json.loads(trial.stdout.readline())


def test_a_warm_trial_has_its_own_folder_environment_streams_and_exit_code(experiment):
    for code in (0, 1, 143):
        trial = start(experiment, code)
        output, errors = trial.communicate(timeout=SECONDS)
        facts = json.loads(output)
        assert trial.returncode == code
        assert errors == "a warning\n"
        assert facts["trial"] == Path(facts["folder"]).name
        assert facts["path"] == ""
        assert facts["imported"]
        assert facts["pid"] != trial.pid


def test_two_warm_trials_run_at_the_same_time(experiment):
    trials = [start(experiment, "wait") for _ in range(2)]
    first, second = (facts_of(trial)["pid"] for trial in trials)
    assert first != second
    assert psutil.pid_exists(first)
    assert psutil.pid_exists(second)
    for trial in trials:
        trial.kill()
        trial.communicate()


def test_sigterm_reaches_the_process_that_works(experiment):
    trial = start(experiment, "wait")
    pid = facts_of(trial)["pid"]
    wait_for(lambda: handles_sigterm(pid))
    trial.terminate()
    trial.communicate(timeout=SECONDS)
    assert trial.returncode == 143
    wait_for(lambda: not psutil.pid_exists(pid))


def test_sigterm_is_handed_on_even_if_it_came_before_the_process(experiment):
    module = """
import time
from pathlib import Path

folder = Path(__file__).parent
(folder / "importing").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
"""
    (experiment / "no_such_module.py").write_text(module)  # there is one now, and it takes time
    trial = start(experiment, "wait")
    wait_for((experiment / "importing").exists)
    trial.terminate()
    (experiment / "go").touch()
    trial.communicate(timeout=SECONDS)
    assert trial.returncode in (128 + signal.SIGKILL, 143)  # before or after it has its handler


def handles_sigterm(pid):
    (caught,) = [
        line.split()[1]
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("SigCgt:")
    ]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def test_the_process_of_a_killed_trial_ends(experiment):
    trial = start(experiment, "wait")
    pid = facts_of(trial)["pid"]
    trial.kill()
    trial.communicate()
    wait_for(lambda: not psutil.pid_exists(pid))


def test_a_trial_ends_as_killed_if_its_process_is(experiment):
    trial = start(experiment, "wait")
    os.kill(facts_of(trial)["pid"], signal.SIGKILL)
    trial.communicate(timeout=SECONDS)
    assert trial.returncode == 137


def test_a_trial_that_raises_fails_with_its_traceback(experiment):
    trial = start(experiment, "fail")
    _, errors = trial.communicate(timeout=SECONDS)
    assert trial.returncode == 1
    assert "RuntimeError: no luck" in errors


def test_a_trial_outlives_the_server(tmp_path):
    server = start_server(tmp_path)
    trial = start(tmp_path, "wait")
    pid = facts_of(trial)["pid"]
    server.kill()
    server.communicate()
    with pytest.raises(subprocess.TimeoutExpired):
        trial.wait(0.5)
    assert psutil.pid_exists(pid)
    late = start(tmp_path, 0)  # the socket is there, but nobody listens
    late.communicate(timeout=SECONDS)
    assert late.returncode == COLD
    trial.kill()
    trial.communicate()


@pytest.mark.parametrize(
    "environment", [{"OMP_NUM_THREADS": "7"}, {"NNI_PETRIDISH_NATIVE": "0"}, {link.SWITCH: "0"}]
)
def test_a_trial_with_another_environment_is_cold(experiment, environment):
    trial = start(experiment, 0, **environment)
    output, _ = trial.communicate(timeout=SECONDS)
    assert trial.returncode == COLD
    assert output == ""


def test_what_nni_sets_for_each_trial_makes_none_cold(experiment):
    trial = start(experiment, 0, NNI_TRIAL_SEQ_ID="3", CUDA_VISIBLE_DEVICES="1")
    trial.communicate(timeout=SECONDS)
    assert trial.returncode == 0


def test_a_trial_without_a_server_is_cold(tmp_path):
    trial = start(tmp_path, 0)
    trial.communicate(timeout=SECONDS)
    assert trial.returncode == COLD


@pytest.mark.parametrize(
    "message", [b"", b"\0", b"\0\0\0\2[]", b"\xff\xff\xff\xff", b"\0\0\0\2{}", b"\0\0\0\1{"]
)
def test_the_server_survives_whatever_it_is_sent(experiment, message):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(experiment / link.FILE))
        if message:
            socket.send_fds(connection, [message], [0, 1, 2])
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    trial = start(experiment, 0)
    trial.communicate(timeout=SECONDS)
    assert trial.returncode == 0


def test_only_the_own_user_may_ask(experiment, monkeypatch):
    assert (experiment / link.FILE).stat().st_mode & 0o077 == 0
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert link.is_own_user(ours)
        monkeypatch.setattr(os, "getuid", lambda: 4711)
        assert not link.is_own_user(ours)


def test_a_path_that_is_too_long_for_a_socket_has_no_server(tmp_path):
    deep = tmp_path / ("a" * 120)
    assert link.address(deep) is None
    Server(deep).close()


def test_all_that_is_imported_for_trials_exists():
    """Nothing is left out in silence because it was renamed."""
    for name in NEEDED:
        __import__(name)
