"""Processes and threads through torch.compile: many on one cache, spawned, forked, interrupted, killed.

Whatever others do to the cache meanwhile, a result is right, and no process ends that nobody ended.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hotloop
from hotloop import backend
from hotloop.runtime import build as build_module
from hotloop.runtime.cache import Cache

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks at /proc"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]

Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def scaled(value: float) -> Function:
    return lambda x: torch.softmax(x * value, -1) + value


def forget() -> None:
    """What this process has compiled and loaded, as if it were another one."""
    torch._dynamo.reset()
    build_module._LOADED.clear()
    backend._builder.cache_clear()


def in_a_child(work: Callable[[], None]) -> int:
    """Fork; the child's exit status is 0 when ``work`` ends well."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(500)  # a deadlock ends here
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - what pytest would show, were it here
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---------------------------------------------------------------- many processes, one cache


def compiles(number: int, folder: Path) -> None:
    """One of many: graphs that all compile, and some that it alone does, again and again."""
    x = torch.linspace(-2, 2, 60).reshape(4, 15)
    warnings.simplefilter("ignore")  # of a folder that went away, say
    with hotloop.config.patch(check=False, cache_dir=str(folder)):
        for turn in range(2):
            for value in (0.5 + turn, 1.0 + number + turn / 8):
                forget()
                f = scaled(value)
                for _ in range(2):
                    torch.testing.assert_close(torch.compile(f, backend="hotloop")(x), f(x))


