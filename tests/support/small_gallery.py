"""Galleries that look like those of searches, made in a second: nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nni_petridish.core.genotype import Genotype
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.running.config import SearchConfig
from nni_petridish.search.events import ask_event
from nni_petridish.search.records import Growth, Outcome
from search_spaces import RecurrentSpace, VisionSpace
from tests.support.chaos import write_config

#: id: (parent, error, multiply-adds); the hull is g00000, g00001, g00003.
MODELS: dict[str, tuple[str | None, float, int]] = {
    "g00000": (None, 0.30, 10_000_000),
    "g00001": ("g00000", 0.20, 20_000_000),
    "g00002": ("g00000", 0.25, 25_000_000),
    "g00003": ("g00001", 0.15, 60_000_000),
}
OUTCOME_EPOCHS = 4


def vision_gallery(folder: Path) -> Gallery:
    """Make a gallery of the vision space with the models of `MODELS`, their weights random."""
    config = SearchConfig.from_yaml(write_config(folder, models=4))
    options = {key: value for key, value in config.space.items() if key != "space"}
    space = VisionSpace((1, 8, 8), 10, **options)
    seed = space.seed()
    first = seed.grown(dict.fromkeys(KEYS, (("prev", "identity"), ("prev_prev", "sep_conv_3x3"))))
    other = seed.grown(dict.fromkeys(KEYS, (("prev_prev", "identity"), ("prev", "identity"))))
    second = first.grown(dict.fromkeys(KEYS, (("h0", "sep_conv_3x3"), ("prev", "identity"))))
    return _fill(config.open_gallery(), space, [seed, first, other, second], list(KEYS))


def recurrent_gallery(folder: Path) -> Gallery:
    """Make a gallery of the recurrent space as the strategy does: without a configuration."""
    space = RecurrentSpace(vocabulary=20, embedding=8)
    seed = space.seed()
    first, other = (seed.grown({"cell": ((source, "tanh"),)}) for source in ("s0", "s1"))
    second = first.grown({"cell": (("s2", "sigmoid"),)})
    described = {"space": "recurrent", **space.describe()}
    gallery = Gallery.create(folder / "gallery", described, {"seed": 0, "i_max": 1})
    return _fill(gallery, space, [seed, first, other, second], ["cell"])


KEYS = ("normal", "reduce")


def _fill(gallery: Gallery, space: Any, genotypes: list[Genotype], keys: list[str]) -> Gallery:
    for (id, (parent, error, size)), genotype in zip(MODELS.items(), genotypes, strict=True):
        growth = Growth(id, parent, seed=int(id[1:]), l1=0.001, i_max=2)
        outcome = Outcome(id, error, size, parameters=size // 100, epochs=OUTCOME_EPOCHS)
        documents = {
            "genotype": genotype.to_dict(),
            "metrics": outcome.to_dict(),
            "lineage": growth.to_dict(),
            "alphas": _alphas(keys) if parent else {},
            "history": _history(("weak", "final") if parent else ("seed",)),
            "settings": {},
        }
        gallery.journal.append(ask_event(growth, 1.0))
        gallery.save_model(id, _weights(space.build(genotype), growth.seed), documents)
    return gallery


def _weights(net: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Return random weights; statistics of batch norms too, so that leaving one out would show."""
    generator = torch.Generator().manual_seed(seed)
    weights = dict(net.state_dict())
    for name, tensor in weights.items():
        if name.endswith("running_var"):
            weights[name] = 0.5 + torch.rand(tensor.shape, generator=generator)
        elif tensor.is_floating_point():
            weights[name] = 0.3 * torch.randn(tensor.shape, generator=generator)
    return weights


def _alphas(keys: list[str]) -> dict[str, Any]:
    rows = [
        {"source": "prev", "op": "identity", "alpha": -0.5, "slope": -0.03},
        {"source": "prev_prev", "op": "sep_conv_3x3", "alpha": 0.4, "slope": -0.02},
        {"source": "prev", "op": "sep_conv_3x3", "alpha": 0.1, "slope": 0.5},
    ]
    step = {"size": 0.03125, "change": -0.1}
    return {"i_max": 2, "tables": dict.fromkeys(keys, rows), "step": step}


def _history(phases: tuple[str, ...]) -> dict[str, Any]:
    losses = {"seed": (2.0, 1.0), "weak": (0.9, 0.8), "final": (0.7, 0.55)}
    return {
        phase: [
            {"epoch": i + 1, "loss": loss + 0.1, "validation_loss": loss, "seconds": 1.0}
            for i, loss in enumerate(losses[phase])
        ]
        for phase in phases
    }
