"""Fingerprints of evaluators: the settings, code and data that decide the results of a search.

A fingerprint is plain data. It takes what can be seen without running anything: arguments that NNI
has traced, the code of functions, shapes and contents of tensors and arrays. It leaves out what
only decides where and how fast an evaluator runs, and the epochs, which the search itself knows.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import textwrap
import types
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

_NEUTRAL = frozenset(
    {
        *("accelerator", "barebones", "callbacks", "default_root_dir", "device", "devices"),
        *("enable_checkpointing", "enable_model_summary", "enable_progress_bar", "epochs"),
        *("folder", "log_every_n_steps", "logger", "max_epochs", "num_nodes", "num_workers"),
        *("persistent_workers", "pin_memory", "prefetch_factor", "profiler", "progress", "root"),
        *("strategy", "workers"),
    }
)
"""Arguments that do not change results, or that the search knows by itself."""
_LIBRARIES = ("nni.", "torch", "pytorch_lightning", "lightning", "numpy", "builtins")
_DEPTH = 6
_PARTS = 64
"""Parts of a list or an object that are looked at, evenly spaced."""
_BYTES = 2**20
"""Bytes of a tensor that are hashed, in evenly spaced blocks."""
_BLOCKS = 16

Plain = dict[str, Any]


def fingerprint(evaluators: Mapping[str, Any]) -> Plain:
    """Return the fingerprint of the evaluators of all phases; one if they are the same.

    Parameters
    ----------
    evaluators
        The evaluator of each phase, or anything else that decides results, by name.
    """
    described = {phase: describe(evaluator) for phase, evaluator in evaluators.items()}
    first = next(iter(described.values()))
    same = isinstance(first, dict) and all(other == first for other in described.values())
    return first if same else described


def describe(value: Any, depth: int = _DEPTH) -> Any:
    """Return plain data that differ where values differ in a way that decides results.

    >>> describe({"lr": 0.1, "num_workers": 4, "sizes": (1, 2)})
    {'lr': 0.1, 'sizes': [1, 2]}
    >>> describe(torch.zeros(2, 3))["shape"]
    [2, 3]
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, PurePath):
        return value.name
    if depth == 0:
        return type(value).__name__
    if isinstance(value, torch.Tensor | np.ndarray):
        return _describe_array(value)
    if isinstance(value, Mapping):
        return _describe_items(value, depth)
    if isinstance(value, list | tuple | set | frozenset):
        return _describe_list(value, depth)
    if isinstance(value, type):
        return _describe_class(value)
    if isinstance(value, types.FunctionType | types.MethodType):
        return _describe_function(value, depth)
    return _describe_object(value, depth)


def _describe_array(array: torch.Tensor | np.ndarray) -> Plain:
    shape, dtype = list(array.shape), str(array.dtype)
    flat = np.asarray(array.detach().cpu() if isinstance(array, torch.Tensor) else array).ravel()
    block = max(1, _BYTES // _BLOCKS // max(1, flat.itemsize))
    starts = np.linspace(0, max(0, flat.size - block), _BLOCKS).astype(int)
    parts = [flat] if flat.nbytes <= _BYTES else [flat[i : i + block] for i in starts.tolist()]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part.tolist()).encode() if part.dtype == object else part.tobytes())
    return {"shape": shape, "dtype": dtype, "content": digest.hexdigest()[:16]}


def _describe_items(items: Mapping[Any, Any], depth: int) -> Plain:
    kept = {str(key): part for key, part in items.items() if key not in _NEUTRAL}
    return {key: describe(part, depth - 1) for key, part in kept.items()}


def _describe_list(values: Iterable[Any], depth: int) -> Any:
    listed = sorted(values, key=repr) if isinstance(values, set | frozenset) else list(values)
    if len(listed) <= 8:
        return [describe(part, depth - 1) for part in listed]
    step = max(1, len(listed) // _PARTS)
    parts = [describe(part, depth - 1) for part in listed[::step]]
    return {"length": len(listed), "content": _digest(repr(parts))}


def _describe_object(value: Any, depth: int) -> Plain:
    """Describe an object by its traced arguments, and by its data if it is a data set."""
    symbol = getattr(value, "trace_symbol", None)  # of NNI's traced objects
    if symbol is not None:
        arguments = {
            **{str(i): part for i, part in enumerate(value.trace_args or ())},
            **(value.trace_kwargs or {}),
        }
        found = {"class": describe(_original(symbol), depth - 1)}
        found |= _describe_items(arguments, depth)
    else:
        found = {"class": describe(type(value), depth - 1)}
        if isinstance(value, DataLoader):
            found |= {"batch_size": value.batch_size, "sampler": type(value.sampler).__name__}
            found["dataset"] = describe(value.dataset, depth - 1)
    if isinstance(value, Dataset):
        found["data"] = _describe_data(value, depth)
    return found


def _describe_data(data: Any, depth: int) -> Plain:
    """Describe what a data set holds; its items are not read, which might draw random numbers."""
    try:
        length = len(data)
    except TypeError:
        length = None
    held = {name: part for name, part in vars(data).items() if not name.startswith("_nni")}
    return {"length": length, **_describe_items(held, depth)}


def _describe_class(kind: type) -> str:
    name = kind.__qualname__
    if kind.__module__.startswith(_LIBRARIES):
        return name
    return f"{name} {_digest(_code(kind))}"


def _describe_function(function: Any, depth: int) -> Plain:
    """Describe a function by its code and by what its code refers to."""
    plain = inspect.unwrap(function)
    plain = getattr(plain, "__func__", plain)
    found: Plain = {"function": f"{plain.__qualname__} {_digest(_code(plain))}"}
    defaults = [*(plain.__defaults__ or ()), *(plain.__kwdefaults__ or {}).values()]
    if defaults:
        found["defaults"] = describe(defaults, depth - 1)
    names = inspect.getclosurevars(plain)
    used = {**names.globals, **names.nonlocals}
    home = plain.__module__
    data = {k: v for k, v in used.items() if _is_data(v) or getattr(v, "__module__", "") == home}
    if data:
        found["uses"] = _describe_items(data, min(depth, 3))
    return found


def _is_data(value: Any) -> bool:
    kinds = (bool, int, float, str, list, tuple, dict, torch.Tensor, np.ndarray)
    return isinstance(value, (*kinds, Dataset, DataLoader))


def _original(symbol: Any) -> Any:
    """Return the class or function that NNI has wrapped in order to trace it."""
    return getattr(symbol, "_nni_symbol", None) or inspect.unwrap(symbol)


def _code(symbol: Any) -> str:
    """Return code without its layout and comments; of a lambda, only its bytecode is its own."""
    if getattr(symbol, "__name__", "") != "<lambda>":
        try:
            return ast.dump(ast.parse(textwrap.dedent(inspect.getsource(symbol))))
        except (OSError, TypeError, SyntaxError, ValueError):
            pass
    return _bytecode(symbol.__code__) if isinstance(symbol, types.FunctionType) else ""


def _bytecode(code: types.CodeType) -> str:
    constants = [_bytecode(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return repr((code.co_code, constants, code.co_names))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
