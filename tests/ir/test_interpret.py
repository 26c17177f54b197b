"""The interpreters against eager: small programs, kernels and schedules built by hand.

What comes in: programs whose meaning one line of torch says. What goes out: nothing. What holds: the
interpreter of loop programs, and that of kernels in both its ways of running, give what that line gives,
and what must not be done (a race, an index out of range, two live buffers in one place) is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir import interpret
from hotloop.ir.evaluate import random_word
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index
from hotloop.ir.interpret import run_program
from hotloop.ir.interpret_kernel import RaceError, run_kernel, run_schedule
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
from hotloop.ir.loops import Buffer, Extern, LoopProgram, Measure, Op, Pointwise, Reduce, ViewRef

F32, I32, I64, BOOL = torch.float32, torch.int32, torch.int64, torch.bool


def buffer(
    name: str, sizes: Sequence[int], dtype: torch.dtype = F32, kind: str = "temp", **more: Any
) -> Buffer:
    strides = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
    return Buffer(name, dtype, tuple(sizes), tuple(more.pop("strides", strides)), kind, **more)


def whole(b: Buffer) -> ViewRef:
    return ViewRef(b.name, b.sizes, b.strides, 0, b.dtype)


def program(buffers: Sequence[Buffer], ops: Sequence[Op], outs: Sequence[Any]) -> LoopProgram:
    named = {b.name: b for b in buffers}
    inputs = tuple(b.name for b in buffers if b.kind == "input")
    return LoopProgram(
        "p", named, tuple(ops), inputs, tuple(whole(o) if isinstance(o, Buffer) else o for o in outs)
    )


def variables(prefix: str, *extents: int) -> tuple[Index, ...]:
    return tuple(ix.var(f"{prefix}{k}", n) for k, n in enumerate(extents))


def pointwise(sizes: Sequence[int], body: Any, *ins: Buffer, dtype: torch.dtype = F32) -> LoopProgram:
    """One operation over ``sizes`` whose body is made of its variables."""
    v = variables("i", *sizes)
    out = buffer("out", sizes, dtype)
    return program([*ins, out], [Pointwise("out", v, body(*v))], [out])


def reduction(kind: str, x: Buffer, keep: int, out_dtype: torch.dtype) -> LoopProgram:
    v = variables("i", *(int(n) for n in x.sizes[:keep]))  # type: ignore[arg-type]
    r = variables("r", *(int(n) for n in x.sizes[keep:]))  # type: ignore[arg-type]
    out = buffer("out", [int(n) for n in x.sizes[:keep]], out_dtype)  # type: ignore[arg-type]
    op = Reduce("out", v, r, kind, ex.load("x", (*v, *r), x.dtype))
    return program([x, out], [op], [out])


# --- programs -----------------------------------------------------------------------------------------------


def test_pointwise_reads_transposed_strides() -> None:
    x = buffer("x", (3, 4), kind="input", strides=(1, 3))
    p = pointwise((4, 3), lambda i, j: ex.call("exp", ex.load("x", (j, i), F32)), x)
    t = torch.randn(4, 3).t()
    assert_close(run_program(p, [t])[0], t.t().exp())


def test_an_input_may_start_inside_its_storage() -> None:
    x = buffer("x", (3,), kind="input", strides=(2,))
    p = pointwise((3,), lambda i: ex.call("neg", ex.load("x", (i,), F32)), x)
    t = torch.arange(10.0)[3:9:2]
    assert_close(run_program(p, [t])[0], -t)


def test_inputs_that_do_not_fit_are_refused() -> None:
    p = pointwise((3,), lambda i: ex.load("x", (i,), F32), buffer("x", (3,), kind="input"))
    for bad in (torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(6)[::2]):
        with pytest.raises(ValueError, match="given for"):
            run_program(p, [bad])


@pytest.mark.parametrize("chunk", [1 << 20, 7])
@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min", "argmax", "argmin"])
def test_reductions(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpret, "CHUNK", chunk)
    x = buffer("x", (5, 3, 4), kind="input")
    t = torch.randn(5, 3, 4).round(decimals=1)
    t[1, 1, 2] = t[1, 2, 0] = math.nan
    flat = t.reshape(5, 12)
    want = getattr(torch, {"max": "amax", "min": "amin"}.get(kind, kind))(flat, -1)
    got = run_program(reduction(kind, x, 1, I64 if "arg" in kind else F32), [t])[0]
    assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("kind", ["any", "all"])
def test_reductions_of_bool(kind: str) -> None:
    t = torch.tensor([[True, True], [True, False], [False, False]])
    got = run_program(reduction(kind, buffer("x", (3, 2), BOOL, "input"), 1, BOOL), [t])[0]
    assert_close(got, getattr(t, kind)(-1))


def test_argmax_takes_the_first_of_equals() -> None:
    t = torch.tensor([[1.0, 3.0, 3.0], [math.nan, 1.0, math.nan]])
    got = run_program(reduction("argmax", buffer("x", (2, 3), kind="input"), 1, I64), [t])[0]
    assert_close(got, torch.tensor([1, 0]))


def test_sum_runs_in_the_dtype_of_the_body_and_is_cast_when_stored() -> None:
    x = buffer("x", (4000,), torch.bfloat16, "input")
    (r,) = variables("r", 4000)
    out = buffer("out", (), torch.bfloat16)
    op = Reduce("out", (), (r,), "sum", ex.cast(ex.load("x", (r,), torch.bfloat16), F32))
    t = torch.full((4000,), 1.0, dtype=torch.bfloat16)
    assert run_program(program([x, out], [op], [out]), [t])[0].item() == 4000  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "dtype", "want"),
    [("sum", F32, 0.0), ("prod", F32, 1.0), ("any", BOOL, False), ("all", BOOL, True)],
)
def test_empty_ranges(kind: str, dtype: torch.dtype, want: float) -> None:
    got = run_program(
        reduction(kind, buffer("x", (2, 0), dtype, "input"), 1, dtype), [torch.zeros(2, 0, dtype=dtype)]
    )
    assert_close(got[0], torch.full((2,), want, dtype=dtype))
    got = run_program(
        reduction(kind, buffer("x", (0, 3), dtype, "input"), 1, dtype), [torch.zeros(0, 3, dtype=dtype)]
    )
    assert got[0].shape == (0,)  # type: ignore[union-attr]


def pad(i: Index) -> Expr:
    inside = ex.call(
        "logical_and",
        ex.call("ge", ex.index_value(i), ex.const(2, I64)),
        ex.call("lt", ex.index_value(i), ex.const(5, I64)),
    )
    return ex.masked(inside, ex.load("x", (i - 2,), F32), ex.const(7, F32))


def test_masked_reads_only_where_the_condition_holds() -> None:
    x = buffer("x", (3,), kind="input")
    t = torch.randn(3)
    assert_close(run_program(pointwise((7,), pad, x), [t])[0], torch.nn.functional.pad(t, (2, 2), value=7.0))


def test_masked_over_an_empty_buffer() -> None:
    def body(i: Index) -> Expr:
        never = ex.call("gt", ex.load("y", (i,), F32), ex.const(1e9, F32))
        return ex.masked(never, ex.load("x", (i,), F32), ex.load("y", (i,), F32))

    p = pointwise((3,), body, buffer("x", (0,), kind="input"), buffer("y", (3,), kind="input"))
    t = torch.randn(3)
    assert_close(run_program(p, [torch.zeros(0), t])[0], t)


def test_masked_guards_division_and_indices_read_from_memory() -> None:
    def body(i: Index) -> Expr:
        n = ex.load("n", (i,), I64)
        good = ex.call("gt", n, ex.const(0, I64))
        row = ix.indirect(ex.call("floordiv", ex.const(6, I64), n), 4)
        return ex.masked(good, ex.load("x", (row,), F32), ex.const(-1, F32))

    p = pointwise((4,), body, buffer("n", (4,), I64, "input"), buffer("x", (4,), kind="input"))
    got = run_program(p, [torch.tensor([0, 2, -9, 6]), torch.arange(4.0)])[0]
    assert_close(got, torch.tensor([-1.0, 3.0, -1.0, 1.0]))


def test_a_load_outside_its_buffer_is_noticed() -> None:
    p = pointwise((4,), lambda i: ex.load("x", (i - 1,), F32), buffer("x", (4,), kind="input"))
    with pytest.raises(IndexError, match="leaves a dimension of 4"):
        run_program(p, [torch.zeros(4)])


def embedding() -> LoopProgram:
    def body(i: Index, j: Index) -> Expr:
        return ex.load("w", (ix.indirect(ex.load("t", (i,), I64), 5), j), F32)

    return pointwise((3, 2), body, buffer("t", (3,), I64, "input"), buffer("w", (5, 2), kind="input"))


def test_indirect_index() -> None:
    w, t = torch.randn(5, 2), torch.tensor([4, 0, 4])
    assert_close(run_program(embedding(), [t, w])[0], w[t])


@pytest.mark.parametrize("bad", [5, -1])
def test_indirect_index_out_of_range(bad: int) -> None:
    with pytest.raises(IndexError, match="index out of range"):
        run_program(embedding(), [torch.tensor([0, bad, 1]), torch.randn(5, 2)])


def test_extern_takes_views_and_gives_strides() -> None:
    x, out = buffer("x", (3, 4), kind="input"), buffer("out", (3, 3))
    view = ViewRef("x", (4, 3), (1, 4), 0, F32)
    op = Extern(("out", None)[:1], torch.ops.aten.mm.default, (whole(x), view), {})
    t = torch.randn(3, 4)
    assert_close(run_program(program([x, out], [op], [out, 5, None]), [t]), [t @ t.t(), 5, None])


def test_extern_with_several_results_and_nested_arguments() -> None:
    x, v, at = buffer("x", (3, 4), kind="input"), buffer("v", (3,)), buffer("at", (3,), I64)
    c = buffer("c", (6, 4))
    ops: list[Op] = [
        Extern(("v", "at"), torch.ops.aten.max.dim, (whole(x), 1), {}),
        Extern(("c",), torch.ops.aten.cat.default, ([whole(x), whole(x)],), {"dim": 0}),
    ]
    t = torch.randn(3, 4)
    want = [*t.max(1), torch.cat([t, t])]
    assert_close(run_program(program([x, v, at, c], ops, [v, at, c]), [t]), want)


def test_an_input_is_mutated_in_place() -> None:
    x = buffer("x", (4,), kind="input")
    (i,) = variables("i", 4)
    p = program([x], [Pointwise("x", (i,), ex.call("neg", ex.load("x", (3 - i,), F32)))], [])
    t = torch.arange(4.0)
    assert run_program(p, [t]) == []
    assert_close(t, torch.tensor([-3.0, -2.0, -1.0, 0.0]))


def test_alias_reinterprets_memory() -> None:
    x = buffer("x", (4,), kind="input")
    bits = buffer("bits", (2,), torch.int32, alias_of="x", offset=2)
    out = buffer("out", (2,), torch.int32)
    (i,) = variables("i", 2)
    view = ViewRef("bits", (2,), (1,), 2, torch.int32)
    p = program([x, bits, out], [Pointwise("out", (i,), ex.load("bits", (i,), torch.int32))], [out, view])
    t = torch.randn(4)
    assert_close(run_program(p, [t]), [t.view(torch.int32)[2:]] * 2)


def test_symbols_are_bound_by_the_sizes_of_inputs() -> None:
    n = ix.symbol("s0", 2)
    i = ix.var("i0", n)
    x = Buffer("x", F32, (n,), (1,), "input")
    out = Buffer("out", F32, (n,), (1,))
    p = program([x, out], [Pointwise("out", (i,), ex.load("x", (n - 1 - i,), F32))], [out])
    p = replace(p, symbols={n: Measure(0, "size", 0)})
    for size in (2, 5):
        t = torch.randn(size)
        assert_close(run_program(p, [t])[0], t.flip(0))


def test_unwritten_memory_is_conspicuous() -> None:
    out = buffer("out", (3,))
    got = run_program(program([out], [], [out]), [])[0]
    assert isinstance(got, Tensor) and bool(got.isnan().all())


def test_random_bits_are_those_of_the_published_generator() -> None:
    """The authors' own test vectors (Random123, kat_vectors): key, counter, and both words."""
    known = [
        (0x0000000000000000, 0x0000000000000000, (0x6B200159, 0x99BA4EFE)),
        (0xFFFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF, (0x1CB996FC, 0xBB002BE7)),
        (0x0370734413198A2E, 0x85A308D3243F6A88, (0xC4923A9C, 0x483DF7A0)),
    ]
    for key, counter, words in known:
        low, high = (c - (1 << 64) if c >> 63 else c for c in (key, counter))
        got = [int(random_word(torch.tensor(low), torch.tensor(high), w)) & 0xFFFFFFFF for w in (0, 1)]
        assert got == list(words)


