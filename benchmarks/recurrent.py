"""Time of a step of training in the recurrent space, measured in one run.

    python benchmarks/recurrent.py [--vocabulary 10000] [--growths 0] [--steps 7]

Four networks take turns: ours and a straightforward loop, each with and without candidates. The
straightforward loop is the plain way to write the cell and Algorithm 1: one matrix product for each
gate of each node and candidate at each step, stop-gradient by a hook that zeroes the gradient (or
by detach, see --stop-gradient), ``x_c - sg(x_c)`` for stop-forward, and logits held whole.
Processor time of one thread is measured, so that others on the machine disturb little; medians and
their ratios are printed, for the whole step and without the decoder.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import statistics
import time

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--vocabulary", type=int, default=10_000)
parser.add_argument("--hidden", type=int, default=200)
parser.add_argument("--length", type=int, default=35, help="steps of backpropagation through time")
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--growths", type=int, default=0, help="growths before the one measured")
parser.add_argument(
    "--stop-gradient",
    choices=("hook", "detach"),
    default="hook",
    help="of the straightforward loop: a hook that zeroes the gradient, or detach",
)
parser.add_argument("--steps", type=int, default=7, help="timed training steps of each network")
parser.add_argument("--threads", type=int, default=1, help="threads of torch")
arguments = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # before torch is imported
# Processor time of one thread is what a step costs, whoever else uses the machine; of several it
# would count what waiting threads burn.
clock = time.process_time if arguments.threads == 1 else time.perf_counter

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from nni_petridish import attach_candidates, finalize_candidates  # noqa: E402
from nni_petridish.running.process import keep_freed_memory  # noqa: E402
from nni_petridish.tasks.language.recipe import LanguageRecipe  # noqa: E402
from search_spaces import RecurrentSpace  # noqa: E402
from search_spaces.recurrent.network import CandidateNode, Node, RecurrentNetwork  # noqa: E402

ACTIVATION = {"sigmoid": torch.sigmoid, "relu": torch.relu, "tanh": torch.tanh}


def stop_gradient(z: Tensor) -> Tensor:
    if arguments.stop_gradient == "detach":
        return z.detach()
    stopped = z * 1.0
    if stopped.requires_grad:
        stopped.register_hook(torch.zeros_like)
    return stopped


class StraightforwardCell(nn.Module):
    """The same cell, with the same weights, gate by gate and candidate by candidate."""

    def __init__(self, net: RecurrentNetwork) -> None:
        super().__init__()
        cell = net.cell
        self.nodes, self.hidden, self.embedding = cell.nodes(), cell.hidden, cell.embedding
        self.initial = nn.ParameterList(cell.weight.detach().clone().chunk(2, 1))
        grown = [module.weight for module in cell.learners.modules() if isinstance(module, Node)]
        self.gates = nn.ModuleList(map(self._halves, [cell.first.weight, *grown]))
        self.average = nn.Parameter(cell.average().detach().clone())
        self.shortcuts: list[tuple[int, str]] = []
        self.candidates = nn.ModuleList()
        if cell.weak_learner is not None:
            table = cell.weak_learner.table
            self.shortcuts = [(int(source[1:]), op) for source, op in table.shortcuts]
            self.candidates.extend(
                self._halves(op.node.weight)
                for op in cell.weak_learner.ops
                if isinstance(op, CandidateNode)
            )
            self.norms = nn.ModuleList(
                nn.BatchNorm1d(self.hidden, affine=False) for _ in self.shortcuts
            )
            self.alpha = nn.Parameter(table.alpha.detach().clone())

    @staticmethod
    def _halves(weight: Tensor) -> nn.ParameterList:
        return nn.ParameterList(weight.detach().clone().chunk(2, 1))

    def forward(self, x: Tensor, h: Tensor, mask: Tensor) -> Tensor:
        outputs = []
        for x_t in x:
            both = torch.cat([x_t, h * mask], 1)
            gate = torch.sigmoid(both @ self.initial[0])
            states = [h + gate * (torch.tanh(both @ self.initial[1]) - h)]
            for (activation, j), halves in zip(self.nodes, self.gates, strict=True):
                states.append(self._node(states[j], mask, halves, activation))
            h = sum(w * s for w, s in zip(self.average, states[1:], strict=True))
            if self.shortcuts:
                x_c = torch.zeros_like(h)
                for k, (j, activation) in enumerate(self.shortcuts):
                    z = stop_gradient(states[j])
                    s = self._node(z, mask, self.candidates[k], activation)
                    x_c = x_c + self.alpha[k] * self.norms[k](s)
                h = h + x_c - x_c.detach()
            outputs.append(h)
        return torch.stack(outputs)

    @staticmethod
    def _node(z: Tensor, mask: Tensor, halves: nn.Module, activation: str) -> Tensor:
        gate = torch.sigmoid((z * mask) @ halves[0])  # type: ignore[index]
        a = (z * mask) @ halves[1]  # type: ignore[index]
        return z + gate * (ACTIVATION.get(activation, lambda v: v)(a) - z)


class Straightforward(RecurrentNetwork):
    """A network with that cell and the plain decoder."""

    def loss(self, features: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.decode(features).flatten(0, 1), targets.flatten())


def build(with_candidates: bool) -> RecurrentNetwork:
    torch.manual_seed(0)
    space = RecurrentSpace(arguments.vocabulary, arguments.hidden)
    net = space.build(space.seed())
    for _ in range(arguments.growths):
        finalize_candidates(attach_candidates(net), i_max=1)
    net.set_dropout(**LanguageRecipe().dropout())
    return attach_candidates(net) if with_candidates else net


def straightforward(net: RecurrentNetwork) -> RecurrentNetwork:
    result = copy.deepcopy(net)
    result.__class__ = Straightforward
    hidden = result.cell.hidden
    result.cell = StraightforwardCell(net)  # type: ignore[assignment]
    assert result.cell.hidden == hidden
    return result


def seconds(net: RecurrentNetwork, text: Tensor, decode: bool) -> float:
    began = clock()
    net.zero_grad()
    torch.manual_seed(1)
    outputs, dropped = net.features(text[:-1])
    (net.loss(dropped, text[1:]) if decode else outputs.square().mean()).backward()
    return clock() - began


def measure(nets: dict[str, RecurrentNetwork], decode: bool) -> dict[str, float]:
    text = torch.randint(arguments.vocabulary, (arguments.length + 1, arguments.batch))
    for net in nets.values():
        seconds(net, text, decode)
    times: dict[str, list[float]] = {name: [] for name in nets}
    for _ in range(arguments.steps):
        for name, net in nets.items():
            times[name].append(seconds(net, text, decode))
    return {name: statistics.median(values) for name, values in times.items()}


def check(nets: dict[str, RecurrentNetwork]) -> None:
    """Both ways must compute the same gradient of the parent."""
    text = torch.randint(arguments.vocabulary, (arguments.length + 1, arguments.batch))
    for net in nets.values():
        seconds(net, text, decode=True)
    gradients = [net.embedding.grad for net in nets.values()]
    for gradient in gradients[1:]:
        assert gradient is not None
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-3, atol=1e-6)


def main() -> None:
    keep_freed_memory()  # as in training; for all alike
    parent, weak = build(False), build(True)
    nets = {
        "parent": parent,
        "weak learning": weak,
        "parent, straightforward": straightforward(parent),
        "weak learning, straightforward": straightforward(weak),
    }
    check(nets)
    candidates = 4 * (arguments.growths + 2)
    print(
        f"hidden {arguments.hidden}, {arguments.length} steps, batch {arguments.batch}, vocabulary"
        f" {arguments.vocabulary}, {arguments.growths + 1} nodes, {candidates} candidates;"
        f" torch {torch.__version__}, threads {arguments.threads}, {platform.machine()}"
    )
    for title, decode in (("whole step", True), ("without the decoder", False)):
        times = measure(nets, decode)
        print(title)
        for name, value in times.items():
            print(f"  {name:32s} {1000 * value:8.1f} ms")
        own, slow = times["weak learning"], times["weak learning, straightforward"]
        base, slow_base = times["parent"], times["parent, straightforward"]
        print(f"  weak learning / parent           {own / base:8.2f}")
        print(f"  the same, straightforward        {slow / slow_base:8.2f}")
        print(f"  straightforward / ours, parent   {slow_base / base:8.2f}")
        print(f"  straightforward / ours, weak     {slow / own:8.2f}")


if __name__ == "__main__":
    main()
