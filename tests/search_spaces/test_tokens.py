"""Growth on tokens: transformers of torchvision, timm and Hugging Face, with random weights."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from nni_petridish import (
    Genotype,
    Grower,
    attach_candidates,
    finalize_candidates,
    make_growable,
    sites,
)
from nni_petridish.core import candidate_parameters
from nni_petridish.errors import GrowthError
from search_spaces.any_model import token_registry
from search_spaces.any_model.causality import looks_ahead
from search_spaces.any_model.token_ops import make_token_op
from search_spaces.any_model.token_registry import (
    CAUSAL_TOKEN_OPS,
    KNOWN_TOKEN_OPS,
    TOKEN_OPS,
    register_token_op,
)

with contextlib.redirect_stdout(io.StringIO()):  # it prints itself
    import this


def vit() -> tuple[nn.Module, Tensor]:
    net = VisionTransformer(8, 2, 2, 2, 16, 32, num_classes=5)
    nn.init.normal_(net.heads.head.weight)  # zero by default, which stops every gradient
    return net, torch.randn(3, 3, 8, 8)


def mixer() -> tuple[nn.Module, Tensor]:
    models = importlib.import_module("timm.models.mlp_mixer")
    net = models.MlpMixer(num_classes=5, img_size=16, patch_size=4, num_blocks=2, embed_dim=16)
    nn.init.normal_(net.head.weight)
    return net, torch.randn(3, 3, 16, 16)


def gpt2() -> tuple[nn.Module, Tensor]:
    hf = importlib.import_module("transformers")
    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    config = hf.GPT2Config(vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=2, **ends)
    return hf.GPT2LMHeadModel(config), torch.randint(0, 20, (3, 6))


def bert() -> tuple[nn.Module, Tensor]:
    hf = importlib.import_module("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.BertConfig(**sizes, intermediate_size=32, max_position_embeddings=16)
    return hf.BertForSequenceClassification(config), torch.randint(1, 20, (3, 6))


def timm_vit() -> tuple[nn.Module, Tensor]:
    models = importlib.import_module("timm.models.vision_transformer")
    sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 16, "depth": 2, "num_heads": 2}
    net = models.VisionTransformer(**sizes, num_classes=5)
    nn.init.normal_(net.head.weight)
    return net, torch.randn(3, 3, 8, 8)


def timm_swin() -> tuple[nn.Module, Tensor]:
    models = importlib.import_module("timm.models.swin_transformer")
    sizes = {"img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 8}
    net = models.SwinTransformer(**sizes, depths=(1, 1), num_heads=(2, 2), num_classes=5)
    nn.init.normal_(net.head.fc.weight)
    return net, torch.randn(3, 3, 16, 16)


def timm_convnext() -> tuple[nn.Module, Tensor]:
    models = importlib.import_module("timm.models.convnext")
    net = models.ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=5)
    nn.init.normal_(net.head.fc.weight)
    return net, torch.randn(3, 3, 64, 64)


STAGES = {timm_swin: ["norm"], timm_convnext: ["stages.1", "stages.2", "norm_pre"]}
"""Networks of images within, not of tokens: their sites."""
MODELS = {
    vit: ("encoder.dropout", "encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1"),
    timm_vit: ("norm_pre", "blocks.0", "blocks.1"),
    mixer: ("stem", "blocks.0", "blocks.1"),
    gpt2: ("transformer.drop", "transformer.h.0", "transformer.h.1"),
    bert: ("bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1"),
}
each_model = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
Made = Callable[[], tuple[nn.Module, Tensor]]


def logits(net: nn.Module, x: Tensor, **options: Tensor) -> Tensor:
    y = net(x, **options)
    return y if isinstance(y, Tensor) else y.logits


def predict(net: nn.Module, x: Tensor, **options: Tensor) -> Tensor:
    with torch.no_grad():
        return logits(net.eval(), x, **options)


def grown(make: Made) -> tuple[nn.Module, Tensor]:
    """Return a network with weak learners of all kinds that take part in its predictions."""
    torch.manual_seed(0)
    net, x = make()
    attach_candidates(make_growable(net.eval(), x))
    finalize_candidates(net, i_max=7)
    for site in sites(net):
        site.learners[0].eta.data.fill_(0.5)
    return net, x


@each_model
def test_blocks_grow_and_no_prediction_or_gradient_changes(make: Made) -> None:
    torch.manual_seed(0)
    net, x = make()
    net.eval()
    before, twin = predict(net, x), copy.deepcopy(net)
    make_growable(net, x)
    entry, first, second = MODELS[make]
    assert dict(net.genotype.sources) == {first: (entry,), second: (entry, first)}
    assert net.genotype.ops == (CAUSAL_TOKEN_OPS if make is gpt2 else TOKEN_OPS)

    attach_candidates(net)
    assert torch.equal(predict(net, x), before)
    for model in (net, twin):
        logits(model, x).logsumexp(-1).sum().backward()
    for name, parameter in twin.named_parameters():
        found = net.get_parameter(name).grad
        assert (found is None) == (parameter.grad is None), name
        assert found is None or torch.equal(found, parameter.grad), name
    assert all(parameter.grad is not None for parameter in candidate_parameters(net))
    assert all(bool(site.weak_learner.table.alpha.grad.any()) for site in sites(net))

    torch.optim.SGD(net.parameters(), 0.1).step()
    trained = predict(net, x)
    finalize_candidates(net, i_max=2)
    assert torch.equal(predict(net, x), trained)


@each_model
def test_a_grown_network_loads_and_exports(make: Made) -> None:
    net, x = grown(make)
    again = make_growable(make()[0], x, genotype=Genotype.from_json(net.genotype.to_json()))
    again.load_state_dict(net.state_dict())
    expected = predict(net, x)
    assert torch.equal(predict(again, x), expected)
    exported = torch.export.export(net.eval(), (x,), strict=False).module()
    torch.testing.assert_close(logits(exported, x), expected)


@pytest.mark.parametrize("make", STAGES, ids=lambda make: make.__name__)
def test_networks_with_stages_grow_as_images(make: Made) -> None:
    torch.manual_seed(0)
    net, x = make()
    before = predict(net, x)
    make_growable(net, x)
    assert [site.key for site in sites(net)] == STAGES[make]
    attach_candidates(net)
    assert torch.equal(predict(net, x), before)
    finalize_candidates(net, i_max=2)
    assert torch.equal(predict(net, x), before)
    for site in sites(net):
        site.learners[0].eta.data.fill_(0.5)
    expected = predict(net, x)
    assert not torch.equal(expected, before)
    again = make_growable(make()[0], x, genotype=Genotype.from_json(net.genotype.to_json()))
    again.load_state_dict(net.state_dict())
    assert torch.equal(predict(again, x), expected)
    exported = torch.export.export(net.eval(), (x,), strict=False).module()
    torch.testing.assert_close(logits(exported, x), expected)


def train(
    net: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], growing: tuple[int, int, int]
) -> list[float]:
    """Grow once within a loop of so many steps before, during and after weak learning."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.003)
    grower = Grower(net, optimizer, i_max=2)
    before, weak, after = growing
    losses = []
    for step, (x, y) in zip(range(before + weak + after), batches, strict=False):
        if step == before:
            grower.attach()
        if step == before + weak:
            grower.finalize()
        loss = F.cross_entropy(logits(net, x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_a_language_model_grows_on_text() -> None:
    text = (this.s * 2)[:1700].lower()
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(letter) for letter in text])
    hf = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=len(letters), n_positions=32, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    net = hf.GPT2LMHeadModel(config)
    make_growable(net, codes[None, :32])

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            starts = torch.randint(len(codes) - 33, (16,))
            rows = torch.stack([codes[start : start + 33] for start in starts])
            yield rows[:, :-1], rows[:, 1:]

    losses = train(net, batches(), (40, 20, 40))
    assert net.genotype.growths == 1
    assert all(site.learners[0].eta.item() != 0 for site in sites(net))  # they take part
    assert sum(losses[-5:]) / 5 < sum(losses[35:40]) / 5 - 0.1 < losses[0] - 0.3


