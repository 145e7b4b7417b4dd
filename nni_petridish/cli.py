"""The command ``nni-petridish``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nni_petridish.errors import PetridishError
from nni_petridish.running.process import (
    StopOnInterrupt,
    interrupt_on_term,
    keep_freed_memory,
    set_threads,
)

if TYPE_CHECKING:
    from nni_petridish.running.config import SearchConfig
    from nni_petridish.search.search import Search


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code. What the user can mend is said in one line."""
    options = _parser().parse_args(arguments)
    set_threads(1)  # before any command imports torch
    keep_freed_memory()
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        result: int = options.command(options)
    except PetridishError as error:
        if os.environ.get("RANK", "0") == "0":  # of torchrun's processes, the first one speaks
            print(f"nni-petridish: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return result


def _parser() -> argparse.ArgumentParser:
    from nni_petridish import __version__

    parser = argparse.ArgumentParser(
        prog="nni-petridish", description="Grow neural networks from small to large."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run", help="run a search through nnictl: several workers, NNI's web UI"
    )
    run.add_argument("--port", type=int, help="of NNI's web UI (default: a free one)")
    run.set_defaults(command=_run)

    search = commands.add_parser(
        "search", help="run the same search in this process, one growth after the other"
    )
    search.set_defaults(command=_search)

    check = commands.add_parser(
        "check", help="say whether a configuration is valid, and what a growth will take"
    )
    how = check.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="without time and memory")
    how.add_argument(
        "--estimate",
        action="store_true",
        help="measure time and memory anew instead of recalling what was measured here",
    )
    check.set_defaults(command=_check)

    for command in (run, search, check):
        command.add_argument(
            "config", type=Path, metavar="CONFIG", help="a YAML file, see configs/"
        )
    for command in (run, search):
        command.add_argument(
            "--resume", action="store_true", help="go on with the search that the gallery holds"
        )

    from nni_petridish.baselines.feature_selection.cli import add_analogy_command
    from nni_petridish.results.commands import add_model_commands
    from nni_petridish.studies.ablations.cli import add_ablate_command
    from nni_petridish.studies.tuning.cli import add_tune_command

    add_model_commands(commands)
    add_analogy_command(commands)
    add_tune_command(commands)
    add_ablate_command(commands)
    return parser


def _run(options: argparse.Namespace) -> int:
    from nni_petridish.nni_adapter.nnictl import Experiment, free_port, run_experiment
    from nni_petridish.search.records import Done

    config = _read_config(options.config)
    config.check_gallery()
    before = _refuse_unless_resuming(config, options.resume)
    if before is not None and isinstance(before.ask(before.elapsed), Done):
        # NNI would wait for ever for the first trial of a search that has none left.
        return _finish(before, config.gallery)
    port = options.port or free_port()
    interrupt_on_term()
    print(f"Starting NNI with {config.concurrency} workers; Ctrl-C stops and keeps what is found.")

    def started(experiment: Experiment) -> None:
        print(f"Web UI: http://127.0.0.1:{port}  (experiment {experiment.id})", flush=True)

    with _Progress(config) as progress:
        search = run_experiment(
            options.config, config, port, on_start=started, on_change=progress.show
        )
    return _finish(search, config.gallery)


def _search(options: argparse.Namespace) -> int:
    config = _read_config(options.config)
    config.check_gallery()
    _refuse_unless_resuming(config, options.resume)
    from nni_petridish.running.growth import Watcher
    from nni_petridish.running.runner import run_search

    stopping = StopOnInterrupt()
    with _Progress(config) as progress:
        watcher = Watcher(stop=stopping.asked, progress=True)
        search = run_search(config, resume=True, watcher=watcher, on_change=progress.show)
    return _finish(search, config.gallery)


def _check(options: argparse.Namespace) -> int:
    from nni_petridish.results.retrain.file import describe_final_file, is_final_file

    if is_final_file(options.config):
        print(describe_final_file(options.config))
        return 0
    config = _read_config(options.config)
    config.check_gallery()
    print(f"{options.config} is valid; the gallery will be {config.gallery}.")
    from nni_petridish.running.cost import describe_cost, describe_size

    print(describe_size(config), flush=True)
    if not options.quick:
        print(describe_cost(config, anew=options.estimate))
    return 0


def _read_config(path: Path) -> SearchConfig:
    """Read and check a configuration, the sections that a search passes over included."""
    from nni_petridish.running.config import SearchConfig, read_experiment
    from nni_petridish.studies.ablations.section import check_ablations
    from nni_petridish.studies.tuning.section import check_tuning

    search_space, arguments, base, experiment = read_experiment(path)
    config = SearchConfig.from_parts(search_space, arguments, base, experiment)
    check_tuning(arguments.get("tuning", {}))
    if "ablations" in arguments:
        check_ablations(arguments["ablations"])
    return config


def _refuse_unless_resuming(config: SearchConfig, resume: bool) -> Search | None:
    """Return the search that the gallery holds, if any."""
    from nni_petridish.gallery.gallery import Gallery
    from nni_petridish.running.coordinator import refuse_unless_resuming
    from nni_petridish.search.search import Search

    if not (config.gallery / "gallery.json").exists():
        return None
    search = Search.replay(config.settings, Gallery(config.gallery).journal.read_all())
    refuse_unless_resuming(config.gallery, search, resume)
    return search


def _finish(search: Search, gallery: Path) -> int:
    """Print the hull and write the report; 1 if there is no model."""
    from nni_petridish.results.report import hull_table, write_report

    print(hull_table(search))
    for id, reason in search.dropped().items():
        print(f"{id} was given up: {reason}")
    print(f"Gallery: {gallery}")
    if not search.models():
        return 1
    print(f"Report:  {write_report(search, gallery)}")
    return 0


class _Progress:
    """A bar over the growths of a search, with the best error so far; lines where no bar fits."""

    def __init__(self, config: SearchConfig) -> None:
        from tqdm import tqdm

        self._total = config.settings.limits.max_models
        self._bar = tqdm(total=self._total, desc="models", unit="model", disable=None)
        self._shown = -1

    def show(self, search: Search) -> None:
        models, best = len(search.models()), search.best()
        if models == self._shown:
            return
        if self._shown < 0:
            self._bar.initial = models
        self._shown = models
        text = f"best error {best.error:.4f}" if best else "training the seed"
        if self._bar.disable:
            of = f" of at most {self._total}" if self._total else ""
            print(f"{models}{of} models, {text}", flush=True)
        else:
            self._bar.n = models
            self._bar.set_postfix_str(text)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


if __name__ == "__main__":
    sys.exit(main())
