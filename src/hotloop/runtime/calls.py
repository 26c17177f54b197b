"""Calls of compiled functions from Python: a built-in function in the place of one of ctypes.

What comes in: a compiled function that takes addresses and whole numbers and gives a whole number. What goes
out: something to call with as many Python integers. What holds in between: as with ctypes, other threads run
Python meanwhile, and arguments of another number or type are a ``TypeError``.

Why: four addresses by ctypes take 0.36 us, by this 0.12 (Xeon, Python 3.11). The next file is ``program.py``.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from hotloop.runtime.build import LoadedLibrary

__all__ = ["CALL", "CALL_NAME", "MOST", "bind_call"]

CALL_NAME = "hotloop_call"

#: Functions of more parameters are called through ctypes.
MOST = 12

#: What of Python's C interface the text calls, in its order.
_INTERFACE = (
    "PyLong_AsVoidPtr", "PyLong_FromLongLong", "PyErr_Occurred", "PyErr_BadArgument", "PyEval_SaveThread",
    "PyEval_RestoreThread",
)  # fmt: skip

#: Function, number of its parameters, and the interface.
_ROW = struct.Struct(f"={2 + len(_INTERFACE)}q")


def _cases() -> str:
    lines = []
    for count in range(MOST + 1):
        types, values = ", ".join(["void*"] * count), ", ".join(f"a[{k}]" for k in range(count))
        lines.append(f"        case {count}: status = ((i64 (*)({types}))function)({values}); break;")
    return "\n".join(lines)


#: A method of Python's (METH_FASTCALL) whose object is a row in ``bytes``. Python's functions come with the
#: row: the text needs neither a header nor a library of Python's.
CALL = f"""\
extern "C" void* {CALL_NAME}(void* self, void* const* args, i64 count) {{
    const i64* row = (const i64*)((const u8*)self + {bytes.__basicsize__ - 1});
    void* function = (void*)row[0];
    auto address_of = (void* (*)(void*))row[2];
    auto number_of = (void* (*)(long long))row[3];
    auto failed = (void* (*)())row[4];
    auto bad_argument = (int (*)())row[5];
    auto leave = (void* (*)())row[6];
    auto enter = (void (*)(void*))row[7];
    void* a[{MOST}];
    if (count != row[1]) {{
        bad_argument();
        return 0;
    }}
    for (i64 k = 0; k < count; k++)
        a[k] = address_of(args[k]);
    if (failed())
        return 0;
    i64 status = 0;
    void* thread = leave();
    switch (count) {{
{_cases()}
    }}
    enter(thread);
    return number_of(status);
}}
"""


class _Method(ctypes.Structure):
    """``PyMethodDef``."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("method", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


_METH_FASTCALL = 0x80


@cache
def _method(address: int) -> _Method:
    """The method at an address; it lives as long as the process."""
    return _Method(b"kernel", address, _METH_FASTCALL, None)


def bind_call(calls: LoadedLibrary, library: LoadedLibrary, name: str, count: int) -> Callable[..., int]:
    """What calls the function ``name`` of ``count`` parameters. ``calls`` is the text above, compiled."""
    if count > MOST or sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != 8:
        function: Any = library.function(name, [ctypes.c_void_p] * count)
        function.restype = ctypes.c_int64
        return function  # type: ignore[no-any-return]
    make: Any = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.py_object)(
        ("PyCFunction_NewEx", ctypes.pythonapi)
    )
    row = _ROW.pack(library.address(name), count, *(_address(f) for f in _INTERFACE))
    made: Callable[..., int] = make(ctypes.addressof(_method(calls.address(CALL_NAME))), row, None)
    return made


def _address(name: str) -> int:
    """The address of a function of Python's interface."""
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0