def test_a_vision_transformer_grows_on_images() -> None:
    X, y = load_digits(return_X_y=True)
    images = torch.from_numpy(X).float().reshape(-1, 1, 8, 8).expand(-1, 3, 8, 8) / 8 - 1
    labels = torch.from_numpy(y)
    torch.manual_seed(0)
    net = VisionTransformer(8, 2, 2, 2, 16, 32, num_classes=10)
    make_growable(net, images[:1])

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            chosen = torch.randint(1500, (64,))
            yield images[chosen], labels[chosen]

    train(net, batches(), (40, 20, 60))
    assert net.genotype.growths == 1
    right = predict(net, images[1500:]).argmax(1) == labels[1500:]
    assert float(right.float().mean()) > 0.5  # by chance 0.1
    assert all(site.learners[0].eta.item() != 0 for site in sites(net))


def test_a_grown_gpt2_stays_causal() -> None:
    net, x = grown(gpt2)
    other = x.clone()
    other[:, -1] = (other[:, -1] + 1) % 20
    assert torch.equal(predict(net, x)[:, :-1], predict(net, other)[:, :-1])
    assert not torch.equal(predict(net, x)[:, -1], predict(net, other)[:, -1])


def test_an_op_that_looks_ahead_is_refused_in_a_causal_network() -> None:
    net, x = gpt2()
    with pytest.raises(GrowthError, match=r"is causal but attention_1h would let its tokens read"):
        make_growable(net, x, ops=["attention_1h", "identity"])


