"""What must be measured in a process of its own: ``worker.py compile|memory CASE BACKEND`` prints JSON.

``CASE`` is ``micro:<name>``, ``model:<name>:<tiny|full>:<dtype>`` or ``train:<layers>`` (see ``cases.py``).

"compile": seconds from ``torch.compile`` to the first result, with everything a user waits for: imports of
Dynamo, of the back end and of its compiler, capture, code generation, build, and the first run.

"memory": MiB. Resident memory rather than an allocator's own count, since it sees whatever any part of the
process takes: tensors, scratch memory of libraries, arenas. "level" is what lies there between calls,
"peak" what a call needs over that.
"""

from __future__ import annotations

import ctypes
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from cases import function_of
from harness import compile_with


def compile_task(case: str, backend: str) -> dict[str, Any]:
    """Times the first call, and a later one to tell how much of the first was running."""
    function, inputs = function_of(case)
    trains = case.startswith("train:")

    def seconds() -> float:
        begin = time.perf_counter()
        result = compiled(*inputs)
        if trains:
            result.backward()
        return time.perf_counter() - begin

    with torch.set_grad_enabled(trains):
        begin = time.perf_counter()
        compiled = compile_with(backend, function)
        first = time.perf_counter() - begin + seconds()
        seconds()
        later = seconds()
    return {"first_call": first, "later_call": later}


def memory_task(case: str, backend: str) -> dict[str, Any]:
    """Reads the kernel's high-water mark of resident memory, set back before each of three calls."""
    function, inputs = function_of(case)
    peaks = []
    with torch.no_grad():
        compiled = compile_with(backend, function)
        for _ in range(3):
            compiled(*inputs)
        for _ in range(3):
            level = _settle()
            result = compiled(*inputs)
            peaks.append(_status("VmHWM") - level)
            del result
    return {"peak": statistics.median(peaks), "level": _settle()}


def _settle() -> float:
    """Gives free memory back to the system, sets the high-water mark back; returns the level in MiB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


if __name__ == "__main__":
    tasks = {"compile": compile_task, "memory": memory_task}
    print(json.dumps(tasks[sys.argv[1]](sys.argv[2], sys.argv[3])))
