"""Errors read at night: each names the stage, the operator, the user's line and what to do next."""

from __future__ import annotations

import pytest
import torch
import torch.fx

from hotloop.errors import CompileError, HotloopError, ToolchainError, VerifyError, source_line, unknown_name


def node_of(trace: str | None) -> torch.fx.Node:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
    if trace is not None:
        node.meta["stack_trace"] = trace
    return node


TRACE = """  File "/home/me/model.py", line 12, in forward
    y = self.block(x)
  File "/home/me/block.py", line 41, in block
    return x + x
  File "/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 99, in add
    return torch.add(a, b)
"""


def test_source_line_is_the_innermost_line_of_the_user() -> None:
    assert source_line(node_of(TRACE)) == "/home/me/block.py:41: return x + x"


@pytest.mark.parametrize(
    ("trace", "line"),
    [
        (None, None),
        ("", None),
        ("no frame at all", None),
        ('  File "/home/me/model.py", line 7, in f', "/home/me/model.py:7"),
        (
            '  File "/home/me/model.py", line 7, in f\n  File "/a.py", line 8, in g\n    z = 1',
            "/a.py:8: z = 1",
        ),
        ('  File "/v/site-packages/torch/nn/f.py", line 7, in f\n    x = 1', None),
    ],
)
def test_source_line_of_odd_traces(trace: str | None, line: str | None) -> None:
    assert source_line(node_of(trace)) == line


def test_source_line_of_a_graph_that_dynamo_captured() -> None:
    lines: list[str | None] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        lines.extend(source_line(node) for node in module.graph.nodes if node.op == "call_function")
        return module

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    torch.compile(f, backend=backend)(torch.ones(2))
    assert len(lines) == 1
    assert lines[0] is not None
    assert lines[0].endswith(": return x * 3")
    assert "test_errors.py:" in lines[0]


def test_compile_error_says_all_four_things() -> None:
    error = CompileError("cannot tell the stride", stage="lower", node=node_of(TRACE), hint="pad the input")
    assert str(error).splitlines() == [
        "hotloop failed in stage 'lower': cannot tell the stride",
        "  operator:  aten.add.Tensor (add_tensor of x)",
        "  your line: /home/me/block.py:41: return x + x",
        "  next:      pad the input",
    ]
    assert isinstance(error, HotloopError)
    assert isinstance(error, RuntimeError)


def test_compile_error_without_a_node_still_says_what_to_do() -> None:
    text = str(CompileError("no order exists", stage="schedule", node="aten.sum"))
    assert "aten.sum" in text
    assert "your line" not in text
    assert "TORCH_COMPILE_DEBUG=1" in text
    assert "hotloop_unfused" in text


def test_verify_error_asks_for_a_report() -> None:
    error = VerifyError("buffer b3 is read before it is written", stage="fuse")
    assert isinstance(error, CompileError)
    assert "report it" in str(error)


def test_toolchain_error_says_what_to_install() -> None:
    text = str(ToolchainError("no C++ compiler: looked for g++, clang++"))
    for way in ("apt-get install g++", "xcode-select", "hotloop[toolchain]", "CXX", "missing_toolchain"):
        assert way in text


def test_unknown_name_without_a_near_one_lists_all() -> None:
    assert str(unknown_name("mode", "zzz", ["b", "a"])) == "hotloop has no mode 'zzz'; valid: a, b"
