"""The host program: the Python that binds a schedule's kernels to memory and calls them.

What comes in: a ``Schedule`` whose kernels are printed. What goes out: the text of a Python module with one
function ``build(rt)`` that returns the callable. What holds in between: everything that can be known at
compile time is a literal in the text; a call allocates outputs, takes one arena, and runs the steps. Sizes
that vary are Python variables: read from the inputs first, or from the result of the call that tells them.
The next folder is ``runtime/``, whose ``program.py`` executes the text and provides ``rt``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotloop.compat import OpOverload
from hotloop.errors import CompileError
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index, IndexLike
from hotloop.ir.kernel import Kernel, KernelCall, Schedule
from hotloop.ir.loops import Buffer, Extern, ViewRef

__all__ = ["print_host"]

#: The C-level functions that write into ``out=``: less overhead than the operator object.
_OUT_FUNCTIONS = {
    "aten.mm.default": "torch.mm",
    "aten.addmm.default": "torch.addmm",
    "aten.bmm.default": "torch.bmm",
    "aten.baddbmm.default": "torch.baddbmm",
}

#: Whose results have as many elements as they announced, or more: inputs that share memory have a base that
#: may be larger than AOTAutograd says, and what is scattered into it is as large.
_SCATTERED = "aten.as_strided_scatter.default"
#: Whose sizes are not compared with those announced: nobody has seen products give others.
_TRUSTED = (*_OUT_FUNCTIONS, _SCATTERED)


def print_host(schedule: Schedule, name: str) -> tuple[str, list[Any]]:
    """The module text for a schedule, and the objects it refers to by number (none, as a rule)."""
    host = _Host(schedule, name)
    return host.text(), host.objects


def _tuple(values: tuple[Any, ...]) -> str:
    return f"({values[0]},)" if len(values) == 1 else f"({', '.join(map(str, values))})"


@dataclass(frozen=True)
class _Packer:
    """What keeps a weight packed: how it is made, the weight, how often it reads that itself, and the name of
    what it gives."""

    made: str
    weight: str
    asked: int
    given: str


class _Host:
    """Collects the lines of one host program."""

    def __init__(self, schedule: Schedule, name: str) -> None:
        self.s = schedule
        self.name = name
        self.p = schedule.program
        self.setup: dict[str, str] = {}  # name -> expression, evaluated once
        self.frame: dict[str, str] = {}  # name -> expression, evaluated once an arena
        self.head: list[str] = []  # what comes before an arena is taken
        self.body: list[str] = []
        self.pointers: dict[str, str] = {}
        self.views: dict[ViewRef, str] = {}
        self.late = {s for op in self.p.ops if isinstance(op, Extern) for s, _, _ in op.binds}
        self.counter = 0
        self.read: Counter[str] = Counter()  # how often the plain memory of a buffer is asked for
        self.packers: dict[str, _Packer] = {}
        self.objects: list[Any] = []

    def text(self) -> str:
        self.body_inputs()
        for name, place in self.s.placements.items():
            if place.kind == "output" and not place.late:
                self.allocate_output(self.p.buffers[name])
        for i, step in enumerate(self.s.steps):
            if isinstance(step, KernelCall):
                self.kernel(step)
            else:
                self.extern(step)
            self.free(self.s.frees[i] if i < len(self.s.frees) else ())
            for _, start, stop in (r for r in self.s.releases if r[0] == i):
                self.setup["release"] = "rt.release"
                self.frame["base"] = "address"
                self.body.append(f"release(base + {start}, {stop - start})")
        self.body.append(f"return [{', '.join(self.output(o) for o in self.p.outputs)}]")
        self.look()
        self.unname_single_pointers()
        return self.assemble()

    def unname_single_pointers(self) -> None:
        """An address that is used once needs no name."""
        text = "\n".join(self.body)
        uses = Counter(re.findall(r"\bp_\w+", text))
        once = {
            f"({name} := {b}.data_ptr())": f"{b}.data_ptr()"
            for b, name in self.pointers.items()
            if uses[name] == 1
        }
        self.body = re.sub(r"\(p_\w+ := \w+\.data_ptr\(\)\)", lambda m: once.get(m[0], m[0]), text).split(
            "\n"
        )

    # --- inputs and outputs ---------------------------------------------------------------------------------

    def body_inputs(self) -> None:
        # None of them is freed early: the caller decides how long they live.
        names = [n if n is not None else f"_{k}" for k, n in enumerate(self.p.inputs)]
        for symbol, m in self.p.symbols.items():
            if m.kind == "number":
                names[m.input] = symbol.name
        if names:
            self.head.append(
                f"{', '.join(names)}, = args" if len(names) == 1 else f"{', '.join(names)} = args"
            )
        for symbol, m in self.p.symbols.items():
            if m.value is None and m.kind != "number":
                value = f"{names[m.input]}.{'shape' if m.kind == 'size' else 'stride()'}[{m.dim}]"
                if m.offset:
                    value = f"({value} - {m.offset})"
                self.head.append(f"{symbol.name} = {value}" + (f" // {m.scale}" if m.scale != 1 else ""))

        for symbol, m in self.p.symbols.items():
            if m.value is not None:
                self.head.append(f"{symbol.name} = {python_text(m.value)}")
        bounded = [v.name for v, m in self.p.symbols.items() if v.hi == sz.MOST and m.value is None]
        if bounded:
            large = " or ".join(f"{name} > {sz.MOST}" for name in bounded)
            self.head.append(f"if {large}: return rt.large(args)")

    def allocate_output(self, b: Buffer) -> None:
        sizes, strides = _tuple(b.sizes), _tuple(b.strides)
        self.setup["empty"] = "rt.empty"
        if sz.hint(_storage_bytes(b)) >= 1 << 16:
            self.setup["pooled"] = "rt.pooled"
            call = f"pooled({sizes}, {strides}, {b.dtype}, {_storage_bytes(b)})"
        else:
            call = f"empty({sizes}, {strides}, {b.dtype})"
        self.body.append(f"{b.name} = {call}")

    def output(self, o: Any) -> str:
        return self.tensor(o, fresh=True) if isinstance(o, ViewRef) else self.number(o)

    def number(self, value: Any) -> str:
        """A number, or an expression of sizes, as Python."""
        return python_text(value) if isinstance(value, Expr) else repr(value)

    # --- naming memory --------------------------------------------------------------------------------------

    def base(self, name: str) -> Buffer:
        b = self.p.buffers[name]
        while b.alias_of is not None:
            b = self.p.buffers[b.alias_of]
        return b

    def base_tensor(self, name: str) -> str:
        """A Python name for the tensor that owns the storage of a buffer."""
        b = self.base(name)
        place = self.s.placements[b.name]
        if place.kind == "constant":
            self.setup[b.name] = f"rt.constant({b.name!r})"
        elif place.kind == "arena":
            self.frame.setdefault(
                f"t_{b.name}",
                f"rt.view(arena, {place.offset}, {_tuple(b.sizes)}, {_tuple(b.strides)}, {b.dtype})",
            )
            return f"t_{b.name}"
        return b.name

    def pointer(self, name: str) -> str:
        """A Python expression for the address of a buffer's memory."""
        b = self.base(name)
        self.read[b.name] += 1
        place = self.s.placements[b.name]
        if place.kind == "arena":
            self.frame.setdefault(f"p_{b.name}", f"address + {place.offset}")
            return f"p_{b.name}"
        if place.kind == "packed":
            if b.name not in self.pointers:
                self.pack(b)
            return f"p_{b.name}"
        if place.kind == "constant":
            self.base_tensor(name)
            self.setup[f"p_{b.name}"] = f"{b.name}.data_ptr()"
            return f"p_{b.name}"
        if b.name not in self.pointers:
            self.pointers[b.name] = f"p_{b.name}"
            empty = ""
            if not b.is_static and not sz.at_least(b.numel, 1):
                # A tensor without elements has no address, and lanes that do not count read one.
                self.setup["nothing"] = "rt.nothing"
                empty = " or nothing"
            return f"(p_{b.name} := {b.name}.data_ptr(){empty})"
        return self.pointers[b.name]

    def pack(self, b: Buffer) -> None:
        """The panels of a weight."""
        assert b.packs is not None
        numbers = f"{_tuple(b.packs.sizes)}, {_tuple(b.packs.strides)}, {_tuple(b.sizes)}"
        weight, given = self.base(b.packs.buffer).name, f"p_{b.name}"
        self.base_tensor(weight)
        self.packers[b.name] = _Packer(f"rt.panels({numbers})", weight, 0, given)
        self.pointers[b.name] = given

    def look(self) -> None:
        """Look at all weights that are kept packed, before the first step: no step writes them."""
        if not self.packers:
            return
        for name, packer in self.packers.items():
            read = self.read[packer.weight] > packer.asked
            self.setup[name] = f"{packer.made[:-1]}, read=True)" if read else packer.made
        self.setup["weights"] = f"rt.weights({', '.join(self.packers)})"
        given = _tuple(tuple(packer.given for packer in self.packers.values()))
        asked = ", ".join(packer.weight for packer in self.packers.values())
        # What is packed lives as long as `packed` does.
        self.head.append(f"{given}, packed = weights({asked})")

    def tensor(self, v: ViewRef, fresh: bool = False) -> str:
        """A Python expression for a strided view. ``fresh``: it is given to the caller."""
        b = self.base(v.buffer)
        self.read[b.name] += 1
        whole = v.sizes == b.sizes and v.strides == b.strides and v.offset == 0 and v.dtype is b.dtype
        owner = self.base_tensor(v.buffer)
        kind = self.s.placements[b.name].kind
        if whole and not v.again:
            return owner
        fixed = kind in ("arena", "constant")
        key = v
        if key in self.views and not fresh:
            return self.views[key]
        source = owner if v.dtype is b.dtype else f"rt.retype({owner}, {v.dtype})"
        offset = ""
        moved = v.offset != 0 or v.dtype is not b.dtype
        if moved and not fixed and kind != "output":
            start = f"{owner}.storage_offset()"
            if v.dtype is not b.dtype:
                start += f" * {b.dtype.itemsize} // {v.dtype.itemsize}"
            offset = f", {start} + {v.offset}"
        elif v.offset != 0 or kind == "arena":
            offset = f", {self.arena_offset(b, v)}"
        self.setup["as_strided"] = "torch.as_strided"
        call = f"as_strided({source}, {_tuple(v.sizes)}, {_tuple(v.strides)}{offset})"
        if fresh:
            # Not a view to autograd: beside its base it would want gradients when the base does.
            return f"{call}.detach()" if kind == "output" else call
        name = f"v{self.counter}"
        self.counter += 1
        self.views[key] = name
        late = any(u in self.late for e in (*v.sizes, *v.strides, v.offset) for u in sz.symbols(e))
        if kind == "arena" and not late:
            self.frame[name] = call
        elif kind == "constant" and b.is_static and sz.is_static((*v.sizes, *v.strides, v.offset)):
            self.setup[name] = call
        else:
            self.body.append(f"{name} = {call}")
        return name

    def arena_offset(self, b: Buffer, v: ViewRef) -> IndexLike:
        place = self.s.placements[b.name]
        start = ix.floordiv(place.offset, v.dtype.itemsize) if place.kind == "arena" else 0
        return sz.plain(start + v.offset)

    # --- steps ----------------------------------------------------------------------------------------------

    def kernel(self, step: KernelCall) -> None:
        name = step.kernel.name
        self.setup[name] = f"rt.kernel({name!r})"
        for p, a in step.bound:
            if p.role != "in" and self.s.placements[self.base(a).name].late:
                self.allocate_output(self.base(a))
        if step.points:
            given = self.table(step)
        else:
            given = [*map(self.pointer, step.args), *(v.name for v in step.kernel.sizes)]
        call = f"{name}({', '.join(given)})"
        if step.kernel.checks:
            self.body.append(f"if status := {call}: rt.fault(status, {name!r}, {_places(step.kernel)!r})")
        else:
            self.body.append(call)

    def table(self, step: KernelCall) -> list[str]:
        """The two ends of the table of a batch, which is kept until the next one is made."""
        self.body.append('batch = array("q", (')
        for row, points in zip(step.rows, step.points, strict=True):
            self.body.append(f"    {', '.join(map(self.pointer, row))}, {points},")
        self.body += ["))", "batch_rows, _ = batch.buffer_info()"]
        return ["batch_rows", f"batch_rows + {8 * len(step.points) * (len(step.kernel.params) + 1)}"]

    def extern(self, step: Extern) -> None:
        into = [b for b in step.outs if b is not None and self.s.placements[b].kind in ("arena", "output")]
        args = [self.argument(a) for a in (step.args if step.weight is None else _tensors(step))]
        kwargs = [f"{k}={self.argument(a)}" for k, a in step.kwargs.items()]
        if into:
            kwargs.append(f"out={self.base_tensor(into[0])}")
            self.body.append(f"{_OUT_FUNCTIONS[str(step.target)]}({', '.join(args + kwargs)})")
            return
        target = self.target(step.target) if step.weight is None else self.keeper(step)
        args = args if step.weight is None else [self.packers[target].given, *args]
        call = f"{target}({', '.join(args + kwargs)})"
        if getattr(step.target, "_schema", None) is None:  # control flow: nothing says what it gives
            self.setup["results"] = "rt.results"
            call = f"results({call})"
        single = len(step.outs) == 1 and not _gives_tuple(step.target)
        names = [b or "_" for b in step.outs]
        for symbol, k, dim in step.binds:
            if dim is None:
                names[k] = symbol.name
        if not names:
            self.body.append(call)
        elif single:
            self.body.append(f"{names[0]} = {call}")
        else:
            self.body.append(
                f"{', '.join(names)}, = {call}" if len(names) == 1 else f"{', '.join(names)} = {call}"
            )
        told = [(v.name, step.outs[k], dim) for v, k, dim in step.binds if dim is not None]
        self.body += [f"{name} = {out}.shape[{dim}]" for name, out, dim in told]
        for b in step.outs:
            if b is not None and not self.p.buffers[b].sealed:
                self.check_result(self.p.buffers[b], step)

    def keeper(self, step: Extern) -> str:
        """A name for the object that makes this call and keeps what it made of the weight."""
        assert step.weight is not None
        numbers, post = step.args[step.weight + 2 :], ""
        if len(numbers) == 6:  # aten.convolution
            stride, padding, dilation, _, _, groups = numbers
        else:
            padding, stride, dilation, groups, *rest = numbers
            if step.weight == 1:  # nothing is added: an activation follows
                name, scalars, algorithm = rest
                post = f", {name!r}, {_tuple(tuple(scalars))}, {algorithm!r}"
        sizes = tuple(map(sz.hint, step.args[0].sizes))
        listed = ", ".join(map(_tuple, (sizes, stride, padding, dilation)))
        made = f"convolution{self.counter}"
        self.counter += 1
        weight = self.base(step.args[step.weight].buffer).name
        self.packers[made] = _Packer(f"rt.convolution({listed}, {groups}{post})", weight, 1, f"{made}_weight")
        return made

    def check_result(self, b: Buffer, step: Extern) -> None:
        """The kernels were made for the sizes and strides that the operator announced: an error where it gave
        other sizes, which of products nobody has seen, and a copy where it gave other strides."""
        self.setup["restride"] = "rt.restride"
        sizes, strides = _tuple(b.sizes), _tuple(b.strides)
        differs = f"{b.name}.stride() != {strides}"
        if step.weight is None and str(step.target) not in _TRUSTED:
            differs += f" or {b.name}.shape != {sizes}"
        elif str(step.target) == _SCATTERED:
            differs += f" or {b.name}.numel() < {b.numel}"
        source = f" ({step.origin.source})" if step.origin.source else ""
        made = f"restride({b.name}, {sizes}, {strides}, {f'{step.target}{source}'!r})"
        self.body.append(f"if {differs}: {b.name} = {made}")

    def target(self, target: Any) -> str:
        if isinstance(target, OpOverload):
            text = f"torch.ops.{target}"
            name = str(target).replace(".", "_").replace("::", "_")
            self.setup[name] = text
            return name
        return self.object(target)

    def argument(self, a: Any) -> str:
        if isinstance(a, ViewRef):
            return self.tensor(a)
        if isinstance(a, tuple):
            return _tuple(tuple(self.argument(x) for x in a))
        if isinstance(a, list):
            return f"[{', '.join(self.argument(x) for x in a)}]"
        if isinstance(a, dict):
            return "{" + ", ".join(f"{k!r}: {self.argument(x)}" for k, x in a.items()) + "}"
        if isinstance(a, float) and (a != a or a in (float("inf"), float("-inf"))):
            return f"float({str(a)!r})"
        if isinstance(a, (torch.dtype, torch.memory_format, torch.layout)) or a is None:
            return str(a)
        if isinstance(a, torch.device):
            return f"torch.{a!r}" if not repr(a).startswith("torch") else repr(a)
        if isinstance(a, (bool, int, float, str, complex)):
            return repr(a)
        if isinstance(a, (Index, Expr)):
            return self.number(a)
        return self.object(a)

    def object(self, value: Any) -> str:
        """A name for an object that has no literal: a higher-order operator's subgraph, say."""
        name = f"object{len(self.objects)}"
        self.setup[name] = f"rt.object({len(self.objects)})"
        self.objects.append(value)
        return name

    def free(self, dead: Sequence[str]) -> None:
        if dead:
            gone = list(dead)
            for v, name in list(self.views.items()):
                if self.base(v.buffer).name in dead:
                    gone.append(name)
                    del self.views[v]
            self.body.append(f"del {', '.join(gone)}")

    # --- text -----------------------------------------------------------------------------------------------

    def assemble(self) -> str:
        lines = [
            f'"""{self.name}: the host program that hotloop generated; `build(rt)` gives the callable."""',
            "",
            *self.imports(),
            "import torch",
            "from torch import device",
            "",
            "",
            "def build(rt):",
        ]
        lines += [f"    {name} = {value}" for name, value in self.setup.items()]
        if not self.frame:
            lines += [
                "",
                "    def call(args):",
                *(f"        {line}" for line in (*self.head, *self.body)),
                "",
                "    return call",
                "",
            ]
            return "\n".join(lines)
        names = ", ".join(self.frame)
        sizes = ", ".join(self.frame_symbols())
        fixed = not sizes
        nbytes = self.s.arena_bytes if fixed else f"max({self.s.arena_bytes}, 64)"
        lines += [
            "",
            f"    def new_frame({'' if fixed else f'arena, {sizes}'}):",
            f"        arena = rt.arena({nbytes}{'' if fixed else ', arena'})",
            "        address = arena.data_ptr()",
            *(f"        {name} = {value}" for name, value in self.frame.items()),
            f"        return arena, {names}",
            "",
            f"    take, give = rt.frames(new_frame, {nbytes})" if fixed else
            "    take, give = rt.sized_frames(new_frame)",
            "",
            "    def call(args):",
            *(f"        {line}" for line in (() if fixed else self.head)),
            f"        frame = take({sizes})",
            "        try:",
            f"            _, {names} = frame" if fixed else f"            _, {names} = frame[1]",
            *(f"            {line}" for line in (*(self.head if fixed else ()), *self.body)),
            "        finally:",
            "            give(frame)",
            "",
            "    return call",
            "",
        ]  # fmt: skip
        return "\n".join(lines)

    def imports(self) -> list[str]:
        """Lines that import what the text uses of Python's library."""
        lines = (*self.head, *self.body)
        used = {"from array import array": " array(", "import math": "math."}
        found = [line for line, word in used.items() if any(word in text for text in lines)]
        return [*found, ""] if found else []

    def frame_symbols(self) -> list[str]:
        """The sizes that an arena and the views in it depend on."""
        words = set(re.findall(r"\w+", " ".join([str(self.s.arena_bytes), *self.frame.values()])))
        return [v.name for v in self.p.symbols if v.name in words]


