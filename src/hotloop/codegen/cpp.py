"""Kernels as C++ source.

What comes in: kernels. What goes out: translation units, each with the vocabulary it needs and one function a
kernel. What holds in between:

* A function is ``extern "C" i64 name(pointer, ...)``: one pointer a parameter, in order, then the sizes that
  vary as ``i64``, which are passed like pointers. That of a batch takes the two ends of its table, of which
  each row is the pointers of one call and its number of points. It returns 0, or what ``read_status`` reads:
  a key of ``ERRORS`` in the lowest two bits, and where it fits the index and the size that do not go
  together. What it wrote is then unspecified.
* Kernels that are equal but for their names share one function: see ``dedupe``.

Separate pointers, declared ``c_void_p``, are the cheapest way of calling through ctypes that needs no
packing: 0.42 us a call with 3 of them, 0.61 with 6, 0.98 with 12; ``c_int64`` costs twice as much, an array
assigned each time 0.57, 0.68, 0.90.

The next file is ``cpp_writer.py``, then ``cpp_index.py``, ``cpp_expr.py``, ``cpp_accumulators.py``,
``cpp_stmt.py``; the words the code is written in are in ``cpp_prelude.h``, ``cpp_memory.h``, ``cpp_math.h``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir.expr import Expr
from hotloop.ir.kernel import Accumulate, Init, Kernel, Let, Loop, Param, Scratch, Stmt, Store, statements

from .cpp_expr import COMPARE, ExprPrinter, narrow
from .cpp_index import fits_32_bits
from .cpp_stmt import BATCH_NAMES, StatementPrinter
from .cpp_text import lanes, prelude, vocabulary
from .cpp_writer import Writer, register

__all__ = [
    "ERRORS",
    "KernelSource",
    "Source",
    "dedupe",
    "function_source",
    "make_units",
    "parameter_count",
    "print_functions",
    "print_kernel",
    "print_kernels",
    "read_status",
]

#: What the lowest bits of a function's result mean.
ERRORS = {
    1: "index out of range",
    2: "integer division or modulo by zero",
    3: "probability outside [0, 1]",
}
#: A translation unit holds at least this much text, so that starting the compiler pays.
UNIT = 6000
_BACKSLASH = "\\ "
_VECTOR_TYPE = re.compile(r"\b(f32|f64|[iu](?:8|16|32|64))x(\d+)\b")


@dataclass(frozen=True)
class KernelSource:
    """One function: its name, its text, and the words of the vocabulary that it uses."""

    symbol: str
    text: str
    needs: frozenset[str]


@dataclass(frozen=True)
class Source:
    """A translation unit and the functions in it."""

    name: str
    text: str
    symbols: tuple[str, ...]


def dedupe(kernels: Iterable[Kernel]) -> dict[str, Kernel]:
    """From each kernel's name to the kernel whose function serves it: the first one that is equal."""
    first: dict[Kernel, Kernel] = {}
    return {k.name: first.setdefault(replace(k, name="", origins=()), k) for k in kernels}


def print_functions(kernels: Iterable[Kernel], level: str, openmp: bool = True) -> list[KernelSource]:
    """Each distinct kernel as a function.

    Arguments:
        level: of the CPU: ``amx``, ``avx512_bf16``, ``avx512``, ``avx2``, ``neon`` or ``scalar``.
        openmp: whether parallel loops are OpenMP's; if not, ``parallel_for`` divides them over the threads of
            torch.
    """
    chosen = {k.name: k for k in dedupe(kernels).values()}
    return [print_kernel(k, level, openmp) for k in chosen.values()]