def test_a_cache_of_earlier_tokens_is_refused() -> None:
    net, x = grown(gpt2)
    with torch.no_grad():
        cache = net(x, use_cache=True).past_key_values
        with pytest.raises(GrowthError, match="call the network with use_cache=False"):
            net(x[:, :1], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("make", [bert, gpt2])
def test_padding_is_not_read(make: Made) -> None:
    net, x = grown(make)
    mask = torch.ones_like(x)
    mask[:, -2:] = 0
    other = x.clone()
    other[:, -2:] = (other[:, -2:] + 1) % 20
    found = [predict(net, tokens, attention_mask=mask) for tokens in (x, other)]
    if make is gpt2:
        found = [each[:, :-2] for each in found]
    assert torch.equal(*found)
    assert bool(found[0].isfinite().all())
    if make is gpt2:
        assert bool(predict(net, x, attention_mask=mask.flip(1)).isfinite().all())
    with pytest.raises(GrowthError, match=r"attention_mask must have the shape .*\(3, 6\)"):
        predict(net, x, attention_mask=torch.ones(3, 1, 6, 6))


@pytest.mark.parametrize("op", KNOWN_TOKEN_OPS)
def test_ops_keep_the_shape_and_normalize_every_token(op: str) -> None:
    torch.manual_seed(0)
    u = make_token_op(op, 10, lambda z: None)(torch.randn(2, 5, 10))
    assert u.shape == (2, 5, 10)
    torch.testing.assert_close(u.mean(-1), torch.zeros(2, 5), atol=1e-5, rtol=0)
    torch.testing.assert_close(u.var(-1, correction=0), torch.ones(2, 5), atol=0.02, rtol=0)
    assert looks_ahead(op, 10) == (op.startswith(("attention", "sep_conv")))


def test_one_decorated_function_adds_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    known = token_registry.KNOWN_TOKEN_OPS
    monkeypatch.setattr(known, "makers", dict(known.makers))

    @register_token_op("linear")
    def linear(width: int) -> nn.Module:
        return nn.Linear(width, width)

    net, x = vit()
    make_growable(net, x, ops=["linear"])
    attach_candidates(net)
    genotype = finalize_candidates(net, i_max=1)
    assert genotype.learners[MODELS[vit][1]] == (((MODELS[vit][0], "linear"),),)


def test_convolutions_over_time_are_not_taken_for_tokens() -> None:
    net = nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1))
    with pytest.raises(GrowthError, match="must return images"):
        make_growable(net, torch.randn(2, 3, 7), sites=["1"], sources=["0"])
