"""Time of evaluation: the error of a grown network on some images, in one run.

    python benchmarks/evaluation.py [--images 10000] [--threads 2] [--growths 2] [--repeats 5]
        [--mode cell] [--processor]

Four ways take turns, batch by batch: our network as `evaluate` runs it, the same network of plain
PyTorch modules in channels_last and in PyTorch's default layout, and its ONNX export in
onnxruntime. All must agree in their predictions, ties of rounding apart. Seconds are wall time for
all images, or processor time, which a busy machine disturbs less; the median of the repeats, and
for ratios the median and the range of the ratios within a repeat.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--images", type=int, default=10_000)
parser.add_argument("--batch", type=int, default=256, help="as in the evaluation of a search")
parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each")
parser.add_argument("--growths", type=int, default=2)
parser.add_argument("--cells-per-stage", type=int, default=3)
parser.add_argument("--filters", type=int, default=16)
parser.add_argument("--mode", choices=("cell", "macro"), default="cell")
parser.add_argument("--repeats", type=int, default=5)
parser.add_argument("--processor", action="store_true", help="processor time, not wall time")
arguments = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # before torch is imported

import onnxruntime  # type: ignore[import-untyped]  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from nni_petridish import attach_candidates, finalize_candidates  # noqa: E402
from nni_petridish.kernels.switch import plain_ops  # noqa: E402
from nni_petridish.running.process import keep_freed_memory  # noqa: E402
from search_spaces import VisionSpace  # noqa: E402
from search_spaces.vision.network import VisionNetwork  # noqa: E402

Way = Callable[[Tensor], Tensor]
clock = time.process_time if arguments.processor else time.perf_counter


def build() -> VisionNetwork:
    """Grow a network and give its norms statistics of their own."""
    torch.manual_seed(0)
    sizes = arguments.cells_per_stage, arguments.filters
    space = VisionSpace((3, 32, 32), 10, *sizes, mode=arguments.mode)
    net = space.build(space.seed())
    for _ in range(arguments.growths):
        attach_candidates(net)
        for name, parameter in net.named_parameters():
            if name.endswith("alpha"):
                parameter.data.normal_()
        finalize_candidates(net)
    for name, parameter in net.named_parameters():
        if name.endswith("eta"):
            parameter.data.fill_(0.5)
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(64, 3, 32, 32))
    return net.eval()


def in_torch(net: VisionNetwork, memory_format: torch.memory_format, is_plain: bool) -> Way:
    space_format = net.memory_format

    def run(images: Tensor) -> Tensor:
        net.memory_format = memory_format
        try:
            with plain_ops() if is_plain else nullcontext(), torch.inference_mode():
                return net(images.contiguous(memory_format=memory_format)).argmax(1)
        finally:
            net.memory_format = space_format

    return run


def in_onnxruntime(net: nn.Module) -> Way:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = arguments.threads
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        images = torch.randn(2, 3, 32, 32)
        batch = torch.export.Dim("batch", min=1, max=65536)
        program = torch.onnx.export(
            net, (images,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False
        )
        assert program is not None
        program.save(file.name, external_data=False)
        session = onnxruntime.InferenceSession(file.name, options, ["CPUExecutionProvider"])
    (name,) = (one.name for one in session.get_inputs())
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0]).argmax(1)


def main() -> None:
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    net = build()
    ways = {
        "ours": in_torch(net, torch.channels_last, False),
        "plain, channels_last": in_torch(net, torch.channels_last, True),
        "plain, contiguous": in_torch(net, torch.contiguous_format, True),
        "onnxruntime": in_onnxruntime(net),
    }
    batches = [torch.randn(arguments.batch, 3, 32, 32) for _ in range(4)]
    for way in ways.values():
        agreement = (way(batches[0]) == ways["ours"](batches[0])).float().mean()
        assert agreement > 0.99, agreement
    count = -(-arguments.images // arguments.batch)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.repeats):
        total = dict.fromkeys(ways, 0.0)
        for i in range(count):
            for name, way in ways.items():
                began = clock()
                way(batches[i % len(batches)])
                total[name] += clock() - began
        for name, whole in total.items():
            times[name].append(whole)
    print(
        f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, {platform.machine()},"
        f" {os.cpu_count()} cores, {arguments.threads} threads;"
        f" cells_per_stage={arguments.cells_per_stage}, filters={arguments.filters},"
        f" {arguments.mode} mode, {arguments.growths} growths; {count} batches of"
        f" {arguments.batch}, median of {arguments.repeats},"
        f" {'processor' if arguments.processor else 'wall'} time"
    )
    for name, seconds in times.items():
        ratios = [one / ours for one, ours in zip(seconds, times["ours"], strict=True)]
        print(
            f"{name:>22} {statistics.median(seconds):7.2f} s"
            f"  {statistics.median(ratios):5.2f} x ours ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