def test_random_bits_depend_on_key_and_counter_alone() -> None:
    key = buffer("key", (), I64, "input")
    p = pointwise((4, 5), lambda i, j: ex.random(ex.load("key", (), I64), i * 5 + j, 1), key, dtype=I32)
    got = run_program(p, [torch.tensor(12345)])[0]
    assert isinstance(got, Tensor)
    assert_close(got.reshape(-1), random_word(torch.tensor(12345), torch.arange(20), 1))
    assert len(set(got.reshape(-1).tolist())) == 20
    with pytest.raises(TypeError, match="int64"):
        ex.random(ex.const(0, F32), 0)


X3 = buffer("x", (3,), kind="input")


def test_a_probability_outside_its_range_is_a_fault() -> None:
    p = pointwise((3,), lambda i: ex.call("probability", ex.load("x", (i,), F32)), X3)
    assert_close(run_program(p, [torch.tensor([0.0, 0.5, 1.0])])[0], torch.tensor([0.0, 0.5, 1.0]))
    for bad in (-0.1, 1.5, math.nan):
        with pytest.raises(RuntimeError, match="outside"):
            run_program(p, [torch.tensor([0.0, bad, 1.0])])


# --- kernels ------------------------------------------------------------------------------------------------

X, OUT = Param("x", F32, "in"), Param("out", F32, "out")
I, J, K, N = ix.var("i", 5), ix.var("j", 7), ix.var("k", 7), ix.var("n", 35)  # noqa: E741 - i, as in the dumps


