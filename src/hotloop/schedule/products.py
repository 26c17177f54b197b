"""Matrix products by a packed weight: which ones, with which work in their tiles, and their loops.

What comes in: the groups and calls in order. What goes out: the same, with a ``Product`` in the place of each
matrix product in float32 whose right operand is a lasting input, and of the elementwise group that works on
its result; and, later, the kernel of a ``Product``. What holds in between: a product runs where its epilogue
ran, no earlier than its operands are there and before anybody reads its result.

A thread takes panels of columns (see ``ir/panels.py``), and a run of rows. For each tile of ``rows`` by
``width`` it sums the products in registers, puts the sums into a scratch array that stays in the L1 cache,
and applies the epilogue to it row by row.

The next file is ``alternatives.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index, IndexLike
from hotloop.ir.kernel import KernelCall, Loop, Multiply, Scratch, Stmt, Store
from hotloop.ir.loops import Buffer, Extern, LoopProgram, Op, Pointwise, ViewRef, op_outputs, op_reads
from hotloop.ir.panels import panel_count

from .axes import flat_index
from .dependences import Uses, base_of
from .fuse import Group
from .loops import Machine, finish, map_statement, substitute_statements
from .passes import build_nest
from .weights import is_dense, lasts

__all__ = ["Product", "build_product", "find_products", "operations", "panels_of", "tile_shapes"]

#: Smaller ones are bound by what a call costs.
LEAST = 8
_TARGETS = ("aten.mm.default", "aten.addmm.default")

#: By level: the lanes of a register, and for each tile its rows, its columns in registers, and the time that
#: a product takes with it. Measured with AVX-512, as shares of the peak: 8 x 48 0.97, 6 x 64 0.96, 12 x 32
#: 0.85.
TILES: Mapping[str, tuple[int, tuple[tuple[int, int, float], ...]]] = {
    "avx512": (16, ((8, 3, 1.0), (6, 4, 1.01), (12, 2, 1.14), (14, 1, 1.5))),
    "avx2": (8, ((6, 2, 1.0), (4, 3, 1.01), (12, 1, 1.5))),
    "neon": (4, ((8, 3, 1.0), (6, 4, 1.01), (12, 2, 1.14), (14, 1, 1.5))),
}


@dataclass(frozen=True)
class Product:
    """``out = left @ matrix (+ bias)`` by panels of ``matrix``, and a group that works on ``out`` in tiles.

    ``left`` is (M, K) with a stride of 1 along K, ``out`` (M, N) and contiguous. ``rows`` and ``width`` are a
    tile's. ``runs`` is how many runs the rows are divided into, 0 for as many as it takes to have work for
    every thread; ``rows_first``: a run goes through all panels, so that its rows stay in the L2 cache.
    """

    op: Extern
    left: ViewRef
    bias: ViewRef | None
    panels: str
    rows: int
    width: int
    epilogue: Group | None = None
    runs: int = 0
    rows_first: bool = False

    @property
    def out(self) -> str:
        """The buffer of the product itself."""
        (name,) = self.op.outs
        assert name is not None
        return name


# --- which ones ---------------------------------------------------------------------------------------------


def find_products(
    p: LoopProgram, groups: Sequence[Group | Extern], level: str, uses: Uses
) -> tuple[LoopProgram, tuple[Group | Extern | Product, ...]]:
    """Products in the place of matrix products, with their epilogues; the program has their panels."""
    if level not in TILES:
        return p, tuple(groups)
    buffers = dict(p.buffers)
    steps: list[Group | Extern | Product | None] = list(groups)
    for i, g in enumerate(groups):
        product = _product(p, g, buffers, level, uses) if isinstance(g, Extern) else None
        if product is not None:
            steps[i] = product
    for i in reversed(range(len(steps))):  # of two products that one group reads, the later one takes it
        step = steps[i]
        at = _epilogue(p, steps, i) if isinstance(step, Product) else None
        if at is not None:
            group = steps[at]
            assert isinstance(step, Product) and isinstance(group, Group)
            steps[at], steps[i] = replace(step, epilogue=group), None
    return replace(p, buffers=buffers), tuple(s for s in steps if s is not None)


def _product(
    p: LoopProgram, op: Extern, buffers: dict[str, Buffer], level: str, uses: Uses
) -> Product | None:
    """The product that a call computes, or ``None`` where it is better left to PyTorch."""
    if str(op.target) not in _TARGETS or op.kwargs or len(op.outs) != 1 or op.outs[0] is None:
        return None
    *bias, left, matrix = op.args
    if not all(isinstance(v, ViewRef) and v.dtype is torch.float32 for v in op.args):
        return None
    out = p.buffers[op.outs[0]]
    if not sz.is_static((*left.sizes[1:], *left.strides, *matrix.sizes, *matrix.strides)):
        return None
    m, k, n = left.sizes[0], sz.static(left.sizes[1]), sz.static(matrix.sizes[1])
    if min(sz.hint(m) * LEAST, k, n) < LEAST or out.device != "cpu" or out.alias_of is not None:
        return None
    if left.strides[1] != 1 or out.strides != (n, 1) or not _is_matrix(p, matrix, uses):
        return None
    if bias and not (len(bias[0].sizes) < 2 or bias[0].sizes[0] in (1, m)):
        return None
    rows, width = tile_shape(m, n, level)
    panels = panels_of(matrix, width)
    buffers.setdefault(panels.name, panels)
    return Product(op, left, bias[0] if bias else None, panels.name, rows, width)


def panels_of(matrix: ViewRef, width: int) -> Buffer:
    """The buffer of a matrix in panels of so many columns."""
    k, n = map(sz.static, matrix.sizes)
    name = f"panels_{matrix.buffer}_{'x'.join(map(str, matrix.strides))}_{width}"
    sizes = (panel_count(n, width), k, width)
    return Buffer(name, torch.float32, sizes, (k * width, width, 1), "packed", packs=matrix)


def _is_matrix(p: LoopProgram, v: ViewRef, uses: Uses) -> bool:
    """Whether a view is all of a lasting input, as it lies or transposed."""
    b = p.buffers[v.buffer]
    same = (v.sizes, v.strides) in ((b.sizes, b.strides), (b.sizes[::-1], b.strides[::-1]))
    whole = len(b.sizes) == 2 and same and v.offset == 0 and is_dense(b)
    return b.lasting and whole and lasts(p, v.buffer, uses)


def tile_shape(rows: IndexLike, columns: int, level: str) -> tuple[int, int]:
    """Rows and columns of the tiles for a product of so many rows and columns: little padding, few loads."""
    return tile_shapes(rows, columns, level)[0]


def tile_shapes(rows: IndexLike, columns: int, level: str) -> list[tuple[int, int]]:
    """Every shape of a tile that a product may have, the most likely one first."""
    lanes, shapes = TILES[level]
    padded = {s: panel_count(columns, lanes * s[1]) * s[1] * s[2] for s in shapes}
    found = []
    for most, count, _ in sorted(shapes, key=lambda s: padded[s]):
        if not isinstance(rows, Index):
            most = -(-rows // -(-rows // most))  # as many tiles, of about equal height
        found.append((most, lanes * count))
    return found


def _epilogue(p: LoopProgram, steps: Sequence[Group | Extern | Product | None], i: int) -> int | None:
    """The position of the group that can work on the tiles of the product at ``i``, or ``None``."""
    product = steps[i]
    assert isinstance(product, Product)
    if p.buffers[product.out].kind != "temp":
        return None
    operands = {base_of(p.buffers, n) for n in op_reads(product.op)}
    for at in range(i + 1, len(steps)):
        step = steps[at]
        if step is None:
            continue
        if product.out in _reads(p, step):
            fits = isinstance(step, Group) and _works_on_tiles(p, step, product)
            return at if fits else None
        if operands & _writes(p, step):
            return None
    return None


def operations(step: Group | Extern | Product) -> tuple[Op, ...]:
    """The operations of a step, in program order."""
    if isinstance(step, Product):
        return (step.op, *(operations(step.epilogue) if step.epilogue is not None else ()))
    return (step,) if isinstance(step, Extern) else tuple(m.op for m in step.members)


def _reads(p: LoopProgram, step: Group | Extern | Product) -> set[str]:
    return {base_of(p.buffers, n) for op in operations(step) for n in op_reads(op)}


def _writes(p: LoopProgram, step: Group | Extern | Product) -> set[str]:
    return {base_of(p.buffers, n) for op in operations(step) for n in op_outputs(op)}


def _works_on_tiles(p: LoopProgram, g: Group, product: Product) -> bool:
    """Whether a group is elementwise over the product's rows and columns, its columns the last axis."""
    if not all(isinstance(m.op, Pointwise) for m in g.members):
        return False
    axes = _rows_and_column(p.buffers, g, product.out)
    if axes is None:
        return False
    *_, column = axes
    for m in g.members:
        if ix.coefficient(flat_index(p.buffers, m.op.out, m.store), column) != 1:
            return False
        for n in ex.loads(m.body):
            at = flat_index(p.buffers, n.buffer, n.indices)
            if n.buffer != product.out and base_of(p.buffers, n.buffer) == product.out:
                return False  # its memory, seen as something else
            if ix.coefficient(at, column) not in (0, 1) or (n.buffer == product.out and at != _flat(axes)):
                return False
    return True


