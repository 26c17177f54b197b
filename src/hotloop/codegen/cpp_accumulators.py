"""The accumulators of reductions in C++: how many there are, how a value is added, how they are combined.

What comes in: ``Init`` and ``Accumulate`` statements, as ``cpp_stmt.py`` meets them. What goes out: their
C++. What holds in between: an accumulator that is initialised outside a vector loop and fed inside has one
part a lane and a part for each of several vectors, combined once, after the last loop that feeds it; parts
are declared when first used. The next file is ``cpp_stmt.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hotloop.ir.kernel import Init

from .cpp_writer import Block, literal, vector_type

__all__ = ["Accumulator", "neutral", "update"]

_COMBINE = {"max": "maximum", "min": "minimum", "any": "mask_or", "all": "mask_and"}
_ACROSS = {"sum": "hsum", "prod": "hprod", "max": "hmax", "min": "hmin", "any": "any", "all": "all"}


def neutral(kind: str, dtype: torch.dtype) -> str:
    """What changes nothing when it is accumulated."""
    if kind in ("any", "all"):
        return "true" if kind == "all" else "false"
    if kind in ("sum", "prod"):
        return literal(0 if kind == "sum" else 1, dtype).text
    low = kind in ("max", "argmax")
    if dtype.is_floating_point:
        return literal(float("-inf") if low else float("inf"), dtype).text
    info = torch.iinfo(dtype)
    return literal(info.min if low else info.max, dtype).text


def update(kind: str, dtype: torch.dtype, into: str, value: str) -> str:
    """The statement that accumulates one more value; not for the arg kinds."""
    if kind in ("sum", "prod"):
        if dtype.is_floating_point or dtype.itemsize >= 4:
            return f"{into} {'+' if kind == 'sum' else '*'}= {value};"
        return f"{into} = {'add' if kind == 'sum' else 'mul'}({into}, {value});"
    return f"{into} = {_COMBINE[kind]}({value}, {into});"


def _bare(text: str) -> str:
    """Without the parentheses around the whole, which ``_two`` puts there."""
    return text[1:-1] if text.startswith("(") else text


@dataclass
class Accumulator:
    """One accumulator while its loops are printed.

    Arguments:
        init: the statement.
        place: where its parts are declared.
        lanes: of a vector part.
        own_lanes: it was initialised inside the vector loop: each lane keeps its own result.
        position: the type of the positions of an arg kind, ``i32`` or ``i64``.
        name: the stem of the parts' names.
    """

    init: Init
    place: Block
    lanes: int
    own_lanes: bool
    position: str
    name: str
    vectors: list[str] = field(default_factory=list)
    scalar: str | None = None
    fed_in_lanes: bool = False

    @property
    def arg(self) -> bool:
        """Whether the result is a position."""
        return self.init.kind in ("argmax", "argmin")

    def _declare(self, name: str, lanes: int) -> None:
        start = neutral(self.init.kind, self.init.dtype)
        kind = vector_type(self.init.dtype, lanes)
        if lanes > 1:
            boolean = self.init.dtype is torch.bool
            start = f"mask_splat<{lanes}>({start})" if boolean else f"splat<{kind}>({start})"
        self.place.items.append(f"{kind} {name} = {start};")
        if self.arg:
            at = self.position if lanes == 1 else f"{self.position}x{lanes}"
            last = "0x7fffffff" if self.position == "i32" else "0x7fffffffffffffff"
            value = last if lanes == 1 else f"splat<{at}>({last})"
            self.place.items.append(f"{at} {name}_at = {value};")

    def part(self, vector: bool, group: int, groups: int) -> str:
        """The variable to feed."""
        if vector:
            while len(self.vectors) <= group:
                k = len(self.vectors)
                suffix = (
                    "" if self.own_lanes and groups == 1 else f"_{'abcd'[k]}" if groups > 1 or k else "_v"
                )
                self.vectors.append(self.name + suffix)
                self._declare(self.vectors[k], self.lanes)
            return self.vectors[group]
        if self.scalar is None:
            self.scalar = f"{self.name}_s" if self.fed_in_lanes or self.arg else self.name
            self._declare(self.scalar, 1)
        return self.scalar

    def _step(self, into: str, value: str) -> str:
        if self.arg:
            return f"{self.init.kind}_step({into}, {into}_at, {value}, {value}_at);"
        return update(self.init.kind, self.init.dtype, into, value)

    def flush(self, into: Accumulator, groups: int) -> list[str]:
        """Add the parts of this accumulator, one of a block, to those of the whole."""
        lines = [self._step(into.part(True, k, groups), v) for k, v in enumerate(self.vectors)]
        if self.scalar is not None:
            lines.append(self._step(into.part(False, 0, 1), self.scalar))
        return lines

    def combine(self) -> list[str]:
        """Make one value of all parts, under the accumulator's own name."""
        if self.arg:
            return self._combine_arg()
        kind, dtype = self.init.kind, self.init.dtype
        if not self.vectors:
            if self.scalar is None:
                self.part(False, 0, 1)
            return (
                []
                if self.scalar == self.name
                else [f"const {vector_type(dtype, 1)} {self.name} = {self.scalar};"]
            )
        parts = list(self.vectors)
        while len(parts) > 1:
            pairs = [parts[k : k + 2] for k in range(0, len(parts), 2)]
            parts = [self._two(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
        value = f"{_ACROSS[kind]}({_bare(parts[0])})"
        if self.scalar is not None:
            value = _bare(self._two(value, self.scalar))
        return [f"const {vector_type(dtype, 1)} {self.name} = {value};"]

    def _two(self, a: str, b: str) -> str:
        kind = self.init.kind
        if kind in ("sum", "prod"):
            return f"({a} {'+' if kind == 'sum' else '*'} {b})"
        return f"{_COMBINE[kind]}({a}, {b})"

    def _combine_arg(self) -> list[str]:
        kind, value = self.init.kind, f"{self.name}_s"
        lines = []
        if self.vectors:
            first = self.vectors[0]
            lines = [self._step(first, v) for v in self.vectors[1:]]
            done = self.scalar is not None
            best = f"{self.name}_best"
            lines.append(f"{vector_type(self.init.dtype, 1)} {best}; {self.position} {best}_at;")
            lines.append(f"h{kind}({first}, {first}_at, {best}, {best}_at);")
            if done:
                lines.append(self._step(best, value))
            value = best
        elif self.scalar is None:
            self.part(False, 0, 1)
        return [*lines, f"const i64 {self.name} = {value}_at;"]
