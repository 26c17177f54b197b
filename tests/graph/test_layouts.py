"""Channels-last for convolutions: where it is chosen, and that nobody outside can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tracing import cleaned, trace

from hotloop.graph import layouts
from judge import assert_as_accurate, reference_of

SEEDED = torch.Generator().manual_seed(0)
X = torch.randn(2, 8, 9, 11, generator=SEEDED)
W = torch.randn(16, 8, 3, 3, generator=SEEDED)
V = torch.randn(16, 16, 1, 1, generator=SEEDED)


def laid_out(f: Callable[..., Any], *inputs: Any) -> tuple[bool, list[torch.fx.Node]]:
    """Whether the pass did anything, and the operators of the graph after it."""
    gm = cleaned(trace(f, *inputs))
    changed = layouts.channels_last(gm)
    return changed, [n for n in gm.graph.nodes if n.op == "call_function"]


def lies_last(node: torch.fx.Node) -> bool:
    return node.meta["val"].is_contiguous(memory_format=torch.channels_last)


def check(f: Callable[..., Any], *inputs: Any, calls: int = 3) -> None:
    """Compiled results equal eager's, strides included, at first and with packed weights."""
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="hotloop", fullgraph=True, dynamic=False)
    with torch.no_grad():
        eager = f(*inputs)
        for _ in range(calls):
            assert_as_accurate(compiled(*inputs), eager, reference_of(f, *inputs), check_stride=True)


def test_what_lies_between_convolutions_follows_them() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = F.relu(F.conv2d(x, w, padding=1)) * 2
        return F.conv2d(y, v).exp().sum((2, 3))

    changed, nodes = laid_out(f, X, W, V)
    assert changed
    assert [n.target for n in nodes].count(torch.ops.aten.clone.default) == 1  # the input alone
    assert all(lies_last(n) for n in nodes if n.meta["val"].ndim == 4)
    check(f, X, W, V)


def test_what_leaves_the_graph_keeps_its_strides() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.relu(F.conv2d(x, w))
        z = F.conv2d(y, v)
        return y, z + 1, z[:, 1:], y.transpose(1, 2)

    _, nodes = laid_out(f, X, W, V)
    first, second = (n for n in nodes if n.target is torch.ops.aten.convolution.default)
    assert lies_last(first) and not lies_last(second)  # a view of the second one is given away
    check(f, X, W, V)


def test_one_copy_serves_all_convolutions_of_a_tensor() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (F.conv2d(x, w) + F.conv2d(x, w * 2)).sum()

    _, nodes = laid_out(f, X, W)
    assert [n.target for n in nodes].count(torch.ops.aten.clone.default) == 1
    check(f, X, W)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w, v: F.conv_transpose2d(x, w.transpose(0, 1)).relu().sum(),
        lambda x, w, v: F.conv1d(x.flatten(2), w.flatten(2)).relu().sum(),
        lambda x, w, v: F.conv2d(x.double(), w.double()).relu().sum(),
        lambda x, w, v: F.conv2d(x, w).relu().as_strided((3, 3), (5, 1), 2) * 1,
    ],
)
def test_what_gains_nothing_or_reads_memory_is_left_alone(f: Callable[..., Any]) -> None:
    changed, _ = laid_out(f, X, W, V)
    assert not changed
    check(f, X, W, V)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w, v: F.max_pool2d(F.conv2d(x, w), 3, 2, 1).sigmoid().flatten(1) * 2,
        lambda x, w, v: F.conv2d(F.avg_pool2d(F.conv2d(x, w, padding=1), 2), v).mean((2, 3)),
        lambda x, w, v: F.conv2d(torch.cat([F.conv2d(x, w)[:, ::2], x[:, :, 1:-1, 1:-1]], 1), v) + 1,
        lambda x, w, v: F.conv2d(F.pad(F.conv2d(x, w), (1, 0, 2, 1)), v).permute(0, 2, 3, 1) * 2,
        lambda x, w, v: F.interpolate(F.conv2d(x, w), scale_factor=2.0) - 1,
        lambda x, w, v: F.interpolate(F.conv2d(x, w), size=(5, 6), mode="bilinear") - 1,
        lambda x, w, v: F.group_norm(F.conv2d(x, w), 4).reshape(2, 16, -1) @ torch.ones(63, 3),
        lambda x, w, v: F.conv2d(F.conv2d(x, w), V.new_ones(16, 1, 3, 3), groups=16).var((0, 2, 3)),
        lambda x, w, v: F.conv2d(x.transpose(2, 3), w, stride=2, dilation=2).relu() + 1,
        lambda x, w, v: F.conv2d(x[0], w).relu() + 1,
        lambda x, w, v: F.conv2d(x, w).argmax(1),
        lambda x, w, v: torch.sort(F.conv2d(x, w) * 2, 3).values + 1,
        lambda x, w, v: F.conv2d(x, w).relu().view(2, 4, 4, 7, 9).sum(2),
        lambda x, w, v: F.conv2d(F.conv2d(x, w).relu().contiguous().view(2, 16, 9, 7), v).view(-1) * 1,
        lambda x, w, v: F.conv2d(x[:, :, :1, :1], w, padding=1) * 2,
        lambda x, w, v: F.pixel_shuffle(F.conv2d(x, w), 2) * 2,
    ],
)
def test_operators_around_convolutions(f: Callable[..., Any]) -> None:
    check(f, X, W, V)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, padding=1).relu() * 2

    check(f, X.to(dtype), W.to(dtype))


def test_random_numbers_on_a_convolution_are_as_in_eager() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w).bernoulli(0.5) + 1

    torch._dynamo.reset()
    compiled = torch.compile(f, backend="hotloop", options={"fallback_random": True})
    with torch.no_grad():
        torch.manual_seed(3)
        eager = f(X, W)
        torch.manual_seed(3)
        assert torch.equal(compiled(X, W), eager)


def test_training_keeps_eagers_layouts() -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1))
    compiled = torch.compile(model, backend="hotloop", fullgraph=True, dynamic=False)
    x = X.clone().requires_grad_()
    model(x).square().sum().backward()
    expected = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    x.grad = None
    compiled(x).square().sum().backward()
    found = [x.grad, *(p.grad for p in model.parameters())]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
