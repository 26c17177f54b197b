"""The back ends as torch.compile sees them: the ladder, options, modes, memory, threads, forks, recursion."""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import hotloop
from hotloop import backend as hotloop_backend
from hotloop.config import MODES
from hotloop.runtime.pool import OutputPool
from hotloop.runtime.toolchain import find_toolchain, runnable_levels
from judge import assert_as_accurate

LADDER = ["hotloop_decomp", "hotloop_unfused", "hotloop"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(f: Callable[..., Any], backend: str = "hotloop", **how: Any) -> Callable[..., Any]:
    return torch.compile(f, backend=backend, **how)


class Block(nn.Module):
    """A little of everything: norm, product, softmax, activation, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.first = nn.Linear(24, 40)
        self.second = nn.Linear(40, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(self.first(self.norm(x)), -1)
        return x + self.second(torch.nn.functional.gelu(y)).sigmoid()


def sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.tanh(x) * x
    return y.sum(0), torch.exp(y - y.amax(-1, keepdim=True))


def kernels_of(f: Callable[..., Any], *args: Any, **how: Any) -> list[str]:
    """The C++ functions that a compile makes."""
    texts: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        made = hotloop_backend.print_functions

        def noted(*given: Any) -> Any:
            functions = made(*given)
            texts.extend(function.text for function in functions)
            return functions

        patch.setattr(hotloop_backend, "print_functions", noted)
        compiled(f, **how)(*args)
    return texts


# ---------------------------------------------------------------- the ladder


def test_the_back_ends_are_registered() -> None:
    assert set(LADDER) <= set(torch._dynamo.list_backends(exclude_tags=()))


@pytest.mark.parametrize("backend", LADDER)
def test_each_rung_gives_the_same_forward_and_backward(backend: str) -> None:
    model, x = Block(), torch.randn(5, 24, requires_grad=True)
    expected = model(x)
    wanted = torch.autograd.grad(expected.pow(2).sum(), [x, *model.parameters()])
    result = compiled(model, backend)(x)
    got = torch.autograd.grad(result.pow(2).sum(), [x, *model.parameters()])
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", LADDER)
def test_each_rung_takes_options_and_refuses_unknown_ones(backend: str) -> None:
    x = torch.randn(4)
    assert torch.equal(compiled(torch.neg, backend, options={"check": True})(x), -x)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"did you mean 'cpp.simd'"):
        compiled(torch.neg, backend, options={"cpp.sims": "scalar"})(x)


def test_unfused_makes_a_kernel_of_each_operator() -> None:
    x = torch.randn(6, 10)
    fused = kernels_of(sums, x)
    torch._dynamo.reset()
    unfused = kernels_of(sums, x, options={"unfused": True})
    assert len(fused) < len(unfused)
    assert len(unfused) >= 6  # tanh, mul, sum, amax, sub, exp


# ---------------------------------------------------------------- options and modes


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_right(mode: str) -> None:
    x = torch.randn(6, 10)
    torch.testing.assert_close(compiled(sums, mode=mode)(x), sums(x))


@pytest.mark.parametrize("level", ["scalar", "avx2", "auto"])
@pytest.mark.parametrize("shape", [(6, 10), (3, 37), (1, 1)])
def test_every_vector_width_is_right(level: str, shape: tuple[int, int]) -> None:
    if level == "avx2" and level not in runnable_levels():
        pytest.skip("this CPU has no AVX2")
    x = torch.randn(shape)
    torch.testing.assert_close(compiled(sums, options={"cpp.simd": level})(x), sums(x))


def test_the_vector_width_is_honoured() -> None:
    x = torch.randn(6, 32)
    assert "f32x" not in "".join(kernels_of(sums, x, options={"cpp.simd": "scalar"}))


def test_one_thread_is_honoured() -> None:
    big = torch.randn(600, 500)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert "omp parallel" in "".join(kernels_of(torch.exp, big))
        torch._dynamo.reset()
        assert "omp parallel" not in "".join(kernels_of(torch.exp, big, options={"cpp.threads": 1}))
    finally:
        torch.set_num_threads(threads)
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(torch.exp, options={"cpp.threads": 1})(big), torch.exp(big))


def columns_turned(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Loops divided over threads: flat ones, rows, columns, and tiles, which are two loops in one."""
    turned = torch.relu(y).t().contiguous()
    return (x + 1).exp(), torch.softmax(x, -1), x.sum(0), turned, torch.nn.functional.embedding(ROWS, x)


ROWS = torch.arange(500)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_compiler_with_another_openmp_uses_torchs_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hotloop_backend, "_toolchain", lambda cxx: dataclasses.replace(find_toolchain(cxx), openmp=False)
    )
    hotloop_backend._builder.cache_clear()
    x, y = torch.randn(600, 500), torch.randn(400, 700)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        text = "".join(kernels_of(columns_turned, x, y))
        torch._dynamo.reset()
        g = compiled(columns_turned)
        for _ in range(3):
            for got, want, exact in zip(
                g(x, y), columns_turned(x, y), columns_turned(x.double(), y.double()), strict=True
            ):
                assert_as_accurate(got, want, exact)
    finally:
        torch.set_num_threads(before)
        hotloop_backend._builder.cache_clear()
    assert "omp parallel" not in text
    assert ("parallel_for(0, " in text) is (threads == 2)
    assert ("iteration0 / " in text) is (threads == 2)


