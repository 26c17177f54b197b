"""Writes at positions that are data, against eager, as loop programs and as kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from check import check, check_schedule, lowered
from torch.nn import functional

from hotloop.ir.interpret import run_program
from hotloop.ir.loops import Extern, Scatter

Function = Callable[..., Any]
put = torch.ops.aten.index_put
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
DTYPES = FLOATS + INTEGERS


def data(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape) > 0.5 if dtype is torch.bool else (torch.randn(shape) * 5).to(dtype)


def positions(n: int, *shape: int, negative: bool = False) -> torch.Tensor:
    return torch.randint(-n if negative else 0, n, shape)


def plus_zero(x: torch.Tensor) -> torch.Tensor:
    """The same values, computed."""
    return x + x.new_zeros(())


def both(f: Function, *inputs: Any, exact: bool = False) -> None:
    program = check(f, *inputs, exact=exact)
    if inputs[0].numel():
        assert any(isinstance(op, Scatter) for op in program.ops), program
    check_schedule(f, *inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter(dtype: torch.dtype) -> None:
    x, src = data(4, 6, 5, dtype=dtype), data(4, 7, 5, dtype=dtype)
    # The last of two values for one place stays, as in eager.
    both(lambda x, i, s: x.scatter(1, i, s), x, positions(6, 4, 7, 5), src, exact=True)
    both(lambda x, i, s: x.scatter(0, i, s), x, positions(4, 3, 2, 4), src, exact=True)
    both(lambda x, i, s: x.scatter(-1, i, s), x, positions(5, 2, 6, 4), src, exact=True)
    both(lambda x, i: x.scatter(1, i, 1), x, positions(6, 4, 3, 5), exact=True)
    both(lambda x, i, s: x.scatter(0, i, s), x.transpose(0, 2), positions(5, 3, 2, 4), src, exact=True)
    both(lambda x, i, s: plus_zero(x).scatter(1, i, s), x, positions(6, 4, 7, 5), src, exact=True)
    check(
        lambda x, i, s: x.scatter(0, i, s), data(dtype=dtype), torch.tensor(0), data(dtype=dtype), exact=True
    )
    check(
        lambda x, i, s: x.scatter(0, i, s),
        data(3, dtype=dtype),
        torch.tensor(2),
        data(dtype=dtype),
        exact=True,
    )
    check(lambda x, i, s: x.scatter(1, i, s), x, positions(6, 4, 0, 5), src, exact=True)
    check(lambda x, i, s: x.scatter(0, i, s), data(0, dtype=dtype), positions(1, 0), data(0, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter_add(dtype: torch.dtype) -> None:
    exact = not dtype.is_floating_point
    x, src = data(4, 6, 5, dtype=dtype), data(4, 9, 5, dtype=dtype)
    both(lambda x, i, s: x.scatter_add(1, i, s), x, positions(6, 4, 9, 5), src, exact=exact)
    both(lambda x, i, s: x.scatter_add(0, i, s), x, positions(4, 4, 5, 5), src, exact=exact)
    both(lambda x, i, s: x.scatter_add(-1, i, plus_zero(s)), x, positions(5, 4, 6, 5), src, exact=exact)
    if dtype is not torch.bool:
        both(lambda x, i, s: x.scatter(1, i, s, reduce="add"), x, positions(6, 4, 9, 5), src, exact=exact)
        both(lambda x, i: x.scatter(1, i, 2, reduce="multiply"), x, positions(6, 4, 9, 5), exact=exact)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter_reduce(dtype: torch.dtype, reduce: str, include_self: bool) -> None:
    if dtype is torch.bool and reduce == "mean":
        pytest.skip("eager has none")
    exact = not dtype.is_floating_point or reduce.startswith("am")

    def f(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor, dim: int = 1) -> torch.Tensor:
        return x.scatter_reduce(dim, i, s, reduce, include_self=include_self)

    x, src = data(3, 6, 4, dtype=dtype), data(3, 9, 4, dtype=dtype)
    if reduce == "prod" and dtype.is_floating_point:
        x, src = x / 4, src / 4
    both(f, x, positions(6, 3, 9, 4), src, exact=exact)
    both(lambda x, i, s: f(x, i, s, 0), x, positions(3, 3, 6, 4), src, exact=exact)
    if dtype.is_floating_point:
        x[0, 0, 0], src[1, 2, 3], src[2, 0, 0] = float("nan"), float("nan"), float("inf")
        both(f, x, positions(6, 3, 9, 4), src)


#: Each with the shape of the values. ``i`` has shape (3,), ``j`` (2, 2), ``k`` (2, 1).
PUTS: dict[str, tuple[Function, tuple[int, ...]]] = {
    "first": (lambda i, j, k: [i], (3, 5, 3)),
    "middle": (lambda i, j, k: [None, j], (4, 2, 2, 3)),
    "last": (lambda i, j, k: [None, None, k], (4, 5, 2, 1)),
    "two": (lambda i, j, k: [k, j], (2, 2, 3)),
    "two broadcast": (lambda i, j, k: [None, j, k], (4, 2, 2)),
    "apart": (lambda i, j, k: [k, None, k], (2, 1, 5)),
    "all": (lambda i, j, k: [k, j, k], (2, 2)),
    "value broadcast": (lambda i, j, k: [k, None, k], (5,)),
    "one value": (lambda i, j, k: [None, j], ()),
    "ones": (lambda i, j, k: [i], (1, 5, 1)),
    "zero-dim": (lambda i, j, k: [i[0]], (5, 3)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PUTS)
def test_index_put(name: str, dtype: torch.dtype) -> None:
    indices, shape = PUTS[name]
    x, v = data(4, 5, 3, dtype=dtype), data(*shape, dtype=dtype)
    # Without repetition: of two values for one place, eager does not say which one stays.
    i, j, k = torch.tensor([1, -1, 0]), torch.tensor([[0, -4], [2, -1]]), torch.tensor([[-1], [1]])
    both(lambda x, i, j, k, v: put(x, indices(i, j, k), v), x, i, j, k, v, exact=True)
    i, j, k = (
        positions(3, 3, negative=True),
        positions(5, 2, 2, negative=True),
        positions(3, 2, 1, negative=True),
    )
    both(
        lambda x, i, j, k, v: put(x, indices(i, j, k), v, accumulate=True),
        *(x, i, j, k, v),
        exact=not dtype.is_floating_point,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks(dtype: torch.dtype) -> None:
    """One value wherever a mask holds is a choice, not a scatter."""
    x, value = data(4, 5, 3, dtype=dtype), data(dtype=dtype)
    for mask in (data(4, dtype=torch.bool), data(4, 5, dtype=torch.bool), data(4, 5, 3, dtype=torch.bool)):
        check(lambda x, m, v: put(x, [m], v), x, mask, value, exact=True)
        check(lambda x, m, v: put(x, [m], v, accumulate=True), x, mask, value)
    check(lambda x, m, v: put(x, [None, m], v), x, data(5, dtype=torch.bool), value, exact=True)
    check(lambda x, m, v: put(x, [m], v), x, mask, data(1, dtype=dtype), exact=True)


@pytest.mark.parametrize("integer", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_slices(dtype: torch.dtype, integer: torch.dtype) -> None:
    exact = not dtype.is_floating_point
    x = data(4, 6, 5, dtype=dtype)
    i = positions(6, 9).to(integer)
    both(lambda x, i, s: x.index_add(1, i, s), x, i, data(4, 9, 5, dtype=dtype), exact=exact)
    both(lambda x, i, s: x.index_add(-2, i, s), x.transpose(0, 2), i, data(5, 9, 4, dtype=dtype), exact=exact)
    if dtype is not torch.bool:
        s = data(4, 6, 9, dtype=dtype)
        both(lambda x, i, s: x.index_add(2, i, s, alpha=3), x, i // 2, s, exact=exact)
    i = positions(6, 9)
    both(lambda x, i, s: x.index_copy(1, i, s), x, i, data(4, 9, 5, dtype=dtype), exact=True)
    both(lambda x, i, s: x.index_copy(0, i, s), x, i[:3] % 4, data(3, 6, 5, dtype=dtype), exact=True)
    both(lambda x, i: x.index_fill(1, i, 1), x, i - 6, exact=True)
    both(lambda x, i, v: x.index_fill(-1, i, v), x, i[:2] % 5, data(dtype=dtype), exact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_slices_of_few_elements(dtype: torch.dtype) -> None:
    one, none = torch.tensor([0]), torch.tensor([], dtype=torch.int64)
    scalar, x = data(dtype=dtype), data(3, 2, dtype=dtype)
    check(lambda x, i, s: x.index_add(0, i, s), scalar, one, data(dtype=dtype))
    check(lambda x, i, s: x.index_add(0, i, s), data(3, dtype=dtype), torch.tensor(2), data(1, dtype=dtype))
    check(lambda x, i, s: x.index_copy(0, i, s), scalar, one, data(dtype=dtype), exact=True)
    check(lambda x, i: x.index_fill(0, i, 2), scalar, one, exact=True)
    check(lambda x, i, s: x.index_add(0, i, s), x, none, data(0, 2, dtype=dtype), exact=True)
    check(lambda x, i: x.index_fill(1, i, 2), x, none, exact=True)
    check(lambda x, i, v: put(x, [i], v), x, none, data(0, 2, dtype=dtype), exact=True)
    check(lambda x, i: x.index_fill(1, i, 2), data(0, 2, dtype=dtype), one, exact=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_put(dtype: torch.dtype) -> None:
    exact = not dtype.is_floating_point
    x, v = data(4, 5, dtype=dtype), data(2, 3, dtype=dtype)
    both(
        lambda x, i, v: x.put(i, v), x, torch.tensor([[3, -1, 7], [0, -20, 11]])[:, :2], v[:, :2], exact=True
    )
    both(
        lambda x, i, v: x.put(i, v, accumulate=True),
        x.t(),
        positions(20, 2, 3, negative=True),
        v,
        exact=exact,
    )


# --- derivatives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_embedding_backward(dtype: torch.dtype, padding: int) -> None:
    backward = torch.ops.aten.embedding_dense_backward
    both(lambda g, i: backward(g * 2, i, 7, padding, False), data(4, 9, 16, dtype=dtype), positions(7, 4, 9))
    both(lambda g, i: backward(g, i, 7, padding, False), data(5, dtype=dtype), torch.tensor(3))
    check(lambda g, i: backward(g, i, 7, padding, False), data(0, 4, dtype=dtype), positions(7, 0))
    check(lambda g, i: backward(g, i, 7, padding, True), data(9, 4, dtype=dtype), positions(7, 9), own=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_max_pool_backward(dtype: torch.dtype) -> None:
    x = data(2, 3, 9, 8, dtype=dtype)
    _, at = functional.max_pool2d(x, 3, 2, 1, return_indices=True)
    backward = torch.ops.aten.max_pool2d_with_indices_backward

    def f(g: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return backward(g * 2, x, [3, 3], [2, 2], [1, 1], [1, 1], False, at)

    both(f, data(*at.shape, dtype=dtype), x, at)
    last = torch.channels_last
    both(
        f,
        data(*at.shape, dtype=dtype).to(memory_format=last),
        x.to(memory_format=last),
        at.to(memory_format=last),
    )
    _, at = functional.adaptive_max_pool2d(x, 4, return_indices=True)
    both(
        lambda g, x, i: torch.ops.aten.adaptive_max_pool2d_backward(g, x, i),
        data(*at.shape, dtype=dtype),
        x,
        at,
    )


# --- positions out of range, order of sums ------------------------------------------------------------------

OUTSIDE: dict[str, tuple[Function, torch.Tensor]] = {
    "scatter": (lambda x, i: x.scatter(0, i[None], 1.0), torch.tensor([0, 4])),
    "scatter from the end": (lambda x, i: x.scatter(0, i[None], 1.0), torch.tensor([-1, 3])),
    "scatter_add": (lambda x, i: x.scatter_add(1, i[None], x), torch.tensor([0, 5])),
    "index_put": (lambda x, i: put(x, [None, i], x[0, 0]), torch.tensor([0, 5])),
    "index_put from the end": (lambda x, i: put(x, [None, i], x[0, 0]), torch.tensor([-6, 0])),
    "index_add": (lambda x, i: x.index_add(0, i, x[:2]), torch.tensor([3, 4])),
    "index_add from the end": (lambda x, i: x.index_add(0, i, x[:2]), torch.tensor([3, -1])),
    "index_copy from the end": (lambda x, i: x.index_copy(0, i, x[:2]), torch.tensor([3, -1])),
    "index_fill": (lambda x, i: x.index_fill(0, i, 1.0), torch.tensor([3, -5])),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_out_of_range(name: str) -> None:
    f, i = OUTSIDE[name]
    x = data(4, 5)
    with pytest.raises((IndexError, RuntimeError)):
        f(x, i)
    program = lowered(f, x, i)
    assert not any(isinstance(op, Extern) for op in program.ops)
    with pytest.raises(IndexError, match="out of range"):
        run_program(program, [x, i])


def test_sums_are_added_in_eagers_order() -> None:
    """The same float32 sums, bit for bit, whatever the number of threads."""
    x, i = torch.zeros(7, 40), positions(7, 500)
    s = data(500, 40)
    check(lambda x, i, s: x.index_add(0, i, s), x, i, s, exact=True)
    for f in (
        lambda x, i, s: x.index_add(0, i, s),
        lambda x, i, s: x.scatter_add(0, i[:, None].expand_as(s), s),
        lambda x, i, s: put(x.t(), [None, i], s.t(), accumulate=True),
    ):
        check_schedule(f, x, i, s)


def test_low_precision_sums_are_made_in_float32() -> None:
    i = torch.zeros(1000, dtype=torch.int64)
    ones = torch.ones(1000, 4, dtype=torch.bfloat16)
    program = lowered(lambda x, i, s: x.index_add(0, i, s), torch.zeros(2, 4, dtype=torch.bfloat16), i, ones)
    (got,) = run_program(program, [torch.zeros(2, 4, dtype=torch.bfloat16), i, ones])
    assert torch.equal(got[0].float(), torch.full((4,), 1000.0))


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d is not torch.bool], ids=str)
def test_index_reduce(dtype: torch.dtype, reduce: str, include_self: bool) -> None:
    exact = not dtype.is_floating_point or reduce.startswith("am")

    def f(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor, dim: int = 1) -> torch.Tensor:
        return x.index_reduce(dim, i, s, reduce, include_self=include_self)

    x, src = data(3, 6, 4, dtype=dtype), data(3, 9, 4, dtype=dtype)
    if reduce == "prod" and dtype.is_floating_point:
        x, src = x / 4, src / 4
    both(f, x, positions(6, 9), src, exact=exact)
    if dtype not in (torch.float32, torch.bfloat16, torch.int64):
        return
    both(lambda x, i, s: f(x, i, s, -3), x, positions(3, 6), data(6, 6, 4, dtype=dtype) % 7, exact=exact)
    both(f, x.transpose(0, 2), positions(6, 9).int(), data(4, 9, 3, dtype=dtype) % 7, exact=exact)
    check(lambda x, i, s: f(x, i, s, 0), data(3, dtype=dtype), torch.tensor(1), data(1, dtype=dtype))
    check(f, x, torch.tensor([], dtype=torch.int64), data(3, 0, 4, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_max_unpool(dtype: torch.dtype) -> None:
    x = data(2, 3, 8, 6, dtype=dtype)
    pooled, at = functional.max_pool2d(x, 2, return_indices=True)
    both(lambda x, i: functional.max_unpool2d(x * 2, i, 2), pooled, at, exact=True)
    both(lambda x, i: functional.max_unpool2d(x, i, 2, output_size=(9, 7)), pooled, at, exact=True)
    both(lambda x, i: functional.max_unpool2d(x, i, 2), pooled[0], at[0], exact=True)
    both(lambda x, i: functional.max_unpool1d(x, i, 2), *_pooled(1, data(2, 3, 8, dtype=dtype)), exact=True)
    both(lambda x, i: functional.max_unpool3d(x, i, 2), *_pooled(3, data(2, 3, 4, 4, 6, dtype=dtype)))
    # Two elements for one place: the last one stays.
    both(lambda x, i: functional.max_unpool2d(x, i, 2), pooled, at // 3, exact=True)
    check(lambda x, i: functional.max_unpool2d(x, i, 2), pooled[:0], at[:0], own=False)


def _pooled(n: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return getattr(functional, f"max_pool{n}d")(x, 2, return_indices=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_accumulation(dtype: torch.dtype) -> None:
    """Positions that are masked out may be anything."""
    x, values = data(4, 5, dtype=dtype), data(3, 2, dtype=dtype)
    i, j = torch.tensor([[0, 9], [-4, 1], [1, 2]]), torch.tensor([[1, 2], [-7, 0], [4, -5]])
    mask = torch.tensor([[True, False], [False, True], [True, True]])

    def f(x: torch.Tensor, m: torch.Tensor, i: torch.Tensor, j: torch.Tensor, v: torch.Tensor) -> Any:
        return torch.ops.aten._unsafe_masked_index_put_accumulate(x, m, [i, j], v)

    both(f, x, mask, i, j, values, exact=not dtype.is_floating_point)
    if dtype.is_floating_point:
        both(f, -torch.zeros_like(x), mask, i, j, -torch.zeros_like(values), exact=True)
