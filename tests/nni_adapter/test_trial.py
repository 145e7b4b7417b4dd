from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from nni_petridish.gallery.gallery import Gallery
from nni_petridish.nni_adapter.trial import parameters_of
from nni_petridish.running.config import SearchConfig
from nni_petridish.search.events import ask_event
from nni_petridish.search.records import Growth
from tests.support.chaos import ROOT
from tests.support.faults import tiny_config

DEAF_AT_THE_END = """
import json, sys
from nni.runtime import trial_command_channel
from nni_petridish import trial
from tests.support.small_manager import PipeChannel

class Channel(PipeChannel):
    def send_metric(self, type, *arguments, **named):
        if type == "FINAL":
            raise BrokenPipeError("Broken pipe")

channel = Channel(0, json.loads(sys.argv[1]), 1)
trial_command_channel.set_default_trial_command_channel(channel)
trial.run()
"""


def test_a_manager_that_dies_before_the_last_report_loses_no_model(tmp_path: Path) -> None:
    gallery = SearchConfig.from_yaml(tiny_config(tmp_path)).open_gallery()
    growth = Growth("g00000", None, seed=0, l1=0.0, i_max=2)
    gallery.journal.append(ask_event(growth, 1.0))
    text = json.dumps(parameters_of(growth, str(gallery.folder), 2))
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DEAF_AT_THE_END, text],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.splitlines()[-1] == (
        "nni_petridish: g00000 is saved; the NNI manager does not answer (Broken pipe)."
    )
    assert "Traceback" not in ended.stderr
    assert Gallery(gallery.folder).model_ids() == ["g00000"]