def make_units(functions: Sequence[KernelSource], units: int = 1) -> list[Source]:
    """The functions in translation units, at most ``units``: as many as compilers will run side by side.

    A unit is named after the functions in it, "cpp_fused_add_0 + 2 more".
    """
    total = sum(len(f.text) for f in functions)
    count = max(1, min(units, len(functions), total // UNIT))
    bins: list[list[KernelSource]] = [[] for _ in range(count)]
    # The largest first, each to the unit that has least.
    for f in sorted(functions, key=lambda f: -len(f.text)):
        min(bins, key=lambda u: sum(len(g.text) for g in u)).append(f)
    order = {f.symbol: k for k, f in enumerate(functions)}
    out = []
    for unit in filter(None, bins):
        unit.sort(key=lambda f: order[f.symbol])
        name = unit[0].symbol + (f" + {len(unit) - 1} more" if len(unit) > 1 else "")
        out.append(Source(name, unit_text(unit), tuple(f.symbol for f in unit)))
    return out


def print_kernels(kernels: Sequence[Kernel], level: str, units: int = 1, openmp: bool = True) -> list[Source]:
    """The translation units of all kernels: ``print_functions``, then ``make_units``."""
    return make_units(print_functions(kernels, level, openmp), units)


def function_source(symbol: str, text: str) -> KernelSource:
    """A function from its text: the words of the vocabulary in it are what it needs."""
    return KernelSource(symbol, text, frozenset(re.findall(r"\w+", text)) & vocabulary())


def read_status(status: int) -> tuple[int, tuple[int, int] | None]:
    """What the result of a function says: the error, and for an index out of range it and the size, if known.

    The first one that a thread met counts. ``cpp_memory.h`` writes the bits: ``out_of_range``.
    """
    code, bits = status & 3, status >> 2 & 63
    if code != 1 or not bits:
        return code, None
    return code, (status >> (8 + bits), (status >> 8) & ((1 << bits) - 1))


def parameter_count(f: KernelSource) -> int:
    """How many pointers the function takes, read from its text."""
    match = re.search(rf'extern "C" i64 {f.symbol}\(([^)]*)\)', f.text)
    if match is None:
        raise ValueError(f'the text of {f.symbol} has no function `extern "C" i64 {f.symbol}(...)`')
    return match[1].count(",") + 1 if match[1].strip() else 0


def unit_text(functions: Sequence[KernelSource]) -> str:
    """A translation unit: the vocabulary, the vector types, and the functions."""
    needs = sorted(set().union(*(f.needs for f in functions)))
    types = sorted(
        {m.groups() for f in functions for m in _VECTOR_TYPE.finditer(f.text)},
        key=lambda t: (t[0], int(t[1])),
    )
    aliases = [f"using {t}x{n} = vec<{t}, {n}>;" for t, n in types]
    return "\n".join([prelude(needs), *aliases, "", *(f.text for f in functions)])


def print_kernel(k: Kernel, level: str, openmp: bool = True) -> KernelSource:
    """One kernel as a function."""
    writer = Writer()
    inside = list(statements(k.body))
    taken = {p.name for p in k.params} | {v.name for v in k.sizes} | {"error"}
    taken |= set(BATCH_NAMES) if k.parts else set()
    taken |= {t.var.name for t in inside if isinstance(t, Loop)}
    taken |= {t.name for t in inside if isinstance(t, (Let, Init, Scratch))}
    values = ExprPrinter(writer, {p.name: p.dtype for p in k.params}, taken)
    shared = frozenset(p.name for p in k.params if not p.restrict)
    printer = StatementPrinter(writer, values, lane_count(k, level), k.parallel, openmp, shared, k.threshold)
    if k.parts:
        printer.batch(k, _parameter)
    else:
        printer.body(k.body)
    body = writer.lines()
    if any("&error" in line for line in body):
        body = ["i64 error = 0;", *body, "return error;"]
    else:
        body.append("return 0;")
    # A backslash at the end would make the next line part of the comment.
    lines = [f"// {s.rstrip(_BACKSLASH)}" for s in dict.fromkeys(o.source for o in k.origins) if s]
    lines += _signature(k)
    lines += [("    " + line if not line.startswith("#") else line) for line in body]
    text = "\n".join([*lines, "}", ""])
    return function_source(k.name, text)


def _signature(k: Kernel) -> list[str]:
    params = [*map(_parameter, k.params), *(f"i64 {v.name}" for v in k.sizes)]
    if k.parts:
        params = ["const i64* rows", "const i64* rows_end"]
    head = f'extern "C" i64 {k.name}('
    whole = f"{head}{', '.join(params)}) {{"
    if len(whole) <= 110:
        return [whole]
    return [head, *(f"        {p}," for p in params[:-1]), f"        {params[-1]}) {{"]


def _parameter(p: Param) -> str:
    kind = "u8" if p.dtype is torch.bool else ex.dtype_name(p.dtype)
    return f"{'const ' if p.role == 'in' else ''}{kind}*{' __restrict' if p.restrict else ''} {p.name}"


# --- lanes --------------------------------------------------------------------------------------------------


def lane_count(k: Kernel, level: str) -> int:
    """The lanes of the kernel's vector loops: as many as the widest value in them allows."""
    widest = [_widest(s) for s in statements(k.body) if isinstance(s, Loop) and s.kind == "vector"]
    return min((lanes(level, w) for w in widest), default=1)


def _widest(loop: Loop) -> int:
    """The bytes of the widest value that a vector loop computes in lanes."""
    inside: list[Stmt] = list(statements(loop.body))
    own = {t.name for t in inside if isinstance(t, (Let, Init))}
    memo: dict[Expr, bool] = {}

    def varies(e: Expr) -> bool:
        got = memo.get(e)
        if got is None:
            got = (
                loop.var in e.free_vars
                or (e.op == "local" and e.attr in own)
                or any(map(varies, ex.children(e)))
            )
            memo[e] = got
        return got

    widest = 1
    seen: set[Expr] = set()

    def visit(e: Expr) -> None:
        nonlocal widest
        if e in seen or not varies(e):
            return
        seen.add(e)
        # Masks are as wide as 32-bit integers; bfloat16 and float16 are float32 in registers.
        widest = max(widest, 4 if e.dtype is torch.bool or register(e.dtype) == "f32" else e.dtype.itemsize)
        for i in e.indices if e.op == "load" else ():
            if ix.coefficient(i, loop.var) is None:
                widest = max(widest, 4 if fits_32_bits(i) else 8)
        if e.op == "random" and not fits_32_bits(e.attr[1]):
            widest = 8
        narrowed = e.op in COMPARE or e.op == "cast"
        if narrowed and all(narrow(a) is not None for a in e.args):
            widest = max(widest, 4)
            return
        for c in ex.children(e):
            visit(c)

    for t in inside:
        if isinstance(t, (Let, Store, Accumulate)):
            visit(t.value)
        if isinstance(t, Store):
            for a in ix.indirect_atoms(t.index):
                visit(a.args[0])
        if isinstance(t, Accumulate):
            widest = max(widest, t.value.dtype.itemsize if t.value.dtype is not torch.bool else 4)
            if t.position is not None and not fits_32_bits(t.position):
                widest = 8
    return widest


def symbols(sources: Iterable[Source]) -> Mapping[str, Source]:
    """Which unit holds each function."""
    return {name: s for s in sources for name in s.symbols}