def _tensors(step: Extern) -> tuple[Any, ...]:
    """What the keeper of a convolution takes at each call: input, weight, bias, and what is added."""
    assert step.weight is not None
    added = step.args[1 : step.weight]
    return (step.args[0], *step.args[step.weight : step.weight + 2], *added)


def _places(k: Kernel) -> list[str]:
    """The user's lines that a kernel serves, each with its operators."""
    operators: dict[str, dict[str, None]] = {}
    for o in k.origins:
        operators.setdefault(o.source or "", {})[o.word] = None
    return [
        f"{', '.join(names)}: {source}" if source else ", ".join(names) for source, names in operators.items()
    ]


def _storage_bytes(b: Buffer) -> IndexLike:
    """The bytes from the first to the last element."""
    if b.numel == 0:
        return 0
    last = sz.total((n - 1) * st for n, st in zip(b.sizes, b.strides, strict=True))
    return sz.plain((last + 1) * b.dtype.itemsize)


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=", "logical_and": "and", "logical_or": "or", "pow": "**",
}  # fmt: skip
_CALLED = {
    "maximum": "max", "minimum": "min", "sqrt": "math.sqrt", "logical_not": "not ", "floor": "math.floor",
    "ceil": "math.ceil", "round": "round", "exp": "math.exp", "log": "math.log",
}  # fmt: skip


def python_text(e: Expr) -> str:
    """A value that depends on sizes alone as a Python expression."""
    if e.op == "const":
        return repr(e.value)
    if e.op == "index":
        return repr(e.attr)
    args = [python_text(a) for a in e.args]
    if e.op in _INFIX:
        return f"({f' {_INFIX[e.op]} '.join(args)})"
    if e.op in _CALLED:
        return f"{_CALLED[e.op]}({', '.join(args)})"
    if e.op == "cast" and e.dtype in (torch.float64, torch.int64):
        return f"{'float' if e.dtype is torch.float64 else 'int'}({args[0]})"
    raise CompileError(f"{e.op} of sizes has no Python form", stage="codegen", node=e.op)


def _gives_tuple(target: Any) -> bool:
    """Whether a call gives a tuple or a list, of one element perhaps."""
    schema = getattr(target, "_schema", None)
    return schema is None or len(schema.returns) > 1 or str(schema.returns[0].type).startswith("List")
