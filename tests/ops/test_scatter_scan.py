"""Scatters and scans as machine code: every operator in every dtype, for several numbers of threads.

What comes in: the operators of a dtype, all in one function, so that one compile serves them. What holds:
results are eager's, as accurate, and the same bits whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from against_eager import check
from judge import assert_as_accurate, reference_of

put = torch.ops.aten.index_put
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def data(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(shape) > 0.5 if dtype is torch.bool else (torch.randn(shape) * 5).to(dtype)


def scans(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    out = [f(t, d) for f in (torch.cumsum, torch.cummax, torch.cummin) for t, d in ((x, 0), (x, 1), (y, -1))]
    floats = [torch.logcumsumexp(t, d) for t, d in ((x, 0), (y, 1))] if x.is_floating_point() else []
    return *(t for o in out for t in (o if isinstance(o, tuple) else (o,))), *floats, (x / 9).cumprod(1)


def scatters(x: Tensor, s: Tensor, rows: Tensor, columns: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    """``x``: (20, 40), ``s``: (70, 40); ``rows``: (70,), below 20; ``columns``: (20, 50), below 40; ``at``:
    (70, 40), below 20.
    """
    t = s[:50].t()[:20]
    out = [
        x.scatter(0, at, s), x.scatter(1, columns, t), x.scatter_add(0, at, s), x.scatter_add(1, columns, t),
        x.index_add(0, rows, s), x.index_copy(0, rows, s), x.index_fill(1, columns[0, :9], 1),
        put(x, [rows], s, True), put(x, [None, columns[0]], t, True),
        put(x, [rows[:3], rows[:3]], s[0, :3], True), x.put(columns[0, :9], s[0, :9]),
    ]  # fmt: skip
    reduces = ["sum", "prod", "amax", "amin"] + ["mean"] * (x.dtype is not torch.bool)
    each = [(reduce, own) for reduce in reduces for own in (True, False)]
    return *out, *(x.scatter_reduce(0, at[:8], s, reduce, include_self=own) for reduce, own in each)


@contextmanager
def thread_count(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_agree(
    fn: Callable[..., Any], *inputs: Tensor, counts: Sequence[int] = (1, 2, 4), dynamic: bool = False
) -> None:
    want = fn(*inputs)
    results = []
    for threads in counts:
        torch.compiler.reset()
        options = {"cpp.threads": threads, "parallel_threshold": 1}
        compiled = torch.compile(fn, backend="hotloop", dynamic=dynamic, options=options)
        with thread_count(threads):
            results.append(compiled(*inputs))
        assert_as_accurate(results[-1], want, reference_of(fn, *inputs))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_scans(dtype: torch.dtype) -> None:
    x = data(37, 45, dtype=dtype)
    if dtype.is_floating_point:
        x[3, 7], x[20, 0], x[0, 44] = float("nan"), float("inf"), -float("inf")
    threads_agree(scans, x, data(3, 9, 33, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_scatters(dtype: torch.dtype) -> None:
    x, s = data(20, 40, dtype=dtype), data(70, 40, dtype=dtype)
    if dtype.is_floating_point:
        x, s = x / 5, s / 5
    places = (torch.randint(0, 20, (70,)), torch.randint(0, 40, (20, 50)), torch.randint(0, 20, (70, 40)))
    threads_agree(scatters, x, s, *places)


def sums(x: Tensor, i: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """``x``: (n, width), ``i``: (m,) from -n on, ``s``: (m, width); added up by rows, and by columns."""
    n = x.shape[0]
    rows, wide = i % n, (i % n)[:, None].expand_as(s)
    return (
        torch.ops.aten.embedding_dense_backward(s, rows, n, -1, False),
        x.index_add(0, rows, s), x.scatter_add(0, wide, s), x.scatter_add(0, (wide + s.long()) % n, s),
        put(x, [i], s, True), put(x.t(), [None, i], s.t(), True),
        x.t().contiguous().index_add(1, rows, s.t()), x.scatter_reduce(0, wide[:, :2], s, "amax"),
    )  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("width", [3, 200])
def test_sums_of_rows_of_any_width(width: int, dynamic: bool) -> None:
    """Short rows belong to one thread, long ones are divided: the bits are the same."""
    x, s = data(11, width), data(90, width)
    anywhere, one = torch.randint(-11, 11, (90,)), torch.full((90,), -4)
    for i in (anywhere, one):
        threads_agree(sums, x, i, s, counts=(1, 2, 3), dynamic=dynamic)
    threads_agree(sums, x, one[:0], s[:0], counts=(1, 2, 3), dynamic=dynamic)


NONE = torch.tensor(0)
GRADIENTS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], Tensor]] = {
    "embedding": (
        lambda w, i: functional.embedding(i, w, padding_idx=2).tanh(), (30, 24), torch.randint(0, 30, (5, 9))
    ),
    "gather": (lambda x, i: x.gather(1, i) * 2, (6, 9), torch.randint(0, 9, (6, 14))),
    "index": (lambda x, i: x[i].sin(), (6, 9), torch.randint(-6, 6, (4, 3))),
    "index_select": (lambda x, i: x.index_select(1, i).sin(), (6, 9), torch.randint(0, 9, (14,))),
    "cumsum": (lambda x, i: x.cumsum(1).sin(), (6, 9), NONE),
    "cumprod": (lambda x, i: x.cumprod(0), (5, 9), NONE),
    "cummax": (lambda x, i: x.cummax(1)[0].sin(), (6, 9), NONE),
    "logcumsumexp": (lambda x, i: x.logcumsumexp(1), (6, 9), NONE),
    "max_pool2d": (lambda x, i: functional.max_pool2d(x, 3, 2, 1).tanh(), (2, 3, 9, 8), NONE),
    "scatter_add": (
        lambda x, i: x.new_zeros(4, 9).scatter_add(0, i, x).tanh(), (6, 9), torch.randint(0, 4, (6, 9))
    ),
    "scatter": (
        lambda x, i: (x * 2).scatter(0, i, x * 3), (6, 9), torch.randperm(6)[:, None].expand(6, 9)
    ),
    "index_put": (lambda x, i: put(x.sin(), [i], x[:3] * 2), (6, 9), torch.tensor([4, 0, 2])),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    fn, shape, i = GRADIENTS[name]
    x = data(*shape, dtype=dtype)

    def both(x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        y = fn(x, i)
        y.backward(torch.linspace(-1, 1, y.numel()).to(y.dtype).reshape(y.shape))
        assert x.grad is not None
        return y.detach(), x.grad

    def compiled(x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        y = torch.compile(fn, backend="hotloop", fullgraph=True)(x, i)
        y.backward(torch.linspace(-1, 1, y.numel()).to(y.dtype).reshape(y.shape))
        assert x.grad is not None
        return y.detach(), x.grad

    torch.compiler.reset()

    def reference() -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            return both(x.double(), i)

    assert_as_accurate(compiled(x, i), both(x, i), reference)


def test_symbolic_sizes() -> None:
    for n in (5, 6, 33):
        x, i = data(n, 12), torch.randint(0, n, (2 * n,))
        check(lambda x: (x.cumsum(0), x.cumsum(1), x.cummax(0)), x, dynamic=True)
        check(lambda x, i: (x.index_add(0, i, x[i]), x.index_fill(0, i[:3], 1)), x, i, dynamic=True)
        check(lambda x, i: x.scatter_add(0, i[:, None].expand(-1, 12), x[i] * 2), x, i, dynamic=True)
