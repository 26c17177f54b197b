"""Matrix products by a packed weight: which ones, with which work in their tiles, and their loops.

What comes in: the groups and calls in order. What goes out: the same, with a ``Product`` in the place of each
matrix product whose right operand is a lasting input, where ``tiles.py`` says so, and of the elementwise
group that works on its result; and, later, the kernel of a ``Product``. What holds in between: a product runs
where its epilogue ran, no earlier than its operands are there and before anybody reads its result.

A thread takes panels of columns (see ``ir/panels.py``), and blocks of rows. It sums the products of a block
in float32, tile by tile in registers, into a scratch array that stays in the cache, and applies the epilogue
to it row by row; so a result is rounded to its dtype once, after the epilogue.

The next file is ``alternatives.py``.
"""

from __future__ import annotations

import functools
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
from hotloop.ir.panels import PRODUCT_DTYPES, panel_count, panel_sizes
from hotloop.ir.rewrite import drop_roundings

from .attention import Attention
from .axes import flat_index
from .dependences import Uses, base_of
from .fuse import Group
from .loops import Machine, finish, map_statement, substitute_statements
from .passes import build_nest
from .tiles import Tiling, choose_tiling, slice_terms
from .weights import is_dense, lasts

__all__ = [
    "Product",
    "buffers_of",
    "build_product",
    "find_products",
    "operands_of",
    "operations",
    "panels_of",
]

_TARGETS = ("aten.mm.default", "aten.addmm.default")
#: Products by the transpose of an int8 weight, each column times its scale if it has one.
_INT8 = ("hotloop.int8_linear.default", "aten._weight_int8pack_mm.default")


@dataclass(frozen=True)
class Product:
    """``out = left @ matrix (+ bias)`` by panels of ``matrix``, and a group that works on ``out`` in tiles.

    ``left`` is (M, K) with a stride of 1 along K, ``out`` (M, N) and contiguous. ``scale``: (N,), by which
    the columns of a product by an int8 matrix are multiplied.
    """

    op: Extern
    left: ViewRef
    bias: ViewRef | None
    panels: str
    tiling: Tiling
    epilogue: Group | None = None
    scale: ViewRef | None = None

    @property
    def out(self) -> str:
        """The buffer of the product itself."""
        (name,) = self.op.outs
        assert name is not None
        return name


# --- which ones ---------------------------------------------------------------------------------------------


def find_products(
    p: LoopProgram, groups: Sequence[Group | Extern], level: str, threads: int, uses: Uses
) -> tuple[LoopProgram, tuple[Group | Extern | Product, ...]]:
    """Products in the place of matrix products, with their epilogues; the program has their panels."""
    buffers = dict(p.buffers)
    steps: list[Group | Extern | Product | None] = list(groups)
    for i, g in enumerate(groups):
        product = _product(p, g, buffers, level, threads, uses) if isinstance(g, Extern) else None
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
    p: LoopProgram, op: Extern, buffers: dict[str, Buffer], level: str, threads: int, uses: Uses
) -> Product | None:
    """The product that a call computes, or ``None`` where it is better left to PyTorch."""
    if str(op.target) not in (*_TARGETS, *_INT8) or op.kwargs or len(op.outs) != 1 or op.outs[0] is None:
        return None
    out = p.buffers[op.outs[0]]
    if not all(isinstance(v, ViewRef) for v in op.args):
        return None
    bias, left, matrix, scale = operands_of(op)
    if not all(v.dtype is out.dtype for v in (*bias, left, *scale)) or out.dtype not in PRODUCT_DTYPES:
        return None
    if matrix.dtype is not (torch.int8 if str(op.target) in _INT8 else out.dtype):
        return None
    if not sz.is_static((*left.sizes[1:], *left.strides, *matrix.sizes, *matrix.strides)):
        return None
    m, k, n = left.sizes[0], sz.static(left.sizes[1]), sz.static(matrix.sizes[1])
    if out.device != "cpu" or out.alias_of is not None:
        return None
    if left.strides[1] != 1 or out.strides != (n, 1) or not _is_matrix(p, matrix, uses):
        return None
    if bias and not (len(bias[0].sizes) < 2 or bias[0].sizes[0] in (1, m)):
        return None
    tiling = choose_tiling(matrix.dtype, m, n, k, level, threads, left.dtype)
    if tiling is None:
        return None
    panels = panels_of(matrix, tiling)
    product = Product(
        op, left, bias[0] if bias else None, panels.name, tiling, scale=scale[0] if scale else None
    )
    for made in buffers_of(product):
        buffers.setdefault(made.name, made)
    return product


def operands_of(op: Extern) -> tuple[list[ViewRef], ViewRef, ViewRef, list[ViewRef]]:
    """Bias if any, left operand, matrix (K, N), and scales if any."""
    if str(op.target) not in _INT8:
        *bias, left, matrix = op.args
        return bias, left, matrix, []
    left, weight, *scale = op.args
    return [], left, replace(weight, sizes=weight.sizes[::-1], strides=weight.strides[::-1]), scale