def x_at(i: ix.IndexLike) -> Expr:
    return ex.load("x", (i,), F32)


def kernel(*body: Stmt, params: tuple[Param, ...] = (X, OUT)) -> Kernel:
    return Kernel("k", params, body)


def loop(v: Index, kind: str, *body: Stmt) -> Loop:
    return Loop(v, 0, v.extent, kind, body)


def local(name: str, dtype: torch.dtype = F32) -> Expr:
    return ex.local(name, dtype)


def softmax() -> Kernel:
    e = ex.call("exp", ex.call("sub", x_at(I * 7 + J), local("m")))
    return kernel(
        loop(
            I,
            "parallel",
            Scratch("row", F32, 7),
            Init("m", "max", F32),
            loop(K, "vector", Accumulate("m", x_at(I * 7 + K))),
            Init("s", "sum", F32),
            loop(J, "vector", Let("e", e), Store("row", J, local("e")), Accumulate("s", local("e"))),
            loop(K, "vector", Store("out", I * 7 + K, ex.call("div", ex.load("row", (K,), F32), local("s")))),
        )
    )


both = pytest.mark.parametrize("scalar", [False, True])


@both
def test_row_kernel(scalar: bool) -> None:
    x, out = torch.randn(35), torch.zeros(35)
    run_kernel(softmax(), {"x": x, "out": out}, scalar=scalar)
    assert_close(out.view(5, 7), x.view(5, 7).softmax(-1))


