"""What is kept on disk between processes: libraries, their sources, and JSON records.

In: a key (a content hash), bytes. Out: the same bytes, or a miss with its reason. What holds: every file is
read back whole and compared with the sha256 in its record before anybody uses it, so a corrupt, truncated or
half written file is a miss and never loaded; nothing is unpickled; a file appears complete, by rename, or
not at all; no method raises for a fault of the disk, it answers "miss" or "not kept". Next: build.py.

The folder, mode 0700:

    objects/ab/abcd...so        a payload; the suffix says what it is (.so, .cpp, .json)
    objects/ab/abcd...so.meta   its record: size, sha256, name, and the parts its key was made from
    names/<hash>.json           the parts of the last key of one thing, a graph or a source: how a miss
                                knows why
    events.jsonl                one line for each miss, one for each run of hits
    tmp/                        files being written; what a killed process left here is swept later

A folder that another user owns or may write to could hold a library that he put there, so it is not used:
like a folder that cannot be written, it is replaced by a private temporary one, with one warning.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import random
import shutil
import stat
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hotloop.config import CACHE_LIMIT

_FORMAT = 1
_SWEEP_EVERY = 256  # files written between two looks at the size of the cache
_SWEEP_SHARE = 1 / 16  # of the limit: bytes written between two looks
_STALE_SECONDS = 3600.0  # a temporary file this old belongs to a process that was killed
_TOUCH_SECONDS = 600.0  # a use younger than this need not be noted again
_BUILD_PREFIX = "hotloop-build-"  # of the folders that compilers work in
_NEVER = "never compiled before"
_EVENTS_LIMIT = 1 << 20  # bytes of events.jsonl before it becomes events.1.jsonl


@dataclass(frozen=True)
class CacheInfo:
    """What `hotloop cache info` shows; sizes in bytes, with the records; counts since the cache was made or
    cleared."""

    directory: str
    files: int
    bytes: int
    limit: int
    hits: int
    misses: int

    @property
    def hit_rate(self) -> float:
        """Hits per look-up, 0.0 when there was none."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0


