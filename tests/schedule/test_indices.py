"""Computed indices become formulas, and only where the formula gives every number."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given
from hypothesis import strategies as st

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.schedule.indices import settle


def computed(n: int, scale: float, offset: float, size: int) -> ex.Expr:
    """``x[int((i + offset) * scale)]`` as upsampling computes it."""
    i = ex.cast(ex.index_value(ix.var("i0", n)), torch.float32)
    at = ex.call("mul", ex.call("add", i, ex.const(offset, torch.float32)), ex.const(scale, torch.float32))
    return ex.load("x", (ix.indirect(ex.cast(at, torch.int64), size),), torch.float32)


@pytest.mark.parametrize(
    ("n", "scale", "formula"), [(112, 0.5, "(i0//2)"), (60, 0.25, "(i0//4)"), (9, 1.0, "i0")]
)
def test_a_nearest_neighbour_is_a_quotient(n: int, scale: float, formula: str) -> None:
    (index,) = settle(computed(n, scale, 0.0, n)).indices
    assert repr(index) == formula


def test_what_leaves_the_tensor_is_left_to_the_kernel() -> None:
    body = computed(100, 0.5, 0.0, 49)  # the last two read position 49
    assert settle(body) is body


def test_what_is_read_from_memory_is_left() -> None:
    i = ix.var("i0", 8)
    body = ex.load("x", (ix.indirect(ex.load("at", (i,), torch.int64), 8),), torch.float32)
    assert settle(body) is body


@given(st.integers(2, 70), st.floats(0.05, 3.0), st.floats(0.0, 2.0))
def test_a_formula_gives_every_number(n: int, scale: float, offset: float) -> None:
    positions = ((torch.arange(n).float() + offset) * scale).to(torch.int64).tolist()
    (index,) = settle(computed(n, scale, offset, max(positions) + 1)).indices
    if index.kind != "indirect":
        (v,) = index.free_vars or (ix.var("i0", n),)
        assert [ix.evaluate(index, {v: k}) for k in range(n)] == positions


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("scale", [2.0, 1.5, 0.5, 3.0])
def test_upsampling_is_eager_s(mode: str, scale: float) -> None:
    x = torch.randn(2, 3, 7, 12)

    def f(x: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(x, scale_factor=scale, mode=mode) + 1

    torch.compiler.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(f, backend="hotloop", dynamic=False)(x), f(x))