def buffers_of(x: Product) -> tuple[Buffer, ...]:
    """The buffers that a product needs besides its operands and its result: the matrix in panels, and the
    sums of slices, (slices, M, N)."""
    _, _, matrix, _ = operands_of(x.op)
    panels = panels_of(matrix, x.tiling)
    if x.tiling.slices == 1:
        return (panels,)
    sizes = (x.tiling.slices, sz.static(x.left.sizes[0]), sz.static(matrix.sizes[1]))
    strides = (sizes[1] * sizes[2], sizes[2], 1)
    return (panels, Buffer(_slices_of(x), torch.float32, sizes, strides, "temp"))


def _slices_of(x: Product) -> str:
    return f"slices_{x.out}_{x.tiling.slices}"


def panels_of(matrix: ViewRef, tiling: Tiling) -> Buffer:
    """The buffer of a matrix in panels."""
    k, n = map(sz.static, matrix.sizes)
    name = f"panels_{matrix.buffer}_{'x'.join(map(str, matrix.strides))}_{tiling.width}_{tiling.multiple}"
    sizes = panel_sizes(k, n, tiling.width, matrix.dtype, tiling.multiple)
    strides = (sizes[1] * sizes[2], sizes[2], 1)
    return Buffer(name, matrix.dtype, sizes, strides, "packed", packs=matrix)


def _is_matrix(p: LoopProgram, v: ViewRef, uses: Uses) -> bool:
    """Whether a view is all of a lasting input, as it lies or transposed; sizes of 1 do not count."""
    b = p.buffers[v.buffer]
    axes = [k for k, n in enumerate(b.sizes) if n != 1]
    sizes, strides = tuple(b.sizes[k] for k in axes), tuple(b.strides[k] for k in axes)
    same = (v.sizes, v.strides) in ((sizes, strides), (sizes[::-1], strides[::-1]))
    whole = len(sizes) == 2 and same and v.offset == 0 and is_dense(b)
    return b.lasting and whole and lasts(p, v.buffer, uses)


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


def operations(step: Group | Extern | Product | Attention) -> tuple[Op, ...]:
    """The operations of a step, in program order."""
    if isinstance(step, Attention):
        return (step.op,)
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
) -> tuple[KernelCall, ...]:
    """The kernel of a product, or of its slices and then of what they add up to. ``stored``: the buffers
    needed outside of it."""
    m, n = buffers[x.out].sizes[0], sz.static(buffers[x.out].sizes[1])
    row, column = ix.var("row", m), ix.var("column", n)
    body = _at_each_element(x, buffers, stored, row, column, keep_roundings)
    panel_size = sz.static(buffers[x.panels].strides[0])
    depth = sz.static(x.left.sizes[1])
    members = x.epilogue.members if x.epilogue is not None else ()
    origins = (x.op.origin, *(o for member in members for o in (*member.op.folded, member.op.origin)))
    seen = tuple(dict.fromkeys(origins))

    def kernel(body: tuple[Stmt, ...], points: IndexLike, work: int) -> KernelCall:
        return finish("fused", seen, body, buffers, machine, sz.plain(points), work, single_pass=False)

    work, slices = sz.hint(m) * n * depth, x.tiling.slices
    if slices == 1:
        return (kernel(_Tiles(x, m, n, depth, row, column, body, panel_size).build(), m * n, work),)
    part, name = ix.var("part", slices), _slices_of(x)
    sums = Store(name, (part * m + row) * n + column, ex.load(_TILE, (column,), torch.float32))
    nest = _Tiles(x, m, n, depth, row, column, (sums,), panel_size, part)

    def added_up(e: Expr) -> Expr | None:
        if e.buffer != _TILE:
            return None
        at = [ex.load(name, ((row + m * k) * n + column,), torch.float32) for k in range(slices)]
        return functools.reduce(lambda a, b: ex.call("add", a, b), at)

    total = tuple(map_statement(s, lambda e: ex.rewrite_loads(e, added_up), lambda i: i) for s in body)
    epilogue = Loop(row, 0, m, "parallel", (Loop(column, 0, n, "vector", total),))
    return kernel(nest.build(), slices * m * n, work), kernel((epilogue,), m * n, slices * sz.hint(m) * n)


