"""From text to library: once each, side by side, with errors that can be acted on."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotloop.errors import ToolchainError
from hotloop.runtime import build as module
from hotloop.runtime.build import Builder, Source
from hotloop.runtime.cache import Cache
from hotloop.runtime.toolchain import Toolchain, find_toolchain, runnable_levels

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="runs a POSIX compiler")


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test sees a process that has loaded nothing."""
    monkeypatch.setattr(module, "_LOADED", {})
    yield


class Counting(Builder):
    """Notes each compiler that is run."""

    def __init__(self, folder: Path, toolchain: Toolchain | None = None) -> None:
        super().__init__(toolchain or find_toolchain(), Cache(folder), workers=2)
        self.ran: list[str] = []

    def _run(self, command: tuple[str, ...], folder: Path, source: Source) -> None:
        self.ran.append(source.name)
        super()._run(command, folder, source)


def _answer(value: int) -> Source:
    return Source(f"answer_{value}", f'extern "C" void answer(int *x) {{ *x = {value}; }}\n')


def _ask(library: module.LoadedLibrary) -> int:
    x = ctypes.c_int()
    library.function("answer")(ctypes.byref(x))
    return x.value


def test_build_in_order_and_once(tmp_path: Path) -> None:
    builder = Counting(tmp_path / "cache")
    sources = [_answer(1), _answer(2), Source("the same again", _answer(1).text), _answer(3)]
    libraries = builder.build(sources)
    assert [_ask(library) for library in libraries] == [1, 2, 1, 3]
    assert libraries[2] is libraries[0]
    assert sorted(name for name in builder.ran if name.startswith("answer")) == [
        "answer_1",
        "answer_2",
        "answer_3",
    ]
    assert builder.build(sources)[0] is libraries[0]
    assert len(builder.ran) == 4  # with the stand-in for libtorch_cpu


def test_second_process_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Counting(tmp_path / "cache").build([_answer(4)])
    monkeypatch.setattr(module, "_LOADED", {})
    second = Counting(tmp_path / "cache")
    assert _ask(second.build([_answer(4)])[0]) == 4
    assert second.ran == []
    assert [path for path in (tmp_path / "cache").rglob("*.cpp") if path.read_text() == _answer(4).text]


def test_key_holds_all_that_changes_the_code(tmp_path: Path) -> None:
    toolchain = find_toolchain()
    cache = Cache(tmp_path / "cache")
    other = Toolchain((*toolchain.compiler, "-DX"), toolchain.kind, "another", toolchain.openmp)
    keys = {
        Builder(chain, cache, level=level)._parts(Source("x", text)).__repr__()
        for chain in (toolchain, other)
        for level in ("scalar", "avx2")
        for text in ("a", "b")
    }
    assert len(keys) == 8
    a, b = (Builder(toolchain, cache)._parts(Source(name, "a")) for name in ("x", "y"))
    assert a == b  # the name alone changes nothing


def test_submit_overlaps(tmp_path: Path) -> None:
    builder = Counting(tmp_path / "cache")
    future = builder.submit(_answer(5))
    assert builder.submit(_answer(5)) is future or future.done()
    assert _ask(future.result(timeout=60)) == 5
    assert builder.submit(_answer(5)).done()
    assert _ask(builder.gather([builder.submit(_answer(5))])[0]) == 5


def test_same_names_in_two_libraries(tmp_path: Path) -> None:
    first, second = Counting(tmp_path / "cache").build([_answer(6), _answer(7)])
    assert (_ask(first), _ask(second), _ask(first)) == (6, 7, 6)
    assert first.address("answer") != second.address("answer")
    with pytest.raises(ToolchainError, match="no function 'question'"):
        first.function("question")


@pytest.mark.skipif("avx2" not in runnable_levels(), reason="the name of Sleef's AVX2 version")
def test_sleef_comes_from_libtorch(tmp_path: Path) -> None:
    text = """
    typedef float f32v __attribute__((vector_size(32)));
    extern "C" f32v Sleef_expf8_u10avx2(f32v);
    extern "C" void exponential(float *x) {
        f32v v = {x[0], x[1]};
        v = Sleef_expf8_u10avx2(v);
        x[0] = v[0], x[1] = v[1];
    }
    """
    library = Counting(tmp_path / "cache").build([Source("exponential", text)])[0]
    x = (ctypes.c_float * 2)(0.5, 1.0)
    library.function("exponential")(x)
    assert list(x) == pytest.approx([1.6487212707, 2.7182818285], rel=1e-6)


