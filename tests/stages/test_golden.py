"""Golden texts of each stage: loop program, kernels, C++ and host program of a few functions.

What a change of the compiler does to generated code is seen here first: ``pytest tests/stages
--update-golden`` rewrites the files, and the difference is read before it is committed. The texts are made
for two threads and AVX2, whatever the machine; C++ is printed without the vocabulary above it, which has
tests of its own. That the texts are right is not left to reading: the verifiers pass, and the interpreter's
result of every schedule is as accurate as eager's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from golden_functions import cases

from hotloop import compat
from hotloop.codegen.cpp import print_kernel
from hotloop.codegen.host import print_host
from hotloop.config import Config
from hotloop.dumps import Log
from hotloop.graph import passes
from hotloop.graph.decompositions import decompositions
from hotloop.ir.interpret_kernel import run_schedule
from hotloop.ir.kernel import Kernel, KernelCall
from hotloop.ir.verify import verify_program, verify_schedule
from hotloop.lower.lower import lower
from hotloop.schedule.schedule import schedule
from judge import assert_as_accurate

# The decompositions, and with them the names and the order of operations, are the running torch's.
pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the golden texts are those of torch 2.13"
)

FOLDER = f"{Path(__file__).parent}/"
THREADS = 2


def captured(fn: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.fx.GraphModule, list[Any]]:
    """The graph that a compile of ``fn`` starts from, its inputs in the order of their use."""
    graphs: list[torch.fx.GraphModule] = []
    called: list[Any] = []

    def keep(gm: torch.fx.GraphModule, _: Any, kind: str) -> Any:
        graphs.append(gm)

        def call(args: list[Any]) -> Any:
            called.extend(args)
            return gm(*args)

        return call

    torch._dynamo.reset()
    backend = compat.aot_backend(keep, decompositions())
    torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    (gm,) = graphs
    return gm, called


@pytest.mark.parametrize("name", cases())
def test_stages(name: str, golden: Any) -> None:
    fn, inputs = cases()[name]
    config = Config()
    gm, given = captured(fn, inputs)
    with Log(config) as log:
        program = lower(passes.run(gm, config, log), config, log, name)
        verify_program(program)
        plan = schedule(program, config, log, THREADS)
    verify_schedule(plan)
    (result,) = run_schedule(plan, given, arena=True)
    doubles = [x.double() if x.is_floating_point() else x for x in inputs]
    assert_as_accurate([result], [fn(*inputs)], lambda: [fn(*doubles)])

    kernels: dict[str, Kernel] = {s.kernel.name: s.kernel for s in plan.steps if isinstance(s, KernelCall)}
    texts = {
        "1_loop_program.txt": str(program),
        "2_schedule.txt": str(plan),
        "3_kernels.cpp": "\n".join(print_kernel(k, "avx2").text for k in kernels.values()),
        "4_host.py": print_host(plan, name)[0],
    }
    for file, text in texts.items():
        golden(f"{name}/{file}", text.replace(FOLDER, ""))
