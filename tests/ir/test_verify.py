"""The verifiers: one malformed value for each rule, and well-formed ones that must pass.

What comes in: programs, kernels and schedules built by hand. What goes out: nothing. What holds: each is
refused for the reason it was made for, by a ``VerifyError`` that shows where.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hotloop.errors import VerifyError
from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index
from hotloop.ir.kernel import (
    Accumulate,
    Init,
    Kernel,
    KernelCall,
    Let,
    Loop,
    Param,
    Placement,
    Schedule,
    Scratch,
    Stmt,
    Store,
)
from hotloop.ir.loops import (
    Buffer,
    Extern,
    LoopProgram,
    Op,
    Origin,
    Pointwise,
    Reduce,
    Scan,
    Scatter,
    ViewRef,
)
from hotloop.ir.verify import verify_kernel, verify_program, verify_schedule

F32, F64, BF16, BOOL = torch.float32, torch.float64, torch.bfloat16, torch.bool
I32, I64 = torch.int32, torch.int64
I, J, K = ix.var("i", 4), ix.var("j", 3), ix.var("k", 3)  # noqa: E741 - i, as in the dumps
MM = torch.ops.aten.mm.default


def buffer(name: str, *sizes: int, dtype: torch.dtype = F32, kind: str = "temp", **more: Any) -> Buffer:
    strides = tuple(math.prod(sizes[k + 1 :]) for k in range(len(sizes)))
    return Buffer(name, dtype, sizes, strides, kind, **more)


def whole(b: Buffer) -> ViewRef:
    return ViewRef(b.name, b.sizes, b.strides, 0, b.dtype)


X = buffer("x", 4, 3, kind="input")
T = buffer("t", 4, dtype=I64, kind="input")
H = buffer("h", 4, 3, dtype=BF16, kind="input")
OUT, ROWS = buffer("out", 4, 3), buffer("rows", 4)


def program(ops: Sequence[Op], outs: Sequence[Any] = (), extra: Sequence[Buffer] = ()) -> LoopProgram:
    buffers = {b.name: b for b in (X, T, H, OUT, ROWS, *extra)}
    return LoopProgram("p", buffers, tuple(ops), ("x", "t", "h"), tuple(outs))


def x_at(i: ix.IndexLike = I, j: ix.IndexLike = J) -> Expr:
    return ex.load("x", (i, j), F32)


def raw(op: str, dtype: torch.dtype, *args: Expr, attr: Any = None) -> Expr:
    """A node that the constructors would refuse."""
    return ex._make(op, dtype, args, attr)


def pw(body: Expr, out: str = "out", at: tuple[Index, ...] = (I, J)) -> Pointwise:
    return Pointwise(out, at, body, Origin(("mul",), "aten.mul", "model.py:7: y = x * x"))


def red(kind: str, body: Expr, out: str = "rows") -> Reduce:
    return Reduce(out, (I,), (J,), kind, body)


GOOD = pw(ex.call("exp", x_at()))
H_AT = ex.load("h", (I, J), BF16)
BOOL_X = ex.call("gt", x_at(), ex.const(0, F32))
FLOAT_INDEX = ix.indirect(x_at(), 4)
MASK = ex.call("lt", ex.index_value(I), ex.const(2, I64))


def test_a_sound_program_passes() -> None:
    gathered = ex.load("x", (ix.indirect(ex.load("t", (I,), I64), 4), J), F32)
    shifted = ex.masked(MASK, x_at(I + 2), ex.const(0, F32))
    correlated = x_at(I, J - J * J // 2)  # the interval is [-2, 2], the values are 0, 1, 0
    low = ex.cast(ex.call("add", ex.cast(H_AT, F32), ex.cast(H_AT, F32)), BF16)
    more = [buffer(f"b{k}", 4, 3, dtype=BF16 if k == 3 else F32) for k in range(4)]
    ops: list[Op] = [
        pw(body, b.name) for b, body in zip(more, (gathered, shifted, correlated, low), strict=True)
    ]
    verify_program(
        program([GOOD, red("sum", ex.load("out", (I, J), F32)), *ops], [whole(OUT), 3, None], more)
    )


BAD_BODIES: Mapping[str, tuple[Expr, str]] = {
    "dtype of the buffer": (ex.cast(x_at(), F64), "out is f32 and its body gives f64"),
    "arithmetic in bfloat16": (ex.cast(raw("exp", BF16, H_AT), F32), "exp computes in bf16"),
    "operands differ": (raw("add", F32, x_at(), ex.const(1, F64)), "add of different dtypes: f32, f64"),
    "result of a comparison": (raw("lt", F32, x_at(), x_at()), "lt of f32 gives f32"),
    "arity": (raw("add", F32, x_at()), "add takes 2 arguments, not 1"),
    "unknown operation": (raw("frobnicate", F32, x_at()), "unknown operation 'frobnicate'"),
    "condition": (raw("where", F32, x_at(), x_at(), ex.const(0, F32)), "the condition of where is"),
    "sides of where": (raw("where", F32, BOOL_X, x_at(), ex.const(0, F64)), "where of f32 and f64"),
    "float operation on integers": (
        ex.cast(raw("exp", I64, ex.load("t", (I,), I64)), F32),
        "operation on floats",
    ),
    "integer operation on floats": (raw("shl", F32, x_at(), x_at()), "operation on integers"),
    "width of a bitcast": (raw("bitcast", F32, ex.const(1, I64)), "changes the width"),
    "dtype of an index": (ex.cast(raw("index", I32, attr=I), F32), "an index is int64"),
    "key of a random number": (
        ex.cast(raw("random", I32, ex.const(0, I32), attr=(0, I)), F32),
        "under a key that is i32",
    ),
    "word of a random number": (
        ex.cast(raw("random", I32, ex.const(0, I64), attr=(4, I)), F32),
        "words 0 to 3, not 4",
    ),
    "counter of a random number": (
        ex.cast(ex.random(ex.const(0, I64), I - 1), F32),
        "may be negative",
    ),
    "float index": (x_at(FLOAT_INDEX), "an index is read from f32"),
    "dtype of a load": (ex.cast(ex.load("x", (I, J), F64), F32), "as f64 reads x: input f32"),
    "number of indices": (ex.load("x", (I,), F32), "has 1 indices"),
    "unknown buffer": (ex.load("y", (I,), F32), "y is not a buffer"),
    "index too large": (x_at(I + 1), r"index \(i \+ 1\) in \[1, 4\] leaves a dimension of size 4"),
    "index negative": (x_at(I, J - 1), "leaves a dimension of size 3"),
    "index of a guard's other side": (
        ex.masked(MASK, x_at(I + 2), x_at(I + 1)),
        "leaves a dimension of size 4",
    ),
    "indirect size": (x_at(ix.indirect(ex.load("t", (I,), I64), 9)), "leaves a dimension of size 4"),
    "unbound variable": (x_at(ix.var("k", 3)), r"\['k'\] are not loop variables"),
    "local": (ex.local("v", F32), "has no locals"),
    "self": (ex.load("out", (I, J), F32), "out is read before it is written"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_bad_body(name: str) -> None:
    body, message = BAD_BODIES[name]
    with pytest.raises(VerifyError, match=message):
        verify_program(program([pw(body)]))


BAD_REDUCTIONS: Mapping[str, tuple[Reduce, str]] = {
    "kind": (red("median", x_at()), "unknown reduction 'median'"),
    "bfloat16": (red("sum", H_AT), "sum computes in bf16"),
    "any of floats": (red("any", x_at()), "any of f32"),
    "sum of bool": (red("sum", BOOL_X), "sum of bool"),
    "position as float": (red("argmax", x_at()), "gives positions, and rows is f32"),
    "variable twice": (Reduce("rows", (I,), (J, I), "sum", x_at()), "bound twice"),
}


@pytest.mark.parametrize("name", BAD_REDUCTIONS)
def test_bad_reduction(name: str) -> None:
    op, message = BAD_REDUCTIONS[name]
    with pytest.raises(VerifyError, match=message):
        verify_program(program([op]))


def scatter(kind: str = "set", body: Expr | None = None, **more: Any) -> Scatter:
    """``out = x``, then rows of it, chosen by ``t``, from ``x``."""
    rows = ix.indirect(ex.load("t", (I,), I64), 4)
    made = Scatter("out", "x", (I, J), (rows, J), kind, x_at() if body is None else body)
    return replace(made, **more)


def scan(kind: str, body: Expr, axis: int = 1) -> Scan:
    return Scan("out", (I, J), axis, kind, body)


BAD_ORDERED: Mapping[str, tuple[Sequence[Op], str]] = {
    "unknown scatter": ([scatter("median")], "unknown scatter 'median'"),
    "scatter of another dtype": ([scatter(body=ex.cast(x_at(), F64))], "out is f32 and its body gives f64"),
    "base of another shape": ([scatter(base="rows")], "rows is read before"),
    "base of another dtype": ([scatter(base="h")], "starts from h: input bf16"),
    "too few positions": ([scatter(indices=(I,))], r"1 indices for out"),
    "position outside": ([scatter(indices=(I + 1, J))], r"leaves a dimension of size 4 of out"),
    "variable of a position": ([scatter(indices=(I, K))], r"\['k'\] in k are not loop variables"),
    "position is a float": ([scatter(indices=(ix.indirect(x_at(), 4), J))], "an index is read from f32"),
    "position unwritten": (
        [scatter(indices=(ix.indirect(ex.load("n", (I,), I64), 4), J))],
        "n is not a buffer",
    ),
    "written before": ([GOOD, scatter()], "out is written twice"),
    "unknown scan": ([scan("median", x_at())], "unknown scan 'median'"),
    "scan of bfloat16": ([scan("sum", H_AT)], "sum computes in bf16"),
    "scan of bools": ([scan("sum", BOOL_X)], "sum of bool"),
    "axis": ([scan("sum", x_at(), axis=2)], "scanned along dimension 2 of 2"),
    "logarithms of integers": ([scan("logaddexp", ex.load("t", (I,), I64))], "logaddexp of i64"),
    "positions as floats": ([scan("argmax", x_at())], "gives positions, and out is f32"),
}


@pytest.mark.parametrize("name", BAD_ORDERED)
def test_bad_scatters_and_scans(name: str) -> None:
    ops, message = BAD_ORDERED[name]
    with pytest.raises(VerifyError, match=message):
        verify_program(program(ops))


def test_sound_scatters_and_scans() -> None:
    verify_program(program([scatter(), scatter("sum", base="out")]))  # the second one in place
    verify_program(program([GOOD, scatter("max", base="out")]))
    verify_program(program([scan("sum", ex.cast(x_at(), F64))]))


LONG = ViewRef("x", (4, 4), (3, 1), 0, F32)
BAD_PROGRAMS: Mapping[str, tuple[LoopProgram, str]] = {
    "number of variables": (program([pw(x_at(0, J), at=(J,))]), "are not the dimensions of"),
    "extent of a variable": (
        program([pw(x_at(J, I % 3), at=(J, I))]),
        "j has 3 values and the dimension .* size 4",
    ),
    "unknown out": (program([pw(x_at(), out="y")]), "y is not a buffer"),
    "written twice": (program([GOOD, GOOD]), "out is written twice"),
    "read before written": (program([red("sum", ex.load("out", (I, J), F32)), GOOD]), "out is read before"),
    "constant written": (
        replace(
            program([pw(x_at(), out="c")], extra=[buffer("c", 4, 3, kind="constant")]),
            constants={"c": torch.ones(4, 3)},
        ),
        "constant f32.* is written",
    ),
    "extern reads unwritten": (program([Extern(("rows",), MM, (whole(OUT),), {})]), "out is read before"),
    "view leaves its buffer": (program([Extern(("rows",), MM, (LONG,), {})]), "leaves x: input"),
    "view starts before": (program([], [replace(whole(X), offset=-1)]), "leaves x: input"),
    "view as a wider dtype": (program([], [ViewRef("x", (4, 3), (3, 1), 0, F64)]), "leaves x: input"),
    "output never written": (program([], [whole(OUT)]), "out is read before"),
    "output unknown": (program([], [replace(whole(X), buffer="y")]), "y is not a buffer"),
    "alias of nothing": (
        program([], extra=[buffer("a", 3, alias_of="y")]),
        "alias of y, which does not exist",
    ),
    "name": (program([], extra=[replace(X, name="z", strides=(1,))]), "the buffer listed as z"),
    "kind": (program([], extra=[buffer("z", 3, kind="heap")]), "unknown kind 'heap'"),
}


@pytest.mark.parametrize("name", BAD_PROGRAMS)
def test_bad_program(name: str) -> None:
    bad, message = BAD_PROGRAMS[name]
    with pytest.raises(VerifyError, match=message):
        verify_program(bad)


def test_the_error_shows_the_operation_its_neighbours_and_the_users_line() -> None:
    first, last = pw(ex.call("neg", x_at()), out="before"), red("max", x_at())
    bad = program([first, pw(x_at(I + 1)), last], extra=[buffer("before", 4, 3)])
    with pytest.raises(VerifyError) as caught:
        verify_program(bad)
    text = str(caught.value)
    assert "> " in text and "out[i<4, j<3]" in text
    assert "before[i<4, j<3]" in text and "rows[i<4] = max(j<3: " in text
    assert "model.py:7: y = x * x" in text


def test_nothing_leaves_a_buffer_where_there_are_no_points() -> None:
    v = ix.var("v", 0)
    verify_program(program([pw(ex.load("x", (v + 9, v), F32), out="e", at=(v,))], extra=[buffer("e", 0)]))


def test_a_large_program_is_verified_quickly() -> None:
    """About the size of a twelve-layer transformer: 600 operations of 20 nodes."""
    a, b = ix.var("a", 512), ix.var("b", 768)
    buffers = [buffer("b0", 512, 768, kind="input"), *(buffer(f"b{k}", 512, 768) for k in range(1, 601))]
    ops: list[Op] = []
    for k in range(600):
        e = ex.load(f"b{k}", (a, (b + 64 * k) % 768), F32)
        for n in range(9):
            e = ex.call("add", ex.call("exp", e), ex.const(n, F32))
        ops.append(Pointwise(f"b{k + 1}", (a, b), e))
    p = LoopProgram("large", {q.name: q for q in buffers}, tuple(ops), ("b0",), (whole(buffers[-1]),))
    times = []
    for _ in range(3):
        start = time.process_time()
        verify_program(p)
        times.append(time.process_time() - start)
    assert min(times) < 0.15  # some 45 ms of a processor alone; the bound leaves room for a busy machine


# --- kernels ------------------------------------------------------------------------------------------------

IN, INOUT, DST = Param("x", F32, "in"), Param("y", F32, "inout"), Param("out", F32, "out")
N = ix.var("n", 12)


def kernel(*body: Stmt, params: tuple[Param, ...] = (IN, DST), checks: bool = False) -> Kernel:
    return Kernel("k", params, body, checks)


def over(v: Index, kind: str, *body: Stmt) -> Loop:
    return Loop(v, 0, v.extent, kind, body)


def flat(i: ix.IndexLike = N, name: str = "x") -> Expr:
    return ex.load(name, (i,), F32)


def copy(*before: Stmt, value: Expr | None = None) -> Kernel:
    return kernel(*before, over(N, "vector", Store("out", N, flat() if value is None else value)))


A = ex.local("a", F32)
SUM = Init("a", "sum", F32)
ADD = Accumulate("a", flat())
FETCH = ex.load("x", (ix.indirect(ex.cast(flat(), I64), 12),), F32)


def test_sound_kernels_pass() -> None:
    verify_kernel(copy())
    verify_kernel(kernel(over(N, "vector", Store("out", N, FETCH)), checks=True))
    row = [over(K, "vector", Accumulate("a", flat(I * 3 + K))), Store("out", I, A)]
    verify_kernel(kernel(over(I, "parallel", SUM, *row)))
    arg = [Init("p", "argmax", F32), over(N, "serial", Accumulate("p", flat(), N))]
    verify_kernel(kernel(*arg, Store("out", ix.const(0), ex.cast(ex.local("p", I64), F32))))
    verify_kernel(kernel(SUM, over(N, "serial", ADD, Store("out", N, A))))  # a scan
    let = [Let("a", flat()), Store("y", N, ex.call("add", A, flat(name="y")))]
    verify_kernel(kernel(over(N, "vector", *let), params=(IN, INOUT)))


BAD_KERNELS: Mapping[str, tuple[Kernel, str]] = {
    "parameter twice": (kernel(params=(IN, IN)), "two parameters have one name"),
    "role": (kernel(params=(replace(IN, role="ref"),)), "unknown role 'ref'"),
    "store to in": (kernel(over(N, "vector", Store("x", N, flat()))), "x has the role in and is stored to"),
    "load from out": (copy(value=flat(name="out")), "out has the role out and is read"),
    "never stored": (kernel(), "out has the role out and is never stored to"),
    "unknown load": (copy(value=flat(name="z")), "reads neither a parameter nor scratch"),
    "unknown store": (kernel(Store("z", ix.const(0), flat(0))), "z is stored to and is neither"),
    "dtype of a store": (copy(value=ex.cast(flat(), F64)), "out is f32; stored f64"),
    "dtype of a load": (copy(value=ex.cast(ex.load("x", (N,), F64), F32)), "as f64 reads f32"),
    "two indices": (copy(value=ex.load("x", (N, N), F32)), "has 2 indices"),
    "kind of a loop": (kernel(over(N, "unrolled", Store("out", N, flat()))), "unknown kind 'unrolled'"),
    "variable bound twice": (
        kernel(over(N, "serial", over(N, "vector", Store("out", N, flat())))),
        "bound by two loops",
    ),
    "unbound in a store": (kernel(Store("out", N, flat(0))), r"\['n'\] in n are not bound"),
    "unbound in a load": (kernel(Store("out", ix.const(0), flat())), r"\['n'\] in x\[n\] are not bound"),
    "unbound in a bound": (
        kernel(Loop(N, 0, K, "serial", (Store("out", N, flat()),))),
        r"\['k'\] in k are not bound",
    ),
    "range of a loop": (kernel(Loop(N, 0, 13, "serial", (Store("out", N, flat()),))), r"runs over 0\.\.13"),
    "undefined local": (copy(value=A), "local a, read as f32, is not defined there"),
    "local out of scope": (
        copy(over(K, "serial", Let("a", flat(K))), value=A),
        "local a.* is not defined there",
    ),
    "dtype of a local": (
        copy(Let("a", flat(0)), value=ex.cast(ex.local("a", F64), F32)),
        "read as f64, is f32",
    ),
    "local defined twice": (copy(Let("a", flat(0)), Let("a", flat(1))), "a is defined twice"),
    "not initialised": (copy(over(N, "serial", ADD)), "a is accumulated and not initialised"),
    "kind of an accumulator": (copy(Init("a", "mean", F32)), "unknown reduction 'mean'"),
    "dtype accumulated": (copy(Init("a", "sum", F64), over(N, "serial", ADD)), "a is f64; accumulated f32"),
    "position missing": (copy(Init("a", "argmax", F32), over(N, "serial", ADD)), "needs position"),
    "position given": (copy(SUM, over(N, "serial", Accumulate("a", flat(), N))), "has no position"),
    "parallel accumulation": (copy(SUM, over(N, "parallel", ADD)), "accumulated by parallel iterations of n"),
    "accumulator read in a vector loop": (
        kernel(SUM, over(N, "vector", ADD, Store("out", N, A))),
        "inside the vector loop",
    ),
    "scratch left by a store": (
        copy(Scratch("s", F32, 3), over(N, "serial", Store("s", N, flat()))),
        "leaves scratch s",
    ),
    "scratch left by a load": (copy(Scratch("s", F32, 3), value=flat(N, "s")), "leaves scratch of 3"),
    "unsaid check": (copy(value=FETCH), "has to be tested"),
    "bad node": (copy(value=raw("exp", F32, ex.const(1, F64))), "exp of f64 gives f32"),
}


@pytest.mark.parametrize("name", BAD_KERNELS)
def test_bad_kernel(name: str) -> None:
    bad, message = BAD_KERNELS[name]
    with pytest.raises(VerifyError, match=message):
        verify_kernel(bad)


# --- schedules ----------------------------------------------------------------------------------------------

BUFFERS = {
    b.name: b
    for b in (
        buffer("in0", 12, kind="input"),
        buffer("c", 12, kind="constant"),
        buffer("a", 12),
        buffer("b", 12),
        buffer("e", 12),
        buffer("short", 6),
        buffer("wide", 12, dtype=F64),
        buffer("res", 12, kind="output"),
    )
}
BASE = LoopProgram("p", BUFFERS, (), ("in0",), (whole(BUFFERS["res"]),), {"c": torch.ones(12)})
COPY = copy()
PLACES = {
    "in0": Placement("input"),
    "c": Placement("constant"),
    "a": Placement("arena", 0, 48),
    "b": Placement("arena", 64, 48),
    "e": Placement("extern"),
    "res": Placement("output"),
    "short": Placement("arena", 0, 24),
}


def schedule(
    *steps: tuple[str, ...] | Extern | KernelCall,
    places: Mapping[str, Placement] | None = None,
    arena: int = 112,
    frees: tuple[tuple[str, ...], ...] = (),
) -> Schedule:
    calls = tuple(KernelCall(COPY, s) if isinstance(s, tuple) else s for s in steps)
    return Schedule(BASE, calls, {**PLACES, **(places or {})}, arena, frees)


def extern(out: str, source: str) -> Extern:
    return Extern((out,), torch.ops.aten.clone.default, (whole(BUFFERS[source]),), {})


CHAIN = (("in0", "a"), ("a", "b"), ("b", "res"))
ALIAS = {"b": Placement("alias", of="a")}
LOOSE = kernel(*COPY.body, params=tuple(replace(q, restrict=False) for q in COPY.params))
LAST = ("e", "res")

BAD_SCHEDULES: Mapping[str, tuple[Schedule, str]] = {
    "unknown buffer": (schedule(("in0", "z")), "z is not a buffer"),
    "number of arguments": (schedule(("in0",)), "takes 2 buffers, not 1"),
    "dtype of an argument": (schedule(("in0", "wide"), places={"wide": Placement("output")}), "wide is f64"),
    "constant written": (schedule(("in0", "c")), "writes the constant c"),
    "bad kernel": (schedule(KernelCall(copy(value=A), ("in0", "res"))), "local a"),
    "read before written": (schedule(("a", "res")), "a is read before it is written"),
    "output never written": (schedule(("in0", "a")), "the output res is never written"),
    "store leaves": (schedule(("in0", "short"), ("in0", "res")), r"out\[n in \[0, 11\]\] leaves 6 elements"),
    "kind of a placement": (schedule(*CHAIN, places={"a": Placement("stack")}), "unknown kind 'stack'"),
    "arena too small": (schedule(*CHAIN, arena=100), "b needs 48 bytes"),
    "arena place too small": (schedule(*CHAIN, places={"a": Placement("arena", 0, 40)}), "a needs 48 bytes"),
    "arena place unaligned": (schedule(*CHAIN, places={"a": Placement("arena", 2, 48)}), "a needs 48 bytes"),
    "overlap in the arena": (schedule(*CHAIN, places={"b": Placement("arena", 32, 48)}), "a and b|b and a"),
    "in place without saying so": (
        schedule(*CHAIN, places={"b": Placement("arena", 0, 48)}),
        "overlap in the arena",
    ),
    "alias of nothing": (schedule(*CHAIN, places={"b": Placement("alias", of="z")}), "alias of z"),
    "alias too small": (
        schedule(*CHAIN, places={"b": Placement("alias", of="short")}),
        "b needs 48 bytes at 0 of short",
    ),
    "alias used later": (
        schedule(("in0", "a"), ("a", "b"), ("a", "res"), places=ALIAS),
        "which is used later as a",
    ),
    "alias of an input": (
        schedule(*CHAIN, places={"a": Placement("alias", of="in0")}),
        "which is the caller's",
    ),
    "frees too few": (schedule(*CHAIN, frees=((),)), "1 lists of buffers to free for 3 steps"),
    "freed early": (
        schedule(extern("e", "in0"), ("in0", "a"), LAST, frees=((), ("e",), ())),
        "e is freed before its last",
    ),
    "freed twice": (schedule(extern("e", "in0"), LAST, frees=(("b",), ("b",))), "b is freed twice"),
    "output freed": (schedule(*CHAIN, frees=((), (), ("res",))), "res is freed before its last use"),
}


@pytest.mark.parametrize("name", BAD_SCHEDULES)
def test_bad_schedule(name: str) -> None:
    bad, message = BAD_SCHEDULES[name]
    with pytest.raises(VerifyError, match=message):
        verify_schedule(bad)


def test_a_buffer_used_without_a_placement() -> None:
    s = schedule(*CHAIN)
    bad = replace(s, placements={k: v for k, v in s.placements.items() if k != "a"})
    with pytest.raises(VerifyError, match="a is used and has no placement"):
        verify_schedule(bad)


def test_sound_schedules_pass() -> None:
    verify_schedule(schedule(*CHAIN))
    verify_schedule(schedule(*CHAIN, places=ALIAS))
    verify_schedule(schedule(extern("e", "in0"), LAST, frees=((), ("e",))))
    loose = KernelCall(LOOSE, ("a", "b"))
    verify_schedule(schedule(CHAIN[0], loose, CHAIN[2], places={"b": Placement("arena", 0, 48)}))
    dead = {"b": Placement("arena", 0, 48)}  # a is dead before b is born
    verify_schedule(schedule(("in0", "a"), ("a", "e"), ("e", "b"), ("b", "res"), places=dead))


def test_a_loop_over_part_of_its_variable_stays_inside() -> None:
    part = kernel(Loop(N, 0, 6, "vector", (Store("out", N, flat()),)))
    verify_schedule(schedule(KernelCall(part, ("in0", "short")), ("in0", "res")))
    late = kernel(Loop(N, 6, 12, "vector", (Store("out", N - 6, flat()),)))
    verify_schedule(schedule(KernelCall(late, ("in0", "short")), ("in0", "res")))