@both
def test_row_kernel_in_place(scalar: bool) -> None:
    x = torch.randn(35)
    want = x.view(5, 7).softmax(-1)
    run_kernel(softmax(), {"x": x, "out": x}, scalar=scalar)
    assert_close(x.view(5, 7), want)


@both
def test_serial_loop_that_reads_its_own_accumulator(scalar: bool) -> None:
    x, out = torch.randn(35), torch.zeros(35)
    scan = kernel(
        Init("a", "sum", F32), loop(N, "serial", Accumulate("a", x_at(N)), Store("out", N, local("a")))
    )
    run_kernel(scan, {"x": x, "out": out}, scalar=scalar)
    assert_close(out, x.cumsum(0))


@both
def test_serial_loop_that_reads_what_it_stored(scalar: bool) -> None:
    step = Store("tmp", ix.const(0), ex.call("add", ex.load("tmp", (0,), F32), x_at(N)))
    k = kernel(
        Scratch("tmp", F32, 1),
        Store("tmp", ix.const(0), ex.const(10, F32)),
        loop(N, "serial", step, Store("out", N, ex.load("tmp", (0,), F32))),
    )
    x, out = torch.randn(35), torch.zeros(35)
    run_kernel(k, {"x": x, "out": out}, scalar=scalar)
    assert_close(out, 10 + x.cumsum(0))


