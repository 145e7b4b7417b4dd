"""The remote training service, over an ssh server of the test's own on this machine."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from nni_petridish.__main__ import main
from nni_petridish.nni_adapter.nnictl import free_port
from nni_petridish.running.config import SearchConfig
from tests.support import chaos

SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """Start an ssh server that listens on the loopback address; yield its port and a key."""
    if SSHD is None:
        pytest.skip("needs openssh-server (apt-get install openssh-server)")
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "rsa", "-m", "PEM", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    port = free_port()
    (folder / "config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder / 'host'}\nStrictModes no\n"
        f"AuthorizedKeysFile {folder / 'user.pub'}\nPidFile {folder / 'pid'}\n"
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\n"
        "Subsystem sftp internal-sftp\nPubkeyAcceptedAlgorithms +ssh-rsa\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd drops its privileges
    log = (folder / "log").open("w")
    process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "config")], stderr=log)
    try:
        time.sleep(1)
        assert process.poll() is None, (folder / "log").read_text()
        yield port, folder / "user"
    finally:
        process.terminate()
        process.wait()
        log.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_over_ssh(tmp_path: Path, server: tuple[int, Path]) -> None:
    port, key = server
    path = chaos.write_config(tmp_path / "search", models=4)
    document = yaml.safe_load(path.read_text())
    document["nniManagerIp"] = "127.0.0.1"
    document["trialCommand"] = f"{sys.executable} -m nni_petridish.trial"
    (tmp_path / "search" / "code").mkdir()
    (tmp_path / "search" / "code" / "README").touch()  # NNI refuses to copy an empty folder
    document["trialCodeDirectory"] = "code"
    machine = {
        "host": "127.0.0.1",
        "port": port,
        "user": getpass.getuser(),
        "sshKeyFile": str(key),
        "pythonPath": str(Path(sys.executable).parent),
    }
    document["trainingService"] = {"platform": "remote", "machineList": [machine]}
    path.write_text(yaml.safe_dump(document))
    assert main(["run", str(path)]) == 0
    chaos.check_gallery(SearchConfig.from_yaml(path), 4)
