"""Networks in a form that leaves the package: plain operations, any batch size.

Image classifiers take normalised images, or pixels. Language models take one word at a time and
their state, so that a text may have any length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nni_petridish.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nni_petridish.gallery.saved_model import SavedModel

Runner = Callable[..., Any]
"""Runs an exported network: tensors in, one tensor or several out."""


@dataclass(frozen=True)
class Portable:
    """A network to export, and what to feed it.

    Parameters
    ----------
    net
        The network, in eval mode. The first dimension of all its inputs is the batch.
    reference
        The model's own network, called the same way, to compare with.
    inputs
        Makes inputs for a batch of so many.
    input_names, output_names
        Their names in an ONNX file.
    """

    net: nn.Module
    reference: Runner
    inputs: Callable[[int], tuple[Tensor, ...]]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]

    def dynamic_shapes(self) -> tuple[dict[int, Any], ...]:
        """Say that the batch may have any size."""
        import torch

        batch = torch.export.Dim("batch", min=1, max=65536)
        return tuple({0: batch} for _ in self.input_names)

    def distance(self, run: Runner) -> float:
        """Return the largest difference between ``run`` and the model, for another batch size."""
        import torch

        inputs = self.inputs(3)
        with torch.no_grad():
            pairs = zip(_listed(run(*inputs)), _listed(self.reference(*inputs)), strict=True)
            return max(float((a - b).abs().max()) for a, b in pairs)


def make_portable(model: SavedModel, pixels: bool = False) -> Portable:
    """Return the form of a model that can be exported."""
    net = model.build()
    if model.space["space"] == "recurrent":
        if pixels:
            raise ConfigError("A language model has no pixels.")
        return _one_word(net, model.space)
    if pixels:
        net = _with_normalisation(net, model.facts.get("normalisation"))
    shape, scale = model.space["image_shape"], 255.0 if pixels else 1.0

    def images(batch: int) -> tuple[Tensor, ...]:
        return (scale * _uniform(batch, *shape),)

    return Portable(net, net, images, ("input",), ("logits",))


def _one_word(net: Any, space: Mapping[str, Any]) -> Portable:
    import torch
    from torch import nn

    class OneWord(nn.Module):
        """One step of the cell in plain operations; training's fused kernel does not export."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, word: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            cell = self.net.cell
            input_weight, weight_0 = cell.weight.split([cell.embedding, cell.hidden])
            projected = nn.functional.embedding(word, self.net.embedding)[None] @ input_weight
            new = cell._step_by_step(projected, state, None, weight_0)[0]
            return self.net.decode(new), new

    def reference(word: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        logits, new = net(word[None], state)
        return logits[0], new

    def inputs(batch: int) -> tuple[Tensor, ...]:
        words = (_uniform(batch) * space["vocabulary"]).to(torch.int64)
        return words, _uniform(batch, space["hidden"]) - 0.5

    return Portable(OneWord().eval(), reference, inputs, ("word", "state"), ("logits", "new_state"))


def _with_normalisation(net: nn.Module, normalisation: Mapping[str, Any] | None) -> nn.Module:
    import torch
    from torch import nn

    if normalisation is None:
        raise ConfigError("The normalisation of the images is unknown: the data are not at hand.")
    statistics = dict(normalisation)

    class Normalised(nn.Module):
        mean: Tensor
        std: Tensor

        def __init__(self) -> None:
            super().__init__()
            for name in ("mean", "std"):
                value = torch.tensor(statistics[name], dtype=torch.float32)
                self.register_buffer(name, value.view(1, -1, 1, 1))
            self.net = net

        def forward(self, pixels: Tensor) -> Tensor:
            result: Tensor = self.net((pixels - self.mean) / self.std)
            return result

    return Normalised().eval()


def _uniform(*shape: int) -> Tensor:
    import torch

    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def _listed(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]
