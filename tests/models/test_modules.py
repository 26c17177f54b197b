"""Modules of torch.nn trained for a few steps, compiled and eager: what is in no model of the zoo.

What comes in: a module and its input. What goes out: nothing. What holds: losses, parameters and buffers are
as near to those of a float64 run as eager's are; modules that draw have eager's numbers, then our own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import judge

STEPS = 2
ROWS, PICTURES, TOKENS = "rows", "pictures", "tokens"


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


class Tied(nn.Module):
    """One weight, twice in the graph: as an embedding and as a projection."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(20, 8, **more), nn.Linear(8, 20, bias=False)
        self.project.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """log_softmax(embed(tokens) @ weight)"""
        return self.project(self.embed(tokens)).log_softmax(-1)


class InParts(nn.Module):
    """Two graphs, a value that crosses the border between them twice, and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """second(relu(first(x))) + relu(first(x))"""
        y = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(y) + y


class InPlace(nn.Module):
    """Writes to a buffer, to parts of a result, and to the result of an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        """relu(linear(x)) with every other column doubled, without the means seen so far."""
        y = self.linear(x)
        self.seen += y.detach().mean((0, 1))
        y = y.clone()
        y[..., ::2] *= 2
        y.relu_()
        return y - self.seen


class Attention(nn.MultiheadAttention):
    """Of a sequence to itself."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """The result, without the weights."""
        return super().forward(x, x, x)[0]


def drops() -> nn.Module:
    noisy = [nn.Dropout2d(0.3), nn.AlphaDropout(0.2), nn.RReLU(), nn.FeatureAlphaDropout(0.2)]
    return nn.Sequential(nn.Conv2d(3, 6, 3), *noisy, nn.Flatten(), nn.Dropout(0.1), nn.Linear(600, 3))


def resampled() -> nn.Module:
    sizes = nn.Sequential(nn.Upsample(scale_factor=2, mode="bicubic"), nn.PixelShuffle(2), nn.LPPool2d(2, 2))
    conv = nn.Conv2d(3, 12, 3, groups=3, padding=2, dilation=2)
    return nn.Sequential(conv, nn.GroupNorm(2, 12), nn.PReLU(12), sizes, nn.AdaptiveMaxPool2d(3))


def activations() -> nn.Module:
    kinds = [nn.Softshrink(), nn.Hardswish(), nn.Mish(), nn.GLU(-1), nn.CELU(), nn.Tanhshrink()]
    return nn.Sequential(nn.Linear(16, 16), *kinds, nn.LogSigmoid())


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(16, 8)), ROWS),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(16, 8)), ROWS),
    "LSTM": (lambda: nn.LSTM(16, 8, 2, batch_first=True), ROWS),
    "GRU": (lambda: nn.GRU(16, 8, bidirectional=True), ROWS),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), ROWS),
    "attention": (lambda: Attention(16, 4, dropout=0.1, batch_first=True), ROWS),
    "tied weights": (Tied, TOKENS),
    "gradients by frequency": (lambda: Tied(scale_grad_by_freq=True, padding_idx=3), TOKENS),
    "in parts": (InParts, ROWS),
    "in place": (InPlace, ROWS),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), PICTURES),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 5, 3, 2, 1, output_padding=1), PICTURES),
    "resampled": (resampled, PICTURES),
    "activations": (activations, ROWS),
    "drops": (drops, PICTURES),
}
DRAWING = ("encoder layer", "attention", "drops")


def data(kind: str) -> Tensor:
    torch.manual_seed(2)
    rows, pictures = torch.randn(4, 6, 16), torch.randn(4, 3, 12, 12)
    return {ROWS: rows, PICTURES: pictures, TOKENS: torch.randint(20, (4, 7))}[kind]


def train(module: nn.Module, x: Tensor, compiled: bool = False, **options: Any) -> list[Tensor]:
    """The losses, parameters and buffers of some steps, with a seed for each."""
    module = copy.deepcopy(module).train()
    x = x.to(next(module.parameters()).dtype) if x.is_floating_point() else x
    run = torch.compile(module, backend="hotloop", options=options or None) if compiled else module
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        y = run(x)
        y = y[0] if isinstance(y, tuple) else y
        loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y).to(y)).sum() + y.square().mean()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in module.parameters()), *module.buffers()]


@pytest.mark.parametrize("name", MODULES)
def test_training_a_module(name: str) -> None:
    make, kind = MODULES[name]
    torch.manual_seed(1)
    module, x = make(), data(kind)
    eager, got = train(module, x), train(module, x, compiled=True, fallback_random=name in DRAWING)
    # Drawn in float64, the noise would be another one.
    exact = None if name in DRAWING else train(copy.deepcopy(module).double(), x)
    judge.assert_as_accurate(got, eager, exact)
    if name in DRAWING:
        torch._dynamo.reset()
        assert all(bool(t.isfinite().all()) for t in train(module, x, compiled=True))
