"""Peak memory of a training step: parent, weak learning, and NNI's DARTS supernet.

    python benchmarks/memory.py [--cells-per-stage 3] [--filters 16] [--batch 32]

Each network trains two steps in a process of its own; what counts is how far the resident memory
of that process rises above what it was before the network was built. The supernet is that of
`nni.nas.strategy.DARTS` on `nni.nas.hub.pytorch.DARTS` with as many cells, reductions included, and
as many filters as ours: 4 nodes a cell, each fed by all earlier ones through 7 ops.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--cells-per-stage", type=int, default=3)
parser.add_argument("--filters", type=int, default=16)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--image", type=int, default=32)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--one", help=argparse.SUPPRESS)
arguments = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # before torch is imported

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

KINDS = ("parent", "weak learning", "weak learning, 3rd growth", "DARTS supernet")


def build(kind: str) -> nn.Module:
    cells, filters = arguments.cells_per_stage, arguments.filters
    if kind == "DARTS supernet":
        warnings.simplefilter("ignore")
        import nni.nas.strategy
        from nni.nas.hub.pytorch import DARTS

        space = DARTS(width=filters, num_cells=3 * cells + 2, dataset="cifar")
        supernet: nn.Module = nni.nas.strategy.DARTS().mutate_model(space)
        return supernet
    from nni_petridish import attach_candidates, finalize_candidates
    from search_spaces import VisionSpace

    space = VisionSpace((3, arguments.image, arguments.image), 10, cells, filters)
    net = space.build(space.seed())
    for _ in range(2 if "3rd" in kind else 0):
        finalize_candidates(attach_candidates(net))
    if kind != "parent":
        attach_candidates(net)
    return net


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The largest resident memory so far, looked at every millisecond."""

    def __init__(self) -> None:
        self.bytes = resident()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.bytes = max(self.bytes, resident())
            time.sleep(0.001)


def measure(kind: str) -> None:
    """Print the peak in MB above the start, the parameters and the seconds of the last step."""
    images = torch.randn(arguments.batch, 3, arguments.image, arguments.image)
    labels = torch.randint(10, (arguments.batch,))
    F.conv2d(images, torch.randn(8, 3, 3, 3))  # what the library needs for itself
    if kind == "DARTS supernet":
        warnings.simplefilter("ignore")
        import nni.nas.hub.pytorch
        import nni.nas.strategy  # noqa: F401
    ctypes.CDLL(None).malloc_trim(0)
    before, peak = resident(), Peak()
    net = build(kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for _ in range(2):
        began = time.process_time()
        optimizer.zero_grad(set_to_none=True)
        output = net(images)
        F.cross_entropy(output[0] if isinstance(output, tuple) else output, labels).backward()
        optimizer.step()
    seconds = time.process_time() - began
    parameters = sum(p.numel() for p in net.parameters())
    print((peak.bytes - before) / 2**20, parameters, seconds)


def main() -> None:
    print(
        f"torch {torch.__version__}, {platform.machine()}, {arguments.threads} threads;"
        f" cells_per_stage={arguments.cells_per_stage}, filters={arguments.filters},"
        f" batch {arguments.batch}, 3x{arguments.image}x{arguments.image}\n"
    )
    print("| network | parameters | peak MB | x parent | processor s per step |")
    print("| --- | ---: | ---: | ---: | ---: |")
    parent = 0.0
    for kind in KINDS:
        done = subprocess.run(
            [sys.executable, *sys.argv, "--one", kind],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        peak, parameters, seconds = map(float, done.stdout.split()[-3:])
        parent = parent or peak
        print(
            f"| {kind} | {parameters:,.0f} | {peak:.0f} | {peak / parent:.1f} | {seconds:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    measure(arguments.one) if arguments.one else main()
