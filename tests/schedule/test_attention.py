"""Attention in kernels of our own: right for every size, mask and layout, for NaN and -inf as the library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planned import LEVELS, Block, can_run, check, exact, planned, steps
from torch.nn import functional as F

from hotloop.ir.interpret_kernel import run_schedule
from hotloop.ir.kernel import Attend, KernelCall, statements

LIBRARY = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def heads(b: int, h: int, rows: int, d: int) -> torch.Tensor:
    """(b, h, rows, d), as a projection leaves it: rows before heads."""
    return torch.randn(b, rows, h, d).transpose(1, 2)


def attention(causal: bool = False, scale: float | None = None) -> Block:
    def f(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)

    return Block(f)


SIZES = [
    (2, 2, 33, 33, 16),
    (1, 3, 50, 77, 32),
    (1, 1, 49, 16, 48),
    (1, 3, 197, 197, 64),
    (2, 1, 17, 130, 80),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size: tuple[int, ...], causal: bool) -> None:
    b, h, rows, keys, d = size
    check(
        attention(causal),
        heads(b, h, rows, d),
        heads(b, h, keys, d),
        heads(b, h, keys, d),
        kernels=["attention"],
    )


@pytest.mark.parametrize("shape", [(2, 3, 40, 50), (2, 1, 40, 50), (1, 1, 1, 50), (40, 50)], ids=str)
def test_masks(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    mask = torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, -torch.inf)
    q, k, v = heads(2, 3, 40, 16), heads(2, 3, 50, 16), heads(2, 3, 50, 16)
    check(attention(scale=0.3), q, k, v, mask, kernels=["attention"])


def test_levels_tell_tiles() -> None:
    q, k, v = heads(1, 2, 50, 16), heads(1, 2, 60, 16), heads(1, 2, 60, 16)
    expected = exact(attention(), q, k, v)()
    for level in LEVELS:
        made, args = planned(attention(), q, k, v, level=level)
        assert steps(made) == ["attention"], level
        (result,) = run_schedule(made, args)
        torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-4)
        if can_run(level):
            torch.compiler.reset()
            run = torch.compile(attention(), backend="hotloop", options={"cpp.simd": level})
            torch.testing.assert_close(run(q, k, v).double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_without_weights_and_what_is_not_finite_are_as_eagers(causal: bool) -> None:
    q, k, v = heads(1, 2, 60, 16), heads(1, 2, 60, 16), heads(1, 2, 60, 16)
    q[0, 0, 20] = torch.nan
    q[0, 1, 21, 3] = -torch.inf
    k[0, 1, 55, 0] = torch.nan
    mask = torch.zeros(60, 60)
    mask[30] = -torch.inf
    mask[31, 7] = torch.inf
    q[0, 0, 40] *= 1e30
    inputs = (q, k, v) if causal else (q, k, v, mask)
    expected = attention(causal)(*inputs)
    assert (expected == 0).all(3).any() != causal and expected.isnan().any()
    torch.compiler.reset()
    result = torch.compile(attention(causal), backend="hotloop")(*inputs)
    torch.testing.assert_close(result, expected, equal_nan=True)
    made, args = planned(attention(causal), *inputs)
    torch.testing.assert_close(run_schedule(made, args)[0], expected, equal_nan=True)


def test_weights_that_vanish_and_scores_far_apart() -> None:
    q, k, v = heads(1, 2, 32, 16), heads(1, 2, 32, 16), heads(1, 2, 32, 16)
    check(attention(scale=40.0), q, k, v, kernels=["attention"])


def test_layouts() -> None:
    packed = torch.randn(2, 40, 3 * 4 * 16)

    def f(_: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (4, 16)).transpose(1, 2) for part in x.chunk(3, 2))
        shared = k[:, :1].expand(-1, 4, -1, -1)
        return F.scaled_dot_product_attention(q, shared, v).transpose(1, 2).flatten(2) * 2

    made = check(Block(f), packed)
    assert "attention" in steps(made)


def test_few_heads_are_divided_by_rows() -> None:
    made = check(attention(True), heads(1, 1, 130, 16), heads(1, 1, 130, 16), heads(1, 1, 130, 16))
    (call,) = made.steps
    assert isinstance(call, KernelCall)
    (attend,) = (s for s in statements(call.kernel.body) if isinstance(s, Attend))
    assert attend.most == 96


def test_what_stays_with_the_library() -> None:
    for rows, keys, d in ((4, 40, 16), (40, 15, 16), (40, 2000, 16), (40, 40, 13)):
        made, _ = planned(attention(), heads(1, 2, rows, d), heads(1, 2, keys, d), heads(1, 2, keys, d))
        assert LIBRARY in steps(made)
    q = heads(1, 2, 40, 16).to(torch.bfloat16)
    assert LIBRARY in steps(planned(attention(), q, q, q)[0])
    assert LIBRARY in steps(planned(attention(), q.float(), q.float(), q.float(), level="scalar")[0])
