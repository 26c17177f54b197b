"""C++ text as a tree of blocks, indented and braced when it is rendered.

What comes in: lines and blocks, in order. What goes out: text. What holds in between: a mark keeps a place
open, so that a declaration can be put there once it is known to be needed. The next file is ``cpp_index.py``.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

import torch

from hotloop.ir.expr import dtype_name

__all__ = [
    "ADD",
    "ATOM",
    "LOW",
    "MUL",
    "UNARY",
    "Block",
    "Code",
    "Writer",
    "literal",
    "register",
    "vector_type",
]

# How strongly a piece of C++ binds; an operand that binds less is put in parentheses.
LOW, ADD, MUL, UNARY, ATOM = range(5)


@dataclass(frozen=True)
class Code:
    """A C++ expression. ``vector``: it has one value a lane; otherwise one value for all of them."""

    text: str
    prec: int = ATOM
    vector: bool = False

    def at(self, prec: int) -> str:
        """The text as an operand that has to bind at least as strongly as ``prec``."""
        return self.text if self.prec >= prec else f"({self.text})"


@dataclass
class Block:
    """A header and what stands under it. An empty header is a scope of its own."""

    header: str = ""
    items: list[Item] = field(default_factory=list)
    mark: bool = False
    end: str = "}"


Item = str | Block


class Writer:
    """Collects lines into the block that is open."""

    def __init__(self) -> None:
        self.root = Block(mark=True)
        self._open = [self.root]

    def line(self, text: str) -> None:
        """Add a line."""
        self._open[-1].items.append(text)

    def mark(self) -> Block:
        """Keep a place open here; ``mark.items`` takes lines later."""
        place = Block(mark=True)
        self._open[-1].items.append(place)
        return place

    def open(self, header: str, end: str = "}") -> None:
        """Start a block: ``header {``."""
        block = Block(header, end=end)
        self._open[-1].items.append(block)
        self._open.append(block)

    def close(self) -> None:
        """End the innermost block."""
        self._open.pop()

    def lines(self) -> list[str]:
        """Everything, indented."""
        return _render(self.root)


def _render(block: Block) -> list[str]:
    inner: list[str] = []
    for item in block.items:
        inner += [item] if isinstance(item, str) else _render(item)
    if block.mark:
        return inner
    if not inner:
        return []
    body = ["    " + line for line in inner]
    head = block.header.split("\n")
    if not block.header:
        return ["{", *body, "}"]
    # A single statement needs no braces; a statement with a block of its own reads better with them.
    if len(inner) == 1 and block.end == "}":
        return [*head, *body]
    return [*head[:-1], head[-1] + " {", *body, block.end]


def register(dtype: torch.dtype) -> str:
    """The C++ type of a value in a register: bfloat16 and float16 are float32 there."""
    if dtype in (torch.bfloat16, torch.float16):
        return "f32"
    return dtype_name(dtype)


def vector_type(dtype: torch.dtype, lanes: int) -> str:
    """``f32x8``: a vector of values in registers; ``f32`` for one lane, ``mask<8>`` for bools."""
    if dtype is torch.bool:
        return "bool" if lanes == 1 else f"mask<{lanes}>"
    return register(dtype) if lanes == 1 else f"{register(dtype)}x{lanes}"


def literal(value: bool | int | float, dtype: torch.dtype) -> Code:
    """A constant, written so that the compiler reads back the same bits."""
    if dtype is torch.bool:
        return Code("true" if value else "false")
    if not dtype.is_floating_point:
        return _integer(int(value), dtype)
    double = dtype is torch.float64
    if math.isnan(value):
        return Code('__builtin_nan("")' if double else '__builtin_nanf("")')
    if math.isinf(value):
        text = "__builtin_inf()" if double else "__builtin_inff()"
    else:
        text = _shortest(abs(float(value)), double)
    return Code("-" + text, UNARY) if math.copysign(1.0, value) < 0 else Code(text)


def _integer(value: int, dtype: torch.dtype) -> Code:
    name = register(dtype)
    if value == torch.iinfo(dtype).min and dtype.is_signed and dtype.itemsize >= 4:
        return Code(f"{name}({value + 1} - 1)")  # C++ has no literal for the lowest integer
    if name == "i32":
        return Code(str(value), ATOM if value >= 0 else UNARY)
    return Code(f"{name}({value})")


def _shortest(value: float, double: bool) -> str:
    """The shortest decimal that reads back as the same number."""
    text = repr(value)
    if not double:
        packed = struct.pack("<f", value)
        for digits in range(1, 10):
            text = f"{value:.{digits}g}"
            try:
                if struct.pack("<f", float(text)) == packed:
                    text = repr(float(text))
                    break
            except OverflowError:  # the largest float32, rounded up
                continue
    if "." not in text and "e" not in text:
        text += ".0"
    elif "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return text if double else text + "f"
