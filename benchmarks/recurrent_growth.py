r"""Does growing a recurrent cell help? Two growths against the same epochs without growth.

    python benchmarks/recurrent_growth.py [--seed 0]
    python benchmarks/recurrent_growth.py --text ptb --root data/ptb --limit 200000 --hidden 200 \
        --epochs 2 1 1 --set batch_size=20 --set dropout_cell_inputs=0.3 --set dropout_outputs=0.3 \
        --set dropout_hidden=0.1

Weak learning leaves the parent's training untouched, so both are the same up to the first
finalising. Validation perplexity is printed after every phase, and again with the weights averaged
over its last epoch, which is far less noisy at DARTS's learning rate.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--text", default="pydoc", help="pydoc, ptb or text_folder")
parser.add_argument("--root", help="folder of the text")
parser.add_argument("--limit", type=int, help="train on so many words")
parser.add_argument("--vocabulary", type=int, help="keep so many words apart")
parser.add_argument("--hidden", type=int, default=100, help="width of embedding and cell")
parser.add_argument("--epochs", type=int, nargs=3, default=[5, 3, 3], metavar="N")
parser.add_argument("--growths", type=int, default=2)
parser.add_argument("--l1", type=float, default=0.01)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe")
arguments = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch  # noqa: E402
import yaml  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from nni_petridish import attach_candidates, finalize_candidates  # noqa: E402
from nni_petridish.core.grow import alpha_tables  # noqa: E402
from nni_petridish.running.process import keep_freed_memory  # noqa: E402
from nni_petridish.tasks.language.recipe import LanguageRecipe  # noqa: E402
from nni_petridish.tasks.language.task import RecurrentTask  # noqa: E402
from nni_petridish.tasks.language.text import load_text  # noqa: E402
from nni_petridish.tasks.task import Callbacks, Phase  # noqa: E402
from search_spaces import RecurrentSpace  # noqa: E402
from search_spaces.recurrent.network import RecurrentNetwork  # noqa: E402


class LastEpoch:
    """The weights of a phase of training, and the average of the weights over its last epoch."""

    def __init__(self, net: nn.Module, epochs: int) -> None:
        self.net, self.left, self.steps = net, epochs, 0
        self.average: list[Tensor] = []

    def on_epoch(self, phase: str, record: object) -> None:
        self.left -= 1

    @torch.no_grad()
    def before_step(self) -> bool:
        """Asked before every step whether to stop: a place to look at the weights."""
        if self.left == 1:
            self.steps += 1
            weights = [p.detach() for p in self.net.parameters()]
            self.average = self.average or [w.clone() for w in weights]
            for average, weight in zip(self.average, weights, strict=True):
                average.lerp_(weight, 1 / self.steps)
        return False

    @contextmanager
    def averaged(self) -> Iterator[None]:
        kept = [p.detach().clone() for p in self.net.parameters()]
        self._give(self.average)
        yield
        self._give(kept)

    @torch.no_grad()
    def _give(self, weights: list[Tensor]) -> None:
        for parameter, weight in zip(self.net.parameters(), weights, strict=True):
            parameter.copy_(weight)


def train(
    task: RecurrentTask, net: RecurrentNetwork, arm: str, name: str, epochs: int, seed: int
) -> None:
    last = LastEpoch(net, epochs)
    records = task.train(
        net,
        Phase(name.split()[0], epochs, seed, label=name),
        Callbacks(last.on_epoch, should_stop=last.before_step),
    )
    with last.averaged():
        averaged = task.evaluate(net)["perplexity"]
    shares = ", ".join(f"{share:+.3f}" for share in net.cell.average().tolist()[1:])
    print(
        f"{arm:9s} {name:8s} training {records[-1]['error']:7.2f}  validation"
        f" {records[-1]['validation_error']:7.2f}  averaged {averaged:7.2f}  shares [{shares}]",
        flush=True,
    )


def main() -> None:
    keep_freed_memory()
    corpus = load_text(
        arguments.text, arguments.root, vocabulary=arguments.vocabulary, limit=arguments.limit
    )
    changes = {k: yaml.safe_load(v) for k, v in (text.split("=", 1) for text in arguments.set)}
    recipe = LanguageRecipe.named(arguments.text, **changes)
    task = RecurrentTask(RecurrentSpace(corpus.vocabulary, arguments.hidden), corpus, recipe)
    seed_epochs, weak_epochs, final_epochs = arguments.epochs
    seed = 1000 * arguments.seed
    torch.manual_seed(seed)
    grown = task.space.build(task.space.seed())
    train(task, grown, "both", "seed", seed_epochs, seed)
    control = copy.deepcopy(grown)
    for growth in range(1, arguments.growths + 1):
        torch.manual_seed(seed + 1)
        attach_candidates(grown, arguments.l1)
        train(task, grown, "grown", f"weak {growth}", weak_epochs, seed + 1)
        rows = alpha_tables(grown)["cell"]
        print(", ".join(f"{r['op']}({r['source']}) {r['alpha']:+.3f}" for r in rows))
        print(finalize_candidates(grown, i_max=1).to_json())
        train(task, grown, "grown", f"final {growth}", final_epochs, seed + 2)
        train(task, control, "no growth", f"weak {growth}", weak_epochs, seed + 1)
        train(task, control, "no growth", f"final {growth}", final_epochs, seed + 2)
        seed += 10
    tested = [task.test(net)["perplexity"] for net in (grown, control)]
    print("test: grown {:.2f}, no growth {:.2f}".format(*tested))


if __name__ == "__main__":
    main()
