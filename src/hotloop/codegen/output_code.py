"""The text of ``output_code.py``: all that was generated for one graph, to be read, run and edited.

What comes in: the kernels' functions and the host program. What goes out: one Python module, which is also
what ``TORCH_LOGS="output_code"`` shows. What holds in between: it is what runs, without the vocabulary that
every kernel shares; ``python output_code.py`` checks and times it (``tools/replay.py``), and
``runtime/override.py`` puts an edited copy in the place of what would be generated.

The next folder is ``../runtime``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from hotloop.ir import sizes as sz
from hotloop.ir.kernel import KernelCall, Schedule
from hotloop.ir.loops import LoopProgram
from hotloop.ir.samples import constant, sample

from .cpp import KernelSource

__all__ = ["fusions", "graph_key", "print_output_code", "steps"]

_HEAD = '''"""{name}: what hotloop generated for one graph.

    python output_code.py            checks it against fx_graph_runnable.py beside it, and times it
    HOTLOOP_OVERRIDE=<its folder>    makes the compiler take this file, as edited, for the same graph

The words of the kernels (load, splat, exp, ...) are in hotloop/codegen/cpp_*.h, starting with cpp_prelude.h.
"""

import torch
from torch import device

graph = "{key}"  # which graph this is for
simd = "{level}"
kernels = {{}}
'''

_KERNEL = """
kernels[{name!r}] = r'''
{text}'''
"""

_TAIL = '''

def inputs():
    """Random inputs of the right sizes and strides."""
    return [{inputs}]


def constants():
    """The graph's own tensors; large ones have random values."""
    return {{{constants}}}


if __name__ == "__main__":
    from hotloop.tools.replay import main

    main(__file__)
'''


def graph_key(program: LoopProgram) -> str:
    """A name for what a graph computes, whatever its number and its place in the user's file."""
    lines = str(program).splitlines()[1:]  # without the name
    text = "\n".join(re.sub(r"    # .*$", "", line) for line in lines)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def print_output_code(
    program: LoopProgram, functions: Sequence[KernelSource], host: str, name: str, level: str
) -> str:
    """The module: the kernels as C++, the host program, and what it takes to run them."""
    text = _HEAD.format(name=name, key=graph_key(program), level=level)
    for f in functions:
        # A line of the user's that is quoted in a comment may hold anything.
        text += _KERNEL.format(name=f.symbol, text=f.text.replace("'''", '"""'))
    text += "\n\n" + host[host.index("def build(rt):") :].rstrip("\n") + "\n"
    return text + _TAIL.format(inputs=_inputs(program), constants=_constants(program))


def _inputs(program: LoopProgram) -> str:
    lines = []
    numbers = {m.input: v for v, m in program.symbols.items() if m.kind == "number"}
    for k, name in enumerate(program.inputs):
        if name is None:
            size = numbers.get(k)
            what = "a number that is part of the code" if size is None else size.name
            lines.append(f"{0 if size is None else sz.hint(size)},  # {what}")
            continue
        b = program.buffers[name]
        sizes, strides = [sz.hint(n) for n in b.sizes], [sz.hint(s) for s in b.strides]
        lines.append(f"{sample(sizes, strides, b.dtype)},  # {name}")
    return _block(lines)


def _constants(program: LoopProgram) -> str:
    return _block([f"{name!r}: {constant(tensor)}," for name, tensor in program.constants.items()])


def _block(lines: Sequence[str]) -> str:
    return "".join(f"\n        {line}" for line in lines) + "\n    " if lines else ""


# --- what was decided, in few lines ---------------------------------------------------------------------


def steps(plan: Schedule) -> str:
    """The schedule, one step a line: what runs, on which buffers, and where intermediates lie."""
    lines = [f"{len(plan.steps)} steps, intermediates in {plan.arena_bytes} bytes"]
    for number, step in enumerate(plan.steps):
        if isinstance(step, KernelCall):
            k = step.kernel
            how = "parallel" if k.parallel else "one thread"
            lines.append(f"{number:4}  {k.name}({', '.join(step.args)})    moves {k.bytes} bytes, {how}")
        else:
            lines.append(f"{number:4}  {', '.join(str(o) for o in step.outs)} = {step.target}")
    for name, place in plan.placements.items():
        if place.kind == "arena":
            lines.append(f"      {name} at {place.offset}, {place.nbytes} bytes")
    return "\n".join(lines)


def fusions(plan: Schedule) -> str:
    """Which operators each kernel holds."""
    lines = []
    kernels = {s.kernel.name: s.kernel for s in plan.steps if isinstance(s, KernelCall)}
    for name, kernel in kernels.items():
        nodes = dict.fromkeys(n for o in kernel.origins for n in o.nodes)
        lines.append(f"fused: {name} = {' + '.join(nodes)}")
    return "\n".join(lines)
