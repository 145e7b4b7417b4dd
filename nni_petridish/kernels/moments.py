"""Moments of image batches, for the gradient of a batch norm whose output is not computed.

In channels_last, the natural matrix of an image batch has one row per pixel and one column per
channel. With 16 channels such rows are too short for vector units, and loop overhead dominates.
Here several pixels share a row (`pixel_rows`), and sums over the copies of a channel are combined
at the end. With x̂ = (x − μ)/σ, y = γ·x̂ and g = ∇_y L, the formulas are

    dγ = Σ g·x̂,    dx = γ/σ · (g − mean(g) − x̂ · mean(g·x̂)).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nni_petridish.kernels.native import calls as native
from nni_petridish.kernels.native.calls import native_applies

_RUNNING = ("running_mean", "running_var", "num_batches_tracked")
ROW_LENGTH = 256
"""Maximum row length: long enough for vector units and short enough for the L1 cache."""


def pixel_rows(x: Tensor) -> Tensor:
    """View a channels_last batch as a matrix with several pixels per row, up to ROW_LENGTH."""
    n, channels, height, width = x.shape
    pixels, per_row = n * height * width, 1
    while 2 * per_row * channels <= ROW_LENGTH and pixels % (2 * per_row) == 0:
        per_row *= 2
    return x.permute(0, 2, 3, 1).reshape(pixels // per_row, per_row * channels)


def image_view(rows: Tensor, like: Tensor) -> Tensor:
    """View the result of `pixel_rows` as a batch of images again."""
    n, channels, height, width = like.shape
    return rows.view(n, height, width, channels).permute(0, 3, 1, 2)


def row_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each column of `pixel_rows(x)`, or of each channel."""
    if native_applies(x):
        return native.moments(x)
    rows = pixel_rows(x)
    if rows.device.type == "cpu":
        mean, variance = torch.batch_norm_update_stats(rows, None, None, 0.0)
    else:
        variance, mean = torch.var_mean(rows, dim=0, correction=0)
    return mean, variance


def channel_moments(
    moments: Sequence[tuple[Tensor, Tensor]], channels: int
) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel of some equally shaped batches.

    Parameters
    ----------
    moments
        The `row_moments` of each batch.
    channels
        The number of channels.

    Returns
    -------
    tuple of Tensor
        Both of shape ``(len(moments), channels)``.
    """
    if len({mean.numel() for mean, _ in moments}) > 1:  # some by column, some by channel
        folded = [channel_moments([pair], channels) for pair in moments]
        return torch.cat([mean for mean, _ in folded]), torch.cat([v for _, v in folded])
    shape = (len(moments), -1, channels)
    means = torch.stack([mean for mean, _ in moments]).view(shape)
    variances = torch.stack([variance for _, variance in moments]).view(shape)
    between, mean = torch.var_mean(means, dim=1, correction=0)
    return mean, variances.mean(dim=1) + between


def update_running_statistics(
    norms: Sequence[nn.BatchNorm2d], mean: Tensor, variance: Tensor, count: int
) -> None:
    """Update the running statistics as a forward pass of each norm in training mode does.

    Parameters
    ----------
    norms
        The norms, all with the same momentum.
    mean, variance
        The result of `channel_moments`, one row per norm.
    count
        The number of values per channel.
    """
    momentum = norms[0].momentum
    assert momentum is not None
    unbiased = variance * (count / (count - 1))
    torch._foreach_lerp_([_buffer(n.running_mean) for n in norms], list(mean), momentum)
    torch._foreach_lerp_([_buffer(n.running_var) for n in norms], list(unbiased), momentum)
    torch._foreach_add_([_buffer(n.num_batches_tracked) for n in norms], 1)


def has_batch_statistics(norm: nn.Module) -> bool:
    """Return whether a module normalizes by the moments of its batch and keeps running ones."""
    return (
        type(norm) is nn.BatchNorm2d  # neither SyncBatchNorm nor a subclass
        and norm.training
        and norm.track_running_stats
        and norm.momentum is not None
        and not has_hooks(norm)
    )


def running_buffers(norm: nn.BatchNorm2d, x: Tensor) -> list[Tensor] | None:
    """Return mean, variance and number of batches of a norm.

    Returns None if they are missing, not contiguous, or not of x's channels and type.
    """
    # Faster than attribute access, which searches three dictionaries: this is called often.
    mean, variance, batches = map(norm._buffers.get, _RUNNING)
    if mean is None or variance is None or batches is None:
        return None
    if not (mean.is_contiguous() and variance.is_contiguous()):
        return None
    if not mean.numel() == variance.numel() == x.shape[1]:
        return None
    if not (mean.dtype is variance.dtype is x.dtype and batches.dtype is torch.int64):
        return None
    return [mean, variance, batches]


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of the module runs hooks besides its forward pass (e.g. pruning)."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    )


def widened(vectors: Tensor, per_row: int) -> Tensor:
    """Repeat vectors over channels, the last dimension, for each pixel of a row."""
    shape = (*vectors.shape[:-1], per_row, vectors.shape[-1])
    # With one channel, flatten returns a view that PyTorch's kernels misread.
    return vectors.unsqueeze(-2).expand(shape).flatten(-2).contiguous()


def row_correlations(g: Tensor, x: Tensor, mean: Tensor, inv_std: Tensor) -> list[Tensor]:
    """Return Σ g·x̂ and Σ g of each column of `pixel_rows`, given `widened` moments."""
    if g.device.type == "cpu":
        _, products, sums = torch.ops.aten.native_batch_norm_backward(
            g, x, None, None, None, mean, inv_std, True, 0.0, [False, True, True]
        )
        return [products, sums]
    return [(g * (x - mean)).sum(0) * inv_std, g.sum(0)]


def input_gradient_coefficients(
    scale: Tensor, mean: Tensor, inv_std: Tensor, products: Tensor, sums: Tensor, count: int
) -> Tensor:
    """Return of_g, of_x and constant such that dx = of_g·g + of_x·x + constant.

    Parameters
    ----------
    scale
        γ/σ.
    mean, inv_std
        μ and 1/σ.
    products, sums
        Σ g·x̂ and Σ g of each channel.
    count
        The number of values per channel.
    """
    of_x = scale * inv_std * products / -count
    return torch.stack([scale, of_x, torch.addcmul(scale * sums / -count, of_x, mean, value=-1)])


def _buffer(buffer: Tensor | None) -> Tensor:
    assert buffer is not None
    return buffer
