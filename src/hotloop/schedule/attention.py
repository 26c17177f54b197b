"""Attention in kernels of our own: which calls, and their loops.

What comes in: the groups, calls and products in order. What goes out: the same, with an ``Attention`` in the
place of each call of ``_scaled_dot_product_flash_attention_for_cpu`` that a kernel computes; and, later, the
kernel. What holds in between: as the call, it gives 0 for a row whose scores are all -inf.

A thread takes heads. It puts the keys and values of one into panels (see ``ir/panels.py``), and for 48
queries at a time sums all scores in tiles, takes their softmax, and sums the values, into a scratch array
that is then stored. So scores never leave the L2 cache. A head's rows are divided where heads are few.

The next file is ``alternatives.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, TypeVar

import torch

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.index import Index
from hotloop.ir.kernel import Attend, KernelCall, Loop, Rows, Scratch, Stmt, Store
from hotloop.ir.loops import Buffer, Extern, LoopProgram, ViewRef

from .loops import Machine, finish
from .tiles import TILES, tile_shapes

__all__ = ["Attention", "build_attention", "find_attention"]

_TARGET = "aten._scaled_dot_product_flash_attention_for_cpu.default"
_NAMES = ("query", "key", "value", "dropout_p", "is_causal")
#: Fewer queries do not pay for keys and values in panels.
LEAST_QUERIES = 16
#: With fewer keys the library gives 0 for a row of NaN.
LEAST_KEYS = 16
#: The scores of a block, keys and values stay in the L2 cache.
MOST_KEYS = 1024
_TILE, _WORK = "attended", "work"

Step = TypeVar("Step")


@dataclass(frozen=True)
class Attention:
    """``out = softmax(scale * query @ key.T + mask) @ value``, by heads; its operands as they are stored."""

    op: Extern
    query: ViewRef
    key: ViewRef
    value: ViewRef
    mask: ViewRef | None
    causal: bool
    scale: float
    scores: tuple[int, int]
    sums: tuple[int, int]

    @property
    def out(self) -> str:
        """The buffer of the result."""
        (name, *_) = self.op.outs
        assert name is not None
        return name


def find_attention(
    p: LoopProgram, steps: Sequence[Step | Extern], level: str
) -> tuple[Step | Extern | Attention, ...]:
    """The steps, with what a kernel computes in the place of calls."""
    return tuple((_attention(p, s, level) or s) if isinstance(s, Extern) else s for s in steps)


def _attention(p: LoopProgram, op: Extern, level: str) -> Attention | None:
    """The attention that a call computes, or ``None`` where it is better left to PyTorch."""
    if str(op.target) != _TARGET or level not in TILES or op.outs[0] is None or any(op.outs[1:]):
        return None
    given: dict[str, Any] = {"dropout_p": 0.0, "is_causal": False, **op.kwargs}
    given.update(zip(_NAMES, op.args, strict=False))
    query, key, value, dropout, causal = (given.pop(name) for name in _NAMES)
    mask, scale = given.pop("attn_mask", None), given.pop("scale", None)
    if given or dropout != 0 or not isinstance(scale, (int, float, NoneType)):
        return None
    if isinstance(mask, ViewRef):
        missing = 4 - len(mask.sizes)
        mask = replace(mask, sizes=(1,) * missing + mask.sizes, strides=(0,) * missing + mask.strides)
    views = [query, key, value, *(() if mask is None else (mask,))]
    out = p.buffers[op.outs[0]]
    if not all(isinstance(v, ViewRef) and _is_plain(v) for v in views) or out.device != "cpu":
        return None
    if not sz.is_static((*out.sizes, *out.strides)) or out.strides[-1] != 1 or out.dtype is not torch.float32:
        return None
    if out.alias_of is not None:
        return None
    rows, depth = query.sizes[2:]
    keys, columns = value.sizes[2:]
    lanes, _ = TILES[level]
    if any(v.sizes[:2] != out.sizes[:2] for v in views[:3]) or (mask is not None and mask.sizes[3] != keys):
        return None
    fits = rows >= LEAST_QUERIES and LEAST_KEYS <= keys <= MOST_KEYS and depth > 0 and columns > 0
    if not fits or columns % lanes or 0 in out.sizes or not (scale is None or math.isfinite(scale)):
        return None
    scale = 1 / math.sqrt(depth) if scale is None else scale
    tiles = [tile_shapes(torch.float32, Attend.BLOCK, n, level, 1)[0] for n in (keys, columns)]
    shapes = [(t.height, t.width) for t in tiles]
    return Attention(op, query, key, value, mask, bool(causal), scale, shapes[0], shapes[1])


def _is_plain(v: ViewRef) -> bool:
    return (
        v.dtype is torch.float32
        and len(v.sizes) == 4
        and sz.is_static((*v.sizes, *v.strides, v.offset))
        and (v.strides[3] == 1 or v.sizes[3] == 1)
    )


def build_attention(x: Attention, buffers: Mapping[str, Buffer], machine: Machine) -> KernelCall:
    """The kernel: heads, or parts of them, side by side."""
    out = buffers[x.out]
    sizes = tuple(map(sz.static, out.sizes))
    batches, heads, rows, columns = sizes
    keys, depth = sz.static(x.key.sizes[2]), sz.static(x.key.sizes[3])
    block = -(-rows // _parts(batches * heads, rows, machine.threads) // Attend.BLOCK) * Attend.BLOCK
    parts = -(-rows // block)
    loops = (("batch", batches), ("head", heads), ("part", parts))
    variables = [ix.var(name, n) for name, n in loops]
    batch, head, part = (v if n > 1 else ix.const(0) for v, (_, n) in zip(variables, loops, strict=True))
    first = part * block
    count = ix.minimum(block, rows - first)

    def place(v: ViewRef, row: Index) -> Rows:
        steps = [0 if n == 1 else sz.static(s) for n, s in zip(v.sizes, v.strides, strict=True)]
        return Rows(v.buffer, ix.linearize((batch, head, row), steps[:3], v.offset), steps[2])

    most = min(block, rows)
    nothing = ix.const(0)
    attend = Attend(
        _TILE, _WORK, place(x.query, first), place(x.key, nothing), place(x.value, nothing),
        None if x.mask is None else place(x.mask, first), first, count, most, keys, depth, columns, x.scale,
        x.causal, x.scores, x.sums,
    )  # fmt: skip
    row, column = ix.var("row", rows), ix.var("column", columns)
    value = ex.load(_TILE, ((row - first) * columns + column,), torch.float32)
    store = Store(x.out, ix.linearize((batch, head, row, column), out.strides, 0), value)
    body: tuple[Stmt, ...] = (
        Scratch(_WORK, torch.float32, attend.work_size),
        Scratch(_TILE, torch.float32, most * columns),
        attend,
        Loop(row, first, first + count, "serial", (Loop(column, 0, columns, "vector", (store,)),)),
    )
    for variable, (_, n) in reversed(list(zip(variables, loops, strict=True))):
        body = (Loop(variable, 0, n, "parallel", body),) if n > 1 else body
    work = batches * heads * rows * keys * (depth + columns)
    return finish("fused", (x.op.origin,), body, buffers, machine, math.prod(sizes), work, single_pass=False)


def _parts(heads: int, rows: int, threads: int) -> int:
    """Into how many parts the rows of a head are divided, so that no thread waits long for the others."""
    if heads % threads == 0 or heads >= 8 * threads:
        return 1
    return min(threads, -(-rows // Attend.BLOCK))
