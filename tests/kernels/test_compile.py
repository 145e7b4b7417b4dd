"""Networks under torch.compile without graph breaks, and under double backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nni_petridish import attach_candidates, finalize_candidates, make_growable
from nni_petridish.kernels.switch import plain_ops
from search_spaces import VisionSpace

OPS = ["sep_conv_3x3", "dil_conv_3x3", "max_pool_3x3", "identity"]


def built_in() -> nn.Module:
    space = VisionSpace((3, 8, 8), 10, cells_per_stage=1, filters=4, stages=2, ops=OPS)
    return space.build(space.seed())


def any_model() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
    )
    return make_growable(net, torch.zeros(1, 3, 8, 8), sites=["2"], ops=OPS)


def network(make: object, stage: str) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = make()  # type: ignore[operator]
    if stage != "seed":
        attach_candidates(net)
    if stage == "grown":
        finalize_candidates(net)
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                if name.endswith("eta"):
                    parameter.fill_(0.5)
    return net


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("stage", ["attached", "grown"])
@pytest.mark.parametrize("make", [built_in, any_model])
def test_the_whole_network_is_one_graph_with_the_same_numbers(make: object, stage: str) -> None:
    torch._dynamo.reset()
    gradients = []
    for compiled in (False, True):
        net = network(make, stage).train()
        call = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
        call(images()).square().mean().backward()
        gradients.append({name: p.grad for name, p in net.named_parameters()})
        net.eval()
        with torch.no_grad():
            outputs = call(images()) if not compiled else (call(images()), net(images()))
    torch.testing.assert_close(outputs[0], outputs[1])
    plain, traced = gradients
    for name in plain:
        assert (plain[name] is None) == (traced[name] is None)
        torch.testing.assert_close(traced[name], plain[name], rtol=1e-3, atol=1e-5)


def test_a_second_derivative_needs_plain_ops_and_the_error_says_so() -> None:
    def penalty(net: nn.Module) -> Tensor:
        loss = net(images().contiguous(memory_format=torch.channels_last)).square().mean()
        own = [p for name, p in net.named_parameters() if "cells" in name]
        found = torch.autograd.grad(loss, own, create_graph=True, allow_unused=True)
        return torch.stack([g.square().sum() for g in found if g is not None]).sum()

    with pytest.raises(RuntimeError, match=r"differentiated once only: use .*plain_ops"):
        penalty(network(built_in, "grown")).backward()
    with plain_ops():
        penalty(network(built_in, "grown")).backward()


@pytest.mark.parametrize("stage", ["seed", "attached", "grown"])
@pytest.mark.parametrize("make", [built_in, any_model])
def test_torch_func_gives_the_gradients_of_training_but_for_l1(make: object, stage: str) -> None:
    net = network(make, stage).train()
    buffers = {name: buffer.detach().clone() for name, buffer in net.named_buffers()}

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, (parameters, buffers), images()).square().mean()

    parameters = {name: parameter.detach() for name, parameter in net.named_parameters()}
    found = torch.func.grad(loss)(parameters, buffers)
    net(images()).square().mean().backward()
    for name, parameter in net.named_parameters():
        if parameter.grad is None:
            continue
        # L1 is a hook of α itself, and torch.func differentiates with respect to copies.
        l1 = 0.001 * parameter.detach().sign() if name.endswith("alpha") else 0.0
        torch.testing.assert_close(found[name], parameter.grad - l1, rtol=1e-3, atol=1e-5)
