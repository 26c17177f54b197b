"""Whether weights have changed since they were last looked at.

What comes in: weights, at each call. What goes out: yes or no. What holds in between: a weight is the same
only as long as the tensor is the same object at the same address, with the same version counter and the same
contents at some places. The version counter sees every update in place that autograd sees; the places see
those made behind its back (``weight.data += ...``), unless they change a few elements alone. A tensor of
inference mode has no version counter: all of its memory is compared.

A look at any number of weights is one call of a compiled function, which asks the tensors themselves where
torch has functions for that (see ``compat.tensor_calls``): 0.06 us a weight, where Python takes 0.3.

The next file is ``packing.py``.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotloop import compat

__all__ = ["LOOK", "LOOK_NAME", "Look", "Seen", "bind_look", "keep_private"]

LOOK_NAME = "hotloop_look"

#: Words of a state before its rows, and of a row; see below.
_HEAD, _ROW = 6, 5

#: A number that hardly ever stays the same when memory changes at one of the places that a state names, or
#: another number than the one noted there where weights are others than those noted.
#:
#: A state is: the number to find; how many rows; what ``TensorCalls`` says of handles and functions. A row is
#: the address of the tensor's Python object; address and bytes of its memory; its version, or -1; places of
#: eight bytes, at equal distances but for the last one: all memory counts where there is little of it, and
#: where a row names no places; a tensor that nobody else writes has -1. Multiply and shift, as in the
#: finaliser of MurmurHash3 (Austin Appleby). What a look costs is the way to memory, page tables included, so
#: that places are asked for two rows before they are waited for.
LOOK = f"""\
extern "C" i64 {LOOK_NAME}(const i64* state, const i64* weights) {{
    typedef u64 word __attribute__((aligned(1), may_alias));
    const i64* rows = state + {_HEAD};
    i64 count = state[1], handle = state[2], different = ~state[0];
    if (weights) {{
        auto is_inference = (bool (*)(const void*))state[3];
        auto version_of = (i64 (*)(const void*))state[4];
        auto data_of = (int (*)(const void*, void**))state[5];
        for (i64 r = 0; r < count; r++) {{
            const i64* row = rows + {_ROW} * r;
            if (weights[r] != row[0])
                return different;
            if (row[4] < 0)
                continue;
            const void* tensor = (const u8*)row[0] + handle;
            void* memory = 0;
            if (is_inference(tensor) != (row[3] < 0) || data_of(tensor, &memory) || (i64)memory != row[1])
                return different;
            if (row[3] >= 0 && version_of(tensor) != row[3])
                return different;
        }}
    }}
    u64 hash = (u64)count;
    for (i64 r = -2; r < count; r++) {{
        if (r + 2 < count) {{
            const i64* row = rows + {_ROW} * (r + 2);
            for (i64 i = 0, places = row[4], step = places ? row[2] / places : 0; i < places; i++)
                __builtin_prefetch((const u8*)row[1] + step * i);
        }}
        if (r < 0)
            continue;
        const i64* row = rows + {_ROW} * r;
        const u8* memory = (const u8*)row[1];
        i64 bytes = row[2], places = row[4], i = 0;
        u64 part[4] = {{1, 2, 3, 4}};
        hash ^= (u64)bytes;
        if (places && bytes > 8 * places) {{
            i64 step = bytes / places;
            for (; i + 4 < places; i += 4)
                for (i64 k = 0; k < 4; k++) {{
                    part[k] = (part[k] ^ *(const word*)(memory + step * (i + k))) * 0xff51afd7ed558ccdull;
                    part[k] ^= part[k] >> 33;
                }}
            for (; i < places; i++) {{
                hash = (hash ^ *(const word*)(memory + (i + 1 < places ? step * i : bytes - 8)));
                hash *= 0xff51afd7ed558ccdull;
                hash ^= hash >> 33;
            }}
        }} else {{
            for (; i + 32 <= bytes; i += 32)
                for (i64 k = 0; k < 4; k++) {{
                    part[k] = (part[k] ^ ((const word*)(memory + i))[k]) * 0xff51afd7ed558ccdull;
                    part[k] ^= part[k] >> 33;
                }}
            for (; i < bytes; i++)
                hash = (hash ^ memory[i]) * 0xff51afd7ed558ccdull;
        }}
        for (i64 k = 0; k < 4; k++)
            hash = (hash ^ part[k]) * 0xff51afd7ed558ccdull;
        hash ^= hash >> 33;
    }}
    return (i64)hash;
}}
"""

#: The compiled function: the address of a state, and that of the addresses of weights, or 0 to look at the
#: memory alone.
Look = Callable[[int, int], int]


def bind_look(address: int) -> Look:
    """The compiled function at an address. No other thread runs Python meanwhile: memory that a weight shows
    is not exchanged, and freed, while it is read."""
    return ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)(address)


def keep_private(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor that nobody else has: it stays as it is without being looked at."""
    tensor._hotloop_private = True  # type: ignore[attr-defined]
    return tensor


@dataclass(frozen=True, eq=False)
class Seen:
    """The state that some weights were in: the text above says what ``state`` holds, at ``address``.
    A private weight is compared by identity alone. ``gone`` names those that live no
    longer, whose identity another tensor may have got: ``alive`` tells."""

    state: array[int]
    address: int
    fingerprint: int
    look: Look
    calls: compat.TensorCalls | None
    alive: tuple[weakref.ref[torch.Tensor], ...]
    gone: list[Any]

    @staticmethod
    def of(weights: Sequence[torch.Tensor], look: Look, places: int) -> Seen:
        """The state that weights are in; their contents at so many places tell it."""
        calls = compat.tensor_calls()
        told = (
            (0, 0, 0, 0) if calls is None else (calls.handle, calls.is_inference, calls.version, calls.data)
        )
        state = array("q", (0, len(weights), *told))
        gone: list[Any] = []
        alive = tuple(weakref.ref(weight, gone.append) for weight in weights)
        for weight in weights:
            if getattr(weight, "_hotloop_private", False):
                state.extend((id(weight), 0, 0, -1, -1))
            elif weight.is_inference():
                state.extend((id(weight), weight.data_ptr(), weight.nbytes, -1, 0))
            else:
                state.extend((id(weight), weight.data_ptr(), weight.nbytes, weight._version, places))
        address, _ = state.buffer_info()
        state[0] = fingerprint = look(address, 0)
        return Seen(state, address, fingerprint, look, calls, alive, gone)

    def still(self, weights: tuple[torch.Tensor, ...]) -> bool:
        """Whether these are the tensors that were seen, as many, with nothing written to them since."""
        if self.gone:
            return False
        if self.calls is not None:
            return self.look(self.address, id(weights) + self.calls.items) == self.fingerprint
        return self._same(weights) and self.look(self.address, 0) == self.fingerprint

    def _same(self, weights: tuple[torch.Tensor, ...]) -> bool:
        """What the compiled function cannot ask here: are objects, addresses and versions those seen?"""
        for weight, at in zip(weights, range(_HEAD, len(self.state), _ROW), strict=True):
            number, address, _, version, places = self.state[at : at + _ROW]
            if id(weight) != number:
                return False
            if places < 0:
                continue
            if weight.is_inference() != (version < 0) or address != weight.data_ptr():
                return False
            if version >= 0 and version != weight._version:
                return False
        return True