def _rows_and_column(buffers: Mapping[str, Buffer], g: Group, out: str) -> tuple[Index, ...] | None:
    """The group's axes in the order in which they walk the product, or ``None`` where they do not."""
    if g.inner:
        return None
    reads = [n for m in g.members for n in ex.loads(m.body) if n.buffer == out]
    columns = sz.static(buffers[out].sizes[1])
    if not reads:
        return None
    at = flat_index(buffers, out, reads[0].indices)
    steps: dict[Index, int] = {}
    for a in g.outer:
        c = ix.coefficient(at, a)
        if c is None or not sz.at_least(c, 1):
            return None
        steps[a] = sz.hint(c)
    axes = tuple(sorted(g.outer, key=lambda a: -steps[a]))
    fits = axes and axes[-1].extent == columns and at == _flat(axes)
    return axes if fits and sz.product(a.extent for a in axes) == buffers[out].numel else None


def _flat(axes: Sequence[Index]) -> Index:
    out = ix.const(0)
    for a in axes:
        out = out * a.extent + a
    return out


# --- the kernel ---------------------------------------------------------------------------------------------

_TILE = "tile"


def build_product(
    x: Product, buffers: Mapping[str, Buffer], stored: set[str], machine: Machine, keep_roundings: bool
) -> KernelCall:
    """The kernel of a product. ``stored``: the buffers needed outside of it."""
    m, n = buffers[x.out].sizes[0], sz.static(buffers[x.out].sizes[1])
    row, column = ix.var("row", m), ix.var("column", n)
    body = _at_each_element(x, buffers, stored, row, column, keep_roundings)
    nest = _Tiles(x, m, n, sz.static(x.left.sizes[1]), row, column, body, machine)
    members = x.epilogue.members if x.epilogue is not None else ()
    origins = (x.op.origin, *(o for member in members for o in (*member.op.folded, member.op.origin)))
    work = sz.hint(m) * n * nest.depth
    body = nest.build()
    seen = tuple(dict.fromkeys(origins))
    return finish("fused", seen, body, buffers, machine, sz.plain(m * n), work, single_pass=False)


