"""Calls of compiled functions from Python: arguments arrive, faults are errors, other threads go on."""

from __future__ import annotations

import ctypes
import gc
import threading
from array import array
from collections.abc import Callable

import pytest

from hotloop import backend
from hotloop.codegen.cpp import KernelSource, make_units
from hotloop.config import resolve
from hotloop.runtime.build import Source
from hotloop.runtime.calls import CALL, CALL_NAME, MOST, bind_call
from hotloop.runtime.toolchain import choose_simd

COUNTS = (0, 1, 2, 3, 4, 7, MOST - 1, MOST, MOST + 1, MOST + 9)


def _weighted(count: int) -> KernelSource:
    """A function that gives 1 * a0 + 2 * a1 + ..."""
    name = f"weighted_{count}"
    given = ", ".join(f"i64 a{k}" for k in range(count))
    total = " + ".join(["(i64)0", *(f"{k + 1} * a{k}" for k in range(count))])
    return KernelSource(name, f'extern "C" i64 {name}({given}) {{\n    return {total};\n}}\n', frozenset())


_WAIT = """\
extern "C" i64 wait(volatile i64* flag, i64 most) {
    for (i64 k = 0; k < most; k++)
        if (*flag)
            return 1;
    return 0;
}
"""


@pytest.fixture(scope="module")
def bind() -> Callable[[str, int], Callable[..., int]]:
    """A function by its name and how many parameters it takes."""
    config = resolve(None, None, {})
    functions = [*map(_weighted, COUNTS), KernelSource("wait", _WAIT, frozenset())]
    (unit,) = make_units(functions, 1)
    level = choose_simd(config.cpp.simd)
    builder = backend._builder(config.cpp.cxx, backend._cache_of(config), 0, level)
    library, calls = builder.build([Source(unit.name, unit.text), backend._lasting(CALL_NAME, CALL)])
    return lambda name, count: bind_call(calls, library, name, count)


@pytest.mark.parametrize("count", COUNTS)
def test_arguments_arrive(count: int, bind: Callable[[str, int], Callable[..., int]]) -> None:
    function = bind(f"weighted_{count}", count)
    gc.collect()
    for given in (
        [3] * count,
        list(range(count)),
        [-7 * k for k in range(count)],
        [(1 << 46) + k for k in range(count)],
    ):
        assert function(*given) == sum((k + 1) * v for k, v in enumerate(given))


@pytest.mark.parametrize("value", [-1, 0, 1, 255, 257, 1 << 31, -(1 << 31), (1 << 63) - 1, -(1 << 63)])
def test_numbers_of_64_bits(value: int, bind: Callable[[str, int], Callable[..., int]]) -> None:
    assert bind("weighted_1", 1)(value) == value


def test_wrong_arguments_are_errors(bind: Callable[[str, int], Callable[..., int]]) -> None:
    function = bind("weighted_3", 3)
    for wrong in ((), (1, 2), (1, 2, 3, 4), (1, "2", 3), (1, None, 3), (1.0, 2, 3)):
        with pytest.raises(TypeError):
            function(*wrong)
    with pytest.raises((OverflowError, TypeError)):
        function(1, 1 << 70, 3)
    assert function(1, 2, 3) == 14


def test_other_threads_run_meanwhile(bind: Callable[[str, int], Callable[..., int]]) -> None:
    """The function waits for what another thread writes, or gives up after a while."""
    function, flag = bind("wait", 2), array("q", [0])
    address, _ = flag.buffer_info()
    timer = threading.Timer(0.05, lambda: ctypes.c_int64.from_address(address).__setattr__("value", 1))
    timer.start()
    assert function(address, 1 << 36) == 1
    timer.join()
