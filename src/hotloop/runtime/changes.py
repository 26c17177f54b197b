"""Whether weights have changed since they were last looked at.

What comes in: weights, at each call. What goes out: yes or no. What holds in between: a weight is the same
only as long as the tensor is the same object at the same address, with the same version counter and the same
contents at some places. The version counter sees every update in place that autograd sees; the places see
those made behind its back (``weight.data += ...``), unless they change a few elements alone. A tensor of
inference mode has no version counter: all of its memory is compared.

The next file is ``packing.py``.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["FINGERPRINT", "FINGERPRINT_NAME", "Fingerprint", "Seen", "keep_private"]

FINGERPRINT_NAME = "hotloop_fingerprint"

#: A number that hardly ever stays the same when memory changes at one of the places that a row names: rows of
#: address, bytes, and places of eight bytes, at equal distances but for the last one; all memory counts
#: where there is little of it, and where a row names no places. Multiply and shift, as in the finaliser of
#: MurmurHash3 (Austin Appleby). What a look costs is the way to memory, page tables included, so that all
#: places are asked for before the first is waited for.
FINGERPRINT = f"""\
extern "C" i64 {FINGERPRINT_NAME}(const i64* rows, i64 count) {{
    typedef u64 word __attribute__((aligned(1), may_alias));
    for (i64 r = 0; r < count; r++)
        for (i64 i = 0, places = rows[3 * r + 2]; i < places; i++)
            __builtin_prefetch((const u8*)rows[3 * r] + rows[3 * r + 1] / places * i);
    u64 hash = (u64)count;
    for (i64 r = 0; r < count; r++) {{
        const u8* memory = (const u8*)rows[3 * r];
        i64 bytes = rows[3 * r + 1], places = rows[3 * r + 2], i = 0;
        hash ^= (u64)bytes;
        if (places && bytes > 8 * places) {{
            for (i64 step = bytes / places; i < places; i++) {{
                const u8* place = memory + (i + 1 < places ? step * i : bytes - 8);
                hash = (hash ^ *(const word*)place) * 0xff51afd7ed558ccdull;
                hash ^= hash >> 33;
            }}
            continue;
        }}
        u64 part[4] = {{1, 2, 3, 4}};
        for (; i + 32 <= bytes; i += 32)
            for (i64 k = 0; k < 4; k++) {{
                part[k] = (part[k] ^ ((const word*)(memory + i))[k]) * 0xff51afd7ed558ccdull;
                part[k] ^= part[k] >> 33;
            }}
        for (; i < bytes; i++)
            hash = (hash ^ memory[i]) * 0xff51afd7ed558ccdull;
        for (i64 k = 0; k < 4; k++)
            hash = (hash ^ part[k]) * 0xff51afd7ed558ccdull;
        hash ^= hash >> 33;
    }}
    return (i64)hash;
}}
"""

#: The compiled function: the address of rows and how many they are.
Fingerprint = Callable[[int, int], int]


def keep_private(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor that nobody else has: it stays as it is without being looked at."""
    tensor._hotloop_private = True  # type: ignore[attr-defined]
    return tensor


@dataclass(frozen=True)
class Seen:
    """The state that some weights were in: each with its address and version, and the fingerprint of
    ``count`` rows at ``address``. A private weight has no row, and is compared by identity alone."""

    weights: tuple[tuple[weakref.ref[torch.Tensor], int | None, int | None], ...]
    rows: array[int]
    address: int
    count: int
    fingerprint: int

    @staticmethod
    def of(weights: Sequence[torch.Tensor], fingerprint: Fingerprint, places: int) -> Seen:
        """The state that weights are in; their contents at so many places tell it."""
        known: list[tuple[weakref.ref[torch.Tensor], int | None, int | None]] = []
        rows = array("q")
        for weight in weights:
            if getattr(weight, "_hotloop_private", False):
                known.append((weakref.ref(weight), None, None))
                continue
            version = None if weight.is_inference() else weight._version
            known.append((weakref.ref(weight), weight.data_ptr(), version))
            rows.extend((weight.data_ptr(), weight.nbytes, 0 if version is None else places))
        address, count = rows.buffer_info()[0], len(rows) // 3
        return Seen(tuple(known), rows, address, count, fingerprint(address, count))

    def still(self, weights: Sequence[torch.Tensor], fingerprint: Fingerprint) -> bool:
        """Whether these are the tensors that were seen, with nothing written to them since."""
        for (known, address, version), weight in zip(self.weights, weights):  # noqa: B905 - it takes time
            if (
                known() is not weight
                or (address is not None and address != weight.data_ptr())
                or (version is not None and version != weight._version)
            ):
                return False
        return not self.count or self.fingerprint == fingerprint(self.address, self.count)
