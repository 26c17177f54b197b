"""The schedule and the kernels: what runs, in which order, over which loops.

What comes in: nothing; ``schedule/`` builds it. What goes out: a frozen ``Schedule`` of steps, each a
``Kernel`` (a loop nest) or an extern call. What holds in between:

* Inside a kernel a load and a store have one *flat* index, in elements from the start of the parameter.
* The kernel is target-neutral. A body under a ``vector`` loop is written for one element: how many lanes are
  computed at once, and how a tail is masked, is the printer's business. So is how many accumulators are kept.
* ``Init`` introduces an accumulator. ``Accumulate`` combines a value into it, under any number of loops
  deeper than its ``Init``. After those loops, ``local(name)`` reads it.

The next file is ``codegen/cpp.py``, which prints kernels; ``interpret.py`` runs them in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from .expr import Expr, dtype_name, walk
from .index import Index, IndexLike
from .loops import Extern, LoopProgram, Origin

__all__ = [
    "Accumulate",
    "Attend",
    "Candidate",
    "Choice",
    "Init",
    "Kernel",
    "KernelCall",
    "Let",
    "Loop",
    "Multiply",
    "Param",
    "Placement",
    "Rows",
    "Schedule",
    "Scratch",
    "Stmt",
    "Store",
]


@dataclass(frozen=True)
class Param:
    """A pointer parameter. ``role`` is ``in``, ``out`` or ``inout`` (an output that is read, or written in
    place).

    ``restrict`` is true where no other parameter of this call can overlap it.
    """

    name: str
    dtype: torch.dtype
    role: str
    restrict: bool = True


@dataclass(frozen=True)
class Loop:
    """``for var in range(start, stop)``; ``kind`` is ``serial``, ``parallel`` or ``vector``.

    ``parallel``: iterations are independent and divided over threads (several directly nested ones collapse).
    ``vector``: iterations are independent, except for accumulators initialised outside.
    ``start`` and ``stop`` may differ from the variable's own range when a loop was split at a mask.
    """

    var: Index
    start: IndexLike
    stop: IndexLike
    kind: str
    body: tuple[Stmt, ...]


@dataclass(frozen=True)
class Let:
    """``name = value``, read by ``local(name)`` in later statements of the same or a deeper loop."""

    name: str
    value: Expr


@dataclass(frozen=True)
class Init:
    """An accumulator of a reduction kind, at its neutral element. For arg kinds it also keeps the
    position."""

    name: str
    kind: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Accumulate:
    """Combine ``value`` into the accumulator. ``position`` (int64) is given for argmax and argmin."""

    name: str
    value: Expr
    position: Index | None = None


@dataclass(frozen=True)
class Store:
    """``buffer[index] = value``; ``value.dtype`` is the parameter's (or the scratch array's) dtype."""

    buffer: str
    index: Index
    value: Expr


@dataclass(frozen=True)
class Scratch:
    """A thread's own array of ``size`` elements, uninitialised, alive in the rest of the enclosing body."""

    name: str
    dtype: torch.dtype
    size: IndexLike


@dataclass(frozen=True)
class Multiply:
    """A block of a matrix product, into a float32 scratch array of ``most`` times ``columns`` elements.

    For ``r < rows`` and ``c < columns``, ``tile[columns * r + c]`` is the sum over ``k < depth`` of
    ``left[at + stride * r + k]`` times element (k, c) of the panel that begins at ``panel[start]`` (see
    ``panels.py``).

    ``left`` and ``panel`` are parameters of one dtype, or ``panel`` is int8; products and sums are float32,
    and partial sums of ``Multiply.BLOCK`` terms are added up, so that rounding errors do not grow with the
    depth. ``height`` rows are computed at once, by a ``method`` of ``METHODS``; ``rest``: the rows that are
    left over then, or ``None`` where they vary.
    """

    tile: str
    left: str
    at: Index
    stride: int
    panel: str
    start: Index
    rows: IndexLike
    most: int
    columns: int
    depth: IndexLike
    height: int
    rest: int | None
    method: str = "fma"

    BLOCK: ClassVar[int] = 384
    #: ``fma``: products of float32, to which other dtypes are widened; of bfloat16 also ``dot``, pairs of
    #: them by vdpbf16ps, and ``amx``, 16 by 32 of them by tdpbf16ps, for which panels have a multiple of 32
    #: rows. Those two take subnormal numbers for zeros.
    METHODS: ClassVar[tuple[str, ...]] = ("fma", "dot", "amx")

    @property
    def reads(self) -> tuple[str, ...]:
        """The parameters that are read."""
        return (self.left, self.panel)

    @property
    def indices(self) -> tuple[IndexLike, ...]:
        """The positions and sizes that may depend on loops around it."""
        return (self.at, self.start, self.rows, self.depth)

    def renamed(self, names: Mapping[str, str]) -> Multiply:
        """The statement with other names for its arrays."""
        return replace(self, tile=names[self.tile], left=names[self.left], panel=names[self.panel])


