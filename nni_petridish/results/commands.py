"""``nni-petridish check``, ``show``, ``export`` and ``train``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish.core.genotype import MERGES
from nni_petridish.errors import ConfigError, Interrupted
from nni_petridish.reading import parse_yaml
from nni_petridish.registry import Measure, measure_of
from nni_petridish.results.selection_options import add_selection, is_selected, selected
from nni_petridish.running.commands import ReadConfig, add_config
from nni_petridish.running.process import INTERRUPTED, StopOnInterrupt

if TYPE_CHECKING:
    from nni_petridish.gallery.saved_model import SavedModel
    from nni_petridish.search.search import Search


def add_check_command(subparsers: Any, read_config: ReadConfig) -> None:
    """Add ``check``.

    Parameters
    ----------
    subparsers
        The result of ``ArgumentParser.add_subparsers``.
    read_config
        Reads a configuration file with all of its sections.
    """
    check = subparsers.add_parser(
        "check", help="check a configuration, and estimate time and memory of a growth"
    )
    how = check.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="without time and memory")
    how.add_argument(
        "--estimate",
        action="store_true",
        help="measure time and memory anew instead of recalling what was measured here",
    )
    add_config(check)
    check.set_defaults(command=lambda options: _check(options, read_config))


def add_model_commands(subparsers: Any) -> None:
    """Add ``show``, ``export`` and ``train`` to the result of ``add_subparsers``."""
    show = subparsers.add_parser("show", help="show the models of a search")
    show.set_defaults(command=_show)
    export = subparsers.add_parser("export", help="write a model to a file of its own")
    export.set_defaults(command=_export)
    train = subparsers.add_parser(
        "train", help="train a model from scratch on all training data, as large as you like"
    )
    train.set_defaults(command=_train)
    for command in (show, export, train):
        also = ", or a file with one model" if command is export else ""
        help = f"a gallery's folder{also}"
        command.add_argument("gallery", type=Path, metavar="GALLERY", help=help)
        add_selection(command)
    _add_export_options(export)
    _add_train_options(train)


def _add_export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        choices=("state_dict", "onnx", "torch_export"),
        default="state_dict",
        help="state_dict: safetensors, read by nni_petridish.load_model; the others need neither"
        " NNI nor this package (default: state_dict)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    inputs = parser.add_mutually_exclusive_group()
    inputs.add_argument(
        "--pixels",
        action="store_true",
        default=None,
        help="onnx, torch_export: take raw pixels and normalize inside (default for images)",
    )
    inputs.add_argument(
        "--normalized",
        dest="pixels",
        action="store_false",
        help="onnx, torch_export: take images that are normalized already",
    )


def _add_train_options(parser: argparse.ArgumentParser) -> None:
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


def finish_search(search: Search, gallery: Path) -> int:
    """Print the hull of a search and write its report.

    Returns
    -------
    int
        1 if there is no model, or if the search gave up because growth after growth failed.
    """
    from nni_petridish.results.report import write_report

    _print_hull(search, _measure_of_gallery(gallery))
    print(f"Gallery: {gallery}")
    if not search.models():
        return 1
    print(f"Report:  {write_report(search, gallery)}")
    gave_up = search.gave_up()
    if gave_up:
        print(
            f"The search gave up: {gave_up}. Once that is mended, --retry-failed goes on.",
            file=sys.stderr,
        )
    return 1 if gave_up else 0


def _measure_of_gallery(folder: Path) -> Measure:
    """Return the measure of a search; the error if it has no gallery yet."""
    from nni_petridish.gallery.gallery import Gallery

    exists = (folder / "gallery.json").exists()
    return measure_of(Gallery(folder).space if exists else {})


def _print_hull(search: Search, measure: Measure) -> None:
    from nni_petridish.results.report import hull_table

    print(hull_table(search, measure))
    for id, reason in search.dropped().items():
        print(f"{id} was given up: {reason}")
    for id, reason in search.refused().items():
        print(f"{id} was refused: {reason}")


def _check(options: argparse.Namespace, read_config: ReadConfig) -> int:
    from nni_petridish.results.retrain.file import describe_retraining_file, is_retraining_file

    if is_retraining_file(options.config):
        print(describe_retraining_file(options.config))
        return 0
    config = read_config(options.config)
    config.check_gallery()
    print(f"{options.config} is valid; the gallery will be {config.gallery}.")
    from nni_petridish.running.cost import describe_cost, describe_size

    print(describe_size(config), flush=True)
    if not options.quick:
        print(describe_cost(config, anew=options.estimate))
    return 0


def _show(options: argparse.Namespace) -> int:
    from nni_petridish.gallery.select import open_search
    from nni_petridish.results.model_page import describe_model
    from nni_petridish.results.report import lineage_table, write_report
    from nni_petridish.results.report.tables import model_row, text_table

    gallery, search = open_search(options.gallery)
    measure = measure_of(gallery.space)
    if is_selected(options):
        record = selected(search, options)
        print(text_table([model_row(search, record, measure)]))
        print(describe_model(gallery, search, record, measure))
        return 0
    _print_hull(search, measure)
    if not search.models():
        return 1
    print(f"\nLineage ({measure.name}, multiply-adds; * on the hull)\n{lineage_table(search)}\n")
    print(f"Report: {write_report(search, options.gallery)}")
    contradictions = gallery.contradictions(search.models())
    for line in contradictions:
        print(f"nni-petridish: {line}", file=sys.stderr)
    return 1 if contradictions else 0


def _export(options: argparse.Namespace) -> int:
    from nni_petridish.gallery.saved_model import read_model
    from nni_petridish.results.export import export_model

    if options.gallery.is_file():  # of a retraining, or exported earlier
        if is_selected(options):
            raise ConfigError(f"{options.gallery} is one model: there is none to choose.")
        model = read_model(options.gallery)
    else:
        model = _chosen_model(options)
    export_model(model, options.out, options.format, options.pixels)
    name = measure_of(model.space).name
    measures = {"error": name, f"test_{name}": f"test {name}"}
    errors = [
        f" ({shown} {model.facts[key]:.4f})"
        for key, shown in measures.items()
        if key in model.facts
    ]
    print(f"{model.facts.get('id', 'The model')}{''.join(errors)} is in {options.out}.")
    return 0


def _chosen_model(options: argparse.Namespace) -> SavedModel:
    """Return the selected model of a gallery."""
    from nni_petridish.gallery.saved_model import from_gallery
    from nni_petridish.gallery.select import open_search

    _, search = open_search(options.gallery)
    return from_gallery(options.gallery, selected(search, options).id)


def _train(options: argparse.Namespace) -> int:
    from nni_petridish.gallery.select import open_search
    from nni_petridish.results.retrain.preparation import prepare_retraining
    from nni_petridish.results.retrain.repetitions import describe_result, run_repetitions, summary
    from nni_petridish.tasks.distributed import joined_world
    from nni_petridish.tasks.task import Callbacks

    gallery, search = open_search(options.gallery)
    id = selected(search, options).id
    wanted = _retraining_options(options, gallery.space)
    repetitions = wanted.pop("repetitions", 1)
    training = prepare_retraining(options.gallery, id, **wanted)
    folder = options.out or options.gallery / "final" / training.name
    multiply_adds, parameters = training.size()
    with joined_world(training.recipe.device) as world:

        def say(text: str) -> None:
            if world.is_main:
                print(text, flush=True)

        together = f", {world.size} processes" if world.size > 1 else ""
        say(
            f"{training.title}: {parameters:,} parameters, {multiply_adds:,} multiply-adds"
            f"{together}; in {folder}"
        )
        # Several processes have to stop at the same step: the launcher of torchrun ends them.
        stop = StopOnInterrupt().asked if world.size == 1 else lambda: False
        try:
            results = run_repetitions(
                training,
                folder,
                repetitions,
                callbacks=Callbacks(should_stop=stop, progress=True),
                on_result=lambda result: say(describe_result(result, training.measure)),
            )
        except Interrupted:
            command = shlex.join(["nni-petridish", *options.line])
            print(
                f"Stopped: the training goes on from its last epoch with\n  {command}",
                file=sys.stderr,
            )
            return INTERRUPTED
        say(summary(results, training.measure))
    return 0


_RETRAINING_FLAGS = {
    "cells": "cells_per_stage",
    "filters": "filters",
    "fit": "max_multiply_adds",
    "merge": "merge",
    "embedding": "embedding",
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
