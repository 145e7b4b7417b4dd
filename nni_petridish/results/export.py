"""Export of models: one safetensors file for this package, ONNX and torch.export for others."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nni_petridish.errors import ConfigError, GalleryError, PetridishError, needing
from nni_petridish.gallery.files import in_one_line, temporary_name
from nni_petridish.gallery.saved_model import SavedModel, write_model
from nni_petridish.registry import kind_of

if TYPE_CHECKING:
    from torch import Tensor

    from nni_petridish.tasks.plain_network import PlainNetwork, Runner

Result = TypeVar("Result")
FORMATS = ("state_dict", "onnx", "torch_export")
TOLERANCE = 1e-4
"""Largest allowed difference between the outputs of an exported file and PyTorch's."""


def export_model(model: SavedModel, path: Path, format: str, pixels: bool | None = None) -> None:
    """Write a model for use elsewhere; the file is complete or not there.

    Parameters
    ----------
    model
        The model to export.
    path
        The file to write; a file that exists is not overwritten.
    format
        ``state_dict`` (read by `load_model`), ``onnx`` or ``torch_export`` (read by
        ``torch.export.load``). The last two are run with another batch size and compared with
        PyTorch before they are kept.
    pixels
        For ``onnx`` and ``torch_export`` of images: whether the network takes raw pixels and
        normalizes them itself (default), or takes normalized images.
    """
    if format not in FORMATS:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)} but got {format!r}.")
    if os.path.lexists(path):
        raise ConfigError(f"{path} is there already: it is not overwritten.")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a folder.")
    if format == "state_dict":
        if pixels is not None:
            raise ConfigError("pixels is for onnx and torch_export; a state_dict has no inputs.")
        _or_one_line(path, lambda: write_model(model, path))
        return
    plain: PlainNetwork = kind_of(model.space).plain_network(
        model.build(), model.space, model.facts, pixels
    )
    export_network(plain, path, format, _metadata(model, plain))


def export_network(
    plain: PlainNetwork, path: Path, format: str, metadata: Mapping[str, str]
) -> None:
    """Write a network as ``onnx`` or ``torch_export``, after comparing it with PyTorch."""
    # The last extension decides how some readers read it.
    temporary = temporary_name(path).with_suffix(path.suffix or ".tmp")
    write = _write_onnx if format == "onnx" else _write_torch_export
    try:
        worst = plain.distance(_or_one_line(path, lambda: write(plain, temporary, metadata)))
        if not worst < TOLERANCE:
            raise PetridishError(
                f"The exported outputs differ from PyTorch's by {worst:.2g}, more than"
                f" {TOLERANCE:g}: nothing was written."
            )
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _or_one_line(path: Path, write: Callable[[], Result]) -> Result:
    try:
        with in_one_line(f"write {path}"):
            return write()
    except GalleryError as error:
        raise ConfigError(str(error)) from error


def _write_onnx(plain: PlainNetwork, path: Path, metadata: Mapping[str, str]) -> Runner:
    import torch

    with needing("export", "ONNX"):
        names = ("onnx", "onnxruntime", "onnxscript")
        onnx, onnxruntime, _ = map(importlib.import_module, names)
    program = torch.onnx.export(
        plain.net,
        plain.inputs(2),
        dynamo=True,
        dynamic_shapes=plain.dynamic_shapes(),
        input_names=list(plain.input_names),
        output_names=list(plain.output_names),
        verbose=False,
    )
    assert program is not None
    program.save(str(path), external_data=False)
    proto = onnx.load(str(path))
    for key, value in metadata.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    onnx.save(proto, str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> list[Tensor]:
        named = {k: x.numpy() for k, x in zip(plain.input_names, inputs, strict=True)}
        return [torch.from_numpy(output) for output in session.run(None, named)]

    return run


def _write_torch_export(plain: PlainNetwork, path: Path, metadata: Mapping[str, str]) -> Runner:
    import torch

    shapes = plain.dynamic_shapes()
    program = torch.export.export(plain.net, plain.inputs(2), dynamic_shapes=shapes)
    with open(path, "wb") as file:  # a name of its own would have to end in .pt2
        torch.export.save(program, file, extra_files=dict(metadata))
    with open(path, "rb") as file:
        return torch.export.load(file).module()


def _metadata(model: SavedModel, plain: PlainNetwork) -> dict[str, str]:
    facts = {**model.facts, "inputs": list(plain.input_names)}
    return {"genotype": model.genotype.to_json(), "facts": json.dumps(facts)}
