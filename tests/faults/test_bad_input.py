"""What a user can get wrong: each mistake is an error to act on, and the next call works."""

from __future__ import annotations

import os
import pickle
import re
import stat
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional

import hotloop
from hotloop import backend
from hotloop.runtime import toolchain

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(f: Function, **how: Any) -> Function:
    return torch.compile(f, backend="hotloop", **how)


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


# ---------------------------------------------------------------- names of modes and options


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"mode": "max-autotun"}, "no mode 'max-autotun'; did you mean 'max-autotune'"),
        ({"options": {"cpp.smd": "scalar"}}, "no option 'cpp.smd'; did you mean 'cpp.simd'"),
        ({"options": {"simd": "scalar"}}, "did you mean 'cpp.simd'"),
        ({"options": {"cpp": {"simd": "scalar"}}}, r'name each with a dot, options={"cpp.simd": ...}'),
        ({"options": {"cpp.simd": "avx9"}}, "'cpp.simd' takes one of 'auto', 'amx'"),
        ({"options": {"cpp.threads": -1}}, "'cpp.threads' takes an integer of at least 0, not -1"),
        ({"options": {"cpp.threads": True}}, "'cpp.threads' takes an integer"),
        ({"options": {"precision": "fast"}}, "'precision' takes one of 'default', 'eager'"),
        ({"options": {1: 2}}, "an option is named by a text, not 1"),
    ],
)
def test_a_wrong_name_or_value_says_what_is_right(how: dict[str, Any], says: str) -> None:
    with pytest.raises(hotloop.OptionError, match=says) as caught:
        compiled(add_one, **how)(torch.ones(3))
    assert isinstance(caught.value, BackendCompilerFailed)


@pytest.mark.parametrize("backend", ["hotloop", "hotloop_unfused", "hotloop_decomp"])
def test_a_wrong_option_is_read_at_once(backend: str) -> None:
    """The message comes first, below a traceback of a few lines; nothing of it stays for the next call."""
    f = torch.compile(add_one, backend=backend, options={"cehck": True})
    for _ in range(2):
        with pytest.raises(hotloop.OptionError) as caught:
            f(torch.ones(3))
        shown = traceback.format_exception(caught.value)
        assert len(shown) <= 6, "".join(shown)
        assert shown[-1].startswith("hotloop.errors.OptionError: hotloop has no option 'cehck'; ")
        assert str(caught.value).startswith("hotloop has no option 'cehck'; did you mean 'check'?\n")
    copy = pickle.loads(pickle.dumps(caught.value))  # as a worker process hands it to its parent
    assert type(copy) is hotloop.OptionError and str(copy) == str(caught.value)
    assert torch.equal(compiled(add_one)(torch.ones(3)), torch.full((3,), 2.0))


@pytest.mark.skipif("avx512" in toolchain.runnable_levels(), reason="this CPU has every level")
def test_a_level_that_the_cpu_lacks_is_refused() -> None:
    with pytest.raises(BackendCompilerFailed, match="a level this CPU lacks; this CPU runs: auto"):
        compiled(add_one, options={"cpp.simd": "avx512"})(torch.ones(3))


def test_an_option_of_the_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTLOOP_CPP_THREADS", "many")
    with pytest.raises(hotloop.OptionError, match="HOTLOOP_CPP_THREADS"):
        compiled(add_one)(torch.ones(3))


# ---------------------------------------------------------------- indices in the data

X = torch.arange(128.0).reshape(8, 16)

INDEXING: dict[str, tuple[Function, list[Any], list[Any]]] = {
    # name: the function, an index out of range, an index within
    "embedding": (lambda i: functional.embedding(i, X) * 2, [3, 99], [3, 7]),
    "embedding_negative": (lambda i: functional.embedding(i, X) * 2, [-1], [1]),
    "gather": (lambda i: torch.gather(X, 1, i) + 1, [[0, 16]], [[0, 15]]),
    "gather_negative": (lambda i: torch.gather(X, 1, i) + 1, [[-1]], [[1]]),
    "index_select": (lambda i: torch.index_select(X, 0, i) + 1, [8], [7]),
    "index": (lambda i: X[i] + 1, [0, 8], [-8, 7]),
    "index_negative": (lambda i: X[i] + 1, [-9], [-1]),
    "index_two": (lambda i: X[i, i] + 1, [7, 8], [7, 0]),
    "take": (lambda i: torch.take(X, i) + 1, [128], [127]),
    "scatter": (lambda i: torch.scatter(X, 1, i, 1.0) + 1, [[16]], [[15]]),
    "index_put": (lambda i: torch.index_put(X, (i,), torch.tensor(1.0)) + 1, [8], [7]),
    "index_add": (lambda i: torch.index_add(X, 0, i, torch.ones(1, 16)) + 1, [8], [7]),
    "summed": (lambda i: X[i].sum(), [0, 8], [0, 7]),
}


