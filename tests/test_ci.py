"""The container and the workflow, as far as they can be checked without running them."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def test_the_workflow_tests_every_python_that_is_declared() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    job = workflow["jobs"]["test"]
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    declared = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    assert job["strategy"]["matrix"]["python"] == declared
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]


def test_the_container_copies_files_that_exist_and_runs_targets_of_make() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for line in re.findall(r"^COPY --chown=\w+ (.*)$", text, re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^(?:RUN|CMD).*make[\", ]+([.\w/]+)", text, re.MULTILINE):
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target
