"""Models to take away: one safetensors file for this package, ONNX and torch.export for others."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nni_petridish.atomic import temporary_name, write_file
from nni_petridish.errors import ConfigError, DataError, GalleryError, PetridishError
from nni_petridish.gallery import Gallery
from nni_petridish.genotype import Genotype
from nni_petridish.model_files import DamagedModelError
from nni_petridish.model_selection import open_search, select_model
from nni_petridish.portable import Portable, Runner, make_portable

if TYPE_CHECKING:
    from torch import Tensor, nn

Result = TypeVar("Result")
FORMATS = ("state_dict", "onnx", "torch_export")
_KEY = "nni_petridish"
_VERSION = 1
TOLERANCE = 1e-4
"""How far the outputs of an exported file may be from PyTorch's."""


@dataclass(frozen=True)
class SavedModel:
    """A trained model apart from any gallery: all that is needed to build and use it.

    Parameters
    ----------
    space
        ``space`` (the kind) and all options of the space.
    genotype
        The architecture.
    weights
        The state of the network, without the auxiliary head.
    facts
        Whatever else is known, as plain data: ``id``, ``error``, ``normalisation``, ...
        ``normalisation`` has the ``mean`` and ``std`` of each channel, for pixels of 0 to 255.
    """

    space: dict[str, Any]
    genotype: Genotype
    weights: dict[str, Tensor]
    facts: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """Return the network with its weights, in eval mode, with ``facts`` as an attribute."""
        net = _make_space(self.space).build(self.genotype)
        try:
            net.load_state_dict(self.weights)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise GalleryError(f"The weights do not fit the genotype: {reason}") from None
        net.facts = self.facts
        return net.eval()


def load_model(path: str | os.PathLike[str], id: str | None = None) -> nn.Module:
    """Return a trained network, ready for inference.

    Parameters
    ----------
    path
        A gallery, or a file that ``nni-petridish export --format state_dict`` wrote.
    id
        Which model of the gallery; the most accurate by default.

    Examples
    --------
    ::

        net = nni_petridish.load_model("galleries/digits")
        logits = net(images)

    ``net.facts["normalisation"]`` has the ``mean`` and ``std`` that images were normalised by, in
    units of pixels from 0 to 255, where they are known.
    """
    path = Path(path)
    if path.is_dir():
        return from_gallery(path, id).build()
    if id is not None:
        raise GalleryError(f"{path} is not a gallery: a model id means nothing there.")
    return read_model(path).build()


def from_gallery(folder: Path, id: str | None = None) -> SavedModel:
    """Read a model of a gallery; the most accurate one by default."""
    gallery, search = open_search(folder)
    record = select_model(search, id)
    weights, documents = gallery.load_model(record.id)
    genotype = Genotype.from_dict(documents["genotype"])
    if genotype.space != gallery.space.get("space"):
        raise GalleryError(
            f"Model {record.id} is of the space {genotype.space!r} but the gallery of"
            f" {gallery.space.get('space')!r}."
        )
    facts = {
        "id": record.id,
        "error": record.error,
        "multiply_adds": record.multiply_adds,
        "parameters": record.parameters,
        "data": gallery.settings.get("data"),
    }
    return SavedModel(_full_space(gallery, weights), genotype, weights, facts)


def write_model(model: SavedModel, path: Path) -> None:
    """Write one safetensors file: weights, and space, genotype and facts in its header."""
    from safetensors.torch import save

    weights = _plain_tensors(model.weights)
    header = {
        "version": _VERSION,
        "space": model.space,
        "genotype": model.genotype.to_dict(),
        "facts": model.facts,
    }
    text = json.dumps(header, sort_keys=True)
    metadata = {_KEY: text, "sha256": _digest(text, weights)}
    write_file(path, save(weights, metadata))


def read_model(path: Path) -> SavedModel:
    """Read what `write_model` wrote, and check that it is what was written; no pickle involved."""
    from safetensors import safe_open

    header, checksum = read_header(path)
    with _readable(path), safe_open(str(path), framework="pt") as file:
        text = file.metadata()[_KEY]
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if checksum != _digest(text, weights):
        raise DamagedModelError(f"{path} is damaged: its checksum is wrong.")
    genotype = Genotype.from_dict(header["genotype"])
    return SavedModel(header["space"], genotype, weights, header["facts"])


