"""Features in what a submodule returns: a tensor, or the first of several values.

Blocks of Hugging Face's models return tuples or ``ModelOutput``s, recurrent layers the outputs and
the state. The features come first in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def features_of(output: Any) -> Tensor | None:
    """Return the features in an output of a submodule; None if there are none.

    Examples
    --------
    >>> import torch
    >>> features_of((torch.zeros(2, 3), None)).shape
    torch.Size([2, 3])
    """
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        output = output[0] if output else None
    return output if isinstance(output, Tensor) else None


def with_features(output: Any, features: Tensor) -> Any:
    """Return an output of a submodule with other features, and all else as it was.

    Examples
    --------
    >>> import torch
    >>> with_features((torch.zeros(1), "state"), torch.ones(1))
    (tensor([1.]), 'state')
    """
    if isinstance(output, Mapping):
        # A ModelOutput is a data class that can be made from its values by name.
        return type(output)(**{**output, next(iter(output)): features})
    if isinstance(output, (tuple, list)):
        values = (features, *output[1:])
        is_named = hasattr(output, "_fields")
        return type(output)(*values) if is_named else type(output)(values)
    return features
