"""An operation of one's own: register it, let it grow, store the network, export it.

One decorated function is all it takes. ``python examples/own_op.py`` takes a few seconds, on
scikit-learn's digits; ``--out FOLDER`` keeps the files that it writes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for small networks more threads are slower

import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import nn

from nni_petridish import (
    Genotype,
    attach_candidates,
    finalize_candidates,
    load_data,
    register_op,
)
from nni_petridish.tasks.vision.splits import Split
from search_spaces import VisionSpace


@register_op("mb_conv_3x3")
def mb_conv_3x3(channels: int, stride: int, affine: bool) -> nn.Module:
    """Return the inverted bottleneck of MobileNetV2: widen, depthwise conv, narrow."""
    wide = 2 * channels
    return nn.Sequential(
        nn.Conv2d(channels, wide, 1, bias=False),
        nn.BatchNorm2d(wide),
        nn.ReLU6(),
        nn.Conv2d(wide, wide, 3, stride, padding=1, groups=wide, bias=False),
        nn.BatchNorm2d(wide),
        nn.ReLU6(),
        nn.Conv2d(wide, channels, 1, bias=False),
        nn.BatchNorm2d(channels, affine=affine),
    )


def train(net: nn.Module, split: Split, steps: int) -> None:
    """Train with plain SGD: whatever trains the network trains its candidates too."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    net.train()
    for _, (images, labels) in zip(range(steps), split.batches(32, generator), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(net(split.normalize(images)), labels).backward()
        optimizer.step()


def main() -> None:
    """Grow a small network once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="steps of each training")
    parser.add_argument("--out", type=Path, help="folder of what is written")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    data = load_data("digits")
    ops = ["mb_conv_3x3", "sep_conv_3x3", "identity"]
    space = VisionSpace(data.image_shape, data.num_classes, 1, filters=8, stages=2, ops=ops)

    net = space.build(space.seed())
    train(net, data.train, arguments.steps)
    attach_candidates(net)
    train(net, data.train, arguments.steps)
    genotype = finalize_candidates(net, i_max=2)
    train(net, data.train, arguments.steps)
    print(genotype.to_json())

    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "genotype.json").write_text(genotype.to_json())
        save_model(net, str(folder / "weights.safetensors"))
        images = data.validation.normalize(next(iter(data.validation.batches(16)))[0])
        program = torch.export.export(net.eval(), (images,))
        torch.export.save(program, folder / "model.pt2")

        again = space.build(Genotype.from_json((folder / "genotype.json").read_text()))
        load_model(again, str(folder / "weights.safetensors"))
        exported = torch.export.load(folder / "model.pt2").module()
        with torch.no_grad():
            expected = net(images)
            torch.testing.assert_close(again.eval()(images), expected)
            torch.testing.assert_close(exported(images), expected)
    print("The stored and the exported network give the same predictions.")


if __name__ == "__main__":
    main()
