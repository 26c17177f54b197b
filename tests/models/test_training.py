"""Small models trained for many steps, compiled and eager from the same weights and the same data.

What comes in: a residual network with batch norm, GPT-2 and a vision transformer. What goes out: nothing.
What holds: after each of fifty steps of AdamW the loss is as near to that of a float64 run as eager's is, and
so are the running statistics at the end; dropout is off, or drawn by PyTorch.

Training multiplies rounding errors, so no tolerance could say what is right: float64 does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

STEPS = 50
BATCHES = 4

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


class Residual(nn.Module):
    """Two convolutions with batch norm, around them a projection or the input itself."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
        project = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.around = nn.Identity() if before == after else project

    def forward(self, x: Tensor) -> Tensor:
        """relu(norm(conv(relu(norm(conv(x))))) + around(x))"""
        inside = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inside)) + self.around(x))


def residual_network() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    body = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
    return nn.Sequential(stem, body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def language_model(dropout: float = 0.0) -> nn.Module:
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes = {"vocab_size": 97, "n_positions": 24, "n_embd": 24, "n_layer": 2, "n_head": 3}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **drops, use_cache=False))


def vision_transformer() -> nn.Module:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
    config = hf.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=10)
    return hf.ViTForImageClassification(config)


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return F.cross_entropy(getattr(out, "logits", out), y)


def predict(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    logits = model(x).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def pictures() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 3, 16, 16), torch.randint(10, (8,))) for _ in range(BATCHES)]


def texts() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randint(97, (4, 19)), torch.zeros(0)) for _ in range(BATCHES)]


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss, Callable[[], list[tuple[Tensor, Tensor]]]]] = {
    "residual network": (residual_network, classify, pictures),
    "language model": (language_model, predict, texts),
    "vision transformer": (vision_transformer, classify, pictures),
}


def train(
    model: nn.Module, loss_of: Loss, data: list[tuple[Tensor, Tensor]], dtype: torch.dtype, compiled: bool,
    steps: int = STEPS, **options: Any,
) -> tuple[list[float], list[Tensor]]:  # fmt: skip
    """The loss of each step, and the buffers at the end. bfloat16 is autocast's."""
    model = copy.deepcopy(model).train()
    if dtype is torch.float64:
        model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = loss_of
    if compiled:
        step = torch.compile(loss_of, backend="hotloop", fullgraph=True, options=options or None)
    losses = []
    for number in range(steps):
        x, y = data[number % BATCHES]
        x = x.double() if dtype is torch.float64 and x.is_floating_point() else x
        low = torch.autocast("cpu", torch.bfloat16) if dtype is torch.bfloat16 else nullcontext()
        optimizer.zero_grad()
        with low:
            loss = step(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [b.detach().clone() for b in model.buffers() if b.is_floating_point()]


@cache
def exact_run(name: str) -> tuple[Any, ...]:
    """The model, its data, and what training gives in float64."""
    make, loss_of, samples = MODELS[name]
    torch.manual_seed(3)
    model, data = make(), samples()
    return model, data, *train(model, loss_of, data, torch.float64, compiled=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_as_accurate_as_eager(name: str, dtype: torch.dtype) -> None:
    loss_of = MODELS[name][1]
    model, data, exact, statistics = exact_run(name)
    eager, eagers = train(model, loss_of, data, dtype, compiled=False)
    got, ours = train(model, loss_of, data, dtype, compiled=True)
    eps = torch.finfo(dtype).eps
    assert got[0] == pytest.approx(exact[0], rel=4 * eps), "the first step"
    error, theirs = (max(abs(a - b) for a, b in zip(run, exact, strict=True)) for run in (got, eager))
    assert error <= 2 * theirs + 4 * eps * max(exact), f"losses are wrong by {error}, eager's by {theirs}"
    assert exact[-1] < 0.8 * exact[0], "nothing was learnt"
    for mine, eagers_own, truth in zip(ours, eagers, statistics, strict=True):
        worst, allowed = (float((b.double() - truth).abs().max()) for b in (mine, eagers_own))
        scale = float(truth.abs().max())
        assert worst <= 3 * allowed + 4 * eps * scale, f"running statistics: {worst}, eager's {allowed}"


def test_training_with_eagers_dropout() -> None:
    torch.manual_seed(3)
    model, data = language_model(dropout=0.1), texts()
    torch.manual_seed(4)
    eager, _ = train(model, predict, data, torch.float32, compiled=False, steps=20)
    torch.manual_seed(4)
    got, _ = train(model, predict, data, torch.float32, compiled=True, steps=20, fallback_random=True)
    assert got == pytest.approx(eager, rel=1e-4)


def test_training_with_dropout_of_our_own() -> None:
    """Other masks, and about the same progress."""
    torch.manual_seed(3)
    model, data = language_model(dropout=0.1), texts()
    eager, _ = train(model, predict, data, torch.float32, compiled=False, steps=20)
    got, _ = train(model, predict, data, torch.float32, compiled=True, steps=20)
    assert got != eager and got[-1] == pytest.approx(eager[-1], rel=0.1)
