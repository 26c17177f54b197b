"""Reads at positions that are data, against eager: values, negative positions, and what is out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from check import check, lowered
from torch.nn import functional

from hotloop.ir import expr as ex
from hotloop.ir.interpret import run_program
from hotloop.ir.loops import Extern, Pointwise

Function = Callable[..., Any]
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)


def data(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape) > 0.5 if dtype is torch.bool else (torch.randn(shape) * 9).to(dtype)


def positions(n: int, *shape: int, negative: bool = False) -> torch.Tensor:
    return torch.randint(-n if negative else 0, n, shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather(dtype: torch.dtype) -> None:
    x = data(4, 5, 3, dtype=dtype)
    check(lambda x, i: x.gather(1, i), x, positions(5, 4, 7, 2), exact=True)
    check(lambda x, i: x.gather(-1, i), x.transpose(0, 2), positions(4, 3, 1, 6), exact=True)
    check(lambda x, i: torch.take_along_dim(x, i, 0), x, positions(4, 2, 5, 3), exact=True)
    check(lambda x, i: x.gather(0, i), data(5, dtype=dtype)[::2], positions(3, 4), exact=True)
    check(lambda x, i: x.gather(0, i), data(dtype=dtype), torch.tensor(0), exact=True)
    check(lambda x, i: x.gather(1, i), x, positions(5, 4, 0, 2), exact=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("integer", [torch.int64, torch.int32])
def test_index_select_embedding_take(dtype: torch.dtype, integer: torch.dtype) -> None:
    x = data(6, 5, 3, dtype=dtype)
    check(lambda x, i: x.index_select(1, i), x, positions(5, 7).to(integer), exact=True)
    check(lambda x, i: x.index_select(-1, i), x.permute(1, 2, 0), positions(6, 2).to(integer), exact=True)
    check(lambda x, i: x.index_select(0, i), data(dtype=dtype), torch.tensor([0]).to(integer), exact=True)
    check(lambda w, i: functional.embedding(i, w), x[:, :, 0], positions(6, 2, 3).to(integer), exact=True)
    check(
        lambda w, i: functional.embedding(i, w, padding_idx=1),
        x[:, :, 0],
        positions(6, 0).to(integer),
        exact=True,
    )
    check(lambda w, i: functional.embedding(i, w), x[:, :, 0], torch.tensor(2).to(integer), exact=True)
    check(lambda x, i: x.take(i), x, positions(90, 4, 3, negative=True), exact=True)


INDEXED: dict[str, Function] = {
    "first": lambda x, i, j: x[i],
    "middle": lambda x, i, j: x[:, i],
    "last": lambda x, i, j: x[..., i],
    "two": lambda x, i, j: x[i, j],
    "two_middle": lambda x, i, j: x[:, i, j],
    "broadcast": lambda x, i, j: x[:, i[:, None], j[None, :2]],
    "apart": lambda x, i, j: x[i, :, j],
    "apart_broadcast": lambda x, i, j: x[i[:, None], :, j],
    "three": lambda x, i, j: x[i, j, i],
    "with_slice": lambda x, i, j: x[1:, i, ::2],
    "with_select": lambda x, i, j: x[1, :, i],
    "with_new_axis": lambda x, i, j: x[:, None, i],
    "scalar": lambda x, i, j: torch.ops.aten.index(x, [i[0]]),
    "two_scalars": lambda x, i, j: torch.ops.aten.index(x, [i[0], None, j[1]]),
    "twice": lambda x, i, j: x[i][:, j],
    "computed": lambda x, i, j: (x + x)[(i + j) % 4],
    "unsafe": lambda x, i, j: torch.ops.aten._unsafe_index(x, [None, i, j]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(INDEXED))
def test_index(name: str, dtype: torch.dtype) -> None:
    i, j = positions(4, 5, negative=True), positions(4, 5, negative=True)
    x = data(4, 4, 4, dtype=dtype)
    check(INDEXED[name], x, i, j, exact=True)
    if name != "scalar":  # PyTorch's fake result has other strides than eager's here
        check(INDEXED[name], x.permute(2, 0, 1), i.to(torch.int32), j, exact=True)


def test_index_of_nothing_and_by_nothing() -> None:
    check(lambda x, i: (x[i], x[:, i]), data(3, 3), positions(3, 0), exact=True)
    # Left to PyTorch, which raises where a position is out of range of an empty table.
    check(lambda x, i: x[:, i], data(0, 3), positions(3, 4), own=False, exact=True)


def test_boolean_masks_stay_with_pytorch() -> None:
    program = lowered(
        lambda x, m: torch.where(m, x, 0)[torch.tensor([0])], data(3), data(3, dtype=torch.bool)
    )
    assert not any(isinstance(op, Extern) and "index" in str(op.target) for op in program.ops)


OUT_OF_RANGE: dict[str, tuple[Function, int, bool]] = {
    # the function, the size of the dimension, whether negative positions count from the end
    "gather": (lambda x, i: x.gather(0, i[:, None]), 5, False),
    "index_select": (lambda x, i: x.index_select(0, i), 5, False),
    "embedding": (lambda x, i: functional.embedding(i, x), 5, False),
    "index": (lambda x, i: x[i], 5, True),
    "take": (lambda x, i: x.take(i), 15, True),
}


@pytest.mark.parametrize("name", sorted(OUT_OF_RANGE))
def test_what_is_out_of_range_raises_as_in_eager(name: str) -> None:
    f, n, wraps = OUT_OF_RANGE[name]
    x = data(5, 3)
    program = lowered(f, x, torch.tensor([0, n - 1]))
    for bad, raises in ((n, True), (-1, not wraps), (-n, not wraps), (-n - 1, True), (2**40, True)):
        i = torch.tensor([0, bad])
        if not raises:
            torch.testing.assert_close(run_program(program, [x, i])[0], f(x, i), rtol=0, atol=0)
            continue
        with pytest.raises((IndexError, RuntimeError)):
            f(x, i)
        with pytest.raises(IndexError):
            run_program(program, [x, i])


def test_positions_known_to_be_in_range_are_not_checked() -> None:
    """With the index tensor's own expression in place of its load, nothing is read and nothing checked."""
    program = check(lambda x: x[torch.arange(3)], data(4, 2), exact=True)
    index, reader = program.ops[0], program.ops[-1]
    assert isinstance(index, Pointwise) and isinstance(reader, Pointwise)
    assert any(load.buffer == index.out for load in ex.loads(reader.body))
    (v,) = index.vars
    inlined = ex.rewrite_loads(
        reader.body, lambda e: index.body.substitute({v: e.indices[0]}) if e.buffer == index.out else None
    )
    assert all(i.kind != "indirect" for load in ex.loads(inlined) for i in load.indices)