@pytest.mark.parametrize("name", INDEXING)
def test_an_index_out_of_range_raises_what_eager_raises(name: str) -> None:
    f, outside, within = INDEXING[name]
    with pytest.raises((IndexError, RuntimeError)) as eager:
        f(torch.tensor(outside))
    g = compiled(f)
    for _ in range(2):
        with pytest.raises(eager.type, match="out of bounds for a dimension with size") as caught:
            g(torch.tensor(outside))
        for number in re.findall(
            r"(?:index|size|tensor of) -?\d+", str(eager.value)
        ):  # where eager names them
            assert number.replace("tensor of", "size") in str(caught.value)
        torch.testing.assert_close(g(torch.tensor(within)), f(torch.tensor(within)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bad", [-1001, 1000, 1 << 32, -(1 << 40), (1 << 63) - 1, -(1 << 63)])
def test_the_index_at_fault_is_named(bad: int, threads: int) -> None:
    """In vectors, on threads, and where index and size do not fit into what a kernel returns."""

    def f(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x[i] + 1

    x, i = torch.randn(1000), torch.arange(1 << 16) % 1000
    i[54321] = bad
    with pytest.raises(IndexError) as eager:
        f(x, i)
    assert str(eager.value) == f"index {bad} is out of bounds for dimension 0 with size 1000"
    with pytest.raises(IndexError) as caught:
        compiled(f, options={"cpp.threads": threads, "parallel_threshold": 1})(x, i)
    fits = abs(bad) < 1 << 45
    said = f"index {bad} is out of bounds for a dimension with size 1000, in one of the operators of cpp_"
    assert str(caught.value).startswith(said if fits else "an index is out of bounds in one of")


def test_the_fault_names_operators_and_lines() -> None:
    def f(i: torch.Tensor) -> torch.Tensor:
        rows = functional.embedding(i, X)
        return torch.relu(rows * 2)

    with pytest.raises(hotloop.errors.IndexRangeError) as caught:
        compiled(f)(torch.tensor([99]))
    text = str(caught.value)
    assert "cpp_fused_embedding_mul_relu" in text
    assert f"embedding: {__file__}:{f.__code__.co_firstlineno + 1}: rows = functional.embedding(i, X)" in text


def test_a_target_out_of_range() -> None:
    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits, target)

    g = compiled(loss)
    logits = torch.randn(4, 5)
    with pytest.raises(IndexError):
        g(logits, torch.tensor([0, 1, 2, 5]))
    ignored = torch.tensor([0, -100, 2, 4])
    torch.testing.assert_close(g(logits, ignored), loss(logits, ignored))


def test_an_index_out_of_range_in_training() -> None:
    weight = torch.randn(10, 4, requires_grad=True)
    g = compiled(lambda w, i: functional.embedding(i, w).pow(2).sum())
    with pytest.raises(IndexError):
        g(weight, torch.tensor([10]))
    g(weight, torch.tensor([9, 9])).backward()
    expected = torch.zeros(10, 4)
    expected[9] = 4 * weight.detach()[9]
    torch.testing.assert_close(weight.grad, expected)


# ---------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["floordiv", "remainder", "fmod"])
def test_integers_divided_by_zero_and_by_minus_one(name: str, dtype: torch.dtype) -> None:
    f = {"floordiv": lambda a, b: a // b + 1, "remainder": lambda a, b: a % b + 1, "fmod": torch.fmod}[name]
    g = compiled(f)
    least = torch.full((40,), torch.iinfo(dtype).min, dtype=dtype)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        g(least, torch.zeros_like(least))
    one = -torch.ones_like(least)  # the quotient overflows, which stops a process that divides carelessly
    assert torch.equal(g(least, one), f(least, one))


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("gives", [4, 9, (5, 1), ()], ids=str)
def test_an_operator_that_announced_another_size(gives: Any) -> None:
    """Kernels would read beyond the result, or broadcast it."""
    with torch.library._scoped_library("hotloop_tests", "FRAGMENT") as library:
        library.define("grows(Tensor x) -> Tensor")
        library.impl("grows", lambda x: torch.full((gives,) if isinstance(gives, int) else gives, 2.0), "CPU")
        library._register_fake("grows", lambda x: torch.empty(5))
        call = compiled(lambda x: torch.ops.hotloop_tests.grows(x) * 2)
        with pytest.raises(hotloop.errors.ResultShapeError, match=r"grows.*test_bad_input.*announced \[5\]"):
            call(torch.ones(3))


def test_unique_rows_by_a_negative_dimension() -> None:
    """PyTorch announces the sizes of that wrongly."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call = compiled(lambda x: torch.unique_consecutive(x, dim=-1))
        with pytest.raises(hotloop.errors.ResultShapeError, match=r"unique_consecutive.*test_bad_input"):
            call(torch.zeros(4, 5))
        right = compiled(lambda x: torch.unique_consecutive(x, dim=1) + 1)
        assert torch.equal(right(torch.zeros(4, 5)), torch.ones(4, 1))


def test_inputs_that_shared_memory_and_share_it_no_longer() -> None:
    """Which PyTorch's guards do not see: the base that it then makes is too short for the graph."""

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        b.add_(1)
        return a + b

    g, whole = compiled(f), torch.arange(36.0)
    expected = whole.clone()
    torch.testing.assert_close(g(whole[:30], whole[3:33]), f(expected[:30], expected[3:33]))
    with pytest.raises(hotloop.errors.ResultShapeError, match="shared memory in an earlier call"):
        g(torch.randn(30), torch.randn(30))


@pytest.mark.parametrize(
    ("f", "shapes"),
    [(torch.add, [(3,), (4,)]), (torch.matmul, [(3, 4), (3, 4)]), (lambda a, b: a.view(5) + b, [(4,), (5,)])],
)
def test_a_wrong_shape_is_an_error_of_pytorch_itself(f: Function, shapes: list[tuple[int, ...]]) -> None:
    """Capture finds it before hotloop is asked: the same error as with any other back end."""
    inputs = [torch.ones(shape) for shape in shapes]

    def said(how: str) -> tuple[type[BaseException], str]:
        torch._dynamo.reset()
        with pytest.raises(RuntimeError) as caught:
            torch.compile(f, backend=how)(*inputs)
        return caught.type, str(caught.value)

    assert said("hotloop") == said("aot_eager")


# ---------------------------------------------------------------- compilers


def script(folder: Path, body: str) -> str:
    """A compiler called g++ that does this."""
    file = folder / "g++"
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def with_constant(value: float) -> Function:
    """A function whose kernel no other test has compiled."""
    return lambda x: x * value + 1


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    f, x = with_constant(0.501), torch.randn(7)
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    with pytest.raises(hotloop.MissingCompilerError, match="CXX names the C\\+\\+ compiler") as caught:
        compiled(f)(x)
    assert isinstance(caught.value, BackendCompilerFailed)
    assert isinstance(caught.value.inner_exception, hotloop.MissingCompilerError)
    assert "apt-get install g++" in str(caught.value)
    shown = traceback.format_exception(caught.value)
    assert len(shown) <= 6, "".join(shown)  # the message and a frame or two, none of the compiler's
    assert shown[-1].startswith("hotloop.errors.MissingCompilerError: CXX names the C++ compiler")
    assert "install g++" in caught.value.hint
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is hotloop.MissingCompilerError and str(copy) == str(caught.value)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(verbose=True), pytest.raises(hotloop.MissingCompilerError) as caught:
        compiled(f)(x)
    assert "in find_toolchain" in "".join(traceback.format_exception(caught.value))
    monkeypatch.delenv("CXX")
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(f)(x), f(x))


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("'unbalanced", "CXX is no command: 'unbalanced: No closing quotation"),
        ("/usr", "'/usr', which is a folder"),
    ],
)
def test_a_compiler_that_is_none(command: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", command)
    with pytest.raises(hotloop.MissingCompilerError, match=re.escape(says)):
        compiled(with_constant(0.507))(torch.randn(7))


def warned(f: Function, *args: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = f(*args)
    return result, [str(w.message) for w in caught if w.category is RuntimeWarning]


def test_without_a_compiler_eager_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/for-eager/g++")
    x = torch.randn(7)
    said: list[str] = []
    with hotloop.config.patch(missing_toolchain="eager"):
        for value in (0.502, 0.503):  # a model has many graphs: one warning
            f = with_constant(value)
            result, more = warned(compiled(f), x)
            assert torch.equal(result, f(x))
            said += more
    assert len(said) == 1
    assert "uncompiled" in said[0] and "/nonexistent/for-eager/g++" in said[0]


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for the compiler")
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("echo 'kernels: error: cannot do it'; exit 1", "cannot do it"),
        ("kill -9 $$", "exit status -9"),
        # It leaves half a library, and says that all is well.
        ('while [ "$1" != -o ]; do shift; done; printf "\\177ELF" > "$2"; exit 0', "does not load"),
        ("exit 0", "made nothing of"),
    ],
)
def test_a_compiler_that_fails(body: str, says: str, tmp_path: Path) -> None:
    f, x = with_constant(0.25 + len(body)), torch.randn(7)
    options = {"cpp.cxx": script(tmp_path, body), "cache_dir": str(tmp_path / "cache")}
    # It is there: an option for a missing one does not hide that it fails.
    with pytest.raises(BackendCompilerFailed, match=says) as caught:
        compiled(f, options={**options, "missing_toolchain": "eager"})(x)
    assert isinstance(caught.value.inner_exception, hotloop.ToolchainError)
    assert not isinstance(caught.value.inner_exception, hotloop.MissingCompilerError)
    torch._dynamo.reset()
    result, said = warned(compiled(f, options={**options, "on_error": "eager"}), x)
    assert torch.equal(result, f(x))
    assert len(said) == 1
    torch._dynamo.reset()
    # Nothing of the failure is kept: with a compiler that works, the same cache serves.
    torch.testing.assert_close(compiled(f, options={"cache_dir": options["cache_dir"]})(x), f(x))


