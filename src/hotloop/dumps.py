"""What a person sees of a compile: TORCH_LOGS artifacts, dumps of each stage, why a fusion was refused.

In: one `Log` per compiled graph, made by backend.py and handed to every stage. Out: log records and files.
Text is always given as a function, called only when somebody reads it, so a log that is off costs a
comparison. Nothing here may fail a compile: a folder that cannot be written turns the dumps off with one
warning.
Next: ir/index.py.
"""

from __future__ import annotations

import logging
import os
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeVar

from hotloop import compat
from hotloop.config import Config
from hotloop.errors import unknown_name

T = TypeVar("T")

Kind = Literal["forward", "backward", "inference"]
Text = Callable[[], str]

# Each artifact, and the part of the compiler that writes it.
ARTIFACTS: Final[Mapping[str, str]] = types.MappingProxyType(
    {
        "post_grad_graphs": "hotloop.graph",
        "ir_pre_fusion": "hotloop.lower",
        "ir_post_fusion": "hotloop.schedule",
        "fusion": "hotloop.schedule",
        "schedule": "hotloop.schedule",
        "kernel_code": "hotloop.codegen",
        "output_code": "hotloop.codegen",
        "perf_hints": "hotloop.backend",
        "autotuning": "hotloop.runtime",
    }
)

# The dumps whose names users rely on, and the artifact that shows the same text. Any other stage may be
# dumped too: its file is numbered in order of writing, "03_memory.txt".
FILES: Final[Mapping[str, tuple[str, str | None]]] = types.MappingProxyType(
    {
        "fx_graph_runnable": ("fx_graph_runnable.py", None),
        "fx_graph_readable": ("fx_graph_readable.py", None),
        "fx_graph_transformed": ("fx_graph_transformed.py", "post_grad_graphs"),
        "ir_pre_fusion": ("ir_pre_fusion.txt", "ir_pre_fusion"),
        "ir_post_fusion": ("ir_post_fusion.txt", "ir_post_fusion"),
        "output_code": ("output_code.py", "output_code"),
    }
)
REFUSALS_FILE: Final = "fusion_refused.txt"

NO_REFUSAL: Final = "nothing was refused\n"

_log = logging.getLogger(__name__)
_LOGGERS: Final[Mapping[str, logging.Logger]] = types.MappingProxyType(
    {name: compat.artifact_logger(module, name) for name, module in ARTIFACTS.items()}
)


@dataclass(frozen=True)
class Refusal:
    """A fusion that was considered and not made.

    Attributes:
        first: the earlier of the two operations or groups, printed.
        second: the later one.
        reason: why they stayed apart.
    """

    first: str
    second: str
    reason: str

    def __str__(self) -> str:
        return f"{self.first} + {self.second}: {self.reason}"