@both
@pytest.mark.parametrize("value", [[1.0, 4.0], [math.nan], [-math.inf]])
def test_argmax_over_ragged_tiles(scalar: bool, value: list[float]) -> None:
    t, u = ix.var("t", 5), ix.var("u", 35)
    inner = Loop(u, t * 8, ix.minimum(t * 8 + 8, 35), "serial", (Accumulate("a", x_at(u), u),))
    k = kernel(
        Init("a", "argmax", F32),
        loop(t, "serial", inner),
        Store("out", ix.const(0), local("a", I64)),
        params=(X, Param("out", I64, "out")),
    )
    x = torch.full((35,), -math.inf)
    x[[20, 33]] = torch.tensor(value)
    out = torch.zeros(1, dtype=I64)
    run_kernel(k, {"x": x, "out": out}, scalar=scalar)
    assert out[0] == x.argmax()


@both
def test_a_loop_split_at_a_mask(scalar: bool) -> None:
    head = Loop(N, 0, 30, "vector", (Store("out", N, x_at(N)),))
    tail = Loop(N, 30, 35, "vector", (Store("out", N, ex.const(0, F32)),))
    x, out = torch.randn(35), torch.ones(35)
    run_kernel(kernel(head, tail), {"x": x, "out": out}, scalar=scalar)
    assert_close(out, torch.cat([x[:30], torch.zeros(5)]))


def test_large_loops_run_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.ir.interpret_kernel.CHUNK", 10)
    x, out = torch.randn(35), torch.zeros(35)
    run_kernel(softmax(), {"x": x, "out": out})
    assert_close(out.view(5, 7), x.view(5, 7).softmax(-1))


@pytest.mark.parametrize("kind", ["parallel", "vector"])
def test_a_race_in_place_is_noticed(kind: str) -> None:
    reverse = kernel(loop(N, kind, Store("out", N, x_at(34 - N))))
    x, out = torch.randn(35), torch.zeros(35)
    run_kernel(reverse, {"x": x, "out": out})
    assert_close(out, x.flip(0))
    with pytest.raises(RaceError, match=r"out\[n\] is written, and x.* read"):
        run_kernel(reverse, {"x": x, "out": x})