def read_header(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return ``space``, ``genotype`` and ``facts`` of a file, and its checksum; needs no torch."""
    from safetensors import safe_open

    with _readable(path), safe_open(str(path), framework="numpy") as file:
        metadata = file.metadata() or {}
    if _KEY not in metadata:
        raise GalleryError(f"{path} was not written by nni-petridish export.")
    try:
        header = json.loads(metadata[_KEY])
    except ValueError:
        raise DamagedModelError(f"{path} is damaged: its header is not JSON.") from None
    if header.get("version") != _VERSION:
        raise GalleryError(f"{path} must have version {_VERSION} but has {header.get('version')}.")
    return header, metadata.get("sha256")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise GalleryError(f"There is no model and no gallery at {path}.") from None
    except Exception as error:  # safetensors raises its own untyped errors
        raise DamagedModelError(f"{path} is not a safetensors file: {error}.") from None


def export_model(model: SavedModel, path: Path, format: str, pixels: bool = False) -> None:
    """Write a model for use elsewhere; the file is complete or not there.

    Parameters
    ----------
    model
        What to export.
    path
        The file. One that is there already is refused.
    format
        ``state_dict`` (read by `load_model`), ``onnx`` or
        ``torch_export`` (read by ``torch.export.load``). Both are run, with another batch size, and
        compared with PyTorch before they are kept.
    pixels
        Of ``onnx`` and ``torch_export``: put the normalisation into the network, which then takes
        pixels from 0 to 255.
    """
    if format not in FORMATS:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)} but got {format!r}.")
    if os.path.lexists(path):
        raise ConfigError(f"{path} is there already: it is not overwritten.")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a folder.")
    if format == "state_dict":
        if pixels:
            raise ConfigError("pixels is for onnx and torch_export; a state_dict has no inputs.")
        _or_one_line(path, lambda: write_model(model, path))
        return
    portable = make_portable(model, pixels)
    # The last extension decides how some readers read it.
    temporary = temporary_name(path).with_suffix(path.suffix or ".tmp")
    write = _write_onnx if format == "onnx" else _write_torch_export
    metadata = _metadata(model)
    try:
        worst = portable.distance(_or_one_line(path, lambda: write(portable, temporary, metadata)))
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
        return write()
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror or error}.") from error


def measure_normalisation(config: Any) -> dict[str, list[float]] | None:
    """Return mean and std of each channel, in pixels; None where the data are not at hand."""
    try:
        data = config.load_task().data
    except (DataError, OSError, AttributeError):  # not here any more, or not images
        return None
    return {"mean": data.train.mean.tolist(), "std": data.train.std.tolist()}


def _write_onnx(portable: Portable, path: Path, metadata: Mapping[str, str]) -> Runner:
    import torch

    onnx, onnxruntime, _ = map(_optional, ("onnx", "onnxruntime", "onnxscript"))
    program = torch.onnx.export(
        portable.net,
        portable.inputs(2),
        dynamo=True,
        dynamic_shapes=portable.dynamic_shapes(),
        input_names=list(portable.input_names),
        output_names=list(portable.output_names),
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
        named = {k: x.numpy() for k, x in zip(portable.input_names, inputs, strict=True)}
        return [torch.from_numpy(output) for output in session.run(None, named)]

    return run


def _write_torch_export(portable: Portable, path: Path, metadata: Mapping[str, str]) -> Runner:
    import torch

    shapes = portable.dynamic_shapes()
    program = torch.export.export(portable.net, portable.inputs(2), dynamic_shapes=shapes)
    with open(path, "wb") as file:  # a name of its own would have to end in .pt2
        torch.export.save(program, file, extra_files=dict(metadata))
    with open(path, "rb") as file:
        return torch.export.load(file).module()


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"ONNX needs the package {name}, which is missing: pip install 'nni-petridish[export]'."
        ) from None


def _metadata(model: SavedModel) -> dict[str, str]:
    return {"genotype": model.genotype.to_json(), "facts": json.dumps(model.facts)}


def _make_space(space: Mapping[str, Any]) -> Any:
    from search_spaces import RecurrentSpace, VisionSpace

    kinds = {"vision": VisionSpace, "recurrent": RecurrentSpace}
    if space.get("space") not in kinds:
        known = ", ".join(kinds)
        raise GalleryError(f"A model's space must be one of {known} but is {space.get('space')!r}.")
    options = {key: value for key, value in space.items() if key != "space"}
    try:
        return kinds[space["space"]](**options)
    except TypeError as error:
        raise GalleryError(f"The model is of a space that cannot be built: {error}.") from None


def _full_space(gallery: Gallery, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the space with what the data decided: read off the weights, so no data are needed."""
    space = dict(gallery.space)
    try:
        if space.get("space") == "recurrent":
            space.setdefault("vocabulary", weights["embedding"].shape[0])
        elif "image_shape" not in space:
            data = gallery.settings.get("data") or {}
            channels = weights["stem.0.weight"].shape[1]
            space["image_shape"] = [channels, *_image_size(data)]
            space["num_classes"] = weights["classifier.weight"].shape[0]
    except KeyError as error:
        raise GalleryError(f"The weights are of another space: {error} is missing.") from None
    described: dict[str, Any] = _make_space(space).describe()
    return {"space": space["space"], **described}


def _image_size(data: Mapping[str, Any]) -> tuple[int, int]:
    from nni_petridish.data import describe

    if data.get("name") == "image_folder":
        size = int(data.get("image_size") or 224)
        return size, size
    return describe(str(data.get("name"))).image_shape[1:]


def _plain_tensors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    import torch

    layout = torch.contiguous_format  # safetensors knows no other memory order
    return {k: w.detach().cpu().clone(memory_format=layout) for k, w in weights.items()}


def _digest(text: str, weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().numpy().tobytes())
    return digest.hexdigest()
