"""Weights in the library's own blocks, kept from call to call until the weight changes.

What comes in: the arguments of a convolution at each call. What goes out: its result. What holds in between:
a weight is packed when two calls in a row saw it unchanged, and the packed copy serves only as long as the
tensor is the same object at the same address, with the same version counter and the same contents at
``SAMPLES`` places. The version counter sees every update in place that autograd sees; the places see those
made behind its back (``weight.data += ...``), unless they change a few elements alone. A weight that is new
at every call is never packed, and costs a comparison.

The next file is ``program.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hotloop import compat

__all__ = ["FINGERPRINT", "FINGERPRINT_NAME", "SAMPLES", "Convolution"]

#: Places of eight bytes, at equal distances from the first to the last, that tell whether a weight changed.
SAMPLES = 32

FINGERPRINT_NAME = "hotloop_fingerprint"

#: A number that hardly ever stays the same when the memory at one of the places changes: multiply and shift,
#: as in the finaliser of MurmurHash3 (Austin Appleby). All memory counts where there is little.
FINGERPRINT = f"""\
extern "C" i64 {FINGERPRINT_NAME}(const u8* memory, i64 bytes) {{
    typedef u64 word __attribute__((aligned(1), may_alias));
    u64 hash = (u64)bytes;
    i64 last = bytes - 8;
    if (bytes <= {8 * SAMPLES}) {{
        for (i64 i = 0; i < bytes; i++)
            hash = (hash ^ memory[i]) * 0xff51afd7ed558ccdull;
        return (i64)(hash ^ (hash >> 33));
    }}
    for (i64 i = 0; i < {SAMPLES}; i++) {{
        hash = (hash ^ *(const word*)(memory + last * i / {SAMPLES - 1})) * 0xff51afd7ed558ccdull;
        hash ^= hash >> 33;
    }}
    return (i64)hash;
}}
"""

Fingerprint = Callable[[int, int], int]


@dataclass(frozen=True)
class _Seen:
    """What tells one state of a weight from another."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    address: int
    fingerprint: int

    def still(self, weight: torch.Tensor, fingerprint: Fingerprint, nbytes: int) -> bool:
        """Whether ``weight`` is the tensor that was seen, with nothing written to it since."""
        return (
            self.tensor() is weight
            and self.version == weight._version
            and self.address == weight.data_ptr()
            and self.fingerprint == fingerprint(self.address, nbytes)
        )


class Convolution:
    """One convolution of a program: its numbers, and its weight in blocks once that has settled.

    Safe under threads: what is kept is replaced as a whole, and the worst that two calls at once can do is to
    pack the same weight twice.
    """

    def __init__(
        self,
        fingerprint: Fingerprint,
        sizes: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> None:
        self._fingerprint = fingerprint
        self._sizes = list(sizes)
        self._numbers = (list(padding), list(stride), list(dilation), groups)
        self._plain = (list(stride), list(padding), list(dilation), False, [0, 0], groups)
        self._seen: _Seen | None = None
        self._kept: tuple[_Seen, torch.Tensor] | None = None
        self._packable = True

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` (N, C, H, W) in channels-last memory; weight (O, C / groups, KH, KW); bias (O,) or none."""
        kept = self._kept
        if kept is not None and kept[0].still(weight, self._fingerprint, weight.nbytes):
            return compat.packed_convolution(x, kept[1], bias, *self._numbers)
        packed = self._pack(weight) if self._packable else None
        if packed is None:
            plain: torch.Tensor = torch.ops.aten.convolution.default(x, weight, bias, *self._plain)
            return plain
        return compat.packed_convolution(x, packed, bias, *self._numbers)

    @property
    def kept_bytes(self) -> int:
        """The bytes of the packed copy, 0 without one."""
        kept = self._kept
        return 0 if kept is None else compat.packed_bytes(kept[1])

    def _pack(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The packed weight, or ``None`` where it is not known to have settled or cannot be packed."""
        if weight.is_inference() or not compat.can_pack_convolution(weight.dtype):
            self._packable = False  # no version counter, or no instructions for this dtype
            return None
        self._kept = None
        seen = self._seen
        if seen is None or not seen.still(weight, self._fingerprint, weight.nbytes):
            address = weight.data_ptr()
            print_ = self._fingerprint(address, weight.nbytes)
            self._seen = _Seen(weakref.ref(weight), weight._version, address, print_)
            return None
        packed = compat.pack_convolution_weight(weight, self._sizes, *self._numbers)
        self._kept = (seen, packed)
        return packed
