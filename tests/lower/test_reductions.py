"""Reductions through lowering against eager: every kind, over dtypes, shapes and layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from check import check, lowered

from hotloop.ir.loops import Extern, Reduce

Function = Callable[..., Any]

FLOATS = (torch.float32, torch.bfloat16, torch.float64)
SHAPES: tuple[tuple[tuple[int, ...], int | None], ...] = (
    ((7,), 0), ((3, 5), 1), ((3, 5), -2), ((2, 3, 4), 1), ((1, 1), 0), ((), None), ((13, 17), None),
)  # fmt: skip


def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(-9, 9, shape).to(dtype)


SUMS: dict[str, Function] = {
    "sum": lambda x, d: x.sum() if d is None else x.sum(d),
    "sum_keepdim": lambda x, d: x.sum(d, keepdim=True),
    "sum_float": lambda x, d: x.sum(d, dtype=torch.float32),
    "prod": lambda x, d: x.prod() if d is None else x.prod(d),
    "nansum": lambda x, d: x.nansum(d),
    "count_nonzero": lambda x, d: torch.count_nonzero(x, d),
    "any": lambda x, d: x.any() if d is None else x.any(d),
    "all": lambda x, d: x.all() if d is None else x.all(d, keepdim=True),
    "amax": lambda x, d: x.amax() if d is None else x.amax(d),
    "amin": lambda x, d: x.amin(() if d is None else d, keepdim=True),
}


@pytest.mark.parametrize("dtype", (*FLOATS, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool))
@pytest.mark.parametrize("name", sorted(SUMS))
def test_sums_and_extremes(name: str, dtype: torch.dtype) -> None:
    for shape, dim in SHAPES:
        check(lambda x, dim=dim: SUMS[name](x, dim), tensor(shape, dtype))


EXTREMES: dict[str, Function] = {
    "max": lambda x, d: x.max() if d is None else x.max(d),
    "min": lambda x, d: x.min() if d is None else x.min(d, keepdim=True),
    "max_values": lambda x, d: x.max() if d is None else x.max(d).values,
    "min_indices": lambda x, d: x.min() if d is None else x.min(d).indices,
    "argmax": lambda x, d: x.argmax(d),
    "argmin": lambda x, d: x.argmin(d, keepdim=True),
    "aminmax": lambda x, d: torch.aminmax(x, dim=d),
}


@pytest.mark.parametrize("dtype", (*FLOATS, torch.int64, torch.uint8, torch.bool))
@pytest.mark.parametrize("name", sorted(EXTREMES))
def test_extremes_and_positions(name: str, dtype: torch.dtype) -> None:
    if dtype is torch.bool and name.startswith("arg"):
        pytest.skip("eager has none for bool")
    for shape, dim in SHAPES:
        check(lambda x, dim=dim: EXTREMES[name](x, dim), tensor(shape, dtype), exact=True)


@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin", "amax", "amin", "any", "sum", "nansum"])
def test_nan_and_ties(name: str) -> None:
    nan = float("nan")
    x = torch.tensor(
        [[1.0, nan, 3.0, nan], [2.0, 5.0, 5.0, -5.0], [nan] * 4, [-float("inf")] * 4, [0.0, -0.0, 0.0, 0]]
    )
    check(lambda x: getattr(x, name)(dim=1), x, exact=True)
    check(lambda x: getattr(x, name)(), x, exact=True)


STATISTICS: dict[str, Function] = {
    "mean": lambda x, d: x.mean() if d is None else x.mean(d),
    "mean_keepdim": lambda x, d: x.mean(d, keepdim=True),
    "var": lambda x, d: x.var(d),
    "var_0": lambda x, d: x.var(d, correction=0, keepdim=True),
    "std_2": lambda x, d: x.std(d, correction=2),
    "var_mean": lambda x, d: torch.var_mean(x, d),
    "std_mean": lambda x, d: torch.std_mean(x, d, correction=0),
    "logsumexp": lambda x, d: torch.logsumexp(x, tuple(range(x.dim())) if d is None else d),
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", sorted(STATISTICS))
def test_statistics(name: str, dtype: torch.dtype) -> None:
    for shape, dim in SHAPES:
        if shape == () and name == "logsumexp":
            continue
        check(lambda x, dim=dim: STATISTICS[name](x, dim), tensor(shape, dtype))


def test_variance_of_values_far_from_zero() -> None:
    check(lambda x: torch.var_mean(x, -1), torch.randn(4, 1000) + 1e4)


@pytest.mark.parametrize("size", [7, 100, 768, 1023, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_values_have_no_variance(size: int, dtype: torch.dtype) -> None:
    def normed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = torch.nn.functional.layer_norm(x, (x.shape[-1],))
        columns = torch.nn.functional.batch_norm(x.t(), None, None, training=True)
        return rows, columns, torch.var(x, -1), torch.std(x, -1, correction=0), torch.var(x.t(), 0)

    torch.compiler.reset()
    x = (torch.rand(20, 1, dtype=dtype) * 100 - 50).expand(20, size).contiguous()
    for found in torch.compile(normed, backend="hotloop", dynamic=False)(x):
        assert (found == 0).all()
    _, mean = torch.compile(lambda x: torch.var_mean(x, -1), backend="hotloop", dynamic=False)(x)
    assert torch.equal(mean, x[:, 0])


@pytest.mark.parametrize("order", [0, 1, 2, 3, 2.5, -1, -2, float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_norms(order: float, dtype: torch.dtype) -> None:
    for shape, dim in SHAPES:
        x = tensor(shape, dtype)
        check(lambda x, dim=dim: torch.linalg.vector_norm(x, order, dim), x)
        check(
            lambda x, dim=dim: torch.linalg.vector_norm(x, order, dim, keepdim=True, dtype=torch.float64), x
        )
    check(lambda x: torch.norm(x, order, 0), tensor((4, 3), dtype))


def test_norm_overflows_where_eager_does() -> None:
    check(lambda x: torch.linalg.vector_norm(x, 2, -1), torch.full((2, 3), 1e30))
    check(lambda x: x.norm(), torch.full((5,), 1e-30))


@pytest.mark.parametrize("name", ["sum", "prod", "mean", "any", "all", "logsumexp", "norm", "var"])
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_empty(name: str) -> None:
    for shape, dim in (((0,), 0), ((3, 0), 1), ((0, 3), 1), ((2, 0, 3), 0)):
        check(lambda x, dim=dim: getattr(x, name)(dim=dim), torch.ones(shape))
    check(lambda x: (x.sum(), x.prod(), x.any(), x.all()), torch.ones(0, 3))


def test_extremes_of_no_rows() -> None:
    check(lambda x: (x.amax(1), *x.max(1), x.argmax(1)), torch.ones(0, 3))
    with pytest.raises((IndexError, RuntimeError)):
        lowered(lambda x: x.amax(1), torch.ones(3, 0))


def test_several_dimensions() -> None:
    x = torch.randn(2, 3, 4, 5)
    for dims in ((0, 2), (-1, 1), (0, 1, 2, 3)):
        for keep in (False, True):
            check(lambda x, d=dims, k=keep: (x.sum(d, k), x.mean(d, k), x.amax(d, k), x.var(d, keepdim=k)), x)
            check(lambda x, d=dims, k=keep: ((x > 1).any(d, k), torch.logsumexp(x, d, k)), x)


def test_layouts() -> None:
    x = torch.randn(2, 6, 5, 7)

    def several(x: torch.Tensor) -> Any:
        return x.sum(1), x.mean((2, 3), keepdim=True), x.argmax(-1), x.amin(0, keepdim=True)

    check(several, x.to(memory_format=torch.channels_last))
    check(several, x.transpose(1, 3))
    check(several, x[:, ::2, 1:, ::3])
    check(several, torch.randn(2, 1, 5, 1).expand(2, 6, 5, 7))


def test_integer_sums_are_int64_and_wrap() -> None:
    check(lambda x: x.sum(), torch.full((300,), 2**31 - 1, dtype=torch.int32))
    check(lambda x: x.sum(), torch.full((4,), 2**62, dtype=torch.int64))
    check(lambda x: x.sum(dtype=torch.int8), torch.full((4,), 100, dtype=torch.int8))


def test_bfloat16_is_accumulated_in_float32() -> None:
    program = check(lambda x: x.sum(-1), torch.full((2, 4096), 0.1, dtype=torch.bfloat16))
    (op,) = program.ops
    assert isinstance(op, Reduce) and op.body.dtype is torch.float32


def test_only_the_results_used_are_computed() -> None:
    program = check(lambda x: x.max(0).indices, torch.randn(3, 4))
    assert [op.kind for op in program.ops if isinstance(op, Reduce)] == ["argmax"]


def test_complex_goes_to_pytorch() -> None:
    program = check(lambda x: x.sum(0), torch.randn(3, 4, dtype=torch.complex64), own=False)
    assert any(isinstance(op, Extern) for op in program.ops)