def test_a_file_in_the_place_of_the_cache(tmp_path: Path) -> None:
    f, x = with_constant(0.504), torch.randn(7)
    (tmp_path / "cache").write_text("a file")
    result, said = warned(compiled(f, options={"cache_dir": str(tmp_path / "cache")}), x)
    torch.testing.assert_close(result, f(x))
    assert len(said) == 1 and "HOTLOOP_CACHE_DIR" in said[0]


# ---------------------------------------------------------------- faults of hotloop itself


def broken(*_: Any) -> Any:
    raise KeyError("a fault inside")


@pytest.mark.parametrize(
    ("stage", "function"),
    [
        ("lower", "lower"),
        ("schedule", "arrange"),
        ("codegen", "print_host"),
        ("compile", "link"),
    ],
)
def test_a_fault_of_a_stage(stage: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5)
    with monkeypatch.context() as patched:
        patched.setattr(backend, function, broken)
        with pytest.raises(BackendCompilerFailed, match=f"stage '{stage}'.*KeyError") as caught:
            compiled(add_one)(x)
        assert isinstance(caught.value.inner_exception, hotloop.CompileError)
        assert "TORCH_COMPILE_DEBUG=1" in str(caught.value)
        torch._dynamo.reset()
        with hotloop.config.patch(on_error="eager"):
            result, said = warned(compiled(add_one), x)
        assert torch.equal(result, x + 1)
        assert len(said) == 1 and f"stage '{stage}'" in said[0]
    torch._dynamo.reset()
    assert torch.equal(compiled(add_one)(x), x + 1)


def test_a_fault_with_dumps_names_the_command_that_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "arrange", broken)
    with (
        hotloop.config.patch(debug=True, debug_dir=str(tmp_path)),
        pytest.raises(BackendCompilerFailed) as caught,
    ):
        compiled(add_one)(torch.randn(5))
    (runnable,) = tmp_path.rglob("fx_graph_runnable.py")
    assert f"python {runnable}" in str(caught.value)
    assert os.access(runnable, os.R_OK)
