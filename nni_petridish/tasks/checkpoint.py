"""Checkpoints: training states on disk, one safetensors file each, written atomically."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish._support.reading import parse_json, read_regular, refuse_large_header
from nni_petridish.gallery.files import in_one_line, make_folder, remove_leftovers, write_file

_log = logging.getLogger(__name__)

FILE = "checkpoint.safetensors"


def unique_state(net: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with each tensor once, under its first name.

    One α table serves many cells, so the same tensor may go by many names.
    """
    state: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in net.state_dict().items():
        if not isinstance(tensor, Tensor):
            continue
        where = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() == 0 or where not in seen:
            seen.add(where)
            state[name] = tensor
    return state


def save_checkpoint(
    folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any]
) -> None:
    """Write network, momenta and `facts` (plain data) in one atomic step."""
    from safetensors.torch import save

    tensors = {f"model.{name}": tensor for name, tensor in unique_state(net).items()}
    for name, parameter in net.named_parameters():
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
        if momentum is not None:
            tensors[f"momentum.{name}"] = momentum
    # Row-major copies: safetensors knows no other memory order.
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    make_folder(folder)
    text = json.dumps(facts)
    write_file(folder / FILE, save(copies, {"facts": text, "sha256": _digest(text, copies)}))


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return the tensors and facts of a checkpoint, None if there is none or it is damaged."""
    path = folder / FILE
    if not path.is_file():
        return None
    remove_leftovers(folder)  # of a process killed while it wrote
    with in_one_line(f"read {path}"):
        data = read_regular(path)
    try:
        return _decode(data)
    except Exception as error:  # safetensors raises its own untyped errors
        reason = " ".join(str(error).split())
        _log.warning("%s is damaged (%s): its training starts anew.", path, reason)
        return None


def _decode(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors.torch import load

    refuse_large_header(data)
    tensors = load(data)
    header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header["__metadata__"]
    # Checkpoints of version 0.1 have no checksum.
    if "sha256" in metadata and metadata["sha256"] != _digest(metadata["facts"], tensors):
        raise ValueError("its checksum is wrong")
    return tensors, parse_json(metadata["facts"])


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    """Return a checksum of all that a checkpoint holds."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fits(tensors: dict[str, Tensor], net: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a checkpoint's tensors have the names, shapes and types of the network's."""
    state = unique_state(net)
    wanted = {f"model.{name}": tensor for name, tensor in state.items()}
    for name, parameter in net.named_parameters():
        if parameter in optimizer.state:
            wanted[f"momentum.{name}"] = parameter
    return wanted.keys() == tensors.keys() and all(
        tensors[name].shape == tensor.shape and tensors[name].dtype == tensor.dtype
        for name, tensor in wanted.items()
    )


def restore(tensors: dict[str, Tensor], net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Copy a checkpoint that `fits` into network and optimizer."""
    with torch.no_grad():
        for name, tensor in unique_state(net).items():
            tensor.copy_(tensors[f"model.{name}"])
        for name, parameter in net.named_parameters():
            if parameter in optimizer.state:
                optimizer.state[parameter]["momentum_buffer"].copy_(tensors[f"momentum.{name}"])
