"""The trunk of a model: its state before the learning rate decayed, from which children grow.

With ``anneal`` a network is trained at the full learning rate, and only the last epochs of its
training let the rate decay. The state before these epochs, momenta included, is the trunk. A growth
goes on from the trunk of its parent, so that the whole life of a network is one training at a
constant rate with one decay at its end, and no growth raises the rate of a converged network again.
What a model is evaluated with, and used for, are the weights after the decay.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from nni_petridish.core.momentum import start_with
from nni_petridish.gallery.files import make_folder, write_file
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.tasks.checkpoint import FILE, load_checkpoint
from nni_petridish.tasks.task import Callbacks, Record

_log = logging.getLogger(__name__)

TRUNKS = "trunks"
_MODEL, _MOMENTUM = "model.", "momentum."


class Trunk:
    """The trunk of a running growth: the checkpoint of a certain epoch, kept apart.

    Parameters
    ----------
    folder
        The work folder of the growth.
    phase
        The name of the phase whose checkpoint it is.
    epoch
        The last epoch at the full learning rate.
    """

    def __init__(self, folder: Path, phase: str, epoch: int) -> None:
        self.checkpoint, self.kept, self.epoch = folder / phase, folder / "trunk", epoch

    def watch(self, callbacks: Callbacks) -> Callbacks:
        """Return callbacks that keep the checkpoint of the epoch as soon as it is written."""

        def on_epoch(phase: str, record: Record) -> None:
            if record["epoch"] == self.epoch:
                _copy(self.checkpoint, self.kept)
            callbacks.on_epoch(phase, record)

        return replace(callbacks, on_epoch=on_epoch)

    def resume(self) -> None:
        """Keep the checkpoint if a growth was interrupted before that was done."""
        found = None if (self.kept / FILE).is_file() else load_checkpoint(self.checkpoint)
        if found is not None and len(found[1].get("records", ())) == self.epoch:
            _copy(self.checkpoint, self.kept)


def save_trunk(gallery: Gallery, id: str, work: Path) -> None:
    """Give a model of the gallery its trunk, if the growth kept one in its work folder."""
    if (work / "trunk" / FILE).is_file():
        _copy(work / "trunk", gallery.folder / TRUNKS / id)


def load_trunk(gallery: Gallery, id: str, net: nn.Module) -> bool:
    """Give a network the state of a model's trunk; return False if the model has none.

    The optimizer that is made next starts with the momenta of the trunk.
    """
    folder = gallery.folder / TRUNKS / id
    found = load_checkpoint(folder)
    state, own = _part(found[0] if found else {}, _MODEL), net.state_dict()
    fits = all(name in own and own[name].shape == tensor.shape for name, tensor in state.items())
    if found is None or not fits:
        _log.warning("%s has no sound trunk in %s: it grows from its decayed weights.", id, folder)
        return False
    net.load_state_dict(state, strict=False)  # a tensor of several names is stored once
    start_with(net, _part(found[0], _MOMENTUM))
    return True


def carry_momenta(checkpoint: Path, net: nn.Module) -> None:
    """Let the next training of a network start with the momenta that its last one ended with."""
    found = load_checkpoint(checkpoint)
    if found is not None:
        start_with(net, _part(found[0], _MOMENTUM))


def held_epochs(epochs: int, anneal: float) -> int:
    """Return the number of epochs at the full learning rate, if the last ones are for its decay."""
    return epochs - math.ceil(epochs * anneal)


def _part(tensors: dict[str, Tensor], start: str) -> dict[str, Tensor]:
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}


def _copy(source: Path, target: Path) -> None:
    make_folder(target)
    write_file(target / FILE, (source / FILE).read_bytes())