def _at_each_element(
    x: Product, buffers: Mapping[str, Buffer], stored: set[str], row: Index, column: Index, keep: bool
) -> tuple[Stmt, ...]:
    """What happens to one element of the product; it reads the element from ``_TILE[column]``."""
    n = column.extent
    value: Expr = ex.load(_TILE, (column,), torch.float32)
    if x.bias is not None:
        value = ex.call("add", value, ex.load(x.bias.buffer, (_bias_at(x.bias, row, column),), torch.float32))
    own: tuple[Stmt, ...] = (Store(x.out, row * n + column, value),) if x.out in stored else ()
    if x.epilogue is None:
        return own
    axes = _rows_and_column(buffers, x.epilogue, x.out)
    assert axes is not None
    nest = build_nest(x.epilogue, buffers, stored, False, keep)
    mapping: dict[Index, IndexLike] = {axes[-1]: column}
    sizes = [a.extent for a in axes[:-1]]
    mapping.update(zip(axes[:-1], ix.delinearize(row, sizes), strict=True))

    def tile(e: Expr) -> Expr | None:
        return value if e.buffer == x.out else None

    moved = substitute_statements(nest.before, mapping)
    return own + tuple(map_statement(s, lambda e: ex.rewrite_loads(e, tile), lambda i: i) for s in moved)


def _bias_at(bias: ViewRef, row: Index, column: Index) -> Index:
    steps = [s if size != 1 else 0 for size, s in zip(bias.sizes, bias.strides, strict=True)]
    return ix.linearize((row, column)[2 - len(steps) :], steps, bias.offset)


