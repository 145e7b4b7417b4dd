"""Layout of features within a network.

Images are (N, C, H, W), or (N, H, W, C) as in Swin's stages; tokens are (N, T, C).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

_LAST_AXIS = (nn.Linear, nn.LayerNorm)
"""Modules that act on the last axis of a tensor."""


def may_be_channels_last(outputs: Mapping[nn.Module, Any]) -> bool:
    """Return whether some module acts on the last axis of a tensor of four axes.

    Without one, as in all networks of convolutions, images are (N, C, H, W).
    """
    return any(
        isinstance(module, _LAST_AXIS) and isinstance(output, Tensor) and output.ndim == 4
        for module, output in outputs.items()
    )


def taller(example: Any) -> Any | None:
    """Return an example with its images repeated, to twice their height; None if not images."""
    first, rest = (example[0], example[1:]) if isinstance(example, tuple) else (example, None)
    if not isinstance(first, Tensor) or first.ndim != 4:
        return None
    repeated = first.repeat(1, 1, 2, 1)
    return repeated if rest is None else (repeated, *rest)


def find_channels_last(
    outputs: Mapping[nn.Module, Any], run_taller: Callable[[], Mapping[nn.Module, Any]]
) -> set[nn.Module]:
    """Return the modules whose images are (N, H, W, C).

    Parameters
    ----------
    outputs
        The output of every module.
    run_taller
        Returns the outputs for taller images: the second axis grows if it is the height. Those that
        did not run, because the network takes images of one size only, are judged by their weights.
    """
    if not may_be_channels_last(outputs):
        return set()
    after = run_taller()
    return {
        module
        for module, output in outputs.items()
        if isinstance(output, Tensor)
        and output.ndim == 4
        and _is_channels_last(module, output, after.get(module))
    }


def _is_channels_last(module: nn.Module, output: Tensor, after: Any) -> bool:
    if isinstance(after, Tensor) and after.shape[1:] != output.shape[1:]:
        return bool(after.shape[1] != output.shape[1])
    widths = set(_widths(module.parameters()))
    return output.shape[3] in widths and output.shape[1] not in widths


def are_tokens(module: nn.Module, features: Tensor | None, batch: int | None) -> bool:
    """Return whether features are tokens (N, T, C), and neither (T, N, C) nor (N, C, T).

    The batch size tells the first from the second, the weights of the module from the third: a
    convolution over T has C biases or filters.
    """
    if features is None or features.ndim != 3 or batch not in (None, len(features)):
        return False
    widths = set(_widths(module.parameters()))
    return features.shape[2] in widths or features.shape[1] not in widths


def _widths(parameters: Iterable[Tensor]) -> Iterable[int]:
    """Yield the widths of biases, norms, linear layers and convolutions."""
    return (parameter.shape[0] for parameter in parameters if parameter.ndim)