class Log:
    """The log of one compiled graph.

    Arguments:
        config: options of the compile; `debug` asks for dumps, `debug_dir` says where.
        graph_id: which of the process's graphs, counted by the caller.
        kind: which of the graphs that AOTAutograd makes of one.
        record: keep the refusals even when nobody reads a log, for a tool that will.
    """

    def __init__(
        self, config: Config, *, graph_id: int = 0, kind: Kind = "inference", record: bool = False
    ) -> None:
        self._config = config
        self.number = graph_id
        self._graph = f"model__{graph_id}_{kind}"
        self._record = record or config.debug
        self._dumping = config.debug
        self._directory: Path | None = None
        self._numbered = 0
        self._refusals: list[Refusal] = []
        self._refusals_written = 0
        self._fused = False

    @property
    def name(self) -> str:
        """What the graph is called in logs, errors and generated texts: the name of its folder, if any."""
        return self._graph if self.directory is None else self.directory.name

    @property
    def directory(self) -> Path | None:
        """The folder that holds this graph's dumps, made on first use; None while dumps are off."""
        if self._dumping and self._directory is None:
            self._directory = self._attempt(self._make_directory)
        return self._directory if self._dumping else None

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The fusions refused so far, if they are recorded: `debug`, `record` or TORCH_LOGS="fusion"."""
        return tuple(self._refusals)

    def stage(self, name: str, text: Text) -> None:
        """Show the output of a stage: write its dump, and log it when it is an artifact.

        A name of `FILES` gives that file; any other is numbered. A stage that runs again adds a dump.
        """
        file, artifact = FILES.get(name, (None, name if name in ARTIFACTS else None))
        logged = artifact is not None and self.enabled(artifact)
        self._fused = self._fused or name == "ir_post_fusion"
        directory = self.directory
        if directory is None and not logged:
            return
        written = text()
        if directory is not None:
            if file is None:
                self._numbered += 1
                file = f"{self._numbered:02d}_{name}.txt"
            self._attempt(lambda: _unused(directory / file).write_text(written, encoding="utf-8"))
            self._write_refusals(directory)
        if artifact is not None and logged:
            self._emit(artifact, written)

    def later(self, name: str) -> Callable[[str], None] | None:
        """What writes a dump once its text is known, after the compile; None without dumps."""
        directory = self.directory
        if directory is None:
            return None

        def write(text: str) -> None:
            self._attempt(lambda: (directory / name).write_text(text, encoding="utf-8"))

        return write

    def record(self, file: str, lines: Sequence[str]) -> None:
        """Append lines to a file in the folder of all graphs' dumps, whether or not this graph has dumps."""

        def append() -> None:
            parent = self._parent()
            parent.mkdir(parents=True, exist_ok=True)
            with open(parent / file, "a", encoding="utf-8") as opened:
                opened.writelines(f"{line}\n" for line in lines)

        self._attempt(append)

    def artifact(self, name: str, text: Text) -> None:
        """Log one of `ARTIFACTS` without a dump: a kernel's code, a fusion made, a hint, a timing."""
        if self.enabled(name):
            self._emit(name, text())

    def enabled(self, artifact: str) -> bool:
        """Whether somebody reads an artifact, through TORCH_LOGS or `torch._logging.set_logs`."""
        logger = _LOGGERS.get(artifact)
        if logger is None:
            raise unknown_name("artifact", artifact, ARTIFACTS)
        # An artifact that is off by default does not propagate, and then has no handler at any level.
        return logger.isEnabledFor(logging.DEBUG) and logger.hasHandlers()

    def refuse_fusion(self, first: object, second: object, reason: str | Text) -> None:
        """Record that two operations or groups were not fused, and why; text is made only for a reader."""
        logged = self.enabled("fusion")
        if not (logged or self._record):
            return
        refusal = Refusal(str(first), str(second), reason if isinstance(reason, str) else reason())
        self._refusals.append(refusal)
        if logged:
            self._emit("fusion", f"not fused: {refusal}")

    def close(self) -> None:
        """Write what is still held back. Called when the compile ends, also when it fails."""
        directory = self.directory if self._refusals or self._fused else None
        if directory is not None:
            self._write_refusals(directory)
            if not self._refusals:  # an absent file would leave open whether fusion was reached
                self._attempt(lambda: (directory / REFUSALS_FILE).write_text(NO_REFUSAL, encoding="utf-8"))

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _emit(self, artifact: str, text: str) -> None:
        # Source code begins on a line of its own.
        _LOGGERS[artifact].debug("%s:%s%s", self.name, "\n" if "\n" in text.rstrip("\n") else " ", text)

    def _parent(self) -> Path:
        return Path(self._config.debug_dir or compat.debug_run_dir()) / "hotloop"

    def _make_directory(self) -> Path:
        parent = self._parent()
        parent.mkdir(parents=True, exist_ok=True)
        attempt = 0
        while True:
            # mkdir tells whether another compile, in another thread, has taken the number.
            directory = parent / f"{self._graph}_{attempt}"
            try:
                directory.mkdir()
            except FileExistsError:
                attempt += 1
            else:
                # Dumps are asked for by somebody who will look for them: at a level that is shown.
                _log.warning(
                    "%s: dumps of every stage are written to %s", directory.name, directory.resolve()
                )
                return directory

    def _write_refusals(self, directory: Path) -> None:
        new = self._refusals[self._refusals_written :]
        if not new:
            return
        self._refusals_written = len(self._refusals)

        def append() -> None:
            with open(directory / REFUSALS_FILE, "a", encoding="utf-8") as file:
                file.writelines(f"{refusal}\n" for refusal in new)

        self._attempt(append)

    def _attempt(self, action: Callable[[], T]) -> T | None:
        """Run something that writes; a full or read-only disk ends this graph's dumps, not the compile."""
        try:
            return action()
        except OSError as error:
            self._dumping = False
            warnings.warn(f"hotloop cannot write its dumps, and goes on without: {error}", stacklevel=2)
            return None


def _unused(path: Path) -> Path:
    """`path`, or with the first free number when it exists: ir_post_fusion.txt, ir_post_fusion_1.txt."""
    number, candidate = 0, path
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.stem}_{number}{path.suffix}")
    return candidate
