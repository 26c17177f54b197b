"""Statements as C++: loops, vectors and their last iterations, accumulators, scratch arrays.

What comes in: the body of a kernel. What goes out: C++ lines. What holds in between:

* A vector loop is printed as up to three: one over several vectors an iteration, one over single vectors, and
  what is left over: as a last vector that does some elements again, where that changes nothing; or as one of
  which some lanes count; or, where the body reads or divides in ways that the other lanes must not, one
  element at a time.
* Long floating-point sums go through partial sums of at most ``BLOCK`` terms, over however many loops they
  run, so that rounding errors do not pile up.
* What does not change in a loop is computed before it.

The next file is ``cpp.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from hotloop.errors import CompileError
from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index, IndexLike
from hotloop.ir.kernel import (
    Accumulate,
    Attend,
    Init,
    Kernel,
    Let,
    Loop,
    Multiply,
    Param,
    Scratch,
    Stmt,
    Store,
    statements,
)

from .cpp_accumulators import Accumulator, neutral, update
from .cpp_expr import DIVISIONS, ExprPrinter, Frame, Lanes, Local
from .cpp_index import fits_32_bits
from .cpp_writer import ADD, Code, Writer, literal, vector_type

__all__ = ["BATCH_NAMES", "StatementPrinter"]

#: What the function of a batch calls its own.
BATCH_NAMES = ("rows", "rows_end", "row", "part", "blocks", "from", "to", "first", "last", "points")

#: The most terms that are added to one accumulator before it is added to the next, as in eager's cascade of
#: sums: as many equal ones are off by 1 unit in the last place on average, four times as many by 5.
BLOCK = 16
#: Fewer terms than this are not worth an accumulator of their own.
FEW = 16
#: The iterations of a loop that nothing bounds, for how sums are cut into blocks.
UNBOUNDED = 1 << 24
#: The most scratch that lives on the stack, in bytes.
STACK = 1 << 16
#: Scratch whose size varies lies on the stack up to these bytes.
NEAR = 1 << 14
#: How many bytes ahead a batch asks for what it reads and writes: its tensors are many, and each is new to
#: the processor, whose own guesses end where a page does. The kernel of AdamW alone, 110 million parameters
#: on two threads: 91 ms without, 89 at 256 bytes, 86 at 1024, 87 at 4096; a whole step 73.5 ms without, 68.8
#: at 1024.
AHEAD = 1024
_SINGLE = "abcd"


def _roots(s: Stmt) -> Iterator[Expr]:
    """The expressions of a statement, those that its indices read included."""
    if isinstance(s, (Let, Accumulate, Store)):
        yield s.value
    if isinstance(s, Store):
        yield from (a.args[0] for a in ix.indirect_atoms(s.index))


def _uses(body: Sequence[Stmt]) -> Counter[Expr]:
    """How often each node is used by the statements of a body, loops inside left out."""
    count: Counter[Expr] = Counter()
    seen: set[Expr] = set()
    for s in body:
        for root in _roots(s):
            count[root] += 1
            for n in ex.walk(root):
                if n not in seen:
                    seen.add(n)
                    count.update(ex.children(n))
    return count


def _replaced(body: Sequence[Stmt], new: Mapping[Expr, Expr]) -> tuple[Stmt, ...]:
    """Stores and lets with other expressions in the place of some."""
    memo = dict(new)

    def value(e: Expr) -> Expr:
        got = memo.get(e)
        if got is None:
            got = memo[e] = ex.rebuild(e, tuple(map(value, e.args)))
        return got

    return tuple(replace(s, value=value(s.value)) for s in body if isinstance(s, (Let, Store)))


def _unlike(atom: Index, var: Index, inner: Container[str]) -> bool:
    """Whether a read index in the loop over ``var`` may be one, in lanes that do not count, that the others
    never are: it is computed there, or tested."""
    payload, _, checked = atom.args
    local = any(n.op == "local" and n.attr in inner for n in ex.walk(payload))
    return local or (checked and var in atom.free_vars)


def _trip(loop: Loop) -> int | None:
    """The number of iterations, where it is constant."""
    n = ix.as_index(loop.stop) - loop.start
    return max(0, n.value) if n.is_const else None


def _most(loop: Loop) -> int:
    """A bound on the number of iterations."""
    stop = ix.as_index(loop.stop)
    # Of a block that may be cut short, each side of the minimum is a bound.
    sizes = [n - loop.start for n in (stop.args if stop.kind == "min" else (stop,))]
    most = min((n.hi for n in sizes if n.hi is not None), default=UNBOUNDED)
    # What multiplies sizes that vary is bounded by a number that no loop reaches.
    return max(0, min(most, UNBOUNDED) if (stop - loop.start).symbolic else most)


def _block_sizes(terms: int, trips: int) -> tuple[int, ...]:
    """Into what blocks a loop is cut, in iterations, outermost first; an iteration adds ``terms`` terms."""
    if terms * trips <= BLOCK:
        return ()
    sizes = [max(1, BLOCK // terms)]
    while trips > sizes[0] * BLOCK:
        sizes.insert(0, sizes[0] * BLOCK)
    return tuple(sizes)


class StatementPrinter:
    """Prints the body of one kernel into a writer. Parameters in ``shared`` may be the same memory; with a
    ``threshold`` (points, least) threads are used where there are that many points."""

    def __init__(
        self,
        writer: Writer,
        values: ExprPrinter,
        lanes: int,
        parallel: bool,
        openmp: bool,
        shared: frozenset[str],
        threshold: tuple[IndexLike, int] | None = None,
    ) -> None:
        self.writer = writer
        self.values = values
        self.width = lanes
        self.parallel = parallel
        self.openmp = openmp
        self.shared = shared
        self.threshold = threshold
        self._accumulators: dict[str, Accumulator] = {}
        self._inside_parallel = False
        self._in_batch = False

    # --- bodies ---------------------------------------------------------------------------------------------

    def body(self, body: Sequence[Stmt]) -> None:
        """Print statements in order, in the block that is open."""
        self.values.frames.append(Frame(uses=_uses(body)))
        heaps: list[str] = []
        ends = self._last_uses(body)
        for k, s in enumerate(body):
            if isinstance(s, Loop):
                self._loop_of_several(s, body)
            elif isinstance(s, Init):
                self._init(s, body[k + 1 :])
            elif isinstance(s, Scratch):
                heaps += self._scratch(s)
            elif isinstance(s, Multiply):
                self._multiply(s)
            elif isinstance(s, Attend):
                self._attend(s)
            else:
                self._in_each_vector(s)
            for name in ends.get(k, ()):
                self._finish(name)
        for line in heaps:
            self.writer.line(line)
        self.values.frames.pop()

    def _last_uses(self, body: Sequence[Stmt]) -> dict[int, list[str]]:
        """After which statements an accumulator of this body is complete."""
        last: dict[str, int] = {}
        for k, s in enumerate(body):
            if isinstance(s, Init):
                last[s.name] = k
            for t in statements((s,)):
                if isinstance(t, Accumulate) and t.name in last:
                    last[t.name] = k
        ends: dict[int, list[str]] = {}
        for name, k in last.items():
            ends.setdefault(k, []).append(name)
        return ends

    def _in_each_vector(self, s: Let | Accumulate | Store) -> None:
        v = self.values
        lanes = v.lanes
        # A value that all vectors share is defined once; what stores or accumulates is done for each of them.
        groups = lanes.groups if not isinstance(s, Let) or v.is_vector(s.value) else 1
        for g in range(groups):
            v.group = g
            if isinstance(s, Let):
                self._let(s, groups, g)
            elif isinstance(s, Store):
                self.writer.line(v.store(s.buffer, s.index, s.value))
            else:
                self._accumulate(s)
        v.group = 0
        if isinstance(s, Store):
            v.forget(s.buffer)

    def _let(self, s: Let, groups: int, g: int) -> None:
        v = self.values
        code = v.value(s.value, root=True)
        names = tuple(f"{s.name}_{_SINGLE[k]}" for k in range(groups)) if groups > 1 else (s.name,)
        mask = code.vector and s.value.dtype is torch.bool
        kind = "auto" if mask else vector_type(s.value.dtype, v.lanes.count if code.vector else 1)
        self.writer.line(f"const {kind} {names[g]} = {code.text};")
        if g == groups - 1:
            v.locals[s.name] = Local(code.vector, names, s.value)

    def _scratch(self, s: Scratch) -> list[str]:
        """Declare a scratch array; what there is to do at the end of its body."""
        if self.values.lanes.var is not None:
            raise CompileError(f"scratch {s.name} inside a vector loop", stage="codegen")
        self.values.dtypes[s.name] = s.dtype
        name = "u8" if s.dtype is torch.bool else ex.dtype_name(s.dtype)
        if not isinstance(s.size, int):
            at, near = self.values.index(), self.values.fresh(f"{s.name}_near")
            fits = f"{at.scalar(s.size).at(ADD)} <= {NEAR // s.dtype.itemsize}"
            heap = f"({name}*)__builtin_malloc({at.scalar(s.size * s.dtype.itemsize).text})"
            self.writer.line(f"alignas(64) {name} {near}[{NEAR // s.dtype.itemsize}];")
            self.writer.line(f"{name}* const {s.name} = {fits} ? {near} : {heap};")
            return [f"if ({s.name} != {near}) __builtin_free({s.name});"]
        if s.size * s.dtype.itemsize <= STACK:
            self.writer.line(f"alignas(64) {name} {s.name}[{max(1, s.size)}];")
            return []
        self.writer.line(f"{name}* const {s.name} = ({name}*)__builtin_malloc({s.size * s.dtype.itemsize});")
        return [f"__builtin_free({s.name});"]

    def _place(self, buffer: str, at: Index) -> str:
        """The address of an element."""
        position = self.values.index().scalar(at).at(ADD)
        return buffer if position == "0" else f"{buffer} + {position}"

    def _attend(self, s: Attend) -> None:
        (height, width), (rows_at_once, columns) = s.scores, s.sums
        shape = f"{height}, {width}, {rows_at_once}, {columns}, {s.BLOCK}"
        flags = f"{'true' if s.causal else 'false'}, {'false' if s.mask is None else 'true'}"
        first, rows = (self.values.index().scalar(ix.as_index(n)).text for n in (s.first, s.rows))
        places = [f"{{{self._place(x.buffer, x.at)}, {x.stride}}}" for x in s.operands]
        mask = places[3] if s.mask is not None else "{nullptr, 0}"
        sizes = f"{first}, {rows}, {s.keys}, {s.depth}, {s.columns}"
        arrays = f"{literal(s.scale, torch.float32).text}, {s.work}, {s.tile}"
        self.writer.line(f"attend<{shape}, {flags}>({', '.join(places[:3])}, {mask}, {sizes}, {arrays});")
        self.values.forget(s.tile)

    def _multiply(self, s: Multiply) -> None:
        left, panel = self._place(s.left, s.at), self._place(s.panel, s.start)
        rest = -1 if s.rest is None else s.rest
        shape = f"{s.height}, {s.columns}, {rest}, {s.most}, {s.BLOCK}"
        rows, depth = (self.values.index().scalar(ix.as_index(n)).text for n in (s.rows, s.depth))
        name = "multiply" if s.method == "fma" else f"multiply_{s.method}"
        self.writer.line(f"{name}<{shape}>({left}, {s.stride}, {rows}, {panel}, {depth}, {s.tile});")
        self.values.forget(s.tile)

    # --- accumulators ---------------------------------------------------------------------------------------

    def _init(self, s: Init, rest: Sequence[Stmt]) -> None:
        inside = self.values.lanes.var is not None
        fed = [t for t in statements(tuple(rest)) if isinstance(t, Accumulate) and t.name == s.name]
        positions = [t.position for t in fed if t.position is not None]
        short = all(fits_32_bits(p) for p in positions)
        lanes = self.values.lanes.count if inside else self.width
        acc = Accumulator(s, self.writer.mark(), lanes, inside, "i32" if short else "i64", s.name)
        acc.fed_in_lanes = not inside and self._fed_in_lanes(s.name, rest)
        self._accumulators[s.name] = acc

    def _fed_in_lanes(self, name: str, body: Sequence[Stmt]) -> bool:
        """Whether a vector loop in ``body`` feeds the accumulator."""
        for loop in statements(tuple(body)):
            if isinstance(loop, Loop) and loop.kind == "vector" and self.width > 1:
                if any(isinstance(t, Accumulate) and t.name == name for t in statements(loop.body)):
                    return True
        return False

    def _accumulate(self, s: Accumulate) -> None:
        v, acc = self.values, self._accumulators[s.name]
        lanes = v.lanes
        vector = lanes.var is not None
        into = acc.part(vector, v.group, lanes.groups if acc.own_lanes else self._parts(acc, lanes))
        dtype = s.value.dtype
        live = None
        if vector and lanes.live is not None and not acc.own_lanes:
            live = f"mask_first<{lanes.count}>({lanes.live})"
        if vector and (acc.arg or live or acc.init.kind not in ("sum", "prod")):
            value = v.vector(s.value, root=True)
        else:  # + and * take one value for all lanes as well
            value = v.value(s.value, root=True).text
        if acc.arg:
            self._accumulate_arg(s, acc, into, value, live)
            return
        if dtype is torch.bool and vector:
            if live is not None and acc.init.kind == "any":
                value = f"mask_and({value}, {live})"
            elif live is not None:
                value = f"mask_or({value}, mask_not({live}))"
            value = f"canonical({value})"
        elif live is not None:
            value = f"select({live}, {value}, {v.spread(Code(neutral(acc.init.kind, dtype)), dtype)})"
        self.writer.line(update(acc.init.kind, dtype, into, value))

    def _accumulate_arg(
        self, s: Accumulate, acc: Accumulator, into: str, value: str, live: str | None
    ) -> None:
        v = self.values
        assert s.position is not None
        if v.lanes.var is None:
            kind = vector_type(s.value.dtype, 1)
            at = f"{acc.position}({v.index().scalar(s.position).text})"
            self.writer.line(f"{acc.init.kind}_step({into}, {into}_at, {kind}({value}), {at});")
            return
        at = v.index().vector(s.position, acc.position).text
        if live is not None:
            worst = v.spread(Code(neutral(acc.init.kind, s.value.dtype)), s.value.dtype)
            last = "0x7fffffff" if acc.position == "i32" else "0x7fffffffffffffff"
            value = f"select({live}, {value}, {worst})"
            at = f"select({live}, {at}, splat<{acc.position}x{v.lanes.count}>({last}))"
        self.writer.line(f"{acc.init.kind}_step({into}, {into}_at, {value}, {at});")

    @staticmethod
    def _parts(acc: Accumulator, lanes: Lanes) -> int:
        return max(lanes.groups, len(acc.vectors))

    def _finish(self, name: str) -> None:
        acc = self._accumulators.pop(name)
        if not acc.own_lanes:
            for line in acc.combine():
                self.writer.line(line)
            self.values.locals[name] = Local(False, (name,))
            return
        groups = self.values.lanes.groups
        for g in range(groups):
            acc.part(True, g, groups)
        names = tuple(acc.vectors)
        if acc.arg:
            names = tuple(f"cast<i64>({n}_at)" for n in names)
        self.values.locals[name] = Local(True, names)

    def _with_parts(self, body: Sequence[Stmt], each: Callable[[], None]) -> None:
        """Run ``each``, which prints what feeds sums, with partial sums in their place; then add those up."""
        whole = self._long_sums(body)
        parts: dict[str, Accumulator] = {}
        for name, acc in whole.items():
            part = self.values.fresh(f"{name}_part")
            parts[name] = replace(acc, place=self.writer.mark(), name=part, vectors=[], scalar=None)
        self._accumulators.update(parts)
        each()
        groups = self.values.lanes.groups
        for name, own in parts.items():
            acc = whole[name]
            for line in own.flush(acc, groups if acc.own_lanes else max(len(own.vectors), len(acc.vectors))):
                self.writer.line(line)
        self._accumulators.update(whole)

    def _long_sums(self, body: Sequence[Stmt]) -> dict[str, Accumulator]:
        """The floating-point sums initialised outside of ``body`` and fed inside."""
        fed = {t.name for t in statements(tuple(body)) if isinstance(t, Accumulate)}
        return {
            n: a for n, a in self._accumulators.items()
            if n in fed and a.init.kind == "sum" and a.init.dtype.is_floating_point
        }  # fmt: skip

    def _terms(self, body: Sequence[Stmt]) -> int:
        """The most terms that one run of ``body`` adds to one accumulator of an outer loop."""
        return max(self._terms_of_each(body, set(self._long_sums(body))).values(), default=0)

    def _terms_of_each(self, body: Sequence[Stmt], sums: set[str]) -> Counter[str]:
        """The terms that ``body`` adds to each of these sums, which it has one after the other."""
        found: Counter[str] = Counter()
        for s in body:
            if isinstance(s, Accumulate) and s.name in sums:
                found[s.name] += 1
            elif isinstance(s, Loop):
                trip = _most(s)
                if s.kind == "vector":  # what is left over is one vector more, or elements of one sum
                    rest = trip % self.width if _trip(s) is not None else min(trip, self.width - 1)
                    trip = max(trip // self.width + (rest > 0), rest)
                for name, terms in self._terms_of_each(s.body, sums).items():
                    found[name] += trip * terms
        return found

    # --- batches --------------------------------------------------------------------------------------------

    def batch(self, k: Kernel, parameter: Callable[[Param], str]) -> None:
        """A function's body that runs that of a batch for each row of its table, ``rows`` to ``rows_end``.

        ``parameter`` is how a pointer is declared. A row without points in this part is passed over.
        """
        start, stop = (v.name for v in k.sizes)
        width, line = len(k.params) + 1, self.writer.line
        part = Loop(ix.var("part", k.parts), 0, k.parts, "parallel", ())

        def rows() -> None:
            line(f"const i64 from = blocks * part / {k.parts}, to = blocks * (part + 1) / {k.parts};")
            line("i64 first = 0;")
            self.writer.open(f"for (const i64* row = rows; first < to; row += {width})")
            line(f"const i64 {start} = first < from ? {k.BLOCK} * (from - first) : 0;")
            line(f"const i64 last = {k.BLOCK} * (to - first), points = row[{width - 1}];")
            line(f"const i64 {stop} = last < points ? last : points;")
            line(f"first += (points + {k.BLOCK - 1}) / {k.BLOCK};")
            self.writer.open(f"if ({start} < {stop})")
            for n, p in enumerate(k.params):
                line(f"{parameter(p)} = ({parameter(p).rpartition('*')[0]}*)row[{n}];")
            self._in_batch = True
            self.body(k.body)
            self._in_batch = False
            self.writer.close()
            self.writer.close()

        line("i64 blocks = 0;")
        self.writer.open(f"for (const i64* row = rows; row < rows_end; row += {width})")
        line(f"blocks += (row[{width - 1}] + {k.BLOCK - 1}) / {k.BLOCK};")
        self.writer.close()
        if k.parallel:
            self._divided([part], rows)
        else:
            self.writer.open(self._header(part))
            rows()
            self.writer.close()

    # --- loops ----------------------------------------------------------------------------------------------

    def _loop_of_several(self, s: Loop, body: Sequence[Stmt]) -> None:
        """A loop of a body that adds up much in several: each adds up its own terms first."""
        own = self._terms((s,))
        if FEW <= own < self._terms(body) > BLOCK:
            self._with_parts((s,), partial(self._loop, s))
        else:
            self._loop(s)

    def _loop(self, s: Loop) -> None:
        if _trip(s) == 0:
            return
        if s.kind == "vector" and self.width > 1 and self.values.lanes.var is None:
            self._vector_loop(s)
        elif s.kind == "parallel" and self.parallel and not self._inside_parallel:
            self._parallel_loop(s)
        elif s.kind == "serial" and self.width > 1 and self.values.lanes.var is None and self._transposed(s):
            self._hoist((s,))
            self._transposing_loop(s)
        else:
            self._hoist((s,))
            self._serial_loop(s)

    def _header(self, s: Loop) -> str:
        at = self.values.index()
        name = s.var.name
        return f"for (i64 {name} = {at.scalar(s.start).text}; {name} < {at.scalar(s.stop).at(ADD)}; {name}++)"

    def _parallel_loop(self, s: Loop) -> None:
        """Loops that are directly nested and parallel are divided over threads as one."""
        nest = [s]
        while len(nest[-1].body) == 1:
            inner = nest[-1].body[0]
            if not isinstance(inner, Loop) or inner.kind != "parallel":
                break
            if any(
                not ix.as_index(e).free_vars.isdisjoint(t.var for t in nest)
                for e in (inner.start, inner.stop)
            ):
                break
            nest.append(inner)
        self._hoist((s,))
        self._divided(nest, partial(self.body, nest[-1].body))

    def _divided(self, nest: Sequence[Loop], body: Callable[[], None]) -> None:
        """Parallel loops around what ``body`` prints."""
        blocks = self._open_openmp(nest) if self.openmp else self._open_parallel_for(nest)
        self._inside_parallel = True
        body()
        self._inside_parallel = False
        for _ in range(blocks):
            self.writer.close()

    def _open_openmp(self, nest: Sequence[Loop]) -> int:
        """Open the blocks of parallel loops, of which the first is divided; how many they are."""
        collapse = f" collapse({len(nest)})" if len(nest) > 1 else ""
        enough = self._enough()
        condition = f" if({enough})" if enough else ""
        pragma = f"#pragma omp parallel for{collapse}{condition} schedule(static)\n"
        for k, loop in enumerate(nest):
            self.writer.open((pragma if k == 0 else "") + self._header(loop))
        return len(nest)

    def _enough(self) -> str:
        """Whether there is work for several threads, where that is known at run time only."""
        if self.threshold is None:
            return ""
        points, least = self.threshold
        return f"{self.values.index().scalar(points).at(ADD)} >= {least}"

    def _open_parallel_for(self, nest: Sequence[Loop]) -> int:
        """The same through torch's threads: the loops become one over the number of all their iterations."""
        at = self.values.index()
        head = "parallel_for({}, {}, [=, &error](i64 {})"
        enough = self._enough()
        end = f"}}, {enough});" if enough else "});"
        starts = [at.scalar(s.start).text for s in nest]
        if len(nest) == 1:
            self.writer.open(head.format(starts[0], at.scalar(nest[0].stop).text, nest[0].var.name), end)
            return 1
        counts = [self.values.fresh(f"{s.var.name}_count") for s in nest]
        for s, count in zip(nest, counts, strict=True):
            self.writer.line(f"const i64 {count} = {at.scalar(ix.as_index(s.stop) - s.start).text};")
        flat = self.values.fresh("iteration")
        self.writer.open(head.format(0, " * ".join(counts), flat), end)
        for k, s in enumerate(nest):
            inside = "".join(f" / {c}" for c in counts[k + 1 :])
            start = "" if starts[k] == "0" else f"{starts[k]} + "
            own = f"{flat}{inside}{f' % {counts[k]}' if k else ''}"
            self.writer.line(f"const i64 {s.var.name} = {start}{own};")
        return 1

    def _serial_loop(self, s: Loop) -> None:
        terms = self._terms(s.body)
        inner = partial(self.body, s.body)
        if terms >= FEW and terms * _most(s) > BLOCK and any(isinstance(t, Loop) for t in s.body):
            # Each iteration adds up its own terms first.
            terms, inner = 1, partial(self._with_parts, s.body, inner)

        def loop(first: str | None, last: str) -> None:
            self.writer.open(f"for (i64 {s.var.name} = {first}; {s.var.name} < {last}; {s.var.name}++)")
            inner()
            self.writer.close()

        at = self.values.index()
        sizes = _block_sizes(terms, _most(s))
        self._in_blocks(s, sizes, 1, at.scalar(s.start).text, at.scalar(s.stop).at(ADD), loop)

    def _in_blocks(
        self, s: Loop, sizes: Sequence[int], step: int, first: str | None, last: str,
        loop: Callable[[str | None, str], None],
    ) -> None:  # fmt: skip
        """A loop cut into blocks, each with sums of its own.

        Arguments:
            sizes: the iterations of a block, of the blocks in it, and so on.
            first: where the variable starts; ``None`` where it goes on from its value.
            loop: prints the innermost loop.
        """
        if not sizes:
            loop(first, last)
            return
        size, name = sizes[0] * step, s.var.name
        begin, stop = self.values.fresh(f"{name}_block"), self.values.fresh(f"{name}_stop")
        if first is None:
            self.writer.open(f"while ({name} < {last})")
        else:
            self.writer.open(f"for (i64 {begin} = {first}; {begin} < {last}; {begin} += {size})")
        self.writer.line(
            f"const i64 {stop} = minimum<i64>({name if first is None else begin} + {size}, {last});"
        )
        inside = None if first is None else begin
        self._with_parts(s.body, lambda: self._in_blocks(s, sizes[1:], step, inside, stop, loop))
        self.writer.close()

    # --- transposes -----------------------------------------------------------------------------------------

    def _transposed(self, s: Loop) -> list[Expr]:
        """The loads of a tile that a serial loop walks along the grain, and the vector loop in it across."""
        inner = s.body[0]
        if len(s.body) != 1 or not isinstance(inner, Loop) or inner.kind != "vector":
            return []
        if not all(isinstance(t, (Store, Let)) for t in inner.body):
            return []
        if any(s.var in ix.as_index(e).free_vars for e in (inner.start, inner.stop)):
            return []
        if self.width == 1 or min(_most(s), _most(inner)) < self.width:
            return []
        stored = {t.buffer for t in inner.body if isinstance(t, Store)}
        found: dict[Expr, None] = {}
        for t in inner.body:
            for root in _roots(t):
                for n in ex.walk(root):
                    if n.op == "masked":
                        return []
                    if n.op == "load" and n.buffer not in stored and n.dtype is not torch.bool:
                        i, v = n.indices[0], inner.var
                        step = ix.coefficient(i, v)
                        if (
                            step
                            and (isinstance(step, Index) or step > 1)
                            and ix.coefficient(i, s.var) == 1
                            and not list(ix.indirect_atoms(i))
                        ):
                            found[n] = None
        size = _most(s) * (_most(inner) + self.width)
        return list(found) if sum(n.dtype.itemsize for n in found) * size <= 2 * STACK else []

    def _transposing_loop(self, s: Loop) -> None:
        """A tile: what lies across the grain is turned into scratch first, and read from there in rows."""
        v, inner = self.values, s.body[0]
        assert isinstance(inner, Loop)
        pitch = -(-_most(inner) // self.width) * self.width
        self.writer.open("")
        turned: dict[Expr, Expr] = {}
        for n in self._transposed(s):
            i, name = n.indices[0], v.fresh("tile")
            v.dtypes[name] = n.dtype
            at = v.index()
            rows, columns = (at.scalar(ix.as_index(t.stop) - t.start).text for t in (inner, s))
            corner = v.pointer(n.buffer, ix.substitute(i, {s.var: s.start, inner.var: inner.start}))
            self.writer.line(f"alignas(64) {ex.dtype_name(n.dtype)} {name}[{_most(s) * pitch}];")
            step = at.scalar(ix.coefficient(i, inner.var) or 0).text
            self.writer.line(f"transpose({corner}, {step}, {rows}, {columns}, {name}, {pitch});")
            place = (s.var - s.start) * pitch + inner.var - inner.start
            turned[n] = ex.load(name, (place,), n.dtype)
        self._serial_loop(replace(s, body=(replace(inner, body=_replaced(inner.body, turned)),)))
        self.writer.close()

    # --- vector loops ---------------------------------------------------------------------------------------

    def _vector_loop(self, s: Loop) -> None:
        v, outside = self.values, self.values.lanes
        groups = self._groups(s)
        v.set_lanes(Lanes(self.width, s.var, groups))
        masked = self._can_be_partial(s)
        v.set_lanes(outside)
        self._hoist((s,))
        trip = _trip(s)
        if trip is not None:
            self._constant_trip(s, trip, groups, masked)
        else:
            self._variable_trip(s, groups, masked)
        v.set_lanes(outside)

    def _groups(self, s: Loop) -> int:
        """The vectors of one iteration: several where a chain of accumulations would be waited for."""
        own = {t.name for t in statements(s.body) if isinstance(t, Init)}
        accumulates = [t for t in statements(s.body) if isinstance(t, Accumulate)]
        if not accumulates or any(isinstance(t, Scratch) for t in statements(s.body)):
            return 1
        # Accumulators initialised inside the loop are fed by nested loops: their own cost is what counts.
        computed = accumulates if own else [
            t for t in statements(s.body) if isinstance(t, (Accumulate, Let, Store))
        ]  # fmt: skip
        cost = ex.cost(*(t.value for t in computed))
        groups = 4 if cost <= 4 else 2 if cost <= 14 else 1
        while groups > 1 and groups * len(accumulates) > 8:
            groups //= 2
        while groups > 1 and _most(s) < groups * self.width * (1 if own else 2):
            groups //= 2
        return groups

    def _can_be_partial(self, s: Loop) -> bool:
        """Whether the lanes after the last one that counts may be computed: they read and report nothing."""
        v = self.values
        inner = {t.name for t in statements(s.body) if isinstance(t, (Init, Let))}
        for t in statements(s.body):
            if isinstance(t, Store) and v.contiguous(t.index) != 1:
                return False
            if (
                isinstance(t, Loop)
                and s.var in ix.as_index(t.stop).free_vars | ix.as_index(t.start).free_vars
            ):
                return False
            for root in _roots(t):
                for n in ex.walk(root):
                    if n.op == "masked" and s.var in n.free_vars:
                        return False
                    if n.op in DIVISIONS and not n.dtype.is_floating_point and n.args[1].op != "const":
                        return False
                    if n.op == "load" and ix.coefficient(n.indices[0], s.var) not in (0, 1):
                        return False
                    if any(_unlike(a, s.var, inner) for i in ex.own_indices(n) for a in ix.indirect_atoms(i)):
                        return False
        return True

    def _repeatable(self, s: Loop) -> bool:
        """Whether an iteration may be done twice: it reads nothing that the loop writes, and adds to
        nothing."""
        inside = list(statements(s.body))
        own = {t.name for t in inside if isinstance(t, Init)}
        stored = {t.buffer for t in inside if isinstance(t, Store)}
        if stored & self.shared:
            stored |= self.shared
        for t in inside:
            if isinstance(t, Scratch) or (isinstance(t, Accumulate) and t.name not in own):
                return False
            for root in _roots(t):
                if any(n.op == "load" and n.buffer in stored for n in ex.walk(root)):
                    return False
        return bool(stored)

    def _constant_trip(self, s: Loop, trip: int, groups: int, masked: bool) -> None:
        v, w, name = self.values, self.width, s.var.name
        start = ix.as_index(s.start)
        done = 0
        for count in dict.fromkeys((groups, 1)):
            step = count * w
            end = done + (trip - done) // step * step
            if end == done:
                continue
            first, last = v.index().scalar(start + done).text, v.index().scalar(start + end).text
            self._vectors(s, count, first, last, (end - done) // step)
            done = end
        if done == trip:
            return
        if trip > w > 1 and trip - done > 1 and self._repeatable(s):
            v.set_lanes(Lanes(w, s.var))
            self.writer.open("")
            self.writer.line(f"const i64 {name} = {v.index().scalar(start + (trip - w)).text};")
            self.body(s.body)
            self.writer.close()
            return
        if trip - done == 1:
            v.set_lanes(Lanes(1))
            self.writer.open("")
            self.writer.line(f"const i64 {name} = {v.index().scalar(start + done).text};")
            self.body(s.body)
            self.writer.close()
            return
        if not masked:
            self._elements(
                s, f"i64 {name} = {v.index().scalar(start + done).text}", v.index().scalar(s.stop).at(ADD)
            )
            return
        self.writer.open("")
        self.writer.line(f"const i64 {name} = {v.index().scalar(start + done).text};")
        self._last_vector(s, str(trip - done))
        self.writer.close()

    def _variable_trip(self, s: Loop, groups: int, masked: bool) -> None:
        v, w, name = self.values, self.width, s.var.name
        end = self.values.fresh(f"{name}_end")
        start = v.index().scalar(s.start).text
        self.writer.open("")
        self.writer.line(f"const i64 {end} = {v.index().scalar(s.stop).text};")
        self.writer.line(f"i64 {name} = {start};")
        most = longest = _most(s)
        for count in dict.fromkeys((groups, 1)):
            step = count * w
            self._vectors(s, count, None, f"{end} - {step - 1}", most // step)
            most = min(most, step)  # what is left
        if masked:
            self.writer.open(f"if ({name} < {end})")
            self._last_vector(s, f"{end} - {name}")
            self.writer.close()
        else:
            if longest > w > 1 and self._repeatable(s):  # the last vector takes elements that were done
                at_start = "" if start == "0" else f" - {start}"
                self.writer.open(f"if ({name} < {end} && {end}{at_start} >= {w})")
                self.writer.line(f"{name} = {end} - {w};")
                v.set_lanes(Lanes(w, s.var))
                self.body(s.body)
                self.writer.line(f"{name} = {end};")
                self.writer.close()
            self._elements(s, "", end)
        self.writer.close()

    def _vectors(self, s: Loop, groups: int, first: str | None, last: str, most: int) -> None:
        """Whole vectors, ``groups`` an iteration, from ``first`` (or where the variable is) to ``last``."""
        v, name, step = self.values, s.var.name, groups * self.width
        v.set_lanes(Lanes(self.width, s.var, groups))

        def loop(begin: str | None, end: str) -> None:
            start = "" if begin is None else f"i64 {name} = {begin}"
            self.writer.open(f"for ({start}; {name} < {end}; {name} += {step})")
            if self._in_batch:
                self._ask_ahead(s)
            self.body(s.body)
            self.writer.close()

        self._in_blocks(s, _block_sizes(self._terms(s.body), most), step, first, last, loop)

    def _ask_ahead(self, s: Loop) -> None:
        """Ask for what a later iteration reads and writes side by side. Asking past the end does no harm."""
        v = self.values
        stored = {t.buffer: t.index for t in s.body if isinstance(t, Store)}
        loaded = {
            n.buffer: n.indices[0] for t in s.body for r in _roots(t) for n in ex.walk(r) if n.op == "load"
        }
        for buffer, at in {**loaded, **stored}.items():
            if v.contiguous(at) == 1:
                place = v.pointer(buffer, at + AHEAD // v.dtypes[buffer].itemsize)
                self.writer.line(f"__builtin_prefetch({place}{', 1' if buffer in stored else ''});")

    def _last_vector(self, s: Loop, live: str) -> None:
        self.values.set_lanes(Lanes(self.width, s.var, 1, live))
        self.body(s.body)

    def _elements(self, s: Loop, first: str, last: str) -> None:
        """One element at a time."""
        self.values.set_lanes(Lanes(1))
        name = s.var.name
        self.writer.open(f"for ({first}; {name} < {last}; {name}++)")
        self.body(s.body)
        self.writer.close()

    # --- loop invariants ------------------------------------------------------------------------------------

    def _hoist(self, loops: Sequence[Loop]) -> None:
        """Compute here what does not change in a loop that comes next."""
        inner = list(statements(tuple(loops)))
        if not self._in_batch and any(_never(t) for t in inner if isinstance(t, Loop)):
            return  # a batch passes rows without points over
        vars_inside = frozenset(t.var for t in inner if isinstance(t, Loop))
        names = {t.name for t in inner if isinstance(t, (Let, Init, Scratch))}
        written = {t.buffer for t in inner if isinstance(t, Store)} | names
        memo: dict[Expr, bool] = {}

        def fixed(e: Expr) -> bool:
            got = memo.get(e)
            if got is None:
                changes = (e.op == "local" and e.attr in names) or (e.op == "load" and e.buffer in written)
                got = not changes and e.free_vars.isdisjoint(vars_inside) and all(map(fixed, ex.children(e)))
                memo[e] = got
            return got

        seen: set[Expr] = set()

        def visit(e: Expr, guarded: bool) -> None:
            if e in seen or e.op in ("const", "local", "index"):
                return
            seen.add(e)
            if fixed(e) and not (guarded and any(n.op == "load" for n in ex.walk(e))):
                self.values.hoist(e)
                return
            for k, c in enumerate(ex.children(e)):
                visit(c, guarded or (e.op == "masked" and k == 1))

        for t in inner:
            for root in _roots(t):
                visit(root, False)


def _never(loop: Loop) -> bool:
    """Whether a loop might not run at all: nothing may be read early on its behalf."""
    n = ix.as_index(loop.stop) - loop.start
    return n.lo is None or n.lo < 1
