"""From C++ text to a loaded library.

In: sources, a toolchain, a cache. Out: `LoadedLibrary`, whose functions are called through ctypes. What
holds: equal text under equal flags is compiled once, and in one process loaded once; several sources compile
side by side; an interrupt ends the compilers and leaves nothing half written; a disk that is full or
read-only costs time, never the result. Next: pool.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotloop import __version__
from hotloop.errors import MissingCompilerError, ToolchainError
from hotloop.runtime.cache import Cache, digest
from hotloop.runtime.toolchain import SimdLevel, Toolchain, detect_simd

# Words by which a compiler says that the disk, not the source, is at fault.
_DISK_FAULTS = (
    "No space left on device",
    "Read-only file system",
    "Permission denied",
    "cannot open output file",
    "Disk quota exceeded",
    "File too large",
    "File size limit exceeded",
)
_STDERR_LINES = 20
#: What compilers say of a fault of their own, and g++ of a part of it that was ended.
_CRASHES = (
    "internal compiler error",
    "unable to generate reloads",
    "submit a full bug report",
    "submit a bug report",
    "signal terminated program",
)

_log = logging.getLogger(__name__)

if sys.platform == "win32":
    _SUFFIX = ".dll"
else:
    _SUFFIX = ".so"


@dataclass(frozen=True)
class Source:
    """One translation unit: a name for messages and logs, and its C++ text."""

    name: str
    text: str


@dataclass(frozen=True, eq=False)
class LoadedLibrary:
    """A library in this process; it is never unloaded.

    Arguments:
        name: of the source that was first compiled to it.
        key: content hash of text, flags, compiler, SIMD level and hotloop's version.
        path: the file that holds it, which may be gone by now.
        handle: the ctypes library; calls through it release the GIL.
    """

    name: str
    key: str
    path: Path
    handle: ctypes.CDLL

    def function(self, name: str, argtypes: Sequence[Any] | None = None) -> Any:
        """The C function `name`, returning nothing, as a new ctypes object of its own.

        Raises:
            ToolchainError: the library has no such function.
        """
        try:
            function = self.handle[name]
        except AttributeError as error:
            raise ToolchainError(
                f"the library {self.path} of '{self.name}' has no function '{name}'"
            ) from error
        function.restype = None
        if argtypes is not None:
            function.argtypes = list(argtypes)
        return function

    def address(self, name: str) -> int:
        """The address of the C function `name`."""
        return ctypes.cast(self.function(name), ctypes.c_void_p).value or 0


class Builder:
    """Compiles and loads sources, each distinct one once.

    Arguments:
        toolchain: from `find_toolchain`.
        cache: where libraries and their sources are kept.
        workers: compilers run side by side; 0 for one per core.
        level: SIMD level; this CPU's own when not given.
    """

    def __init__(
        self, toolchain: Toolchain, cache: Cache, workers: int = 0, level: SimdLevel | None = None
    ) -> None:
        self.toolchain = toolchain
        self.cache = cache
        self.workers = workers or os.cpu_count() or 1
        self.level: SimdLevel = level or detect_simd()
        self._lock = threading.Lock()
        self._stub_lock = threading.Lock()
        self._pending: dict[str, Future[LoadedLibrary]] = {}
        self._running: set[subprocess.Popen[str]] = set()
        self._executor: ThreadPoolExecutor | None = None
        self._stopped = False
        self._pid = os.getpid()

    def submit(self, source: Source) -> Future[LoadedLibrary]:
        """Start compiling `source`, so that code generation goes on meanwhile; the library comes in the
        future.

        A library that is loaded or cached is there at once. Errors (`ToolchainError`) come from `result()`.
        """
        self._after_fork()
        parts = self._parts(source)
        key = digest(parts)
        with self._lock:
            self._stopped = False
            pending = self._pending.get(key)
            if pending is not None:
                return pending
            future: Future[LoadedLibrary] = Future()
            self._pending[key] = future
        try:
            library = _LOADED.get(key) or self._from_cache(source, key, parts)
            if library is None:
                self._enqueue(source, key, parts, future)
            else:
                self._finish(key, future, library)
        except BaseException:
            # An interrupt in here must not leave a future that never ends for the next one to wait for.
            with self._lock:
                self._pending.pop(key, None)
            future.cancel()
            raise
        return future

    def build(self, sources: Sequence[Source]) -> list[LoadedLibrary]:
        """The libraries of `sources`, in order, compiled side by side.

        Raises:
            ToolchainError: the compiler failed; the text has its command, its last lines, and the kept
            source.
        """
        try:
            futures = [self.submit(source) for source in sources]
        except BaseException:
            self.interrupt()
            raise
        return self.gather(futures)

    def gather(self, futures: Sequence[Future[LoadedLibrary]]) -> list[LoadedLibrary]:
        """The libraries of these futures, in order; an interrupt while waiting ends the compilers first."""
        try:
            return [future.result() for future in futures]
        except ToolchainError:
            raise
        except BaseException:
            self.interrupt()
            raise

    def interrupt(self) -> None:
        """End the compilers that run and forget what was queued; the next `submit` starts afresh."""
        with self._lock:
            self._stopped = True
            executor, self._executor = self._executor, None
            running = list(self._running)
        for process in running:
            _kill(process)
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.cancel()

    # ---------------------------------------------------------------- inside

    def _after_fork(self) -> None:
        if self._pid != os.getpid():
            # The threads of the pool stayed in the parent, and a lock may have been held at that moment.
            self._lock, self._stub_lock = threading.Lock(), threading.Lock()
            self._pending, self._running, self._executor = {}, set(), None
            self._pid = os.getpid()

    def _parts(self, source: Source) -> dict[str, str]:
        return {
            "source": source.text,
            "flags": " ".join(self.toolchain.compile_flags(self.level) + self.toolchain.link_flags(None)),
            "compiler": self.toolchain.identity,
            "CPU level": self.level,
            "hotloop": __version__,
        }

    def _enqueue(
        self, source: Source, key: str, parts: dict[str, str], future: Future[LoadedLibrary]
    ) -> None:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.workers, thread_name_prefix="hotloop-build")
            self._executor.submit(self._work, source, key, parts, future)

    def _finish(self, key: str, future: Future[LoadedLibrary], library: LoadedLibrary) -> None:
        _LOADED.setdefault(key, library)
        with self._lock:
            self._pending.pop(key, None)
        if future.set_running_or_notify_cancel():
            future.set_result(_LOADED[key])

    def _work(self, source: Source, key: str, parts: dict[str, str], future: Future[LoadedLibrary]) -> None:
        """Compile in a thread of the pool; whatever happens goes into the future."""
        try:
            library = self._compile(source, key, parts)
        except BaseException as error:  # noqa: BLE001 - the one who waits for the future gets it
            with self._lock:
                self._pending.pop(key, None)
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        self._finish(key, future, library)

    def _from_cache(self, source: Source, key: str, parts: dict[str, str]) -> LoadedLibrary | None:
        data = self.cache.get(key, _SUFFIX, source.name, parts, of=parts["source"])
        if data is not None:
            with contextlib.suppress(ToolchainError):  # made with another torch, say: compile it again
                return self._loaded(source, key, data)
        return None

    def _compile(self, source: Source, key: str, parts: dict[str, str]) -> LoadedLibrary:
        try:
            data = self._compile_in(source, key, fallback=False)
        except _DiskError:
            # The disk of temporary files is full or read-only: once more in the cache.
            data = self._compile_in(source, key, fallback=True)
        if self.cache.put(key, _SUFFIX, data, source.name, parts, of=parts["source"]) is not None:
            self.cache.put(key, ".cpp", source.text.encode(), source.name)
        try:
            return self._loaded(source, key, data)
        except ToolchainError:
            self.cache.drop(key, _SUFFIX)
            raise

    def _compile_in(self, source: Source, key: str, fallback: bool) -> bytes:
        """The bytes of the library that the compiler makes."""
        try:
            with self.cache.scratch(fallback) as folder:
                text, output = folder / f"{key[:16]}.cpp", folder / f"{key[:16]}{_SUFFIX}"
                text.write_text(source.text, encoding="utf-8")
                stub = self._stub(folder) if self.toolchain.needs_stub else None
                command = self.toolchain.command(text, output, self.level, stub)
                return self._made_somehow(command, folder, source, output)
        except OSError as error:
            if fallback:
                raise ToolchainError(
                    f"no folder to compile '{source.name}' in: {error}",
                    hint="free some disk space, or set TMPDIR or HOTLOOP_CACHE_DIR to a folder with room",
                ) from error
            raise _DiskError from error

    def _loaded(self, source: Source, key: str, data: bytes) -> LoadedLibrary:
        path = self.cache.path(key, _SUFFIX)
        handle = _load_from_memory(data, path.name)
        try:
            if handle is None:
                try:
                    handle = _load(path)
                except OSError:
                    if path.exists():
                        raise
                    # Not kept, or removed since by another process: the loader needs a file.
                    path = _write_private(self.cache.private_folder() / path.name, data)
                    handle = _load(path)
        except OSError as error:
            raise ToolchainError(
                f"the compiled '{source.name}' does not load: {error}",
                hint="a folder mounted 'noexec' holds no libraries: set HOTLOOP_CACHE_DIR to another; "
                "an undefined symbol is a fault of hotloop",
            ) from error
        return LoadedLibrary(source.name, key, path, handle)

    def _stub(self, folder: Path) -> Path:
        """An empty library called libtorch_cpu.so to link against: 20 ms, once per cache."""
        source, output = folder / "stub.cpp", folder / "libtorch_cpu.so"
        text = " ".join(self.toolchain.stub_command(Path("source"), Path("output")))
        key = digest({"command": text, "compiler": self.toolchain.identity})
        with self._stub_lock:
            data = self.cache.get(key, ".stub", "libtorch_cpu stand-in")
            if data is not None:
                output.write_bytes(data)
                return output
            source.write_text("", encoding="utf-8")
            command, stub = self.toolchain.stub_command(source, output), Source("libtorch_cpu stand-in", "")
            self.cache.put(key, ".stub", self._made(command, folder, stub, output), stub.name)
        return output

    def _made_somehow(self, command: tuple[str, ...], folder: Path, source: Source, output: Path) -> bytes:
        """What the compiler makes; where it crashes, with fewer of its passes, which changes no value."""
        try:
            return self._made(command, folder, source, output)
        except _CrashError as error:
            for flags in self.toolchain.careful_flags:
                with contextlib.suppress(_CrashError):
                    data = self._made((*command, *flags), folder, source, output)
                    _log.warning(
                        "the C++ compiler crashed on '%s', and compiled it with %s: another version of %s "
                        "may make it faster",
                        source.name, " ".join(flags), command[0],
                    )  # fmt: skip
                    return data
            raise error

    def _made(self, command: tuple[str, ...], folder: Path, source: Source, output: Path) -> bytes:
        """What a compiler writes into ``output``."""
        self._run(command, folder, source)
        if folder.is_dir() and not output.exists():
            raise ToolchainError(
                f"the C++ compiler made nothing of '{source.name}', and said nothing (exit status 0)\n"
                f"  command:   {' '.join(command)}",
                hint="set CXX to a C++ compiler: g++ 9, clang 10 or later",
            )
        return output.read_bytes()

    def _run(self, command: tuple[str, ...], folder: Path, source: Source) -> None:
        """Run a compiler to its end.

        Popen as it is by default forks in 0.65 ms from a process with torch and a gigabyte resident, as
        posix_spawn does, since Python calls vfork; with a preexec_fn, which forbids that, 49 ms. The session
        of its own keeps the terminal's Ctrl-C to us, who then end the compiler with the children it started.
        """
        environment = {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C", **dict(self.toolchain.environment)}
        with self._lock:
            if self._stopped:
                raise ToolchainError(f"compiling '{source.name}' was interrupted")
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    cwd=folder,
                    env=environment,
                    start_new_session=sys.platform != "win32",
                )
            except OSError as error:
                if not folder.is_dir():
                    raise
                # It was there when it was looked for.
                kind = MissingCompilerError if isinstance(error, FileNotFoundError) else ToolchainError
                raise kind(f"cannot run the C++ compiler {command[0]}: {error.strerror}") from error
            self._running.add(process)
        try:
            printed, _ = process.communicate()
        finally:
            with self._lock:
                self._running.discard(process)
        if process.returncode == 0:
            return
        if self._stopped:
            raise ToolchainError(f"compiling '{source.name}' was interrupted")
        for line in printed.splitlines():
            if any(words in line for words in _DISK_FAULTS):
                raise OSError(line.strip())
        raise self._failed(command, process.returncode, printed, source)

    def _failed(self, command: tuple[str, ...], status: int, printed: str, source: Source) -> ToolchainError:
        # The scratch folder goes away, so the source is kept where the person who reads this can look at it.
        name = digest({"failed": source.text})[:16] + ".cpp"
        kept: Path | None = None
        for folder in (self.cache.directory / "failed", self.cache.private_folder()):
            with contextlib.suppress(OSError):
                folder.mkdir(mode=0o700, exist_ok=True)
                kept = _write_private(folder / name, source.text.encode())
                break
        shown = " ".join(str(kept) if word.endswith(".cpp") and kept else word for word in command)
        last = "\n".join(f"    {line}" for line in printed.strip().splitlines()[-_STDERR_LINES:])
        crashed = status < 0 or any(words in printed for words in _CRASHES)
        return (_CrashError if crashed else ToolchainError)(
            f"the C++ compiler failed on '{source.name}' (exit status {status})\n"
            f"  command:   {shown}\n  source:    {kept}\n  it printed:\n{last or '    nothing'}",
            hint="if the compiler is too old, set CXX to another (g++ 9, clang 10 or later); "
            "otherwise this is a fault of hotloop: please report it with the source above",
        )


# Libraries of this process by key. A loaded library is a fact of the process, as sys.modules is: another
# Builder with the same key must get the same one.
_LOADED: dict[str, LoadedLibrary] = {}


def _serial_in_child() -> None:
    """A forked child of a process that has run kernels works on one thread.

    GCC's OpenMP runtime does not survive a fork: the threads of its team are gone in the child, which would
    wait for them forever. DataLoader's workers do the same for themselves; eager PyTorch hangs in others.
    """
    if _LOADED:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_serial_in_child)


class _CrashError(ToolchainError):
    """The compiler met a fault of its own."""


class _DiskError(Exception):
    """The folder that was compiled in would not take the files, or is gone."""


# RTLD_NOW, ctypes's own rule: a missing symbol is an error here and not a crash in the middle of a kernel.
# RTLD_LOCAL: kernels of two libraries may have the same name.
_MODE = getattr(os, "RTLD_LOCAL", ctypes.DEFAULT_MODE)
_memory_files = itertools.count()


def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path), mode=_MODE)


def _load_from_memory(data: bytes, name: str) -> ctypes.CDLL | None:
    """The library of these bytes, without a file that somebody could write to; None where that does not go.

    A file that is changed after it was checked would be another library, and one that is cut short while it
    is mapped ends the process. On Linux alone; a system may forbid to run such memory.
    """
    if not hasattr(os, "memfd_create"):
        return None
    with contextlib.suppress(OSError):
        handle = os.memfd_create(name[:64], os.MFD_CLOEXEC)
        try:
            with open(handle, "wb", closefd=False) as file:
                file.write(data)
            # The loader takes an equal path for an equal library, and the number of a closed file serves
            # again: the path is spelled differently each time.
            spelling = "".join("./" if bit == "1" else "/" for bit in f"{next(_memory_files):b}")
            return ctypes.CDLL(f"/proc/self/fd/{spelling}{handle}", mode=_MODE)
        finally:
            os.close(handle)
    return None


def _write_private(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.write_bytes(data)
    os.chmod(temporary, 0o700)
    os.replace(temporary, path)
    return path


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