def spoil(path: Path, how: int) -> None:
    """What may happen to a file, also while somebody reads it or runs what is in it."""
    size = path.stat().st_size
    if how == 0:
        os.truncate(path, size // 2)
    elif how == 1:
        with open(path, "r+b") as file:
            file.seek(size // 3)
            file.write(os.urandom(64))
    elif how == 2:
        path.write_bytes(b"")
    elif how == 3:
        path.unlink()
    else:
        shutil.rmtree(path.parent)


def vandal(folder: Path, victims: list[int], stop: Path) -> None:
    """Spoils a file every now and then, and kills a writer."""
    chance = random.Random(1)
    while not stop.exists():
        time.sleep(chance.random() * 0.05)
        with contextlib.suppress(OSError):  # somebody else was faster
            files = [path for path in folder.rglob("*") if path.is_file()]
            if files:
                spoil(chance.choice(files), chance.randrange(5))
        if victims and chance.random() < 0.05:
            with contextlib.suppress(OSError):
                os.kill(victims.pop(), signal.SIGKILL)


def test_sixteen_processes_with_a_vandal_on_one_cache(tmp_path: Path) -> None:
    folder, stop = tmp_path / "cache", tmp_path / "stop"
    victims = [in_a_child(lambda k=k: compiles(100 + k, folder)) for k in range(4)]  # type: ignore[misc]
    wrecker = in_a_child(lambda: vandal(folder, victims, stop))
    workers = [in_a_child(lambda k=k: compiles(k, folder)) for k in range(16)]  # type: ignore[misc]
    statuses = [ended(pid) for pid in workers]
    stop.touch()
    assert statuses == [0] * 16
    assert ended(wrecker) == 0
    assert {ended(pid) for pid in victims} <= {0, -signal.SIGKILL}
    # Whatever is left is whole, or a miss.
    assert ended(in_a_child(lambda: compiles(3, folder))) == 0
    cache = Cache(folder)
    for path in (folder / "objects").rglob("*.so"):
        data = cache.get(path.stem, ".so")
        assert data is None or data.startswith(b"\x7fELF")


# ---------------------------------------------------------------- forked and spawned


class Doubled:
    """What a worker is given: it compiles by itself."""

    def __call__(self, size: int) -> float:
        f = torch.compile(lambda x: (x * 2 + 1).sum(), backend="hotloop", dynamic=False)
        return float(f(torch.ones(size, 300)))


def test_spawned_workers_compile_for_themselves() -> None:
    double = Doubled()
    assert double(40) == 40 * 300 * 3
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(double, [40, 400]) == [40 * 300 * 3, 400 * 300 * 3]


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """A data set whose items are computed by a function that each worker compiles."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, k: int) -> torch.Tensor:
        return torch.compile(torch.neg, backend="hotloop")(torch.full((300, 300), float(k)))


def test_workers_of_a_data_loader_are_spawned() -> None:
    loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context="spawn")
    assert [float(batch.mean()) for batch in loader] == [0.0, -1.0, -2.0, -3.0]


def test_a_pool_of_forked_workers_calls_what_was_compiled_before() -> None:
    g = torch.compile(scaled(0.71), backend="hotloop")
    x = torch.randn(700, 400)
    want = g(x)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        g(x)  # OpenMP has a team of threads now, which no child has
        children = [in_a_child(lambda: torch.testing.assert_close(g(x), want)) for _ in range(3)]
        assert [ended(pid) for pid in children] == [0, 0, 0]
    finally:
        torch.set_num_threads(threads)


def test_a_fork_while_another_thread_looks_something_up(tmp_path: Path) -> None:
    """A lock that a thread of the parent holds at that moment is not waited for in the child."""
    cache = Cache(tmp_path / "cache")
    cache.put("ab" + "0" * 62, ".bin", b"x")

    def looks_up() -> None:
        assert cache.get("ab" + "0" * 62, ".bin") == b"x"
        cache.flush()

    held = cache._counts.lock
    held.acquire()
    try:
        assert ended(in_a_child(looks_up)) == 0
    finally:
        held.release()


def test_a_fork_while_another_thread_compiles_a_size() -> None:
    graph = torch.fx.Graph()
    x, number = graph.placeholder("x"), graph.placeholder("number")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, number)),))
    call = backend._PerSize(torch.fx.GraphModule({}, graph), "inference", hotloop.Config())

    def another_size() -> None:
        assert call([torch.arange(3), 2])[0].tolist() == [0, 2, 4]

    with call._lock:
        assert ended(in_a_child(another_size)) == 0


# ---------------------------------------------------------------- interrupts and exceptions

SLOW_COMPILER = """#!/bin/sh
echo started >> {folder}/started
sleep 60
exec g++ "$@"
"""

INTERRUPTED = """
import sys, torch
f = torch.compile(lambda x: x.exp() + 1, backend="hotloop")
try:
    f(torch.ones(3))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(7)
"""


def test_an_interrupt_during_a_build_leaves_a_clean_cache(tmp_path: Path) -> None:
    compiler, folder = tmp_path / "g++", tmp_path / "cache"
    compiler.write_text(SLOW_COMPILER.format(folder=tmp_path))
    compiler.chmod(0o700)
    environment = {**os.environ, "CXX": str(compiler), "HOTLOOP_CACHE_DIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
         + INTERRUPTED],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    while not (tmp_path / "started").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate()
    assert process.returncode == 7 and "interrupted" in printed, printed
    assert not list(folder.rglob("*.so")) and list((folder / "tmp").iterdir()) == []
    f = torch.compile(lambda x: x.exp() + 1, backend="hotloop", options={"cache_dir": str(folder)})
    torch.testing.assert_close(f(torch.ones(3)), torch.ones(3).exp() + 1)


def test_an_operator_that_raises_in_the_middle_leaves_nothing_behind() -> None:
    """The arena is given back, the arguments are free, and the next call is right."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = (x @ x.t()).relu() - 2 * torch.eye(x.shape[0])
        return torch.linalg.cholesky(y).exp() + x.sum()

    good, bad = torch.eye(50) * 2, torch.zeros(50, 50)
    g = torch.compile(f, backend="hotloop")
    torch.testing.assert_close(g(good), f(good))
    for _ in range(3):
        with pytest.raises(torch.linalg.LinAlgError):
            g(bad)
        torch.testing.assert_close(g(good), f(good))

    passing = torch.zeros(50, 50)
    reference = weakref.ref(passing)
    with contextlib.suppress(torch.linalg.LinAlgError):
        g(passing)
    del passing
    assert reference() is None


def test_a_failed_backward_continues_in_eager_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each graph stands for itself: the forward graph is compiled, the backward graph runs uncompiled."""
    real, kinds = backend.lower, []

    def lower(gm: Any, config: Any, log: Any, name: str, *more: Any) -> Any:
        kinds.append(name.rpartition("_")[2])
        if name.endswith("backward"):
            raise KeyError("a fault inside")
        return real(gm, config, log, name, *more)

    monkeypatch.setattr(backend, "lower", lower)
    x = torch.randn(6, 5, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(x, -1) * x.sigmoid()).pow(2).sum()

    g = torch.compile(f, backend="hotloop", options={"on_error": "eager"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = torch.autograd.grad(g(x), x)
        again = torch.autograd.grad(g(x), x)
    torch.testing.assert_close(got, torch.autograd.grad(f(x), x))
    torch.testing.assert_close(again, got)
    assert kinds == ["forward", "backward"]
    said = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert len(said) == 1 and "stage 'lower'" in said[0] and "uncompiled" in said[0]


def test_threads_meet_a_failing_compile_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("a fault inside")

    monkeypatch.setattr(backend, "settle", broken)
    g = torch.compile(scaled(0.37), backend="hotloop", options={"on_error": "eager"})
    x, results = torch.randn(4, 9), []
    threads = [threading.Thread(target=lambda: results.append(g(x))) for _ in range(6)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 6
    for result in results:
        torch.testing.assert_close(result, scaled(0.37)(x))
