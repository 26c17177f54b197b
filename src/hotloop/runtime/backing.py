"""Weights on disk: the memory of a plain weight is given back while its packed copy serves.

What comes in: a weight of which a program reads a packed copy only. What goes out: how many bytes of memory
were given back. What holds in between: the weight stays what it is, for everybody, at the same address. Its
whole pages become a private mapping of a file without a name: a read brings a page back from
disk, a write makes the page memory again, and the file goes with the last page that shows it. So a parameter,
its views, ``state_dict``, a copy, an update or C code with a pointer never see a difference.

Only memory that is nobody else's in any sense is replaced: anonymous and private, as ``/proc/self/maps`` says
it, neither shared with other processes nor pinned nor mapped from a file already. A write from another thread
in the moment of the replacement could be lost: what was written to the file is compared with the memory
before it takes its place. Linux only; elsewhere, and on a full disk or one that is memory itself, weights
stay.

The next file is ``packing.py``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import threading
import warnings
import weakref
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from hotloop import compat
from hotloop.runtime.changes import Seen
from hotloop.runtime.pool import give_back, whole_pages

__all__ = ["LEAST", "Backing"]

#: Fewer bytes are not worth a file.
LEAST = 1 << 16

#: <sys/mman.h> of Linux.
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
#: <linux/magic.h>: file systems that are memory.
_TMPFS, _RAMFS = 0x01021994, 0x858458F6


@dataclass
class _Record:
    """Pages of one weight that show a file. ``storage`` keeps the memory from being freed as it is."""

    first: int
    nbytes: int
    file: tuple[int, int]
    storage: torch.UntypedStorage
    version: int


class Backing:
    """What a process has given back. Safe under threads: who finds it busy leaves the weight as it is.

    Arguments:
        folder: where files are made; on a disk.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._records: dict[int, _Record] = {}
        self._orphans: list[_Record] = []  # of weights that are gone
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._failed = not sys.platform.startswith("linux")

    @property
    def given_back(self) -> int:
        """The bytes of all pages that show a file, whether or not somebody has read or written them since."""
        self._tidy()
        return sum(r.nbytes for r in [*self._records.values(), *self._orphans])

    def release(self, weight: torch.Tensor, seen: Seen) -> None:
        """Give the memory of a weight back, which fills it from its first to its last byte. Later calls
        look at it as ``seen`` does: no more than that comes back at once."""
        if self._failed or weight.is_inference():  # an inference tensor is compared whole at each call
            return
        if self._pid != os.getpid():  # a thread of the parent may have held it at the fork
            self._lock, self._pid = threading.Lock(), os.getpid()
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._tidy()
            self._release(weight, seen)
        except OSError as error:
            self._failed = True
            warnings.warn(f"weights stay in memory beside their packed copies: {error}", RuntimeWarning, 2)
        finally:
            self._lock.release()

    def _release(self, weight: torch.Tensor, seen: Seen) -> None:
        first, nbytes = whole_pages(weight.data_ptr(), weight.nbytes)
        known = self._records.get(id(weight))
        if known is not None and known.first == first and known.version == weight._version:
            return
        if known is not None and known.first != first:
            self._forget(id(weight))
            known = None
        if nbytes < LEAST or weight.is_shared() or weight.is_pinned():  # type: ignore[no-untyped-call]
            return
        if not _is_own(first, nbytes, known.file if known is not None else None):
            return
        version = weight._version
        file = _replace(first, nbytes, self._folder)
        if file is None:
            return
        if known is None:
            storage = weight.untyped_storage()
            weakref.finalize(weight, self._forget, id(weight)).atexit = False
            self._records[id(weight)] = _Record(first, nbytes, file, storage, version)
        else:
            known.file, known.version = file, version
        # Without this, the system would read the neighbourhood of each place too.
        libc = _libc()
        libc.madvise(first, nbytes, mmap.MADV_RANDOM)
        seen.still((weight,))
        libc.madvise(first, nbytes, mmap.MADV_NORMAL)

    def _forget(self, key: int) -> None:
        """A weight is going: as long as this is told, it still has its memory."""
        record = self._records.pop(key, None)
        if record is not None:
            self._orphans.append(record)

    def _tidy(self) -> None:
        """Memory that nobody has any more becomes ordinary memory before it is freed: whoever gets it next
        shall not wait for a disk."""
        for _ in range(len(self._orphans)):
            record = self._orphans.pop(0)
            if _owners(record) != _alone():
                self._orphans.append(record)
                continue
            start = record.storage.data_ptr()
            if not start <= record.first <= record.first + record.nbytes <= start + record.storage.nbytes():
                continue  # `share_memory_` and `resize_` put other memory in the place of a storage's own
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            place = _libc().mmap(None, record.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
            if place != _FAILED:
                _move(place, record.first, record.nbytes)


def _owners(record: _Record) -> tuple[int, int, int]:
    """Who holds the memory of a record: storages and tensors, Python names, weak references."""
    storage = record.storage
    return compat.storage_use_count(storage), sys.getrefcount(storage), weakref.getweakrefcount(storage)


@cache
def _alone() -> tuple[int, int, int]:
    """The owners of a record's memory when nobody else has it: they differ between versions of torch."""
    return _owners(_Record(0, 0, (0, 0), torch.empty(1).untyped_storage(), 0))


def _is_own(first: int, nbytes: int, file: tuple[int, int] | None) -> bool:
    """Whether memory is private to this process, and no file's but ``file`` (device and inode)."""
    reached = first
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            span, access, _, device, inode, *_ = line.split()
            start, stop = (int(word, 16) for word in span.split("-"))
            if stop <= reached or start >= first + nbytes:
                continue
            major, minor = (int(word, 16) for word in device.split(":"))
            mine = (os.makedev(major, minor), int(inode)) == file
            if start > reached or access != "rw-p" or not (mine or int(inode) == 0):
                return False
            reached = stop
    return reached >= first + nbytes


def _replace(first: int, nbytes: int, folder: str) -> tuple[int, int] | None:
    """Pages of a file in the place of memory, and the file's device and inode; ``None`` where the memory was
    written meanwhile."""
    libc = _libc()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        number = file.fileno()
        if _is_memory(number):
            raise OSError(f"{folder} is in memory itself")
        memory = memoryview((ctypes.c_char * nbytes).from_address(first)).cast("B")
        done = 0
        while done < nbytes:
            done += os.write(number, memory[done : done + (1 << 30)])
        os.fsync(number)
        place = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, number, 0)
        if place == _FAILED:
            raise OSError(ctypes.get_errno(), "mmap")
        same = libc.memcmp(place, first, nbytes) == 0
        give_back(place, nbytes)
        os.posix_fadvise(number, 0, nbytes, os.POSIX_FADV_DONTNEED)
        if not same:
            libc.munmap(place, nbytes)
            return None
        _move(place, first, nbytes)
        found = os.fstat(number)
        return found.st_dev, found.st_ino


def _move(place: int, first: int, nbytes: int) -> None:
    """The pages at ``place`` take those at ``first`` away, in one step."""
    libc = _libc()
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    if libc.mremap(place, nbytes, nbytes, flags, ctypes.c_void_p(first)) == _FAILED:
        number = ctypes.get_errno()
        libc.munmap(place, nbytes)
        raise OSError(number, "mremap")


def _is_memory(number: int) -> bool:
    """Whether an open file lies on a file system that is memory."""
    found = (ctypes.c_long * 64)()  # struct statfs, whose first member is the type
    return _libc().fstatfs(number, found) == 0 and found[0] & 0xFFFFFFFF in (_TMPFS, _RAMFS)


_FAILED = ctypes.c_void_p(-1).value


@cache
def _libc() -> Any:
    """The C library, with the types of what is called here."""
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype, libc.mmap.argtypes = pointer, [pointer, size, number, number, number, ctypes.c_int64]
    libc.mremap.restype, libc.mremap.argtypes = pointer, [pointer, size, size, number]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    libc.memcmp.argtypes = [pointer, pointer, size]
    libc.fstatfs.argtypes = [number, pointer]
    return libc
