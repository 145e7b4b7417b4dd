"""``nni-petridish check``, ``show``, ``export`` and ``train``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish.core.genotype import MERGES
from nni_petridish.errors import ConfigError
from nni_petridish.gallery.select import (
    add_selection,
    is_selected,
    open_search,
    parse_count,
    selected,
)
from nni_petridish.registry import measure_of
from nni_petridish.running.commands import ReadConfig, add_config

if TYPE_CHECKING:
    from nni_petridish.gallery.saved_model import SavedModel
    from nni_petridish.results.retrain.language import LanguageRetraining
    from nni_petridish.results.retrain.vision import VisionRetraining
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
        "check", help="say whether a configuration is valid, and what a growth will take"
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
    show = subparsers.add_parser("show", help="show what a search has found")
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
    parser.add_argument(
        "--pixels",
        action="store_true",
        help="onnx, torch_export: take pixels of 0 to 255 and normalize inside",
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
    """Print the hull of a search and write its report; return 1 if there is no model."""
    from nni_petridish.results.report import write_report

    _print_hull(search)
    print(f"Gallery: {gallery}")
    if not search.models():
        return 1
    print(f"Report:  {write_report(search, gallery)}")
    return 0


def _print_hull(search: Search) -> None:
    from nni_petridish.results.report import hull_table

    print(hull_table(search))
    for id, reason in search.dropped().items():
        print(f"{id} was given up: {reason}")


def _check(options: argparse.Namespace, read_config: ReadConfig) -> int:
    from nni_petridish.results.retrain.file import describe_final_file, is_final_file

    if is_final_file(options.config):
        print(describe_final_file(options.config))
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
    from nni_petridish.results.report import lineage_table, write_report
    from nni_petridish.results.report.tables import model_row, text_table

    _, search = open_search(options.gallery)
    if is_selected(options):
        print(text_table([model_row(search, selected(search, options))]))
        return 0
    _print_hull(search)
    if not search.models():
        return 1
    print(f"\nLineage (error, multiply-adds; * on the hull)\n{lineage_table(search)}\n")
    print(f"Report: {write_report(search, options.gallery)}")
    return 0


def _export(options: argparse.Namespace) -> int:
    from nni_petridish.gallery.saved_model import read_model
    from nni_petridish.results.export import export_model

    if options.gallery.is_file():  # of a final training, or exported earlier
        if is_selected(options):
            raise ConfigError(f"{options.gallery} is one model: there is none to choose.")
        model = read_model(options.gallery)
    else:
        model = _chosen_model(options)
    export_model(model, options.out, options.format, options.pixels)
    measures = ("error", f"test_{measure_of(model.space).name}")
    errors = [
        f" ({name.replace('_', ' ')} {model.facts[name]:.4f})"
        for name in measures
        if name in model.facts
    ]
    print(f"{model.facts.get('id', 'The model')}{''.join(errors)} is in {options.out}.")
    return 0


def _chosen_model(options: argparse.Namespace) -> SavedModel:
    """Return the model of a gallery that is meant, with what its images are normalized by."""
    from dataclasses import replace

    from nni_petridish.gallery.saved_model import from_gallery
    from nni_petridish.results.export import measure_normalization
    from nni_petridish.running.config import SearchConfig

    gallery, search = open_search(options.gallery)
    model = from_gallery(options.gallery, selected(search, options).id)
    if not (gallery.folder / "config.json").exists():
        return model
    known = measure_normalization(SearchConfig.of_gallery(gallery))
    return replace(model, facts={**model.facts, "normalisation": known})


def _train(options: argparse.Namespace) -> int:
    from nni_petridish.results.retrain.retraining import describe_result, summary
    from nni_petridish.tasks.distributed import joined_world

    gallery, search = open_search(options.gallery)
    id = selected(search, options).id
    is_text = gallery.space.get("space") == "recurrent"
    training, repetitions = (_language_training if is_text else _vision_training)(options, id)
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

        def tell(result: dict[str, Any]) -> None:
            say(describe_result(result, training.measure))

        results = training.run(folder, repetitions, progress=True, on_result=tell)
        say(summary(results, training.measure))
    return 0


def _language_training(options: argparse.Namespace, id: str) -> tuple[LanguageRetraining, int]:
    from nni_petridish.results.retrain.language import language_retraining

    for name in ("config", "cells", "filters", "fit", "merge"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} is for vision but the gallery holds language models.")
    training = language_retraining(
        options.gallery,
        id,
        embedding=options.embedding,
        epochs=options.epochs,
        seed=options.seed or 0,
        changes=dict(map(_read_change, options.set)),
    )
    return training, 1 if options.repetitions is None else options.repetitions


def _vision_training(options: argparse.Namespace, id: str) -> tuple[VisionRetraining, int]:
    from nni_petridish.results.retrain.file import read_final_file
    from nni_petridish.results.retrain.setup import vision_retraining

    if options.embedding is not None:
        raise ConfigError("--embedding is for language models but the gallery is one of vision.")
    wanted = {} if options.config is None else read_final_file(options.config)
    given = {
        "cells_per_stage": options.cells,
        "filters": options.filters,
        "max_multiply_adds": None if options.fit is None else parse_count(options.fit),
        "merge": options.merge,
        "epochs": options.epochs,
        "repetitions": options.repetitions,
        "seed": options.seed,
    }
    if options.fit is not None and options.filters is None:
        wanted.pop("filters", None)
    if options.filters is not None and options.fit is None:
        wanted.pop("max_multiply_adds", None)
    changes = {**wanted.pop("changes", {}), **dict(map(_read_change, options.set))}
    wanted |= {name: value for name, value in given.items() if value is not None}
    repetitions = wanted.pop("repetitions", 1)
    return vision_retraining(options.gallery, id, **wanted, changes=changes), repetitions


def _read_change(text: str) -> tuple[str, Any]:
    import yaml

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set must be KEY=VALUE but got {text!r}.")
    return key, yaml.safe_load(value)
