"""Trained models outside of galleries: read and written as one safetensors file, and built."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish._support.reading import as_mapping, parse_json, read_json, refuse_large_header
from nni_petridish.core.genotype import Genotype
from nni_petridish.errors import DamagedModelError, GalleryError
from nni_petridish.gallery.files import unseal, write_file
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.model_files import contiguous_copies
from nni_petridish.gallery.select import open_search, select_model
from nni_petridish.registry import Kind, kind_names, kind_of
from nni_petridish.search.records import Outcome

if TYPE_CHECKING:
    from torch import Tensor, nn

_KEY = "nni_petridish"
_VERSION = 1
FACTS = "facts"
"""The document of a model with the facts of its data; models of earlier versions have none."""


@dataclass(frozen=True)
class SavedModel:
    """A trained model outside of a gallery, with all that is needed to build and use it.

    Parameters
    ----------
    space
        ``space`` (the kind) and all options of the space.
    genotype
        The architecture.
    weights
        The state dict of the network, without the auxiliary head.
    facts
        Further facts as plain data: ``id``, ``error``, and those of its data. For images these are
        ``normalisation`` (``mean`` and ``std`` of each channel, in units of the pixels),
        ``pixel_range`` and ``classes``; for text, ``words``.
    """

    space: dict[str, Any]
    genotype: Genotype
    weights: dict[str, Tensor]
    facts: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """Build the network with its weights, in eval mode and with ``facts`` as an attribute.

        Its attribute ``predict`` takes raw images or words, see `load_model`.
        """
        net = _make_space(self.space).build(self.genotype)
        try:
            net.load_state_dict(self.weights)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise GalleryError(f"The weights do not fit the genotype: {reason}") from None
        net.facts = self.facts
        net.predict = _known_kind(self.space).make_predictor(net, self.space, self.facts)
        return net.eval()


def load_model(path: str | os.PathLike[str], id: str | None = None) -> nn.Module:
    """Return a trained network, ready for inference.

    Parameters
    ----------
    path
        A gallery, or a file written by ``nni-petridish export --format state_dict``.
    id
        Id of a model of the gallery. By default, the most accurate one.

    Examples
    --------
    ::

        net = nni_petridish.load_model("galleries/digits")
        labels = net.predict(images)  # raw pixels: (n, h, w) or (n, c, h, w)
        names = net.predict(images, names=True)
        logits = net(normalized_images)

    A language model has ``net.predict("a text", count=3)``: the most probable next words.
    ``net.facts`` has the facts of `SavedModel`.
    """
    path = Path(path)
    if path.is_dir():
        return from_gallery(path, id).build()
    if id is not None:
        raise GalleryError(f"{path} is not a gallery: a model id means nothing there.")
    return read_model(path).build()


def from_gallery(folder: Path, id: str | None = None) -> SavedModel:
    """Read a model of a gallery, by default the most accurate one."""
    gallery, search = open_search(folder)
    record = select_model(search, id)
    weights, documents = gallery.load_model(record.id)
    if Outcome.from_dict(documents["metrics"]) != record.outcome:
        raise DamagedModelError(f"Model {record.id} is damaged: the journal has other metrics.")
    genotype = Genotype.from_dict(documents.get("genotype"))
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
        **(documents.get(FACTS) or _facts_of_data(gallery)),
    }
    return SavedModel(_full_space(gallery, weights), genotype, weights, facts)


def write_model(model: SavedModel, path: Path) -> None:
    """Write a model to one safetensors file, with space, genotype and facts in its header."""
    from safetensors.torch import save

    weights = contiguous_copies(model.weights)
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
    """Read a model written by `write_model` and verify its checksum, without pickle."""
    from safetensors import safe_open

    header, checksum = read_header(path)
    with _readable(path), safe_open(str(path), framework="pt") as file:
        text = file.metadata()[_KEY]
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if checksum != _digest(text, weights):
        raise DamagedModelError(f"{path} is damaged: its checksum is wrong.")
    genotype = Genotype.from_dict(header.get("genotype"))
    for name in ("space", "facts"):
        if not isinstance(header.get(name), dict):
            raise DamagedModelError(f"{path} is damaged: {name} must be a mapping.")
    return SavedModel(header["space"], genotype, weights, header["facts"])


def read_header(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return ``space``, ``genotype`` and ``facts`` of a file, and its checksum, without torch."""
    from safetensors import safe_open

    with _readable(path):
        refuse_large_header(path)
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
    if _KEY not in metadata:
        raise GalleryError(f"{path} was not written by nni-petridish export.")
    try:
        header = as_mapping(parse_json(metadata[_KEY]))
    except ValueError as error:
        raise DamagedModelError(f"{path} is damaged: its header is not JSON ({error}).") from None
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


def _known_kind(space: Mapping[str, Any]) -> Kind:
    if space.get("space") not in kind_names():
        known = ", ".join(kind_names())
        raise GalleryError(f"A model's space must be one of {known} but is {space.get('space')!r}.")
    return kind_of(space)


def _make_space(space: Mapping[str, Any]) -> Any:
    try:
        return _known_kind(space).make_space(space)
    except (TypeError, ValueError) as error:
        raise GalleryError(f"The model is of a space that cannot be built: {error}.") from None


def _full_space(gallery: Gallery, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the complete space; options that depend on the data are read from the weights."""
    data = gallery.settings.get("data") or {}
    try:
        as_mapping(data)
        space = _known_kind(gallery.space).space_of_weights(gallery.space, data, weights)
    except KeyError as error:
        raise GalleryError(f"The weights are of another space: {error} is missing.") from None
    except (TypeError, ValueError, IndexError) as error:
        raise GalleryError(f"{gallery.folder} has data that cannot be read: {error}.") from None
    described: dict[str, Any] = _make_space(space).describe()
    return {"space": space["space"], **described}


def _facts_of_data(gallery: Gallery) -> dict[str, Any]:
    """Return the facts of the data of a search, for models of earlier versions, if it has them."""
    path = gallery.folder / "config.json"
    if "recipe" not in gallery.settings and not path.exists():
        return {}  # of a NasExperiment, whose evaluator had the data
    try:
        data = as_mapping(unseal(read_json(path), path)["data"])
        return _known_kind(gallery.space).data_facts(data)
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise GalleryError(
            f"{path} cannot be read ({reason}): resume the search to write it again."
        ) from None


def _digest(text: str, weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().numpy().tobytes())
    return digest.hexdigest()
