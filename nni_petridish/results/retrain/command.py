"""The command ``nni-petridish train``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish._support.reading import parse_yaml
from nni_petridish.core.genotype import MERGES
from nni_petridish.errors import ConfigError, Interrupted
from nni_petridish.results.selection_options import add_selection, selected
from nni_petridish.running.display import (
    Display,
    Headline,
    Lines,
    add_display_options,
    open_display,
)
from nni_petridish.running.process import INTERRUPTED, StopOnInterrupt

if TYPE_CHECKING:
    from nni_petridish.results.retrain.repetitions import Result
    from nni_petridish.tasks.distributed import World
    from nni_petridish.tasks.retraining import Retraining


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``train``."""
    parser.set_defaults(command=_train)
    parser.add_argument("gallery", type=Path, metavar="GALLERY", help="a gallery's folder")
    add_selection(parser)
    _add_options(parser)
    add_display_options(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a YAML file such as configs/imagenet_transfer.yml; the options below go before it",
    )
    parser.add_argument("--cells", type=int, metavar="N", help="cells per stage (default: 6)")
    parser.add_argument("--filters", type=int, metavar="F", help="of the first stage (default: 32)")
    parser.add_argument(
        "--fit", metavar="N", help="as many filters as N multiply-adds allow, such as 600M"
    )
    parser.add_argument(
        "--merge", choices=MERGES, help="op_merge of the weak learners (default: the search's)"
    )
    parser.add_argument(
        "--embedding", type=int, metavar="E", help="width of a language model (default: as found)"
    )
    parser.add_argument(
        "--width", type=int, metavar="W", help="of the cells for a table (default: as found)"
    )
    parser.add_argument("--epochs", type=int, help="(default: 600; for text 4500, pydoc 30)")
    parser.add_argument("--repetitions", type=int, help="(default: 1)")
    parser.add_argument("--seed", type=int, help="of the first repetition (default: 0)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change the recipe, such as lr=0.025; may be given several times",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="(default: a folder in GALLERY/final)"
    )


def _train(options: argparse.Namespace) -> int:
    from nni_petridish.gallery.select import open_search
    from nni_petridish.results.retrain.preparation import prepare_retraining
    from nni_petridish.results.retrain.repetitions import summary
    from nni_petridish.tasks.distributed import joined_world

    gallery, search = open_search(options.gallery)
    id = selected(search, options).id
    wanted = _retraining_options(options, gallery.space)
    repetitions = wanted.pop("repetitions", 1)
    training = prepare_retraining(options.gallery, id, **wanted)
    folder = options.out or options.gallery / "final" / training.name
    with joined_world(training.recipe.device) as world:
        try:
            with _display(options, training, folder, world) as display:
                results = _repeat(training, folder, repetitions, display, world)
        except Interrupted:
            command = shlex.join(["nni-petridish", *options.line])
            print(
                f"Stopped: the training goes on from its last epoch with\n  {command}",
                file=sys.stderr,
            )
            return INTERRUPTED
        if world.is_main:
            print(summary(results, training.measure))
    return 0


def _display(
    options: argparse.Namespace, training: Retraining[Any, Any], folder: Path, world: World
) -> Display:
    """Return the display of the first process; the others show nothing."""
    if not world.is_main:
        return Lines(is_quiet=True)
    return open_display(options, f"training {training.model}", folder, ["run-*"])


def _repeat(
    training: Retraining[Any, Any],
    folder: Path,
    repetitions: int,
    display: Display,
    world: World,
) -> list[Result]:
    """Train the repetitions and show how far they are."""
    from nni_petridish.results.retrain.repetitions import (
        count_finished,
        describe_result,
        run_repetitions,
    )
    from nni_petridish.tasks.task import Callbacks

    multiply_adds, parameters = training.size()
    together = f", {world.size} processes" if world.size > 1 else ""
    display.say(
        f"{training.title}: {parameters:,} parameters, {multiply_adds:,} multiply-adds"
        f"{together}; in {folder}"
    )
    # Several processes have to stop at the same step: the launcher of torchrun ends them.
    stop = StopOnInterrupt(display.stopping).asked if world.size == 1 else lambda: False

    def show() -> None:
        done = count_finished(folder, repetitions)
        display.show(Headline(done, repetitions, "repetitions", ""))

    def tell(result: Result) -> None:
        display.say(describe_result(result, training.measure))
        show()

    show()
    callbacks = Callbacks(should_stop=stop)
    return run_repetitions(training, folder, repetitions, callbacks=callbacks, on_result=tell)


_RETRAINING_FLAGS = {
    "cells": "cells_per_stage",
    "filters": "filters",
    "fit": "max_multiply_adds",
    "merge": "merge",
    "embedding": "embedding",
    "width": "width",
    "epochs": "epochs",
    "seed": "seed",
}
"""The option of a retraining that each flag of ``train`` gives."""


def _retraining_options(options: argparse.Namespace, space: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `prepare_retraining`, and ``repetitions``; flags go before a file."""
    from nni_petridish.gallery.select import parse_count
    from nni_petridish.results.retrain.file import read_retraining_file
    from nni_petridish.results.retrain.preparation import check_options

    given = {flag: getattr(options, flag) for flag in _RETRAINING_FLAGS}
    given = {flag: value for flag, value in given.items() if value is not None}
    check_options(space, {_RETRAINING_FLAGS[flag]: f"--{flag}" for flag in given})
    wanted: dict[str, Any] = {}
    if options.config is not None:
        check_options(space, {"data": "--config"})
        wanted = read_retraining_file(options.config)
    if "fit" in given:
        given["fit"] = parse_count(given["fit"])
        if "filters" not in given:
            wanted.pop("filters", None)
    elif "filters" in given:
        wanted.pop("max_multiply_adds", None)
    wanted |= {_RETRAINING_FLAGS[flag]: value for flag, value in given.items()}
    if options.repetitions is not None:
        wanted["repetitions"] = options.repetitions
    wanted["changes"] = {**wanted.get("changes", {}), **dict(map(_read_change, options.set))}
    return wanted


def _read_change(text: str) -> tuple[str, Any]:
    import yaml

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set must be KEY=VALUE but got {text!r}.")
    try:
        return key, parse_yaml(value)
    except yaml.YAMLError:
        raise ConfigError(
            f"--set must be KEY=VALUE, the value in YAML, but got {text!r}."
        ) from None