@dataclass
class _Counts:
    hits: int = 0
    # How much of what is written between two looks at the size has been written. A random start: many short
    # processes that write a few files each look as often as one long one.
    unseen: float = field(default_factory=random.random)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Cache:
    """A content-addressed store in one folder, safe under many threads and processes.

    Arguments:
        directory: config.cache_dir; created when missing.
        limit: config.cache_limit, bytes above which the least recently used files are removed. All processes
            together may exceed it by about a sixteenth, or 256 files, before one of them looks.
    """

    def __init__(self, directory: str | os.PathLike[str], limit: int = CACHE_LIMIT) -> None:
        self.limit = limit
        self.wanted = Path(directory)
        self._counts = _Counts()
        self._fallback: Path | None = None
        self._warned = False
        problem = _make_private(self.wanted)
        if problem is None:
            problem = _try_writing(self.wanted)
        self.directory = self.wanted
        if problem is not None:
            self.directory = self._use_fallback(problem)
        reference = weakref.ref(self)
        atexit.register(_flush, reference)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: _renew_lock(reference))

    # ---------------------------------------------------------------- look-up

    def get(
        self, key: str, suffix: str, name: str = "", parts: Mapping[str, str] | None = None, of: str = ""
    ) -> bytes | None:
        """The verified bytes of `key`, or None; the miss and its reason are noted under `name`.

        `parts` are the texts that the key was made from, by what they are ("source", "flags", ...). A miss
        says which of them differ from what was last kept `of` the same thing: names are for people, and
        things that have nothing to do with each other may share one. Without `of`, it is the name.
        """
        path = self.path(key, suffix)
        data, reason = self._verified(path)
        if data is None:
            self._note_miss(name or key[:16], suffix, reason or self._why(of or name, parts))
            return None
        self._note_hit(path)
        return data

    def get_json(self, key: str, name: str = "") -> object | None:
        """The JSON value kept under `key`, or None."""
        data = self.get(key, ".json", name)
        if data is None:
            return None
        try:
            value: object = json.loads(data)
        except ValueError:
            return None
        return value

    # ---------------------------------------------------------------- keeping

    def put(
        self,
        key: str,
        suffix: str,
        data: bytes,
        name: str = "",
        parts: Mapping[str, str] | None = None,
        of: str = "",
    ) -> Path | None:
        """Keep `data` under `key`; the path, or None when the disk would not take it."""
        for attempt in (0, 1):
            try:
                return self._write(key, suffix, data, name, parts or {}, of or name)
            except OSError as error:
                # Somebody may have removed the folder under us: make it again, once.
                if attempt or _make_private(self.directory) is not None:
                    self._warn(
                        f"cannot write to the cache folder {self.directory} ({error.strerror or error})"
                    )
        return None

    def put_json(self, key: str, value: object, name: str = "") -> bool:
        """Keep a JSON value under `key`; False when the disk would not take it."""
        return self.put(key, ".json", json.dumps(value).encode(), name) is not None

    def drop(self, key: str, suffix: str) -> None:
        """Forget what is kept under `key`: it turned out to be of no use."""
        self._drop(self.path(key, suffix))

    @contextlib.contextmanager
    def scratch(self, fallback: bool = False) -> Iterator[Path]:
        """A private folder to build in, removed at the end.

        A temporary one that no other process knows of: `clear` in another process must not take a source
        from its compiler. Where there is no room for that, or `fallback` asks for it, it lies in the cache.
        """
        folder: str | None = None
        if not fallback:
            with contextlib.suppress(OSError):
                folder = tempfile.mkdtemp(prefix=f"{_BUILD_PREFIX}{os.getpid()}-")
        if folder is None:
            _make_private(self.directory / "tmp")
            folder = tempfile.mkdtemp(dir=self.directory / "tmp")
        try:
            yield Path(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def private_folder(self) -> Path:
        """A temporary folder of this process alone, for libraries that the cache could not keep."""
        with self._counts.lock:
            if self._fallback is None or not self._fallback.is_dir():
                self._fallback = _temporary_folder()
            return self._fallback

    # ---------------------------------------------------------------- the command line's questions

    def info(self) -> CacheInfo:
        """Sizes and counts, over all processes that used this folder."""
        files = self._entries()
        hits = misses = 0
        for event in self.events():
            if event.get("event") == "hits":
                count = event.get("count")
                hits += count if isinstance(count, int) else 0
            else:
                misses += 1
        payloads = sum(path.parent.name != "names" for path, _, _ in files)
        size = sum(size for _, size, _ in files)
        return CacheInfo(str(self.directory), payloads, size, self.limit, hits, misses)

    def clear(self) -> int:
        """Remove everything kept; the number of files removed. Processes at work go on, with misses."""
        removed = sum(path.parent.name != "names" for path, _, _ in self._entries())
        for name in ("objects", "names", "tmp"):
            shutil.rmtree(self.directory / name, ignore_errors=True)
        for name in ("events.jsonl", "events.1.jsonl"):
            with contextlib.suppress(OSError):
                (self.directory / name).unlink()
        return removed

    def events(self) -> list[dict[str, object]]:
        """What was noted, oldest first: misses with `name`, `kind` and `why`, and counts of hits."""
        self.flush()
        events: list[dict[str, object]] = []
        for name in ("events.1.jsonl", "events.jsonl"):
            try:
                lines = (self.directory / name).read_text(encoding="utf-8", errors="replace").splitlines()
            except OSError:
                continue
            for line in lines:
                with contextlib.suppress(ValueError):  # a line cut short by a full disk
                    event = json.loads(line)
                    if isinstance(event, dict):
                        events.append(event)
        return events

    def why(self) -> list[tuple[str, str]]:
        """The misses, oldest first, as (name, reason)."""
        return [
            (str(event.get("name")), str(event.get("why")))
            for event in self.events()
            if event.get("event") == "miss"
        ]

    def flush(self) -> None:
        """Note the hits counted since the last call."""
        with self._counts.lock:
            hits, self._counts.hits = self._counts.hits, 0
        if hits:
            self._note({"event": "hits", "count": hits})

    # ---------------------------------------------------------------- inside

    def path(self, key: str, suffix: str) -> Path:
        """Where the payload of `key` is, or would be."""
        return self.directory / "objects" / key[:2] / (key + suffix)

    def _verified(self, path: Path) -> tuple[bytes | None, str | None]:
        """The bytes, or why there are none (None: simply not there)."""
        try:
            record = json.loads(_meta(path).read_bytes())
            data = path.read_bytes()
        except FileNotFoundError:
            return None, None
        except (OSError, ValueError) as error:
            self._drop(path)
            return None, f"unreadable: {error}"
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            return None, "written by another version of hotloop"
        if record.get("size") != len(data) or record.get("sha256") != hashlib.sha256(data).hexdigest():
            self._drop(path)
            return None, "corrupt: the file is not what was written"
        return data, None

    def _drop(self, path: Path) -> None:
        for file in (_meta(path), path):
            with contextlib.suppress(OSError):
                file.unlink()

    def _write(
        self, key: str, suffix: str, data: bytes, name: str, parts: Mapping[str, str], of: str
    ) -> Path:
        path = self.path(key, suffix)
        digests = {part: hashlib.sha256(text.encode()).hexdigest() for part, text in parts.items()}
        record = {
            "format": _FORMAT,
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "name": name,
            "parts": digests,
        }
        for folder in (self.directory / "tmp", path.parent):
            _make_folder(folder)
        # The payload first: a record without its payload would be read as corrupt, the other way round as
        # absent.
        self._replace(path, data)
        self._replace(_meta(path), json.dumps(record).encode())
        if of and digests:
            _make_folder(self.directory / "names")
            self._replace(self._last_path(of), json.dumps(digests).encode())
        with self._counts.lock:
            self._counts.unseen += 1 / _SWEEP_EVERY + len(data) / max(1.0, self.limit * _SWEEP_SHARE)
            due = self._counts.unseen >= 1
            if due:
                self._counts.unseen = 0.0
        if due:
            self.sweep(keep=path)
        return path

    def _replace(self, path: Path, data: bytes) -> None:
        handle, temporary = tempfile.mkstemp(dir=self.directory / "tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            if path.suffix == ".so":
                os.chmod(temporary, 0o700)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _last_path(self, of: str) -> Path:
        return self.directory / "names" / (hashlib.sha256(of.encode()).hexdigest()[:32] + ".json")

    def _why(self, of: str, parts: Mapping[str, str] | None) -> str:
        """Why there is nothing with these parts: which of them differ from the last that was kept."""
        if self._fallback is not None and self.directory == self._fallback:
            return "the cache folder cannot be used, so nothing is kept between processes"
        if not of or not parts:
            return _NEVER
        try:
            last = json.loads(self._last_path(of).read_bytes())
        except (OSError, ValueError):
            return _NEVER
        if not isinstance(last, dict):
            return _NEVER
        changed = [
            part
            for part, text in parts.items()
            if last.get(part) != hashlib.sha256(text.encode()).hexdigest()
        ]
        return "changed: " + ", ".join(changed) if changed else "kept once, and removed since"

    def _note_hit(self, path: Path) -> None:
        with self._counts.lock:
            self._counts.hits += 1
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _TOUCH_SECONDS:
                os.utime(path)

    def _note_miss(self, name: str, suffix: str, why: str) -> None:
        self._note({"event": "miss", "name": name, "kind": suffix.lstrip("."), "why": why})

    def _note(self, event: Mapping[str, object]) -> None:
        line = json.dumps({"time": round(time.time(), 3), "pid": os.getpid(), **event}) + "\n"
        path = self.directory / "events.jsonl"
        with contextlib.suppress(OSError):
            # One write of an appending file: lines of several processes do not mix.
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, line.encode())
                full = os.fstat(handle).st_size > _EVENTS_LIMIT
            finally:
                os.close(handle)
            if full:
                os.replace(path, self.directory / "events.1.jsonl")

    def _entries(self) -> list[tuple[Path, int, float]]:
        """Every payload, with the size of it and its record, and every last key; with the time of its last
        use."""
        found = []
        for root in ("objects", "names"):
            for folder, _, names in os.walk(self.directory / root):
                for name in names:
                    path = Path(folder, name)
                    with contextlib.suppress(OSError):
                        status = path.stat()
                        size = status.st_size
                        if name.endswith(".meta"):
                            continue
                        with contextlib.suppress(OSError):
                            size += _meta(path).stat().st_size if root == "objects" else 0
                        found.append((path, size, status.st_mtime))
        return found

    def sweep(self, keep: Path | None = None) -> None:
        """Remove the least recently used down to 80% of the limit, and what killed processes left."""
        files = self._entries()
        total = sum(size for _, size, _ in files)
        if total > self.limit:
            for path, size, _ in sorted(files, key=lambda entry: entry[2]):
                if total <= self.limit * 0.8:
                    break
                if path != keep:
                    self._drop(path)
                    total -= size
        _remove_stale(self.directory / "tmp", "")
        _remove_stale(Path(tempfile.gettempdir()), _BUILD_PREFIX)

    def _use_fallback(self, problem: str) -> Path:
        folder = self.private_folder()
        self._warn(f"{problem}; compiled code is kept in {folder} for this process only")
        return folder

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"hotloop: {problem}. Set HOTLOOP_CACHE_DIR to a folder of your own.",
                RuntimeWarning,
                stacklevel=4,
            )