def test_undefined_symbol_is_an_error_not_a_crash(tmp_path: Path) -> None:
    text = 'extern "C" void nowhere(); extern "C" void f() { nowhere(); }'
    with pytest.raises(ToolchainError, match=r"does not load.*nowhere"):
        Counting(tmp_path / "cache").build([Source("f", text)])


def test_compiler_failure_tells_all(tmp_path: Path) -> None:
    builder = Counting(tmp_path / "cache")
    with pytest.raises(ToolchainError) as caught:
        builder.build([_answer(8), Source("cpp_fused_bad_0", "int f() { return nonsense; }\n")])
    text = str(caught.value)
    assert "failed on 'cpp_fused_bad_0' (exit status 1)" in text
    assert "'nonsense' was not declared" in text and " -O3 " in text
    kept = Path(next(line for line in text.splitlines() if "source: " in line).split()[-1])
    assert kept.read_text() == "int f() { return nonsense; }\n"
    assert str(kept) in next(line for line in text.splitlines() if "command: " in line)
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []
    assert _ask(builder.build([_answer(8)])[0]) == 8
    with pytest.raises(ToolchainError, match="nonsense"):  # again, not a memory of the first
        builder.build([Source("cpp_fused_bad_0", "int f() { return nonsense; }\n")])


def test_compiler_that_went_away(tmp_path: Path) -> None:
    gone = Toolchain((str(tmp_path / "g++"),), "gcc", "x", openmp=False)
    with pytest.raises(ToolchainError, match=r"cannot run the C\+\+ compiler .*No such file"):
        Counting(tmp_path / "cache", gone).build([_answer(9)])


def test_compiler_that_crashes(tmp_path: Path) -> None:
    program = tmp_path / "g++"
    program.write_text("#!/bin/sh\nfor i in $(seq 100); do echo line $i >&2; done\nkill -SEGV $$\n")
    program.chmod(0o755)
    with pytest.raises(ToolchainError) as caught:
        Counting(tmp_path / "cache", find_toolchain(str(program))).build([_answer(10)])
    assert "exit status -11" in str(caught.value) and "line 100" in str(caught.value)
    assert "line 80\n" not in str(caught.value)


@pytest.mark.parametrize("passes", ["-fdisable-rtl-combine", "-O1", "-O0"])
def test_a_crash_of_the_compiler_costs_passes_and_not_the_kernel(
    passes: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    real = find_toolchain()
    program = tmp_path / "g++"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *{passes}|*stub*) exec {" ".join(real.compiler)} "$@";; esac\n'
        "echo 'k.cpp:9:1: internal compiler error: in curr_insn_transform' >&2\nexit 1\n"
    )
    program.chmod(0o755)
    builder = Counting(tmp_path / "cache", find_toolchain(str(program)))
    with caplog.at_level("WARNING", "hotloop"):
        assert _ask(builder.build([_answer(11)])[0]) == 11
    (said,) = [r.getMessage() for r in caplog.records]
    assert f"crashed on 'answer_11', and compiled it with {passes}" in said


def _hanging(folder: Path) -> Toolchain:
    """A compiler that starts a child and never ends."""
    program = folder / "g++"
    program.write_text(
        f"#!/bin/sh\necho $$ >> {folder}/pids\necho x > half.o\nsleep 600 &\necho $! >> {folder}/pids\nwait\n"
    )
    program.chmod(0o755)
    return find_toolchain(str(program))


def _alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_interrupt_leaves_nothing(tmp_path: Path) -> None:
    builder = Counting(tmp_path / "cache", _hanging(tmp_path))
    pids = tmp_path / "pids"

    def interrupt() -> None:
        while not pids.exists() or len(pids.read_text().split()) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    # A process in the background of a shell is started with this signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            builder.build([_answer(11), _answer(12), _answer(13)])
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []
    deadline = time.monotonic() + 10
    while any(_alive(int(pid)) for pid in pids.read_text().split()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids.read_text().split() if _alive(int(pid))]
    builder.toolchain = find_toolchain()
    assert _ask(builder.build([_answer(11)])[0]) == 11


def test_many_threads_one_builder(tmp_path: Path) -> None:
    builder = Counting(tmp_path / "cache")
    found: list[int] = []

    def work() -> None:
        found.extend(_ask(library) for library in builder.build([_answer(14), _answer(15)]))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [14] * 8 + [15] * 8
    assert sorted(builder.ran)[:2] == ["answer_14", "answer_15"] and len(builder.ran) == 3


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_builder_after_fork(tmp_path: Path) -> None:
    builder = Counting(tmp_path / "cache")
    builder.build([_answer(16)])
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if _ask(builder.submit(_answer(17)).result(timeout=60)) == 17 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
