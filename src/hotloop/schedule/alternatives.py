"""The ways in which a matrix product may run: what only a measurement can decide between.

What comes in: a ``Product`` with its default tile. What goes out: the same with other tiles, other divisions
over threads, its epilogue apart, and PyTorch's own call. What holds in between: all compute the same results
within the rounding of their dtype, and the first is the one that is taken unmeasured.

The next file is ``weights.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hotloop.ir import sizes as sz
from hotloop.ir.loops import (
    Buffer,
    Extern,
    LoopProgram,
    Measure,
    Op,
    Origin,
    ViewRef,
    op_outputs,
    op_reads,
    program_symbols,
)

from .dependences import base_of
from .fuse import Group
from .products import Product, buffers_of, operands_of, panels_of
from .tiles import tilings

__all__ = ["Way", "alone", "operands", "title", "ways"]


@dataclass(frozen=True)
class Way:
    """Steps that take the place of a product; panels of other widths are new buffers of the program."""

    name: str
    steps: tuple[Product | Group | Extern, ...]
    panels: tuple[Buffer, ...] = ()


def ways(x: Product, level: str, threads: int, backends: Collection[str]) -> tuple[Way, ...]:
    """How a product may run, by the implementations allowed (``CPP``, ``ATEN``). The default comes first."""
    _, left, matrix, _ = operands_of(x.op)
    found: list[Way] = []
    if "CPP" in backends:
        m, k, n = left.sizes[0], sz.static(matrix.sizes[0]), sz.static(matrix.sizes[1])
        tiles: list[tuple[tuple[Product | Group, ...], tuple[Buffer, ...]]] = []
        for tiling in tilings(matrix.dtype, m, n, k, level, threads, left.dtype):
            other = replace(x, tiling=tiling, panels=panels_of(matrix, tiling).name)
            tiles.append(((other,), buffers_of(other)))
        if x.epilogue is not None:
            tiles.append(((replace(x, epilogue=None), x.epilogue), buffers_of(x)))
        found = [Way(f"cpp_packed_gemm_{k}", steps, made) for k, (steps, made) in enumerate(tiles)]
    if "ATEN" in backends:
        epilogue = () if x.epilogue is None else (x.epilogue,)
        found.append(Way(f"aten_{_operator(x)}", (x.op, *epilogue)))
    return tuple(found)


# --- what a person calls it ---------------------------------------------------------------------------------


def _operator(x: Product) -> str:
    *_, matrix = x.op.args
    name = Origin(target=str(x.op.target)).word.strip("_")
    like_linear = name in ("mm", "addmm") and matrix.strides[0] == 1 and matrix.strides != (1, 1)
    return "linear" if like_linear else name


def title(x: Product) -> str:
    """The operators of a product and its epilogue: ``linear_relu``."""
    members = x.epilogue.members if x.epilogue is not None else ()
    origins = [o for m in members for o in (*m.op.folded, m.op.origin)]
    names = [o.word.strip("_") for o in origins]
    return "_".join(dict.fromkeys((_operator(x), *filter(None, names))))


def operands(x: Product) -> tuple[ViewRef, ...]:
    """The operands as the user has them: input, weight and bias of a linear layer."""
    if _operator(x) != "linear":
        return tuple(x.op.args)
    *bias, left, matrix = x.op.args
    weight = replace(matrix, sizes=matrix.sizes[::-1], strides=matrix.strides[::-1])
    return (left, weight, *bias)


# --- a part of a program as a program -----------------------------------------------------------------------


def alone(p: LoopProgram, ops: Sequence[Op], results: Sequence[str], name: str) -> LoopProgram:
    """The program of some operations of ``p``: what they read are its inputs, ``results`` its outputs.

    Sizes that vary are numbers that it takes besides, after its tensors.
    """
    written = {base_of(p.buffers, n) for op in ops for n in op_outputs(op)}
    buffers: dict[str, Buffer] = {}
    for mentioned in [n for op in ops for n in (*op_reads(op), *op_outputs(op))]:
        for n in dict.fromkeys((base_of(p.buffers, mentioned), mentioned)):
            b = p.buffers[n]
            if b.alias_of is None:
                kept = "output" if n in results else "temp"
                b = replace(b, kind=kept if n in written else "input")
            buffers.setdefault(n, b)
    inputs: list[str | None] = [n for n, b in buffers.items() if b.kind == "input"]
    outputs = tuple(ViewRef(n, buffers[n].sizes, buffers[n].strides, 0, buffers[n].dtype) for n in results)
    made = LoopProgram(name, buffers, tuple(ops), tuple(inputs), outputs)
    symbols = sorted(program_symbols(made), key=lambda v: v.name)
    numbers = {v: Measure(len(inputs) + k) for k, v in enumerate(symbols)}
    return replace(made, inputs=(*inputs, *(None for _ in symbols)), symbols=numbers)