def digest(parts: Mapping[str, str]) -> str:
    """The key of these named texts: 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def count_reasons(misses: list[tuple[str, str]]) -> list[tuple[str, int]]:
    """How often each reason was given, the most frequent first."""
    return Counter(reason for _, reason in misses).most_common()


def format_bytes(count: int) -> str:
    """A size as a person reads it: "12.5 MiB"."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _meta(path: Path) -> Path:
    return path.with_name(path.name + ".meta")


def _make_folder(path: Path) -> None:
    # Not mkdir(parents=True), which gives the mode to the last folder alone.
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def _make_private(path: Path) -> str | None:
    """Create the folder for this user alone; what is wrong with it, or None."""
    try:
        with contextlib.suppress(FileExistsError):
            _make_folder(path)
        status = path.stat()
    except OSError as error:
        return f"cannot create the cache folder {path} ({error.strerror or error})"
    if not stat.S_ISDIR(status.st_mode):
        return f"the cache folder {path} is a file"
    if sys.platform == "win32":
        return None  # a user's folders are closed to others by their parent's access list
    if status.st_uid != os.geteuid():
        return f"the cache folder {path} belongs to another user"
    if status.st_mode & 0o022:
        return f"the cache folder {path} can be written by others (chmod 700 {path})"
    return None