@pytest.mark.skipif(shutil.which("clang++") is None, reason="no clang here")
def test_clang_compiles_what_is_printed() -> None:
    x, y = torch.randn(600, 500), torch.randn(400, 700)
    got = compiled(columns_turned, options={"cpp.cxx": "clang++"})(x, y)
    exact = columns_turned(x.double(), y.double())
    for a, b, c in zip(got, columns_turned(x, y), exact, strict=True):
        assert_as_accurate(a, b, c)


def test_torchs_threads_serve_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there is work for several threads is known when it is called."""
    monkeypatch.setattr(
        hotloop_backend, "_toolchain", lambda cxx: dataclasses.replace(find_toolchain(cxx), openmp=False)
    )
    hotloop_backend._builder.cache_clear()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        text = "".join(kernels_of(scaled, torch.randn(30, 40), dynamic=True))
        torch._dynamo.reset()
        g = compiled(scaled, dynamic=True)
        for rows in (3, 700, 1, 2000):
            x = torch.randn(rows, 400)
            assert torch.equal(g(x), scaled(x))
    finally:
        torch.set_num_threads(before)
        hotloop_backend._builder.cache_clear()
    assert "omp parallel" not in text and "parallel_for(" in text and "}, s" in text, text


def test_an_index_out_of_range_is_found_by_torchs_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hotloop_backend, "_toolchain", lambda cxx: dataclasses.replace(find_toolchain(cxx), openmp=False)
    )
    hotloop_backend._builder.cache_clear()
    table, rows = torch.randn(600, 500), torch.arange(600)
    g = compiled(lambda table, rows: torch.nn.functional.embedding(rows, table) * 2)
    torch.testing.assert_close(g(table, rows), table * 2)
    rows[599] = 600
    with pytest.raises(IndexError):
        g(table, rows)
    hotloop_backend._builder.cache_clear()


def test_eager_precision_rounds_where_eager_does() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b + a) * b - a

    a, b = torch.randn(2, 1000).bfloat16()
    exact = compiled(f, options={"precision": "eager"})(a, b)
    assert torch.equal(exact, f(a, b))
    torch._dynamo.reset()
    default = compiled(f)(a, b)
    assert not torch.equal(default, exact)
    truth = f(a.double(), b.double())
    assert (default - truth).abs().mean() <= (exact - truth).abs().mean()


def test_options_of_hotloop_config_hold_for_later_compiles() -> None:
    x = torch.randn(6, 32)
    with hotloop.config.patch({"cpp.simd": "scalar"}):
        assert "f32x" not in "".join(kernels_of(sums, x))


LAZY = [
    lambda c: c.conj().imag * 2 + 1,
    lambda c: (c * 2).conj().imag.exp(),
    lambda c: (c * 2).conj().imag,
    lambda c: torch.view_as_real(c.resolve_conj()) + 1,
    lambda c: c.imag.t() @ c.imag,
    lambda c: (c.conj() + 1).abs(),
    lambda c: torch.stack([c.real, c.imag]).sum(0),
]


@pytest.mark.parametrize("f", LAZY)
def test_tensors_that_are_conjugated_or_negated_by_a_bit(f: Callable[..., Any]) -> None:
    torch.compiler.reset()
    run = torch.compile(f, backend="hotloop", fullgraph=True, dynamic=False)
    c = torch.randn(4, 5, dtype=torch.complex64)
    for given in (c, c.conj(), torch._neg_view(c), torch._neg_view(c.conj())):
        torch.testing.assert_close(run(given), f(given))
    torch.compiler.reset()
    run = torch.compile(lambda n: n * 2 + n.sum(), backend="hotloop", fullgraph=True, dynamic=False)
    for n in (c.imag, c.conj().imag):  # of one layout, told apart by the bit
        torch.testing.assert_close(run(n), n * 2 + n.sum())


def test_an_input_that_is_negated_by_a_bit_is_written_in_place() -> None:
    for f in (lambda n: n.mul_(2), lambda n: n.add_(n.exp()), lambda n: (n.relu_(), n + 1)[1]):
        a = torch.randn(4, 5, dtype=torch.complex64)
        b = a.clone()
        torch.compiler.reset()
        got, want = torch.compile(f, backend="hotloop")(a.conj().imag), f(b.conj().imag)
        torch.testing.assert_close((a, got), (b, want))


def test_numbers_that_are_equal_are_not_the_same_number() -> None:
    graph = torch.fx.Graph()
    x, number = graph.placeholder("x"), graph.placeholder("number")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, number)),))
    call = hotloop_backend._PerSize(torch.fx.GraphModule({}, graph), "inference", hotloop.Config())
    x = torch.arange(1, 5)
    for value in (1, True, 1.0, 0.0, -0.0, 1):
        (got,) = call([x, value])
        want = x * value
        assert got.dtype is want.dtype and torch.equal(got, want), value
        assert torch.equal(got.double().signbit(), want.double().signbit()), value


# ---------------------------------------------------------------- memory


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> OutputPool:
    """A pool of its own that takes small outputs too."""
    made = OutputPool(1 << 10, 1 << 28)
    monkeypatch.setattr(hotloop_backend, "_pool", lambda *_: made)
    return made


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def test_outputs_that_are_held_are_not_written_again(pool: OutputPool) -> None:
    g = compiled(scaled)
    inputs = [torch.full((200, 200), float(k)) for k in range(6)]
    held = [g(x) for x in inputs]
    views = [g(x)[3:5].t() for x in inputs]
    arrays = [g(x).numpy() for x in inputs]
    detached = [g(x).detach() for x in inputs]
    storages = [g(x).untyped_storage() for x in inputs]
    memory = [memoryview(g(x).numpy()[0]) for x in inputs]
    for _ in range(10):
        g(torch.full((200, 200), -1.0))
    for k in range(6):
        want = 2.0 * k + 1
        assert (held[k] == want).all() and (views[k] == want).all() and (detached[k] == want).all()
        assert (arrays[k] == want).all() and (numpy.asarray(memory[k]) == want).all()
        assert torch.tensor([], dtype=torch.float32).set_(storages[k])[0] == want
    del held, views, arrays, detached, storages, memory
    before = pool.info().reused
    for _ in range(10):
        g(inputs[0])
    assert pool.info().reused == before + 10


def test_an_output_dropped_is_used_again_and_one_saved_for_backward_is_not(pool: OutputPool) -> None:
    x = torch.randn(200, 200, requires_grad=True)
    g = compiled(lambda x: torch.exp(x).sigmoid())
    losses = [g(x * k).sum() for k in range(1, 5)]
    for k, loss in enumerate(losses, 1):
        (got,) = torch.autograd.grad(loss, x)
        (want,) = torch.autograd.grad(torch.exp(x * k).sigmoid().sum(), x)
        torch.testing.assert_close(got, want)


def test_an_output_written_in_place_by_its_owner_stays_his(pool: OutputPool) -> None:
    g = compiled(scaled)
    x = torch.zeros(200, 200)
    mine = g(x)
    mine.add_(5)
    other = g(x)
    assert (mine == 6).all() and (other == 1).all() and mine.data_ptr() != other.data_ptr()


def test_without_the_pool_nothing_is_kept() -> None:
    g = compiled(scaled, options={"memory_pool": False, "memory_pool_threshold": 0})
    x = torch.randn(300, 300)
    results = [g(x + k) for k in range(3)]
    for k, result in enumerate(results):
        torch.testing.assert_close(result, scaled(x + k))


def test_results_own_their_memory_in_inference_mode_and_out_of_it(pool: OutputPool) -> None:
    g = compiled(scaled)
    x = torch.ones(200, 200)
    with torch.inference_mode():
        inside = g(x)
    outside = g(x)
    assert inside.is_inference() and not outside.is_inference()
    outside.requires_grad_().sum().backward()
    assert (inside == 3).all() and (outside == 3).all()


# ---------------------------------------------------------------- threads, recursion, processes


def test_threads_may_call_one_function(pool: OutputPool) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ w, -1).relu() + 1  # the product lies in an arena

    g = compiled(f)
    w = torch.randn(64, 300)
    inputs = [torch.randn(80, 64) for _ in range(6)]
    wanted = [f(x, w) for x in inputs]
    results: dict[int, bool] = {}

    def work(k: int) -> None:
        right = [torch.allclose(g(inputs[k], w), wanted[k], rtol=1.3e-6, atol=1e-5) for _ in range(25)]
        results[k] = all(right)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(len(inputs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == dict.fromkeys(range(len(inputs)), True)


def test_threads_may_compile_at_once() -> None:
    functions = [lambda x, k=k: torch.sin(x) * (k + 0.5) for k in range(4)]
    x = torch.randn(50)
    results: dict[int, torch.Tensor] = {}

    def work(k: int) -> None:
        results[k] = compiled(functions[k])(x)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for k, f in enumerate(functions):
        torch.testing.assert_close(results[k], f(x))


def test_threads_may_bring_new_sizes_at_once() -> None:
    """FX knows by a global variable whether it traces: two threads must not do so at once."""
    g = compiled(scaled, dynamic=True)
    results: dict[int, torch.Tensor] = {}

    def work(k: int) -> None:
        for size in range(2, 8):
            results[10 * k + size] = g(torch.full((k + 2, size), float(k)))

    workers = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for k in range(4):
        for size in range(2, 8):
            assert torch.equal(results[10 * k + size], torch.full((k + 2, size), 2.0 * k + 1))
    assert not torch.fx._symbolic_trace.is_fx_tracing()


def test_a_hook_may_call_the_function_whose_backward_runs() -> None:
    weight = torch.randn(40, 40)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh((x @ weight).sigmoid() @ weight)

    g = compiled(f)
    seen: list[torch.Tensor] = []
    x = torch.randn(20, 40, requires_grad=True)
    y = x * 1
    y.register_hook(lambda grad: seen.append(g(grad)))
    g(y).sum().backward()
    expected = torch.autograd.grad(f(x).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)
    torch.testing.assert_close(seen[0], f(expected))


def test_a_function_may_be_called_by_an_operator_within_it() -> None:
    """The inner call comes while the outer one has its arena in use."""
    calls = 0

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return grad * g(torch.ones(30, 30)).mean()

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).relu() @ x

    g = compiled(f)
    x = torch.randn(30, 30, requires_grad=True)
    g(Outer.apply(x)).sum().backward()
    assert calls == 1
    want = torch.autograd.grad(f(x).sum(), x)[0] * f(torch.ones(30, 30)).mean()
    torch.testing.assert_close(x.grad, want, atol=1e-2, rtol=1e-4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_runs_and_compiles() -> None:
    """OpenMP's team of threads is gone in the child, which must not wait for it."""
    x = torch.randn(600, 500)
    g = compiled(scaled)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        g(x)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(60)  # a deadlock ends here
                right = torch.equal(g(x), scaled(x))
                right &= torch.allclose(compiled(lambda x: torch.cos(x) * 0.75)(x), torch.cos(x) * 0.75)
                status = 0 if right else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.get_num_threads() == 2
        torch.testing.assert_close(g(x), scaled(x))
    finally:
        torch.set_num_threads(threads)


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    """A data set whose items are computed by a compiled function."""

    def __init__(self, g: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.g = g

    def __len__(self) -> int:
        return 4

    def __getitem__(self, k: int) -> torch.Tensor:
        return self.g(torch.full((400, 400), float(k)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_workers_of_a_data_loader_may_call_it() -> None:
    g = compiled(scaled)
    g(torch.zeros(400, 400))
    loader = torch.utils.data.DataLoader(
        Squares(g), num_workers=2, multiprocessing_context="fork", timeout=60
    )
    assert [float(batch.mean()) for batch in loader] == [1.0, 3.0, 5.0, 7.0]


def test_tensors_without_host_memory_run_uncompiled() -> None:
    torch.compiler.reset()

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2 + 1, -1).sum(0)

    for symbolic in (False, True):
        result = torch.compile(f, backend="hotloop", dynamic=symbolic)(torch.empty(3, 5, device="meta"))
        assert result.device.type == "meta" and result.shape == (5,)

    def mixed(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, device="meta") + 1

    assert torch.compile(mixed, backend="hotloop")(torch.randn(4)).device.type == "meta"


def _times_constant(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0])


def _constant_and_sum(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([5, 6, 7])[:2], x + 1


def _constant_written(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 3.0, 4.0]).add_(x)


def _picked(x: torch.Tensor) -> torch.Tensor:
    return x[torch.tensor([3, 1, 0])]


@pytest.mark.parametrize("f", [_times_constant, _constant_and_sum, _constant_written, _picked])
@pytest.mark.parametrize("backend", LADDER)
def test_constants_live_as_long_as_the_program(f: Callable[..., Any], backend: str) -> None:
    x = torch.tensor([10.0, 20.0, 30.0, 40.0])
    call = compiled(f, backend)
    for _ in range(3):
        torch.testing.assert_close(call(x), f(x), rtol=0, atol=0)
        gc.collect()
        junk = [torch.full((n,), -7) for n in (1, 2, 3, 4, 8) for _ in range(200)]  # takes what was freed
        del junk
