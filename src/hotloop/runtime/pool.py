"""Memory that serves again: outputs nobody holds any more, and arenas for intermediates.

In: sizes, strides, dtype. Out: a fresh tensor object, over used memory where there is some. What holds:
memory is handed out again only when the pool is its sole owner, so a tensor that a caller got is never
written by a later call; the bytes that the pool knows of stay under its limit. Next: program.py, which calls
it.

Why: a fresh output of 32 MiB costs a page fault for every 4 KiB, more than the arithmetic that fills it.
PyTorch's allocator gives such memory back to the system at each free; the pool does not.

When it pays: measured on 16 cores, torch 2.11, neg(x) into the output, the last output held as `y = f(x)` in
a loop holds it: at 2 MiB 251 us in fresh memory and 20 in the pool's, at 8 MiB 527 and 83, at 32 MiB 2893
and 267; at 1 MiB and less 14 and 17, for a pooled tensor costs 2 to 5 us more to make. With the last output
dropped before the call, the allocator itself serves the same pages again up to 31 MiB and the pool gains
nothing; from 32 MiB on it never does (8193 page faults a call, none in the pool). Hence the threshold of 1
MiB.

When is the pool the sole owner? A slot keeps one tensor over the memory, the base, which never leaves the
pool, and the storage's Python object. Callers get `base.data`: another tensor over the same storage, with
its own version counter, autograd state and attributes, and no view of anything. Whatever shares the memory
then holds the storage:

    the tensor, its views, detach(), .data, saved tensors of autograd, other C++ owners, and DLPack capsules,
    numpy arrays and memoryviews, which hold the tensor         -> the storage's use count is higher
    untyped_storage(), in a variable or a container             -> its Python reference count is
    a weak reference to it, through which it can be revived     -> getweakrefcount is not zero
    a lazy clone (copy on write), shared memory, resize_()      -> the data pointer or the size differs

The counts of an idle slot are recorded when it is made rather than assumed: they differ between versions of
torch.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from hotloop import compat

# How many held slots of one size a call looks at before it takes fresh memory: a caller that keeps a thousand
# outputs must not make each call slower than the last.
_PROBES = 4
_ARENA_ROUND = 1 << 16

_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14  # <sys/mman.h> of Linux


@dataclass(frozen=True)
class PoolInfo:
    """Bytes in all slots of a pool, bytes nobody else holds, and how many calls were served how."""

    slots: int
    bytes: int
    idle_bytes: int
    reused: int
    fresh: int


class _Slot:
    """One storage that the pool knows of, with the counts that it has when nobody else holds it."""

    __slots__ = ("address", "base", "form", "nbytes", "references", "storage", "uses")

    def __init__(self, base: torch.Tensor, form: _Form) -> None:
        self.base = base
        self.form = form
        self.storage = base.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.address = base.data_ptr()
        self.uses = compat.storage_use_count(self.storage)
        self.references = sys.getrefcount(self.storage)

    def idle(self) -> bool:
        return (
            compat.storage_use_count(self.storage) == self.uses
            and sys.getrefcount(self.storage) == self.references
            and not weakref.getweakrefcount(self.storage)
        )

    def sound(self) -> bool:
        """Whether the memory is still what it was; asked of an idle slot only (it ends a copy on write)."""
        return self.base.data_ptr() == self.address and self.storage.nbytes() == self.nbytes

    def shaped(self, form: _Form) -> torch.Tensor:
        """A fresh tensor of this form over the memory."""
        if form != self.form:
            sizes, strides, dtype, _ = form
            base = torch.empty(0, dtype=dtype, device="cpu")
            base.set_(self.storage, 0, sizes, strides)
            self.base, self.form = base, form
        return self.base.data


# Sizes, strides, dtype, and whether inference mode was on: its tensors are of another kind.
_Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]


class OutputPool:
    """Output tensors and arenas on the CPU, over memory that is used again.

    Thread-safe and re-entrant without waiting: a call that finds the pool busy takes fresh memory. That
    includes a call from a destructor that runs in the middle of another call, where any lock would be a
    deadlock.

    Arguments:
        threshold: bytes below which an output is left to PyTorch's allocator (config.memory_pool_threshold).
        limit: bytes of all slots together, held by callers or idle (config.memory_pool_limit). The least
        recently
            used slot is forgotten first; what a caller holds stays his.
        enabled: False gives fresh memory always (config.memory_pool).
    """

    def __init__(self, threshold: int = 1 << 20, limit: int = 1 << 30, enabled: bool = True) -> None:
        self.threshold = threshold
        self.limit = limit if enabled else 0
        self._reset()
        if hasattr(os, "register_at_fork"):
            reference = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _reset_in_child(reference))

    def _reset(self) -> None:
        self._lock = threading.Lock()
        # By size in bytes; in each queue the slot handed out longest ago is first, since it is the likeliest
        # idle.
        self._slots: OrderedDict[int, deque[_Slot]] = OrderedDict()
        self._bytes = 0
        self._reused = 0
        self._fresh = 0

    def empty(
        self, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, nbytes: int
    ) -> torch.Tensor:
        """An uninitialised tensor, as torch.empty_strided(sizes, strides, dtype=dtype) gives.

        `nbytes` is the size of its storage, see `storage_bytes`.
        """
        if nbytes < self.threshold or nbytes > self.limit or not self._lock.acquire(blocking=False):
            return compat.empty_strided_cpu(sizes, strides, dtype)
        try:
            return self._serve((sizes, strides, dtype, torch.is_inference_mode_enabled()), nbytes)
        finally:
            self._lock.release()

    def arena(self, nbytes: int) -> torch.Tensor:
        """Uninitialised bytes for the intermediates of one call, at least `nbytes`; dropping it gives it
        back.

        An arena may be up to twice what was asked, so that graphs of about the same size share one.
        """
        size = -(-nbytes // _ARENA_ROUND) * _ARENA_ROUND
        if nbytes < self.threshold or size > self.limit or not self._lock.acquire(blocking=False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        try:
            larger = sorted(
                kept for kept in self._slots if size < kept <= 2 * size and not kept % _ARENA_ROUND
            )
            for candidate in (size, *larger):
                if any(slot.idle() for slot in itertools.islice(self._slots.get(candidate, ()), _PROBES)):
                    size = candidate
                    break
            return self._serve(((size,), (1,), torch.uint8, torch.is_inference_mode_enabled()), size)
        finally:
            self._lock.release()

    def trim(self) -> None:
        """Give back to the system all memory that nobody else holds."""
        with self._lock:
            for nbytes in list(self._slots):
                held = deque(slot for slot in self._slots[nbytes] if not slot.idle())
                self._bytes -= nbytes * (len(self._slots[nbytes]) - len(held))
                if held:
                    self._slots[nbytes] = held
                else:
                    del self._slots[nbytes]

    def info(self) -> PoolInfo:
        """What the pool holds at this moment."""
        with self._lock:
            slots = [slot for queue in self._slots.values() for slot in queue]
            idle = 0
            for slot in slots:
                idle += slot.nbytes if slot.idle() else 0
            return PoolInfo(len(slots), self._bytes, idle, self._reused, self._fresh)

    # ---------------------------------------------------------------- inside; the lock is held

    def _serve(self, form: _Form, nbytes: int) -> torch.Tensor:
        slot = self._take(nbytes)
        if slot is None:
            sizes, strides, dtype, _ = form
            self._make_room(nbytes)
            slot = _Slot(torch.empty_strided(sizes, strides, dtype=dtype, device="cpu"), form)
            self._fresh += 1
            if slot.nbytes != nbytes:
                return slot.base  # the caller's arithmetic is off: his tensor is right, and not kept
            self._slots.setdefault(nbytes, deque()).append(slot)
            self._bytes += nbytes
        else:
            self._reused += 1
        self._slots.move_to_end(nbytes)
        # Handed out before the lock is released: from here on its use count says that it is held.
        return slot.shaped(form)

    def _take(self, nbytes: int) -> _Slot | None:
        """An idle slot of this size, moved to the end of its queue."""
        queue = self._slots.get(nbytes, deque())
        for _ in range(min(_PROBES, len(queue))):
            slot = queue.popleft()
            if slot.idle() and not slot.sound():
                self._bytes -= nbytes  # its memory was exchanged or shared: no longer ours
                continue
            queue.append(slot)
            if slot.idle():
                return slot
        return None

    def _make_room(self, nbytes: int) -> None:
        """Forget slots, of the size used longest ago first, until `nbytes` more are within the limit."""
        while self._slots and self._bytes + nbytes > self.limit:
            size, queue = next(iter(self._slots.items()))
            if queue:
                queue.popleft()
                self._bytes -= size
            if not queue:
                del self._slots[size]


def storage_bytes(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """The bytes that a tensor of these sizes and strides reaches, as torch.empty_strided allocates them."""
    if 0 in sizes:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))) * itemsize


def _reset_in_child(reference: weakref.ref[OutputPool]) -> None:
    # Another thread of the parent may have held the lock, and its tensors are not ours to wait for.
    pool = reference()
    if pool is not None:
        pool._reset()


@cache
def _advise() -> Callable[[ctypes.c_void_p, ctypes.c_size_t, int], int] | None:
    """`madvise` of the C library, on Linux; elsewhere its advice means something else."""
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[[ctypes.c_void_p, ctypes.c_size_t, int], int] | None
    found = getattr(ctypes.CDLL(None), "madvise", None)
    return found


def whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """Where the whole pages of `nbytes` at `address` begin, and their bytes: 0 or less for none."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start


def give_back(address: int, nbytes: int) -> None:
    """Give the whole pages of `nbytes` at `address` back to the system; their contents are lost.

    The memory stays its owner's, and costs a page fault when it is touched again.
    """
    _advise_pages(address, nbytes, _MADV_DONTNEED)


def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Ask for pages of 2 MiB under memory that nobody has touched yet and that is read again and again."""
    _advise_pages(address, nbytes, _MADV_HUGEPAGE)


def _advise_pages(address: int, nbytes: int, advice: int) -> None:
    advise = _advise()
    start, whole = whole_pages(address, nbytes)
    if advise is not None and whole > 0:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(whole), advice)
