"""The rules of single values and indices, and the sizes of buffers: what ``verify.py`` asks about them.

What comes in: an expression, an index, a buffer. What goes out: what is wrong with it, as text, or ``None``;
sizes where they are known. What holds in between: an index whose interval leaves its dimension is enumerated
before it is called wrong, because intervals forget that two terms depend on the same variable.

The next file is ``verify.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from . import index as ix
from .expr import OPS, Expr, OpInfo, children, dtype_name, own_indices
from .index import Index, IndexLike
from .loops import Buffer

__all__ = ["LOW", "extent_of", "leaves", "memory_of", "node_fault", "unguarded"]

LOW = (torch.bfloat16, torch.float16)
_LEAVES = {
    "load": 0,
    "const": 0,
    "index": 0,
    "local": 0,
    "random": 1,
    "cast": 1,
    "bitcast": 1,
    "where": 3,
    "masked": 3,
}
#: An index with more values than this is not enumerated.
_ENUMERATE = 1 << 20


def node_fault(e: Expr) -> str | None:
    """What is wrong with one node by itself: its arity and dtypes."""
    info = OPS.get(e.op)
    arity = _LEAVES.get(e.op) if info is None else info.arity
    if arity is None:
        return f"unknown operation {e.op!r}"
    if len(e.args) != arity:
        return f"{e.op} takes {arity} arguments, not {len(e.args)}"
    if info is not None:
        return _arithmetic_fault(e, info)
    if e.op in ("where", "masked"):
        cond, a, b = e.args
        if cond.dtype is not torch.bool:
            return f"the condition of {e.op} is {cond.dtype}, not bool: {cond!r}"
        if a.dtype is not b.dtype or a.dtype is not e.dtype:
            return f"{e.op} of {dtype_name(a.dtype)} and {dtype_name(b.dtype)} as {dtype_name(e.dtype)}"
    if e.op == "bitcast" and e.args[0].dtype.itemsize != e.dtype.itemsize:
        return f"bitcast from {e.args[0].dtype} to {e.dtype} changes the width"
    if e.op == "random" and (fault := _random_fault(e)) is not None:
        return fault
    if e.op == "index" and e.dtype is not torch.int64:
        return f"an index is int64, not {e.dtype}"
    return _indirect_fault(e)


def _arithmetic_fault(e: Expr, info: OpInfo) -> str | None:
    dtype = e.args[0].dtype
    if any(a.dtype is not dtype for a in e.args):
        return f"{e.op} of different dtypes: {', '.join(dtype_name(a.dtype) for a in e.args)}"
    if dtype in LOW:
        return f"{e.op} computes in {dtype_name(dtype)}; it has to be cast to float32 first"
    if e.dtype is not (torch.bool if info.result == "bool" else dtype):
        return f"{e.op} of {dtype_name(dtype)} gives {dtype_name(e.dtype)}"
    if info.takes != "numbers" and dtype.is_floating_point != (info.takes == "floats"):
        return f"{e.op} is an operation on {info.takes}, not {dtype_name(dtype)}"
    return None


def _random_fault(e: Expr) -> str | None:
    word, counter = e.attr
    if e.dtype is not torch.int32 or e.args[0].dtype is not torch.int64:
        return f"a random number is {dtype_name(e.dtype)} under a key that is {dtype_name(e.args[0].dtype)}"
    if word not in range(4):
        return f"a random number has the words 0 to 3, not {word}"
    return None if counter.lo is not None and counter.lo >= 0 else f"the counter {counter!r} may be negative"


def _indirect_fault(e: Expr) -> str | None:
    for i in own_indices(e):
        for atom in ix.indirect_atoms(i):
            dtype = atom.args[0].dtype
            if dtype.is_floating_point or dtype is torch.bool:
                return f"an index is read from {dtype_name(dtype)}: {atom!r}"
    return None


def unguarded(e: Expr) -> Iterator[Expr]:
    """The nodes whose value counts everywhere: those not only inside the guarded side of a ``masked``."""
    seen: set[Expr] = set()
    stack = [e]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend((node.args[0], node.args[2]) if node.op == "masked" else children(node))


def leaves(i: Index, size: IndexLike) -> bool:
    """Whether an index certainly takes a value outside ``[0, size)``."""
    if i.lo is not None and i.lo >= 0:
        limit = ix.as_index(size)
        if i.hi is not None and limit.lo is not None and i.hi < limit.lo:
            return False
    if not isinstance(size, int):
        return False
    if i.is_const:
        return not 0 <= i.value < size
    below = i.lo is not None and i.lo < 0
    above = i.hi is not None and i.hi >= size
    return (below or above) and _enumerated(i, size)


def _enumerated(i: Index, size: int) -> bool:
    """The same by evaluating the index everywhere; false where that cannot be done."""
    if any(True for _ in ix.indirect_atoms(i)):
        return i.kind == "indirect"
    variables = sorted(i.free_vars, key=lambda v: v.name)
    extents = [v.extent for v in variables]
    total = 1
    for n in extents:
        if not isinstance(n, int):
            return False
        total *= n
    if total > _ENUMERATE or total == 0:
        return False
    env = {
        v: torch.arange(int(ix.evaluate(v.extent, {}))).reshape(
            [-1 if j == k else 1 for j in range(len(variables))]
        )
        for k, v in enumerate(variables)
    }
    try:
        lo, hi = torch.aminmax(ix.evaluate(i, env))
    except KeyError:  # a size symbol
        return False
    return int(lo) < 0 or int(hi) >= size


def extent_of(b: Buffer, at: Callable[[IndexLike], int] | None = None) -> int | None:
    """Elements from the buffer's first to its last, or ``None`` where a size is symbolic. ``at`` gives such
    sizes a value."""
    if 0 in b.sizes:
        return 0
    out = 1
    for size, step in zip(b.sizes, b.strides, strict=True):
        n, stride = (size, step) if at is None else (at(size), at(step))
        if isinstance(n, Index) or isinstance(stride, Index):
            return None
        if n == 0:
            return 0
        out += (n - 1) * stride
    return out


def memory_of(buffers: Mapping[str, Buffer], name: str) -> int | None:
    """The bytes of a buffer's memory; for an alias, of the memory that it reinterprets."""
    b = buffers[name]
    if b.alias_of is not None:
        return memory_of(buffers, b.alias_of)
    extent = extent_of(b)
    return None if extent is None else extent * b.dtype.itemsize
