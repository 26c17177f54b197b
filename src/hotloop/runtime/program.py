"""The running program: what the generated host text calls, and the object that holds it all together.

What comes in: the host text, the loaded kernels, the constants, the memory pool. What goes out: a callable
that takes the graph's inputs as a list and returns its outputs as a list. What holds in between: a call is
thread-safe and re-entrant, since each takes an arena of its own; a fault that a kernel found in the data is
raised as the error that eager raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hotloop import compat
from hotloop.codegen.cpp import read_status
from hotloop.errors import IndexRangeError, IntegerDivisionError, ProbabilityError, ResultShapeError
from hotloop.ir.sizes import MOST
from hotloop.runtime.backing import Backing
from hotloop.runtime.changes import LOOK_NAME
from hotloop.runtime.packing import Convolution, Kept, Packer, Panels, Weights
from hotloop.runtime.pool import OutputPool, give_back

__all__ = ["Runtime", "load_program", "profiled"]

#: Arenas of one program kept for the next calls: more than this only while as many calls run at once.
KEPT_FRAMES = 2

Call = Callable[[Sequence[Any]], list[Any]]


class Runtime:
    """What a host program may ask for; one a program. Its methods are called while the program is set up,
    except ``fault``, ``large``, ``restride``, ``pooled`` and ``empty``, which the calls themselves use."""

    def __init__(
        self,
        kernels: Mapping[str, Any],
        constants: Mapping[str, torch.Tensor],
        objects: Sequence[Any],
        pool: OutputPool,
        keep_memory: bool = True,
        shared: Kept | None = None,
        backing: Backing | None = None,
    ) -> None:
        self._kernels = kernels
        self._constants = constants
        self._objects = objects
        self._keep = keep_memory
        self._shared = Kept() if shared is None else shared
        self._backing = backing
        self.pooled = pool.empty
        self.empty = compat.empty_strided_cpu
        self._pool = pool
        self.kept_frames: list[Any] = []
        #: What runs a call with sizes larger than ``sizes.MOST``, where sizes vary.
        self.otherwise: Callable[[list[Any]], Any] | None = None
        self._spare = torch.zeros(8, dtype=torch.int64)
        #: An address that may be read, for tensors without elements.
        self.nothing = self._spare.data_ptr()

    def kernel(self, name: str) -> Any:
        """The compiled function; its arguments are addresses."""
        return self._kernels[name]

    def large(self, args: list[Any]) -> Any:
        """A call with sizes that this program is not for."""
        if self.otherwise is None:
            raise ValueError(f"a size is larger than {MOST}: compile this program for larger ones")
        return self.otherwise(args)

    def constant(self, name: str) -> torch.Tensor:
        """A tensor of the graph module."""
        return self._constants[name]

    def object(self, number: int) -> Any:
        """An object that has no literal form in the text."""
        return self._objects[number]

    def convolution(self, *numbers: Any, read: bool = False) -> Convolution:
        """A convolution that may keep its weight in blocks; see ``Convolution`` for the numbers. ``read``:
        the program reads the plain weight too."""
        return Convolution(self._kernels[LOOK_NAME], self._shared, None if read else self._backing, *numbers)

    def panels(self, *numbers: Any, read: bool = False) -> Panels:
        """A weight that is kept in panels; see ``Panels`` for the numbers, and above for ``read``."""
        return Panels(self._kernels[LOOK_NAME], self._shared, None if read else self._backing, *numbers)

    def weights(self, *packers: Packer) -> Weights:
        """All weights that the program keeps packed."""
        return Weights(self._kernels[LOOK_NAME], packers)

    def arena(self, nbytes: int, old: torch.Tensor | None = None) -> torch.Tensor:
        """Uninitialised bytes, aligned to a cache line: those of an old arena where it is large enough, and
        not much too large."""
        if old is not None and nbytes <= old.numel() <= max(4 * nbytes, 1 << 20):
            return old
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8)

    @staticmethod
    def release(address: int, nbytes: int) -> None:
        """Give the pages of dead memory back to the system before the memory itself is freed."""
        give_back(address, nbytes)

    def frames(self, new: Callable[[], Any], nbytes: int) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        """``take`` and ``give`` of arenas with their views. Appending to and popping from a list are
        atomic."""
        kept = self.kept_frames
        keep = KEPT_FRAMES if self._keep and nbytes <= self._pool.limit else 0

        def take() -> Any:
            try:
                return kept.pop()
            except IndexError:
                return new()

        def give(frame: Any) -> None:
            if len(kept) < keep:
                kept.append(frame)

        return take, give

    def sized_frames(
        self, new: Callable[..., Any]
    ) -> tuple[Callable[..., Any], Callable[[tuple[Any, Any]], None]]:
        """``take`` and ``give`` of arenas for sizes that vary: a frame of these sizes, or one made over the
        memory of another that nobody uses. A frame begins with its arena."""
        kept = self.kept_frames

        def take(*sizes: int) -> tuple[Any, Any]:
            try:
                found, frame = kept.pop()
            except IndexError:
                return sizes, new(None, *sizes)
            return (found, frame) if found == sizes else (sizes, new(frame[0], *sizes))

        def give(item: tuple[Any, Any]) -> None:
            if self._keep and len(kept) < KEPT_FRAMES and item[1][0].numel() <= self._pool.limit:
                kept.append(item)

        return take, give

    @staticmethod
    def view(
        arena: torch.Tensor, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor at a byte offset of an arena."""
        with torch.inference_mode(False):
            typed = arena[: arena.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            return typed.as_strided(sizes, strides, offset // dtype.itemsize)

    @staticmethod
    def retype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor's whole storage under another dtype, flat."""
        flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        usable = (
            flat.numel() * tensor.element_size() // dtype.itemsize * dtype.itemsize // tensor.element_size()
        )
        return flat[:usable].view(dtype)

    @staticmethod
    def restride(
        tensor: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], operator: str
    ) -> torch.Tensor:
        """A copy with the strides that the kernels expect. Dimensions of size 1 may have any: they need no
        copy. Other sizes are an error, for kernels would read beyond the result."""
        if tensor.shape != sizes:
            raise ResultShapeError(
                f"{operator} gave a result of sizes {list(tensor.shape)}, where PyTorch announced "
                f"{list(sizes)} to compilers: leave the call out of the graph with torch.compiler.disable; "
                "where inputs that are written shared memory in an earlier call, and do so no longer, copy "
                "them first"
            )
        same = all(s <= 1 or a == b for s, a, b in zip(sizes, tensor.stride(), strides, strict=True))
        if same or math.prod(sizes) == 0:
            return tensor
        return torch.empty_strided(sizes, strides, dtype=tensor.dtype).copy_(tensor)

    @staticmethod
    def results(value: Any) -> Sequence[Any]:
        """What an operator gave, as a sequence without nesting."""
        if not isinstance(value, (tuple, list)):
            return (value,)
        if not any(isinstance(part, (tuple, list)) for part in value):
            return value
        return [leaf for part in value for leaf in Runtime.results(part)]

    @staticmethod
    def fault(status: int, kernel: str, places: Sequence[str]) -> None:
        """Raise what eager raises for the fault that a kernel reports."""
        error, found = read_status(status)
        at = f" in one of the operators of {kernel}:" + "".join(f"\n  {place}" for place in places)
        if error == 1:
            what = "an index is out of bounds"
            if found is not None:
                what = f"index {found[0]} is out of bounds for a dimension with size {found[1]},"
            raise IndexRangeError(what + at)
        if error == 2:
            raise IntegerDivisionError("ZeroDivisionError" + at)
        raise ProbabilityError("a probability is outside [0, 1]" + at)


def profiled(kernel: Callable[..., int], row: str) -> Callable[..., int]:
    """A kernel whose calls are a row of their own in ``torch.profiler``."""

    def call(*args: Any) -> int:
        with torch.profiler.record_function(row):
            return kernel(*args)

    return call


def load_program(text: str, filename: str, runtime: Runtime) -> Call:
    """Execute a host text and give its callable."""
    namespace: dict[str, Any] = {"__name__": "hotloop_generated"}
    exec(compile(text, filename, "exec"), namespace)
    call: Call = namespace["build"](runtime)
    # It may hold no more than the addresses of constants and of ``nothing``: they live as long as it does.
    call.__dict__["runtime"] = runtime
    return call
