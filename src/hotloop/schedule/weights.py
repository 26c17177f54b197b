"""Which calls through PyTorch have a weight that the runtime may keep in a form of its own.

What comes in: an ``Extern`` operation. What goes out: the same, its ``weight`` set where that pays. What
holds in between: a weight is a graph input or a constant, whole, that nothing in the program writes. Its
elements fill the memory from its first to its last one: the runtime tells by that memory whether it changed.

The next file is ``batches.py``.
"""

from __future__ import annotations

from dataclasses import replace

from hotloop.ir import sizes as sz
from hotloop.ir.loops import Buffer, Extern, LoopProgram, ViewRef

from .dependences import Uses

__all__ = ["is_dense", "lasts", "mark_weight"]


def mark_weight(p: LoopProgram, op: Extern, uses: Uses) -> Extern:
    """``op`` with ``weight`` set where it is a 2-D convolution, in channels-last, by a lasting weight."""
    at = _WEIGHT_AT.get(str(op.target))
    if at is None:
        return op
    x, weight, bias = op.args[0], op.args[at], op.args[at + 1]
    transposed = str(op.target) == "aten.convolution.default" and op.args[6]
    plain = isinstance(x, ViewRef) and isinstance(weight, ViewRef) and not transposed and not op.kwargs
    if not plain or len(x.sizes) != 4 or not _channels_last(x) or not _whole(p, weight, uses):
        return op
    if bias is not None and not (isinstance(bias, ViewRef) and bias.strides == (1,)):
        return op  # the packed form reads it as it lies
    if not all(isinstance(n, int) for numbers in op.args[at + 2 : at + 5] for n in numbers):
        return op
    return replace(op, weight=at)


#: Convolutions, alone and with what follows, and the position of their weight.
_WEIGHT_AT = {
    "aten.convolution.default": 1,
    "mkldnn._convolution_pointwise.default": 1,
    "mkldnn._convolution_pointwise.binary": 2,
}


def _channels_last(v: ViewRef) -> bool:
    _, channels, height, width = v.sizes
    return v.strides == (channels * height * width, 1, channels * width, channels)


def _whole(p: LoopProgram, weight: ViewRef, uses: Uses) -> bool:
    """Whether the weight is all of an input or constant that stays as it is."""
    b = p.buffers[weight.buffer]
    whole = weight.sizes == b.sizes and weight.strides == b.strides and weight.dtype is b.dtype
    return whole and is_dense(b) and lasts(p, weight.buffer, uses)


def is_dense(b: Buffer) -> bool:
    """Whether a buffer's elements lie side by side, in any order: none twice, and nothing in between."""
    if not sz.is_static((*b.sizes, *b.strides)):
        return False
    expected = 1
    for step, size in sorted(zip(map(sz.static, b.strides), map(sz.static, b.sizes), strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def lasts(p: LoopProgram, name: str, uses: Uses) -> bool:
    """Whether a buffer is an input or a constant that the program leaves as it is."""
    b = p.buffers[name]
    if b.kind not in ("input", "constant") or b.device != "cpu" or b.alias_of is not None:
        return False
    return name not in uses.writer
