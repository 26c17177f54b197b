"""The kinds of error a user of hotloop can meet, and how each is worded.

In: what a stage knows when it fails: its own name, the FX node, a hint. Out: one exception whose text names
the stage, the operator, the user's own source line, and what to do next. Nothing here imports torch at run
time; an FX node is only read. Every error that hotloop raises on purpose is a `HotloopError`.
Next: config.py.
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.fx

# One frame of a Python traceback, as FX keeps it: the place on one line and the source text on the next.
_FRAME = re.compile(
    r'^[ \t]*File "(?P<file>[^"]+)", line (?P<line>\d+), in .*(?:\n[ \t]+(?!File ")(?P<text>\S.*))?',
    re.MULTILINE,
)


class HotloopError(RuntimeError):
    """Base of every error that hotloop raises on purpose."""


class CompileError(HotloopError):
    """A stage of the compiler cannot go on.

    Arguments:
        message: what went wrong, in one sentence.
        stage: the stage at fault, a name from backend.py's list ("lower", "schedule", ...).
        node: the FX node being worked on, or the operator's name.
        source_line: the user's own line; read from `node` when that is an FX node.
        hint: what to do next. The default leads to the rung of the ladder at fault.
    """

    def __init__(
        self,
        message: str,
        *,
        stage: str,
        node: torch.fx.Node | str | None = None,
        source_line: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.message = message
        self.stage = stage
        self.node = node
        if source_line is None and node is not None and not isinstance(node, str):
            source_line = _source_line_of(node)
        self.source_line = source_line
        self.hint = hint if hint is not None else _LADDER_HINT
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [f"hotloop failed in stage '{self.stage}': {self.message}"]
        if self.node is not None:
            lines.append(f"  operator:  {describe_node(self.node)}")
        if self.source_line is not None:
            lines.append(f"  your line: {self.source_line}")
        lines.append(f"  next:      {self.hint}")
        return "\n".join(lines)


class VerifyError(CompileError):
    """An IR broke one of its own rules: a fault of hotloop, never of the user.

    Arguments:
        message: the rule that is broken, with the values that break it.
        stage: the stage after which the verifier ran.
        node: the offending node, printed with its neighbourhood.
    """

    def __init__(
        self,
        message: str,
        *,
        stage: str,
        node: torch.fx.Node | str | None = None,
        source_line: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(
            message,
            stage=stage,
            node=node,
            source_line=source_line,
            hint=hint or "this is a fault in hotloop: please report it, with TORCH_COMPILE_DEBUG=1 dumps",
        )


class OptionError(HotloopError, ValueError):
    """The user gave an unknown option or mode, or a value that an option cannot take."""


class ToolchainError(HotloopError):
    """No C++ compiler was found, or the one found failed.

    Arguments:
        message: what was looked for, or the compiler's command and its first error.
        hint: what to install or to set.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint if hint is not None else _TOOLCHAIN_HINT
        super().__init__(f"{message}\n  next: {self.hint}")


class MissingCompilerError(ToolchainError):
    """There is no C++ compiler, or the one that was asked for is not there."""


class IndexRangeError(HotloopError, IndexError):
    """An index in the data is out of range.

    Eager raises IndexError or RuntimeError, depending on the operator: this is both.
    """


class IntegerDivisionError(HotloopError, ZeroDivisionError):
    """An integer was divided by zero. Eager raises RuntimeError("ZeroDivisionError"): this is both."""


class ResultShapeError(HotloopError):
    """An operator called through PyTorch gave a result of other sizes than its shape function announced."""


class ProbabilityError(HotloopError):
    """A probability in the data is not within [0, 1]. Eager raises RuntimeError, which this is."""


_LADDER_HINT = (
    'set TORCH_COMPILE_DEBUG=1 for the dumps of every stage; backend="hotloop_unfused", "hotloop_decomp" and '
    '"aot_eager" tell which stage is at fault; hotloop.config.on_error = "eager" runs such graphs uncompiled'
)

_TOOLCHAIN_HINT = (
    "install g++ or clang++ (Debian, Ubuntu: apt-get install g++; macOS: xcode-select --install), or "
    "pip install 'hotloop[toolchain]', or set CXX to a compiler; "
    'hotloop.config.missing_toolchain = "eager" runs uncompiled instead'
)


def unknown_name(kind: str, name: str, valid: Iterable[str], prefix: str = "") -> OptionError:
    """The error for an unknown name, with the nearest valid one: `unknown_name("mode", "fast", MODES)`.

    `prefix`: what `name` and all valid names begin with, which makes none of them similar to another.
    """
    own, names = name.removeprefix(prefix), sorted(n.removeprefix(prefix) for n in valid)
    near = difflib.get_close_matches(own, names, n=1, cutoff=0.5)
    if not near:
        # "simd" is meant as "cpp.simd", and "autotuning" as "trace.log_autotuning_results".
        near = [candidate for candidate in names if own and own in candidate][:1]
    listed = ", ".join(prefix + n for n in names)
    help_ = f"did you mean '{prefix}{near[0]}'?" if near else f"valid: {listed}"
    return OptionError(f"hotloop has no {kind} '{name}'; {help_}")


def describe_node(node: torch.fx.Node | str) -> str:
    """One line that names an FX node: its operator, its own name and the names of its inputs."""
    if isinstance(node, str):
        return node
    inputs = ", ".join(str(argument) for argument in node.all_input_nodes)
    return f"{node.target} ({node.name} of {inputs})" if inputs else f"{node.target} ({node.name})"


def describe_exception(error: Exception) -> str:
    """One line for an exception that nobody expected: its kind, its text and where it was raised.

    Dynamo shows a back end's error without its cause, so that the place would be lost.
    """
    places = []
    for frame in reversed(traceback.extract_tb(error.__traceback__)[-3:]):
        file = "/".join(frame.filename.replace("\\", "/").split("/")[-2:])
        places.append(f"{file}:{frame.lineno} {frame.name}")
    text = f"{type(error).__name__}: {error}"
    return f"{text} (raised at {' < '.join(places)})" if places else text


def source_line(fx_node: torch.fx.Node) -> str | None:
    """The user's line that an FX node came from, as `file:line: text`, or None when it was not recorded.

    The innermost frame outside torch counts: a loss computed by torch.nn is the user's call of it.
    """
    trace = fx_node.meta.get("stack_trace") or fx_node.stack_trace
    if not trace:
        return None
    frames = [frame for frame in _FRAME.finditer(trace) if not _inside_torch(frame["file"])]
    if not frames:
        return None
    frame = frames[-1]
    place = f"{frame['file']}:{frame['line']}"
    return f"{place}: {frame['text'].strip()}" if frame["text"] else place


# CompileError's argument has the same name as the function.
_source_line_of = source_line


def _inside_torch(file: str) -> bool:
    path = file.replace("\\", "/")
    return "/site-packages/torch/" in path or "/dist-packages/torch/" in path
