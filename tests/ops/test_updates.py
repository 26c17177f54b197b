"""Writes into parts of graph inputs: right in every order, and without a copy of what is not written.

What comes in: functions that write to their arguments. What holds: compiled and eager leave the same values
in results and arguments; a cache is touched where it is written, and nowhere else.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from against_eager import Function, check
from hotloop import backend
from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir.kernel import KernelCall, Loop, Schedule, Stmt, Store, expressions
from hotloop.ir.loops import Extern

CACHE = (2, 3, 64, 32)
AT = torch.tensor([5])


def schedules(fn: Function, *inputs: Tensor) -> list[Schedule]:
    """What a compile of ``fn`` makes on its way."""
    made: list[Schedule] = []
    own = backend.settle

    def keep(*args: Any, **kwargs: Any) -> Schedule:
        made.append(own(*args, **kwargs))
        return made[-1]

    torch.compiler.reset()
    with mock.patch.object(backend, "settle", keep):
        torch.compile(fn, backend="hotloop", fullgraph=True)(*(x.clone() for x in inputs))
    return made


def accesses(body: Sequence[Stmt], points: int = 1) -> int:
    """About how many elements the statements load and store."""
    total = 0
    for s in body:
        if isinstance(s, Loop):
            trip = ix.as_index(s.stop) - s.start
            total += accesses(s.body, points * int(trip.hi or 0))
        else:
            loads = {n for e in expressions((s,)) for n in ex.loads(e)}
            total += points * (len(loads) + isinstance(s, Store))
    return total


def assert_only_the_part_is_touched(fn: Function, *inputs: Tensor) -> None:
    size = inputs[0].numel()
    for made in schedules(fn, *inputs):
        assert not any(isinstance(step, Extern) for step in made.steps)
        touched = sum(accesses(s.kernel.body) for s in made.steps if isinstance(s, KernelCall))
        assert 0 < touched < size // 4, made
        assert made.arena_bytes < inputs[0].nbytes // 4, made


def token(*shape: int) -> Tensor:
    return torch.randn(2, 3, 1, 32) if not shape else torch.randn(shape)


def index_assignment(cache: Tensor, k: Tensor) -> Tensor:
    cache[:, :, AT] = k
    return cache[:, :, 5].sum()


def two_steps(cache: Tensor, k: Tensor) -> None:
    cache[:, :, 7:8] = k
    cache[:, :, 8:9] = k * 2


def nested(cache: Tensor, k: Tensor) -> None:
    cache[1][:, 2:3] = k[0]


def views(cache: Tensor, k: Tensor) -> None:
    cache.view(6, 64, 32)[:, 3] = k.view(6, 32)


def transposed(cache: Tensor, k: Tensor) -> None:
    cache.transpose(1, 2)[:, 9] = k[:, :, 0]


def flat(cache: Tensor, k: Tensor) -> None:
    cache.view(-1)[100:132] = k[0, 0, 0]


def from_itself(cache: Tensor, k: Tensor) -> None:
    cache[:, :, 6:7] = cache[:, :, 5:6] + k


def shifted(cache: Tensor, k: Tensor) -> None:
    cache[:, :, 5:8] = cache[:, :, 4:7].clone()


def added(cache: Tensor, k: Tensor) -> None:
    cache.index_add_(2, torch.tensor([4, 4, 1]), k.expand(2, 3, 3, 32))


def read_before(cache: Tensor, k: Tensor) -> Tensor:
    old = cache[:, :, 5] * 2
    cache.index_copy_(2, AT, k)
    return old


def read_between(cache: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    cache[:, :, 7:8] = k
    between = cache[:, :, 7] + 1
    cache[:, :, 7:8] = k * 2
    return between, cache[:, :, 7] + 1


def slice_fill(cache: Tensor, k: Tensor) -> None:
    cache[0, 1, 3:9] = 0
    cache[1, :, ::16].zero_()


PARTS: dict[str, Function] = {
    "index assignment": index_assignment,
    "index_copy": lambda cache, k: cache.index_copy_(2, AT, k)[:, :, 5].sum(),
    "index_put": lambda cache, k: cache.index_put_((AT // 5, AT // 4, AT), k[0, 0])[0, 0, 0],
    "scatter": lambda cache, k: cache.scatter_(2, AT.expand(2, 3, 1, 32), k)[0, 0, 0].sum(),
    "index_fill": lambda cache, k: cache.index_fill_(2, AT, 1.5)[0, 0, 0].sum(),
    "slice": lambda cache, k: cache[:, :, 3:4].copy_(k),
    "select": lambda cache, k: cache[:, :, 3].copy_(k[:, :, 0]),
    "masked values": lambda cache, k: cache.index_copy_(2, AT, torch.where(k > 0, k, 0)),
    "diagonal": lambda cache, k: cache[0, 0].diagonal().copy_(k[0, 0, 0]),
    "two steps": two_steps,
    "nested": nested,
    "views": views,
    "transposed": transposed,
    "flat": flat,
    "from itself": from_itself,
    "shifted": shifted,
    "added": added,
    "read before": read_before,
    "read between": read_between,
    "fill": slice_fill,
}


@pytest.mark.parametrize("name", PARTS)
def test_only_the_part_that_is_written_is_touched(name: str) -> None:
    fn = PARTS[name]
    inputs = (torch.randn(CACHE), token())
    assert_only_the_part_is_touched(fn, *inputs)
    check(fn, *inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    inputs = (torch.randn(CACHE).to(dtype), token().to(dtype))
    for name in ("index assignment", "slice", "two steps"):
        assert_only_the_part_is_touched(PARTS[name], *inputs)
        check(PARTS[name], *inputs)


def resident() -> int:
    """The bytes of memory that this process has touched and holds."""
    with open("/proc/self/statm", encoding="ascii") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is measured through /proc")
def test_one_token_of_a_large_cache() -> None:
    """The step of a language model: one token into half a gigabyte of keys; nobody touches the rest.

    Pages of zeros exist only once they have been read or written, so a copy of the buffer would be seen.
    """
    cache = torch.zeros(8, 32, 4096, 128, dtype=torch.bfloat16)
    k = torch.randn(8, 32, 1, 128, dtype=torch.bfloat16)

    def step(cache: Tensor, k: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(2, at, k)
        return cache[:, :, 5].float().sum()

    torch.compiler.reset()
    compiled = torch.compile(step, backend="hotloop", fullgraph=True, dynamic=False)
    compiled(cache, k, torch.tensor([5]))
    before, where = resident(), cache.data_ptr()
    for position in (6, 4095):
        compiled(cache, k, torch.tensor([position]))
        assert torch.equal(cache[:, :, position], k[:, :, 0])
    assert cache.data_ptr() == where
    assert resident() - before < cache.nbytes // 16


# --- where a copy has to be made, and orders that only look harmless ----------------------------------------


def read_after_for_old(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    old = x.clone()
    x[2] = v
    return old * 2, x * 3


def swapped_rows(x: Tensor, v: Tensor) -> None:
    a, b = x[0].clone(), x[1].clone()
    x[0], x[1] = b, a


def both_inputs(x: Tensor, y: Tensor) -> None:
    t = x[0] + y[0]
    x[0] = y[1]
    y[1] = t
    x[1] = y[1]


def reversed_in_place(x: Tensor, v: Tensor) -> None:
    x.copy_(x.flip(0))


def reversed_and_added(x: Tensor, v: Tensor) -> Tensor:
    y = x.flip(0) * 2
    x.add_(y)
    return y


def rotated(x: Tensor, v: Tensor) -> None:
    x.copy_(torch.roll(x, 1, 0) + x)


def accumulates_itself(x: Tensor, v: Tensor) -> None:
    x.index_add_(0, torch.tensor([0, 0, 2]), x[:3].clone())


def out_of_place_too(x: Tensor, v: Tensor) -> Tensor:
    y = x.index_copy(0, torch.tensor([1]), v[None])
    x.copy_(y)
    return y


def branch(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    y = x.index_fill(0, torch.tensor([1]), 0.0)
    z = x.index_fill(0, torch.tensor([2]), 1.0)
    x.copy_(z)
    return y, z + 1


def index_from_itself(x: Tensor, i: Tensor) -> None:
    i[i[:2] % 4] = i[1:3].clone()


def moved_between(x: Tensor, y: Tensor) -> None:
    y.copy_(x[: y.shape[0]])
    x.add_(1)


def chained(x: Tensor, v: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[1] = v
    y[2] = y[1] + 1
    x += y
    return y


ORDERS: dict[str, tuple[Function, list[Tensor]]] = {
    "old value kept": (read_after_for_old, [torch.randn(4, 5), torch.randn(5)]),
    "rows swapped": (swapped_rows, [torch.randn(4, 5), torch.randn(5)]),
    "two inputs": (both_inputs, [torch.randn(4, 5), torch.randn(4, 5)]),
    "reversed": (reversed_in_place, [torch.randn(40, 5), torch.randn(5)]),
    "reversed and added": (reversed_and_added, [torch.randn(40, 5), torch.randn(5)]),
    "rotated": (rotated, [torch.randn(40, 5), torch.randn(5)]),
    "adds itself": (accumulates_itself, [torch.randn(4, 5), torch.randn(5)]),
    "result is another tensor": (out_of_place_too, [torch.randn(4, 5), torch.randn(5)]),
    "two versions": (branch, [torch.randn(4, 5), torch.randn(5)]),
    "index of itself": (index_from_itself, [torch.randn(3), torch.tensor([3, 1, 0, 2])]),
    "moved": (moved_between, [torch.randn(6, 5), torch.randn(4, 5)]),
    "intermediate": (chained, [torch.randn(4, 5), torch.randn(5)]),
    "strided": (
        lambda x, v: x.index_fill_(0, torch.tensor([1, 3]), 0.0), [torch.randn(5, 8)[:, ::2], torch.randn(5)]
    ),
    "transposed": (
        lambda x, v: x.index_copy_(1, torch.tensor([1]), v[:, None]), [torch.randn(5, 4).t(), torch.randn(4)]
    ),
    "zero-dim": (lambda x, v: x.index_fill_(0, torch.tensor([0]), 3.0), [torch.tensor(1.0), torch.randn(2)]),
    "empty": (lambda x, v: x.index_fill_(0, AT[:0], 3.0), [torch.randn(3), torch.randn(2)]),
    "nothing left": (lambda x, v: x[3:2].copy_(v[:0]), [torch.randn(3), torch.randn(2)]),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_orders_of_reads_and_writes(name: str) -> None:
    fn, inputs = ORDERS[name]
    check(fn, *inputs)


BASE = torch.randn(24)
ALIASES: dict[str, tuple[Function, list[Tensor]]] = {
    "a view of an input": (lambda x: (x[1:].index_fill_(0, AT, 2.0), x.sum()), [torch.randn(9)]),
    "two views, one written": (lambda x, y: (x.index_fill_(0, AT, 2.0), y * 2), [BASE[:12], BASE[4:16]]),
    "two views, both written": (lambda x, y: (x[3:5].zero_(), y.add_(x[0])), [BASE[:12], BASE[4:16]]),
    "one tensor twice": (lambda x, y: (x[2:4].zero_(), y[3:6].add_(1)), [BASE, BASE]),
    "a strided view and its base": (
        lambda x, y: (x.index_add_(0, AT, y[:1].clone()), y + 1),
        [BASE, BASE[::2]],
    ),
}


@pytest.mark.parametrize("name", ALIASES)
def test_inputs_that_share_memory(name: str) -> None:
    fn, inputs = ALIASES[name]
    check(fn, *inputs)


def test_nothing_else_changes_when_an_index_is_out_of_range() -> None:
    """The caller still has the tensor after the error: element 0, where such an index goes, is as before."""
    for fn in (
        lambda x, i: x.index_copy_(0, i, x.new_ones(len(i), 4)),
        lambda x, i: x.index_put_((i,), x.new_ones(4), accumulate=True),
        lambda x, i: x.scatter_(0, i[:, None].expand(-1, 4), 1.0),
    ):
        torch.compiler.reset()
        x = torch.zeros(6, 4)
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            torch.compile(fn, backend="hotloop")(x, torch.tensor([9, 3]))
        assert torch.equal(x[[0, 1, 2, 4, 5]], torch.zeros(5, 4))


def test_autograd_sees_that_an_input_was_written() -> None:
    """Its version counts, as after an operator in eager: what was saved of it is known to be stale."""
    for grad in (False, True):
        torch.compiler.reset()
        cache, k = torch.randn(CACHE), token().requires_grad_(grad)
        before = cache._version
        torch.compile(lambda c, k: (c.index_copy_(2, AT, k.detach()), k * 2)[1], backend="hotloop")(cache, k)
        assert cache._version > before


def test_symbolic_sizes() -> None:
    for name in ("index_copy", "slice", "two steps", "read between", "added"):
        for length in (64, 65, 80):
            check(PARTS[name], torch.randn(2, 3, length, 32), token(), dynamic=True)