def _try_writing(path: Path) -> str | None:
    try:
        _make_folder(path / "tmp")
        handle, name = tempfile.mkstemp(dir=path / "tmp")
        os.close(handle)
        os.unlink(name)
    except OSError as error:
        return f"cannot write to the cache folder {path} ({error.strerror or error})"
    return None


def _temporary_folder() -> Path:
    """A folder of this process, removed at its end; in memory when the disk has no room for it."""
    problem: OSError | None = None
    for parent in (None, "/dev/shm"):
        try:
            folder = tempfile.mkdtemp(prefix="hotloop-", dir=parent)
        except OSError as error:
            problem = error
            continue
        atexit.register(_remove_own, folder, os.getpid())
        return Path(folder)
    raise problem or OSError("no temporary folder")


def _remove_stale(folder: Path, prefix: str) -> None:
    """Remove what killed processes of this user left."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if not entry.name.startswith(prefix) or _owner_lives(entry.name):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                own = sys.platform == "win32" or status.st_uid == os.geteuid()
                if not own or time.time() - status.st_mtime <= _STALE_SECONDS:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)


def _owner_lives(name: str) -> bool:
    """Whether the process whose build folder this is still runs: a clock that jumps makes nothing stale."""
    owner = name.removeprefix(_BUILD_PREFIX).partition("-")[0]
    if not name.startswith(_BUILD_PREFIX) or not owner.isdecimal() or sys.platform == "win32":
        return False
    try:
        os.kill(int(owner), 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _flush(reference: weakref.ref[Cache]) -> None:
    cache = reference()
    if cache is not None:
        cache.flush()


def _renew_lock(reference: weakref.ref[Cache]) -> None:
    # Another thread of the parent may have held it at the moment of the fork, and the hits are the parent's.
    cache = reference()
    if cache is not None:
        cache._counts = _Counts()


def _remove_own(folder: str, pid: int) -> None:
    # A forked child inherits the exit handler, but not the folder.
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
