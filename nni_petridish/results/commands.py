"""``nni-petridish check``, ``show`` and ``export``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nni_petridish.errors import ConfigError
from nni_petridish.registry import Measure, measure_of
from nni_petridish.results.selection_options import add_selection, is_selected, selected
from nni_petridish.running.commands import ReadConfig, add_config

if TYPE_CHECKING:
    from nni_petridish.gallery.saved_model import SavedModel
    from nni_petridish.search.search import Search


def add_check_options(parser: argparse.ArgumentParser, read_config: ReadConfig) -> None:
    """Add the options of ``check``.

    Parameters
    ----------
    parser
        The parser of the command.
    read_config
        Reads a configuration file with all of its sections.
    """
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="without time and memory")
    how.add_argument(
        "--estimate",
        action="store_true",
        help="measure time and memory anew instead of recalling what was measured here",
    )
    add_config(parser)
    parser.set_defaults(command=lambda options: _check(options, read_config))


def add_show_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``show``."""
    _add_model(parser)
    parser.set_defaults(command=_show)


def _add_model(parser: argparse.ArgumentParser) -> None:
    help = "a gallery's folder, or a file with one model"
    parser.add_argument("gallery", type=Path, metavar="GALLERY", help=help)
    add_selection(parser)


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``export``."""
    _add_model(parser)
    parser.set_defaults(command=_export)
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
    for id, reason in search.rejected().items():
        print(f"{id} was not made: {reason}")
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
    from nni_petridish.gallery.recovery import contradictions
    from nni_petridish.gallery.select import open_search
    from nni_petridish.results.model_page import describe_model
    from nni_petridish.results.report import lineage_table, write_report
    from nni_petridish.results.report.tables import model_row, text_table

    if options.gallery.is_file():
        return _show_file(options)
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
    title = f"Lineage ({measure.name}, {search.complexity.title}; * on the hull)"
    print(f"\n{title}\n{lineage_table(search)}\n")
    lines = contradictions(gallery, search.models())
    for line in lines:
        print(f"nni-petridish: {line}", file=sys.stderr)
    print(f"Report: {write_report(search, options.gallery)}")
    return 1 if lines else 0


def _show_file(options: argparse.Namespace) -> int:
    from nni_petridish.results.model_page import describe_file

    model = _model_of_file(options)
    print(describe_file(model, options.gallery, measure_of(model.space)))
    return 0


def _model_of_file(options: argparse.Namespace) -> SavedModel:
    """Return the model of a file, of a retraining or exported earlier."""
    from nni_petridish.gallery.saved_model import read_model

    if is_selected(options):
        raise ConfigError(f"{options.gallery} is one model: there is none to choose.")
    return read_model(options.gallery)


def _export(options: argparse.Namespace) -> int:
    from nni_petridish.results.export import export_model

    model = _model_of_file(options) if options.gallery.is_file() else _chosen_model(options)
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