def _at_each_element(
    x: Product, buffers: Mapping[str, Buffer], stored: set[str], row: Index, column: Index, keep: bool
) -> tuple[Stmt, ...]:
    """What happens to one element of the product; it reads the element from ``_TILE[column]``."""
    n, dtype = column.extent, buffers[x.out].dtype
    value: Expr = ex.load(_TILE, (column,), torch.float32)
    if x.scale is not None:
        at = ix.linearize((column,), x.scale.strides, x.scale.offset)
        scale = ex.load(x.scale.buffer, (at,), dtype)
        value = ex.call("mul", value, ex.cast(scale, torch.float32))
    if x.bias is not None:
        bias = ex.load(x.bias.buffer, (_bias_at(x.bias, row, column),), dtype)
        value = ex.call("add", value, ex.cast(bias, torch.float32))
    value = ex.cast(value, dtype, implicit=True)
    own: tuple[Stmt, ...] = (Store(x.out, row * n + column, value),) if x.out in stored else ()
    if x.epilogue is None:
        return own
    axes = _rows_and_column(buffers, x.epilogue, x.out)
    assert axes is not None
    nest = build_nest(x.epilogue, buffers, stored, False, keep)
    mapping: dict[Index, IndexLike] = {axes[-1]: column}
    sizes = [a.extent for a in axes[:-1]]
    mapping.update(zip(axes[:-1], ix.delinearize(row, sizes), strict=True))

    def from_tile(e: Expr) -> Expr:
        e = ex.rewrite_loads(e, lambda n: value if n.buffer == x.out else None)
        return e if keep else drop_roundings(e)

    moved = substitute_statements(nest.before, mapping)
    return own + tuple(map_statement(s, from_tile, lambda i: i) for s in moved)


def _bias_at(bias: ViewRef, row: Index, column: Index) -> Index:
    steps = [s if size != 1 else 0 for size, s in zip(bias.sizes, bias.strides, strict=True)]
    return ix.linearize((row, column)[2 - len(steps) :], steps, bias.offset)


class _Tiles:
    """The loops around a block: panels, and blocks of rows."""

    def __init__(
        self, x: Product, m: IndexLike, n: int, depth: int, row: Index, column: Index, body: tuple[Stmt, ...],
        panel_size: int, part: Index | None = None,
    ) -> None:  # fmt: skip
        self.x = x
        self.m, self.n, self.depth = m, n, depth
        self.row, self.column = row, column
        self.body = body
        self.panel_size = panel_size
        self.part = part

    def build(self) -> tuple[Stmt, ...]:
        """Every slice of the terms by every panel by every block of rows."""
        if self.part is None:
            return self.panels()
        return (Loop(self.part, 0, self.x.tiling.slices, "parallel", self.panels()),)

    def panels(self) -> tuple[Stmt, ...]:
        """Every panel by every block of rows; of the last panel fewer columns may count."""
        width = self.x.tiling.width
        count = panel_count(self.n, width)
        if count == 1:
            return self.blocks(ix.const(0), self.n)
        panel = ix.var("panel", count)
        columns = width if self.n % width == 0 else ix.minimum(width, self.n - panel * width)
        body = self.blocks(panel * 1, columns)
        if self.x.tiling.rows_first and isinstance(body[0], Loop) and body[0].kind == "parallel":
            return (replace(body[0], body=(Loop(panel, 0, count, "parallel", body[0].body),)),)
        return (Loop(panel, 0, count, "parallel", body),)

    def blocks(self, panel: Index, columns: IndexLike) -> tuple[Stmt, ...]:
        """The blocks of rows by one panel, of which so many columns count."""
        size = self.x.tiling.rows
        count = sz.plain((self.m + (size - 1)) // size)
        if count == 1:
            return self.block(panel, columns, ix.const(0), self.m)
        run = ix.var("run", count)
        first = run * size
        rows = sz.plain(ix.minimum(self.m - first, size)) if not self._fits(size) else size
        return (Loop(run, 0, count, "parallel", self.block(panel, columns, first, rows)),)

    def _fits(self, size: int) -> bool:
        return isinstance(self.m, int) and self.m % size == 0

    def block(self, panel: Index, columns: IndexLike, first: Index, rows: IndexLike) -> tuple[Stmt, ...]:
        """The product of one block, and what happens to each of its elements."""
        x, tiling = self.x, self.x.tiling
        width, most = tiling.width, tiling.rows
        at = ix.linearize((first,), (x.left.strides[0],), x.left.offset)
        start, depth = panel * self.panel_size, ix.as_index(self.depth)
        if self.part is not None:
            size = slice_terms(self.depth, tiling.slices)
            at, start = at + self.part * size, start + self.part * (size * width)
            depth = ix.minimum(self.depth - self.part * size, size)
        product = Multiply(
            _TILE, x.left.buffer, at, sz.static(x.left.strides[0]), x.panels, start, rows,
            most, width, sz.plain(depth), tiling.height, tiling.rest, tiling.method,
        )  # fmt: skip
        inside = (self.row - first) * width + self.column - panel * width

        def place(e: Expr) -> Expr | None:
            return ex.load(_TILE, (inside,), torch.float32) if e.buffer == _TILE else None

        body = tuple(map_statement(s, lambda e: ex.rewrite_loads(e, place), lambda i: i) for s in self.body)
        start = panel * width
        vector = Loop(self.column, start, start + columns, "vector", body)
        return (
            Scratch(_TILE, torch.float32, most * width),
            product,
            Loop(self.row, first, first + rows, "serial", (vector,)),
        )
