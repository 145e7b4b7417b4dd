"""The files of one model: weights as safetensors, documents as JSON, and checksums."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish._support.reading import parse_json, read_regular, refuse_large_header
from nni_petridish.errors import DamagedModelError, GalleryError, SearchError
from nni_petridish.gallery.files import in_one_line, to_json
from nni_petridish.search.records import plain

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "weights.safetensors"
CHECKSUMS = "checksums.json"
_REQUIRED = {WEIGHTS, "lineage.json", "metrics.json"}


def check_names(names: Iterable[str]) -> None:
    """Raise a GalleryError for names of documents that are not valid file names."""
    for name in names:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or f"{name}.json" == CHECKSUMS:
            raise GalleryError(f"A document needs a name like 'genotype' but got {name!r}.")


def encode_model(weights: Mapping[str, Tensor], documents: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the content of all files of a model by file name, checksums included."""
    try:
        files = {f"{name}.json": to_json(plain(data)) for name, data in documents.items()}
    except SearchError as error:
        raise GalleryError(str(error)) from error
    files[WEIGHTS] = _encode_weights(weights)
    # Computed in memory, not from the disk, so that they detect errors in writing too.
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    return {**files, CHECKSUMS: to_json(sums)}


def _encode_weights(weights: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save

    return bytes(save(contiguous_copies(weights)))


def contiguous_copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors for safetensors, which need to be contiguous and share no memory."""
    import torch

    layout = torch.contiguous_format
    return {k: w.detach().cpu().clone(memory_format=layout) for k, w in weights.items()}


def decode_weights(id: str, data: bytes) -> dict[str, Tensor]:
    """Decode weights from safetensors, without pickle."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        refuse_large_header(data)
        return dict(load(data))
    except (SafetensorError, ValueError) as error:
        raise DamagedModelError(f"The weights of model {id} are damaged: {error}.") from error


def decode_documents(id: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Decode the documents of a model, by name."""
    try:
        return {name.removesuffix(".json"): parse_json(data) for name, data in files.items()}
    except ValueError as error:
        raise DamagedModelError(f"A document of model {id} is damaged: {error}.") from error


def read_files(folder: Path, with_weights: bool) -> dict[str, bytes]:
    """Read the files of a model and verify their checksums."""
    expected = read_checksums(folder)
    files = {}
    for name in expected:
        if name != WEIGHTS or with_weights:
            files[name] = _read(folder / name)
            if hashlib.sha256(files[name]).hexdigest() != expected[name]:
                raise DamagedModelError(f"{folder / name} is damaged: its checksum is wrong.")
    return files


def _read(path: Path) -> bytes:
    with in_one_line(f"read {path}"):
        try:
            return read_regular(path)
        except FileNotFoundError as error:
            raise DamagedModelError(f"{path} is missing.") from error


def read_checksums(folder: Path) -> dict[str, str]:
    """Read the checksums of a model's files, by file name."""
    path = folder / CHECKSUMS
    try:
        sums = parse_json(_read(path))
    except ValueError:
        sums = None
    if (
        not isinstance(sums, dict)
        or not sums.keys() >= _REQUIRED
        or any("/" in name for name in sums)
    ):
        raise DamagedModelError(f"{path} is damaged.")
    return sums