@dataclass(frozen=True)
class Rows:
    """Rows of numbers side by side: element (r, c) of ``buffer`` is at ``at + stride * r + c``."""

    buffer: str
    at: Index
    stride: int

    def __str__(self) -> str:
        return f"{self.buffer}[{self.at!r} + {self.stride}r + c]"


@dataclass(frozen=True)
class Attend:
    """Attention of queries to the keys of one head, into a float32 scratch array ``tile`` of ``most`` rows.

    For ``r < rows``, row r of ``tile``, ``columns`` wide, is the sum of weights times the rows of ``value``.
    The weights are the softmax of ``scale`` times the products, ``depth`` terms each, of row r of ``query``
    with the rows of ``key``, plus row r of ``mask``. With ``causal``, query ``first + r`` sees no key beyond
    ``first + r``. A row whose scores are all -inf has weights of 0.

    All are float32 parameters. ``work``: a float32 scratch array of ``work_size`` elements. ``scores`` and
    ``sums``: rows and columns of a tile of the scores, and of the result; their rows divide ``BLOCK``.
    """

    tile: str
    work: str
    query: Rows
    key: Rows
    value: Rows
    mask: Rows | None
    first: Index
    rows: IndexLike
    most: int
    keys: int
    depth: int
    columns: int
    scale: float
    causal: bool
    scores: tuple[int, int]
    sums: tuple[int, int]

    #: The rows whose scores are in memory at once.
    BLOCK: ClassVar[int] = 48

    @property
    def work_size(self) -> int:
        """Keys and values in panels, and the scores and sums of a block."""
        wide = -(-self.keys // self.scores[1]) * self.scores[1]
        columns = -(-self.columns // self.sums[1]) * self.sums[1]
        return wide * (self.depth + self.BLOCK) + columns * (self.keys + self.BLOCK)

    @property
    def operands(self) -> tuple[Rows, ...]:
        """What is read."""
        return (self.query, self.key, self.value, *(() if self.mask is None else (self.mask,)))

    @property
    def reads(self) -> tuple[str, ...]:
        """The parameters that are read."""
        return tuple(dict.fromkeys(r.buffer for r in self.operands))

    @property
    def indices(self) -> tuple[IndexLike, ...]:
        """The positions and sizes that may depend on loops around it."""
        return (*(r.at for r in self.operands), self.first, self.rows)

    def renamed(self, names: Mapping[str, str]) -> Attend:
        """The statement with other names for its arrays."""
        query, key, value, *mask = (replace(r, buffer=names[r.buffer]) for r in self.operands)
        return replace(
            self, tile=names[self.tile], work=names[self.work], query=query, key=key, value=value,
            mask=mask[0] if mask else None,
        )  # fmt: skip


Stmt = Loop | Let | Init | Accumulate | Store | Scratch | Multiply | Attend


@dataclass(frozen=True)
class Kernel:
    """One function. ``bytes`` is the memory it moves and ``work`` its element operations, for threading
    decisions.

    ``single_pass``: no loop runs over the same points twice, so that work in place is possible.
    ``checks``: whether an indirect index inside has to be tested, so that the function returns nonzero on a
    fault. ``sizes`` are the symbols that occur in it: parameters that are numbers, after the pointers.
    ``bytes`` and ``work`` are estimates where there are any, and ``threshold``, a size and a number, says at
    run time whether threads pay: where the size is that number at least. Two kernels that are equal but for
    ``name`` and ``origins`` share one compiled function.

    ``parts``, where it is not 0, makes it a *batch*: the function takes a table, of whose rows each has the
    pointers of one call and its number of points, and runs the body for all of them. ``sizes`` are then the
    two symbols between which the body runs over points. The points of all rows together, in blocks of
    ``BLOCK``, are divided into so many parts, which threads share out.
    """

    name: str
    params: tuple[Param, ...]
    body: tuple[Stmt, ...]
    checks: bool = False
    parallel: bool = True
    bytes: int = 0
    work: int = 0
    single_pass: bool = False
    origins: tuple[Origin, ...] = field(default=(), compare=False)
    sizes: tuple[Index, ...] = ()
    threshold: tuple[IndexLike, int] | None = None
    parts: int = 0

    BLOCK: ClassVar[int] = 1024

    def __str__(self) -> str:
        return to_text(self)


@dataclass(frozen=True)
class KernelCall:
    """Run ``kernel`` with these buffers, one a parameter in order.

    Of a batch, the buffers of its rows follow each other, and ``points`` says how many points each row has.
    """

    kernel: Kernel
    args: tuple[str, ...]
    points: tuple[int, ...] = ()

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The buffers of each row; those of the call itself where it is no batch."""
        width = max(1, len(self.kernel.params))
        return tuple(self.args[k : k + width] for k in range(0, len(self.args), width)) or ((),)

    @property
    def bound(self) -> tuple[tuple[Param, str], ...]:
        """Each buffer with the parameter that it is bound to."""
        return tuple(zip(self.kernel.params * len(self.rows), self.args, strict=True))


@dataclass(frozen=True)
class Placement:
    """Where a buffer lives: ``input``, ``constant``, ``output`` (a fresh tensor), ``arena`` at a byte
    ``offset``, ``extern`` (PyTorch allocates it), ``packed`` (the runtime keeps it), or ``alias`` (shares the
    storage of buffer ``of``).

    ``late``: its size is known only when the step that writes it is reached; it is allocated there, a tensor
    of its own."""

    kind: str
    offset: IndexLike = 0
    nbytes: IndexLike = 0
    of: str | None = None
    late: bool = False


@dataclass(frozen=True)
class Schedule:
    """The program as steps in execution order. ``frees`` lists for each step the extern buffers dead after
    it. ``releases`` are ``(step, start, stop)``: bytes of the arena that nothing touches after the step."""

    program: LoopProgram
    steps: tuple[KernelCall | Extern, ...]
    placements: Mapping[str, Placement]
    arena_bytes: IndexLike
    frees: tuple[tuple[str, ...], ...] = ()
    releases: tuple[tuple[int, int, int], ...] = ()

    def __str__(self) -> str:
        return schedule_text(self)


@dataclass(frozen=True)
class Candidate:
    """One way of computing what a ``Choice`` is about: a schedule of that alone, its operands as inputs.

    ``name`` begins with the kind of implementation: ``cpp_`` or ``aten_``.
    """

    name: str
    schedule: Schedule


@dataclass(frozen=True)
class Choice:
    """Ways of computing the same results, of which only a measurement can tell the fastest.

    The first candidate is taken without one. ``title`` and ``operands``, each as sizes, strides and dtype,
    are the operator's as its user wrote it.
    """

    title: str
    operands: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    candidates: tuple[Candidate, ...]


def statements(body: tuple[Stmt, ...]) -> Iterator[Stmt]:
    """Every statement, outer before inner."""
    for s in body:
        yield s
        if isinstance(s, Loop):
            yield from statements(s.body)


def expressions(body: tuple[Stmt, ...]) -> Iterator[Expr]:
    """Every root expression of a body."""
    for s in statements(body):
        if isinstance(s, (Let, Accumulate, Store)):
            yield s.value


def buffers_read(body: tuple[Stmt, ...]) -> set[str]:
    loaded = {n.buffer for e in expressions(body) for n in walk(e) if n.op == "load"}
    return loaded.union(*(s.reads for s in statements(body) if isinstance(s, (Multiply, Attend))))


def to_text(k: Kernel) -> str:
    params = [f"{p.role} {dtype_name(p.dtype)} {p.name}" for p in k.params] + [v.name for v in k.sizes]
    lines = [f"kernel {k.name}({', '.join(params)})"]
    lines += [f"  # {source}" for source in dict.fromkeys(o.source for o in k.origins) if source]
    _body_text(k.body, "  ", lines)
    return "\n".join(lines) + "\n"


def _body_text(body: tuple[Stmt, ...], pad: str, lines: list[str]) -> None:
    for s in body:
        if isinstance(s, Loop):
            lines.append(f"{pad}{s.kind} for {s.var.name} in {s.start}..{s.stop}:")
            _body_text(s.body, pad + "  ", lines)
        elif isinstance(s, Let):
            lines.append(f"{pad}{s.name} = {s.value!r}")
        elif isinstance(s, Init):
            lines.append(f"{pad}{s.name} = {s.kind} of {dtype_name(s.dtype)}")
        elif isinstance(s, Accumulate):
            at = "" if s.position is None else f" at {s.position!r}"
            lines.append(f"{pad}{s.name} <- {s.value!r}{at}")
        elif isinstance(s, Store):
            lines.append(f"{pad}{s.buffer}[{s.index!r}] = {s.value!r}")
        elif isinstance(s, Multiply):
            left = f"{s.left}[{s.at!r} + {s.stride}r + k]"
            panel = f"{s.panel}[{s.start!r} + (k, c)]"
            tile = f"{s.tile}[r<{s.rows}, c<{s.columns}]"
            how = f"{s.height} rows at once by {s.method}"
            lines.append(f"{pad}{tile} = sum(k<{s.depth}: {left} * {panel}), {how}")
        elif isinstance(s, Attend):
            tile = f"{s.tile}[r<{s.rows}, c<{s.columns}]"
            mask = "" if s.mask is None else f" + {s.mask}"
            seen = f"k<{s.keys}" + (f", k<={s.first!r} + r" if s.causal else "")
            weights = f"softmax({seen}: {s.scale} * {s.query} * {s.key}, {s.depth} terms{mask})"
            lines.append(f"{pad}{tile} = {weights} * {s.value}")
        else:
            lines.append(f"{pad}scratch {dtype_name(s.dtype)} {s.name}[{s.size}]")


def schedule_text(s: Schedule) -> str:
    lines = [f"schedule of {s.program.name}, arena {s.arena_bytes} bytes"]
    for step in s.steps:
        if isinstance(step, KernelCall):
            lines.append(f"{step.kernel.name}({', '.join(step.args)})")
            lines += ["  " + line for line in str(step.kernel).splitlines()]
        else:
            lines.append(f"{', '.join(map(str, step.outs))} = extern {step.target}")
    return "\n".join(lines) + "\n"
