"""``nni-petridish run``: a search through nnictl."""

from __future__ import annotations

import argparse
import importlib
import threading
from typing import TYPE_CHECKING

from nni_petridish.errors import needing
from nni_petridish.registry import measure_of
from nni_petridish.running.commands import (
    Finish,
    ReadConfig,
    add_searching_options,
    config_to_search,
    open_search_display,
    start_of,
    tell_end,
    tell_stopped,
)
from nni_petridish.running.display import show_search
from nni_petridish.running.process import interrupt_on_term

if TYPE_CHECKING:
    from nni_petridish.nni_adapter.nnictl import Experiment


def add_run_options(
    parser: argparse.ArgumentParser, read_config: ReadConfig, finish: Finish
) -> None:
    """Add the options of ``run``; the parameters are those of `add_search_options`."""
    add_searching_options(parser)
    parser.add_argument("--port", type=int, help="port of NNI's web UI (default: a free one)")
    parser.set_defaults(command=lambda options: _run(options, read_config, finish))


def _run(options: argparse.Namespace, read_config: ReadConfig, finish: Finish) -> int:
    from nni_petridish.gallery.gallery import Gallery
    from nni_petridish.nni_adapter.nnictl import free_port, is_local, run_experiment
    from nni_petridish.running.coordinator import Coordinator

    with needing("nni", "nni-petridish run"):
        importlib.import_module("nni")
    config, before = config_to_search(options, read_config)
    began = start_of(before)
    is_done = before is not None and before.why_ended(before.elapsed) is not None
    if before is not None and is_done and not before.refused():
        # NNI would wait forever for the first trial of a finished search.
        with Coordinator(Gallery(config.gallery), config.settings):
            pass  # removes what a kill after the last model left behind
        tell_end(before, began)
        return finish(before, config.gallery)
    if before is None and is_local(options.config):
        config.check_task(config.load_task)  # before a gallery is made
    port = options.port or free_port()
    interrupt_on_term()
    stopped = threading.Event()
    with open_search_display(options, config) as display:
        workers = f"{config.concurrency} worker{'s' if config.concurrency > 1 else ''}"
        display.say(f"Starting NNI with {workers}; Ctrl-C stops and keeps what is found.")

        def started(experiment: Experiment) -> None:
            display.say(f"Web UI: {experiment.url}  (experiment {experiment.id})")

        def stop() -> None:
            stopped.set()
            display.stopping()

        search = run_experiment(
            options.config,
            config,
            port,
            on_start=started,
            on_change=show_search(display, measure_of(config.space)),
            on_stop=stop,
        )
    if not stopped.is_set():
        tell_end(search, began)
    code = finish(search, config.gallery)
    return tell_stopped(search, options) if stopped.is_set() else code
