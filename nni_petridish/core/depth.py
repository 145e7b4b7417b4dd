"""Selection of the shortcuts that make the network deepest.

A shortcut from a layer that was grown before puts its operation on top of that layer's, so that the
network sees further and composes more. Width cannot buy that. docs/results/growth.md has what was
measured.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, nn

from nni_petridish.core.held_out import Losses, alpha_tables_of
from nni_petridish.core.modes import evaluation_mode
from nni_petridish.core.untrained import Numbers, child_with, first_inputs, prior_score
from nni_petridish.kernels.switch import plain_ops

_WITH_WEIGHTS = ("Convolution", "Addmm", "Mm", "Bmm")
"""Starts of the names that autograd gives to products with weights."""


def depth_score(net: nn.Module, losses: Losses) -> Numbers:
    """Return the depth of each candidate's child; children of one depth are ranked by their prior.

    It needs no weak learning.

    Parameters
    ----------
    net
        A network with candidates attached. It does not change.
    losses
        Returns parts of the loss on held-out batches; the first input of the first one is used.
    """
    image = first_inputs(net, losses)[:1]
    promised = prior_score(net, losses)
    above = 1.0 + max(score for table in promised.values() for score in table)
    return {
        key: [
            network_depth(child_with(net, key, place), image) + promised[key][place] / above
            for place in range(len(table.shortcuts))
        ]
        for key, table in alpha_tables_of(net).items()
    }


def network_depth(net: nn.Module, inputs: Tensor) -> int:
    """Return the number of layers with weights on the longest way through a network.

    A separable convolution has two such layers, a pooling and an identity have none.
    """
    with evaluation_mode(net), torch.enable_grad(), plain_ops():
        output = net(inputs.detach().requires_grad_())
    return _longest_way(output.grad_fn)


def _longest_way(output: torch.autograd.graph.Node | None) -> int:
    """Return the largest number of products with weights on a way from an output back."""
    if output is None:
        return 0
    users: dict[object, int] = {output: 0}
    waiting = [output]
    while waiting:
        for before in _before(waiting.pop()):
            if before not in users:
                waiting.append(before)
            users[before] = users.get(before, 0) + 1
    depth, ready = dict.fromkeys(users, 0), deque([output])
    while ready:
        node = ready.popleft()
        depth[node] += node.name().startswith(_WITH_WEIGHTS)
        for before in _before(node):
            depth[before] = max(depth[before], depth[node])
            users[before] -= 1
            if not users[before]:
                ready.append(before)
    return max(depth.values())


def _before(node: torch.autograd.graph.Node) -> list[torch.autograd.graph.Node]:
    return [before for before, _ in node.next_functions if before is not None]
