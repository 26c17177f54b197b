"""A cache folder that is missing, full, read-only, corrupt, foreign or contested: slower, never wrong."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotloop.errors import ToolchainError
from hotloop.runtime import build as build_module
from hotloop.runtime import cache as cache_module
from hotloop.runtime.build import Builder, LoadedLibrary, Source
from hotloop.runtime.cache import Cache
from hotloop.runtime.toolchain import find_toolchain

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="provokes faults as Linux has them")

KEY = "ab" + "0" * 62
TEXT = 'extern "C" void answer(int *x) { *x = 42; }\n'


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test sees a process that has loaded nothing."""
    monkeypatch.setattr(build_module, "_LOADED", {})
    yield


def _build(cache: Cache, text: str = TEXT) -> LoadedLibrary:
    return Builder(find_toolchain(), cache, workers=1).build([Source("answer", text)])[0]


def _ask(library: LoadedLibrary) -> int:
    x = ctypes.c_int()
    library.function("answer")(ctypes.byref(x))
    return x.value


def _built_file(folder: Path) -> Path:
    return next(iter((folder / "objects").rglob("*.so")))


def _again(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> LoadedLibrary:
    """Build as a new process would."""
    monkeypatch.setattr(build_module, "_LOADED", {})
    return _build(cache)


# ---------------------------------------------------------------- a folder that cannot be used


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("I am a file")
    with pytest.warns(RuntimeWarning, match="HOTLOOP_CACHE_DIR") as caught:
        cache = Cache(tmp_path / "cache")
        assert _ask(_build(cache)) == 42
        assert _ask(_build(cache, TEXT.replace("42", "43"))) == 43
    assert len(caught) == 1
    assert (tmp_path / "cache").read_text() == "I am a file"
    assert cache.directory.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("folder", ["/proc/hotloop", "/proc/self/fd/hotloop", "/dev/null/cache"])
def test_a_folder_that_cannot_be_made(folder: str) -> None:
    with pytest.warns(RuntimeWarning, match="cannot create"):
        assert _ask(_build(Cache(folder))) == 42


def test_a_read_only_folder(tmp_path: Path) -> None:
    # root may write in spite of any mode, so the file system itself must refuse.
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,mode=700", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("may not mount here")
    try:
        with pytest.warns(RuntimeWarning, match="Read-only file system"):
            assert _ask(_build(Cache(folder))) == 42
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("may not mount here")
    try:
        cache = Cache(folder)
        with open(folder / "ballast", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert _ask(_build(cache)) == 42
            assert _ask(_build(cache, TEXT.replace("42", "44"))) == 44
        assert len([warning for warning in caught if warning.category is RuntimeWarning]) <= 1
        assert not list((folder / "objects").rglob("*.so"))
        (folder / "ballast").unlink()
        assert _ask(_build(cache, TEXT.replace("42", "45"))) == 45
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache")

    def full(*arguments: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "_replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device") as caught:
        assert _ask(_build(cache)) == 42
        assert cache.put(KEY, ".cpp", b"x") is None
        assert not cache.put_json(KEY, 1)
    assert len(caught) == 1
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []


def test_a_half_written_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache")

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cache_module.os, "replace", interrupted)
        cache.put(KEY, ".so", b"x")
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []
    assert cache.get(KEY, ".so") is None


def test_no_folder_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache")

    def full(*arguments: Any, **named: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(ToolchainError, match=r"no folder to compile 'answer' in.*No space left(.|\n)*TMPDIR"):
        _build(cache)


# ---------------------------------------------------------------- a folder that must not be trusted


@pytest.mark.skipif(os.geteuid() != 0 if hasattr(os, "geteuid") else True, reason="gives a folder away")
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    planted = _built_file(tmp_path / "cache") if _build(cache) else None
    os.chown(tmp_path / "cache", 12345, 12345)
    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        other = Cache(tmp_path / "cache")
    build_module._LOADED.clear()
    library = _build(other)
    assert _ask(library) == 42 and library.path != planted
    assert tmp_path / "cache" not in library.path.parents


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write(tmp_path: Path, mode: int) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with pytest.warns(RuntimeWarning, match=r"can be written by others \(chmod 700"):
        library = _build(Cache(tmp_path / "cache"))
    assert _ask(library) == 42
    assert list((tmp_path / "cache").iterdir()) == []


# ---------------------------------------------------------------- corrupt files


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _swap(path: Path) -> None:
    path.write_bytes(b"\x7fELF" + os.urandom(path.stat().st_size - 4))


def _into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FAULTS = {
    "truncated": _truncate,
    "emptied": lambda path: path.write_bytes(b""),
    "one bit": _flip,
    "another file": _swap,
    "removed": Path.unlink,
    "a folder": _into_folder,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("which", ["library", "record"])
@pytest.mark.filterwarnings("ignore:hotloop. cannot write:RuntimeWarning")
def test_corrupt_files_are_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, which: str
) -> None:
    cache = Cache(tmp_path / "cache")
    library = _build(cache)
    path = _built_file(tmp_path / "cache")
    if which == "record":
        path = path.with_name(path.name + ".meta")
    FAULTS[fault](path)
    assert _ask(library) == 42  # what is loaded is not the file
    loaded: list[bytes] = []
    original = build_module._load_from_memory

    def load(data: bytes, name: str) -> ctypes.CDLL | None:
        loaded.append(data)
        return original(data, name)

    monkeypatch.setattr(build_module, "_load_from_memory", load)
    assert _ask(_again(cache, monkeypatch)) == 42
    assert len(loaded) == 1 and loaded[0].startswith(b"\x7fELF")
    assert len(cache.why()) >= 2
    assert _ask(_again(cache, monkeypatch)) == 42


def test_every_record_damaged(tmp_path: Path) -> None:
    for text in ("", "null", "[]", "{}", '{"format": 1}', '{"format": 1, "size": 1, "sha256": 7}', "\xff"):
        cache = Cache(tmp_path / "cache")
        path = cache.put(KEY, ".json", b"7")
        assert path is not None
        path.with_name(path.name + ".meta").write_text(text)
        assert cache.get_json(KEY) is None, text
    path = cache.put(KEY, ".json", b"not json")
    assert cache.get_json(KEY) is None


# ---------------------------------------------------------------- other processes

WRITER = """
import os, sys
from hotloop.runtime.cache import Cache
cache = Cache(sys.argv[1])
print("ready", flush=True)
index = 0
while True:
    index += 1
    cache.put(f"{index % 7:064x}", ".bin", bytes([index % 251]) * 200_000)
"""


def _read(folder: Path, index: int) -> None:
    """One of several processes: what all build, what half of them build, again and again."""
    builder = Builder(find_toolchain(), Cache(folder), workers=1)
    for turn in range(3):
        build_module._LOADED.clear()
        values = [index % 2, 10 + turn]
        texts = [TEXT.replace("42", str(value)) for value in values]
        libraries = builder.build([Source(f"answer_{i}", text) for i, text in enumerate(texts)])
        assert [_ask(library) for library in libraries] == values


def _start(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_killed_writer_leaves_whole_files(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    process = _start(WRITER, str(folder))
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.3)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    cache = Cache(folder)
    found = [cache.get(f"{index:064x}", ".bin") for index in range(7)]
    assert [data for data in found if data is not None]
    assert all(data is None or (len(data) == 200_000 and len(set(data)) == 1) for data in found)
    for path in (folder / "tmp").iterdir():
        os.utime(path, (0, 0))
    (folder / "tmp" / "a_scratch_folder").mkdir()
    os.utime(folder / "tmp" / "a_scratch_folder", (0, 0))
    cache.sweep()
    assert list((folder / "tmp").iterdir()) == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_eight_processes_on_one_cache(tmp_path: Path) -> None:
    children = []
    for index in range(8):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                warnings.simplefilter("error")
                _read(tmp_path / "cache", index)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 8
    assert len(list((tmp_path / "cache" / "objects").rglob("*.so"))) == 5
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []


@pytest.mark.filterwarnings("error")
def test_the_folder_is_deleted_mid_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache")
    builder = Builder(find_toolchain(), cache, workers=1)
    first = builder.build([Source("answer", TEXT)])[0]
    shutil.rmtree(tmp_path / "cache")
    assert _ask(first) == 42
    second = builder.build([Source("answer", TEXT.replace("42", "46"))])[0]
    assert _ask(second) == 46
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    assert _built_file(tmp_path / "cache").exists()


@pytest.mark.parametrize("memory", [True, False], ids=["from memory", "from a file"])
def test_the_library_is_deleted_between_write_and_load(
    memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not memory:
        monkeypatch.delattr(os, "memfd_create")
    cache = Cache(tmp_path / "cache")
    put = cache.put

    def put_and_lose(key: str, suffix: str, *rest: Any, **named: Any) -> Path | None:
        path = put(key, suffix, *rest, **named)
        if suffix == ".so" and path is not None:
            path.unlink()
        return path

    monkeypatch.setattr(cache, "put", put_and_lose)
    assert _ask(_build(cache)) == 42


def test_libraries_are_loaded_from_files_where_memory_cannot_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    cache = Cache(tmp_path / "cache")
    assert [_ask(_build(cache, TEXT.replace("42", str(value)))) for value in (42, 43)] == [42, 43]
    assert _ask(_again(cache, monkeypatch)) == 42


def test_a_number_of_a_file_that_serves_again_is_another_library(tmp_path: Path) -> None:
    """Each is loaded from a closed file whose number the next one gets."""
    cache = Cache(tmp_path / "cache")
    libraries = [_build(cache, TEXT.replace("42", str(value))) for value in range(8)]
    assert [_ask(library) for library in libraries] == list(range(8))


SLOW = """#!/bin/sh
# A compiler during whose work another process empties the cache.
rm -rf {folder}/tmp
exec g++ "$@"
"""


def test_the_cache_is_cleared_while_the_compiler_works(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(SLOW.format(folder=tmp_path / "cache"))
    compiler.chmod(0o700)
    builder = Builder(find_toolchain(str(compiler)), Cache(tmp_path / "cache"), workers=1)
    assert _ask(builder.build([Source("answer", TEXT)])[0]) == 42


def test_what_a_killed_build_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = Cache(tmp_path / "cache")
    with cache.scratch() as used:
        assert used.parent == tmp_path
        (tmp_path / "hotloop-build-old").mkdir()
        os.utime(tmp_path / "hotloop-build-old", (0, 0))
        os.utime(used, (0, 0))  # the clock may jump while a compiler works
        (tmp_path / "another").mkdir()
        os.utime(tmp_path / "another", (0, 0))
        cache.sweep()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "cache", used.name]
    assert not used.exists()


def test_files_may_not_grow(tmp_path: Path) -> None:
    """The limit of a file's size is met by compiler and cache: an error that says so, and no half file."""
    program = f"""
import resource, sys
from hotloop.errors import ToolchainError
from hotloop.runtime.build import Builder, Source
from hotloop.runtime.cache import Cache
from hotloop.runtime.toolchain import find_toolchain
resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
try:
    Builder(find_toolchain(), Cache(sys.argv[1]), workers=1).build([Source("answer", {TEXT!r})])
except ToolchainError as error:
    assert "no folder to compile" in str(error) and "limit exceeded" in str(error), error
else:
    raise AssertionError("compiled")
"""
    process = _start(program, str(tmp_path / "cache"))
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    assert not list((tmp_path / "cache").rglob("*.so"))
    assert _ask(_build(Cache(tmp_path / "cache"))) == 42


@pytest.mark.parametrize("shift", [-400 * 86400, 400 * 86400], ids=["past", "future"])
def test_the_clock_is_set(shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a time that has not come, or long gone: they are found, and the sweep does its work."""
    cache = Cache(tmp_path / "cache", limit=1 << 30)
    for index in range(8):
        assert cache.put(f"{index:064x}", ".bin", bytes([index]) * 500) is not None
    (tmp_path / "cache" / "tmp" / "left").write_bytes(b"x")
    for path in (tmp_path / "cache").rglob("*"):
        os.utime(path, (time.time() + shift + 2, time.time() + shift))
    assert [cache.get(f"{index:064x}", ".bin") for index in range(8)] == [bytes([i]) * 500 for i in range(8)]
    cache.limit = cache.info().bytes // 2
    cache.sweep()
    assert cache.info().bytes <= 0.8 * cache.limit
    assert cache.put(KEY, ".bin", b"new") is not None and cache.get(KEY, ".bin") == b"new"
    assert _ask(_build(cache)) == 42
    real = time.time
    with monkeypatch.context() as patch:  # and once more, between one look-up and the next
        patch.setattr(cache_module.time, "time", lambda: real() - shift)
        assert cache.get(KEY, ".bin") == b"new" or cache.put(KEY, ".bin", b"new") is not None
        assert _ask(_again(cache, monkeypatch)) == 42
        cache.sweep()
