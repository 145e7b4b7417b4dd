"""Facts of the first forward pass of a user's network: its inputs, and choices that are not used.

Only the evaluator knows the data. Their shapes are needed to count multiply-adds, and travel with
the weights: as a tensor of the state dict, but not as a buffer, since weight averaging and other
precisions would change the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.errors import ConfigError, TrainingError
from nni_petridish.nni_adapter.user_spaces.sites import UserSite

KEY = "input_seen"
_NUMBERS = 8
"""Numbers of an input in the state dict: whether it has integers, dimensions, and its shape."""


class FirstPass:
    """The shapes of a network's inputs, once it has run.

    Parameters
    ----------
    net
        The network.
    """

    def __init__(self, net: nn.Module) -> None:
        self.inputs: list[list[int]] = []
        self.is_over = False
        self._run: set[str] = set()
        self._watching: list[Any] = []
        net.register_forward_pre_hook(self.look_at_inputs)
        net.register_forward_hook(self.look_at_sites)
        net._register_state_dict_hook(self.save)
        net._register_load_state_dict_pre_hook(self.load)

    def look_at_inputs(self, net: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Remember the shapes; a pre-hook of the network."""
        if self.is_over:
            return
        if not inputs or not all(isinstance(x, Tensor) and x.ndim < _NUMBERS - 1 for x in inputs):
            got = ", ".join(type(x).__name__ for x in inputs) or "nothing"
            raise ConfigError(
                "multiply-adds can be counted for networks whose inputs are tensors of at most"
                f" {_NUMBERS - 2} dimensions, given by position, but this one got {got}."
            )
        self.inputs = [
            [int(not x.is_floating_point()), x.ndim, *map(int, x.shape[1:])] for x in inputs
        ]
        if not torch.compiler.is_compiling():
            sites = [module for module in net.modules() if isinstance(module, UserSite)]
            self._watching = [site.register_forward_hook(self._note) for site in sites]

    def look_at_sites(self, net: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Refuse choices that did not run, before anything is trained; a hook of the network."""
        if self.is_over:
            return
        self.is_over = True
        if torch.compiler.is_compiling():
            return
        for handle in self._watching:
            handle.remove()
        self._watching = []
        keys = dict.fromkeys(m.key for m in net.modules() if isinstance(m, UserSite))
        unused = [key for key in keys if key not in self._run]
        if unused and net.training:
            self.is_over = False
            raise ConfigError(
                f"the choice {unused[0]!r} is not used in the forward pass, so nothing tells its"
                " candidates apart: name it in fixed, with a value."
            )

    def _note(self, site: UserSite, inputs: Any, output: Any) -> None:
        self._run.add(site.key)

    def examples(self) -> Iterator[Tensor]:
        """Yield zeros in the shape of one example of every input."""
        if not self.inputs:
            raise TrainingError("multiply-adds cannot be counted: the network has never run.")
        for kind, _, *shape in self.inputs:
            yield torch.zeros(1, *shape, dtype=torch.int64 if kind else torch.float32)

    def save(self, net: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        """Add the shapes to a state dict; a hook of the network."""
        rows = self.inputs or [[]]
        state[prefix + KEY] = torch.tensor([[*row, *[0] * (_NUMBERS - len(row))] for row in rows])
        if len(rows) == 1:  # the form that galleries have always had
            state[prefix + KEY] = state[prefix + KEY][0]

    def load(self, state: dict[str, Tensor], prefix: str, *others: Any) -> None:
        """Take the shapes out of a state dict; a hook of the network."""
        seen = state.pop(prefix + KEY, None)
        if seen is not None:
            rows = seen.reshape(-1, _NUMBERS).tolist()
            self.inputs = [row[: row[1] + 1] for row in rows if row[1]]