def test_two_iterations_that_store_to_one_element_are_noticed() -> None:
    with pytest.raises(RaceError, match=r"written, and .* written"):
        run_kernel(
            kernel(loop(N, "parallel", Store("out", N // 2, x_at(N)))),
            {"x": torch.zeros(35), "out": torch.zeros(35)},
        )


@both
def test_positions_outside_a_parameter_or_scratch_are_noticed(scalar: bool) -> None:
    tensors = {"x": torch.zeros(35), "out": torch.zeros(35)}
    for bad in (
        kernel(loop(N, "vector", Store("out", N + 1, x_at(N)))),
        kernel(loop(N, "vector", Store("out", N, x_at(N - 1)))),
        kernel(Scratch("tmp", F32, 3), loop(N, "serial", Store("tmp", N, x_at(N)))),
    ):
        with pytest.raises(IndexError, match="position"):
            run_kernel(bad, tensors, scalar=scalar)


# --- schedules ----------------------------------------------------------------------------------------------


def chain(placements: dict[str, Placement], arena_bytes: int, first: Expr, third: Expr) -> Schedule:
    """``a = -x``, ``b = first(a)``, ``out = third(b, a)`` over 35 elements."""
    inputs = [
        buffer("x", (35,), kind="input"),
        buffer("a", (35,)),
        buffer("b", (35,)),
        buffer("out", (35,), kind="output"),
    ]
    p = program(inputs, [], [inputs[-1]])
    neg = kernel(loop(N, "vector", Store("out", N, ex.call("neg", x_at(N)))))
    one = kernel(loop(N, "vector", Store("out", N, first)))
    two = kernel(loop(N, "vector", Store("out", N, third)), params=(X, Param("y", F32, "in"), OUT))
    steps = (KernelCall(neg, ("x", "a")), KernelCall(one, ("a", "b")), KernelCall(two, ("b", "a", "out")))
    return Schedule(p, steps, placements, arena_bytes)


PLACED = {"x": Placement("input"), "out": Placement("output"), "a": Placement("arena", 0, 140)}
SUM = ex.call("add", x_at(N), ex.load("y", (N,), F32))


@both
@pytest.mark.parametrize("arena", [False, True])
def test_schedule(arena: bool, scalar: bool) -> None:
    s = chain({**PLACED, "b": Placement("arena", 192, 140)}, 332, ex.call("exp", x_at(N)), SUM)
    x = torch.randn(35)
    assert_close(run_schedule(s, [x], arena=arena, scalar=scalar)[0], (-x).exp() - x)


def test_overlap_in_the_arena_shows() -> None:
    s = chain({**PLACED, "b": Placement("arena", 0, 140)}, 140, ex.call("exp", x_at(N)), SUM)
    x = torch.randn(35)
    want = (-x).exp() - x
    assert_close(run_schedule(s, [x])[0], want)
    assert not torch.allclose(run_schedule(s, [x], arena=True)[0], want)  # type: ignore[arg-type]


def test_wrong_reuse_in_place_shows() -> None:
    alias = {**PLACED, "b": Placement("alias", of="a")}
    x = torch.randn(35)
    right = chain(alias, 140, ex.call("exp", x_at(N)), x_at(N))
    assert_close(run_schedule(right, [x])[0], (-x).exp())
    wrong = chain(alias, 140, ex.call("exp", x_at(N)), SUM)
    assert not torch.allclose(run_schedule(wrong, [x])[0], (-x).exp() - x)  # type: ignore[arg-type]
    with pytest.raises(RaceError):
        run_schedule(chain(alias, 140, x_at(34 - N), x_at(N)), [x])


def test_use_after_free_shows() -> None:
    s = chain({**PLACED, "b": Placement("extern")}, 140, ex.call("exp", x_at(N)), SUM)
    freed = Schedule(s.program, s.steps, s.placements, s.arena_bytes, ((), ("b",), ()))
    got = run_schedule(freed, [torch.randn(35)])[0]
    assert isinstance(got, Tensor) and bool(got.isnan().all())