class _Tiles:
    """The loops around a tile: panels, runs of rows, tiles of whole and of remaining rows."""

    def __init__(
        self, x: Product, m: IndexLike, n: int, depth: int, row: Index, column: Index, body: tuple[Stmt, ...],
        machine: Machine,
    ) -> None:  # fmt: skip
        self.x = x
        self.m, self.n, self.depth = m, n, depth
        self.row, self.column = row, column
        self.body = body
        self.machine = machine

    def build(self) -> tuple[Stmt, ...]:
        whole = self.n // self.x.width
        out: list[Stmt] = []
        if whole:
            out.append(self.panels(whole, lambda panel: self.runs(panel * 1, self.x.width, whole)))
        if self.n % self.x.width:
            out += self.runs(ix.const(whole), self.n % self.x.width, 1)
        if isinstance(self.m, Index):
            if whole:
                out.append(self.panels(whole, lambda panel: self.varying_rest(panel * 1, self.x.width)))
            if self.n % self.x.width:
                out += self.varying_rest(ix.const(whole), self.n % self.x.width)
        return tuple(out)

    def panels(self, count: int, runs: object) -> Loop:
        panel = ix.var("panel", count)
        body: tuple[Stmt, ...] = runs(panel)  # type: ignore[operator]
        if self.x.rows_first and isinstance(body[0], Loop) and body[0].kind == "parallel":
            return replace(body[0], body=(Loop(panel, 0, count, "parallel", body[0].body),))
        return Loop(panel, 0, count, "parallel", body)

    def runs(self, panel: Index, columns: int, panels: int) -> tuple[Stmt, ...]:
        """Runs of rows, as many as it takes to have work for every thread."""
        rows = self.x.rows
        if isinstance(self.m, Index):
            return self.varying_runs(panel, columns, panels, self.m // rows)
        tiles = self.m // rows
        runs = max(1, min(self.x.runs or -(-4 * self.machine.threads // panels), tiles))
        if runs == 1:
            return (*self.tiles(panel, columns, 0, tiles), *self.rest(panel, columns))
        size = -(-tiles // runs)
        runs = -(-tiles // size)
        run = ix.var("run", runs)
        stop = ix.minimum(run * size + size, tiles)
        inside = self.tiles(panel, columns, run * size, stop)
        if self.m % rows:
            last = ix.var("last", 1)
            # One turn in the last run, none in the others.
            turns = ix.maximum(run - (runs - 2), 0)
            inside += (Loop(last, 0, turns, "serial", self.rest(panel, columns)),)
        return (Loop(run, 0, runs, "parallel", inside),)

    def varying_runs(self, panel: Index, columns: int, panels: int, tiles: Index) -> tuple[Stmt, ...]:
        """The same for a number of rows that is known only at run time, without those of no whole tile."""
        most = sz.hint(tiles)
        size = max(1, -(-most // max(1, min(-(-4 * self.machine.threads // panels), most))))
        run = ix.var("run", sz.plain((tiles + (size - 1)) // size))
        inside = self.tiles(panel, columns, run * size, ix.minimum(run * size + size, tiles))
        return (Loop(run, 0, run.extent, "parallel", inside),)

    def varying_rest(self, panel: Index, columns: int) -> tuple[Stmt, ...]:
        """The rows of no whole tile, in tiles of 8, 4, 2 and 1 rows: as the bits of their number say."""
        rest = ix.mod(self.m, self.x.rows)
        out: list[Stmt] = []
        for rows in (8, 4, 2, 1):
            if rows < self.x.rows:
                first = ix.as_index(self.m) - rest + rest // (2 * rows) * (2 * rows)
                body = self.tile(panel, columns, first, rows, f"_rest{rows}")
                out.append(Loop(ix.var(f"last{rows}", 2), 0, (rest // rows) % 2, "serial", body))
        return tuple(out)

    def tiles(self, panel: Index, columns: int, start: IndexLike, stop: IndexLike) -> tuple[Stmt, ...]:
        """Tiles of whole rows, from one number to another."""
        count = self.m // self.x.rows
        if count == 0:
            return ()
        tile = ix.var("block", count)
        body = self.tile(panel, columns, tile * self.x.rows, self.x.rows)
        return (Loop(tile, start, stop, "serial", body),)

    def rest(self, panel: Index, columns: int) -> tuple[Stmt, ...]:
        """The rows that no whole tile has."""
        m = sz.static(self.m)
        rows = m % self.x.rows
        return self.tile(panel, columns, ix.const(m - rows), rows, "_rest") if rows else ()

    def tile(self, panel: Index, columns: int, first: Index, rows: int, suffix: str = "") -> tuple[Stmt, ...]:
        """The product of one tile, and what happens to each of its elements."""
        x, width = self.x, self.x.width
        name = _TILE + suffix
        at = ix.linearize((first,), (x.left.strides[0],), x.left.offset)
        product = Multiply(
            name, x.left.buffer, at, sz.static(x.left.strides[0]), x.panels,
            panel * (self.depth * width), rows, width, self.depth,
        )  # fmt: skip
        inner = ix.var(f"r{suffix}", rows)
        column = ix.var("column", self.n)

        def place(e: Expr) -> Expr | None:
            if e.buffer != _TILE:
                return None
            return ex.load(name, (inner * width + column - panel * width,), torch.float32)

        body = tuple(
            map_statement(s, lambda e: ex.rewrite_loads(e, place), lambda i: i)
            for s in substitute_statements(self.body, {self.row: first + inner})
        )
        start = panel * width
        vector = Loop(column, start, start + columns, "vector", body)
        return (
            Scratch(name, torch.float32, rows * width),
            product,
            Loop(inner, 0, rows, "serial", (vector,)),
        )
