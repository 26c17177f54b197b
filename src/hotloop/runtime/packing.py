"""Weights in blocks, kept from call to call until the weight changes.

What comes in: a weight at each call. What goes out: its panels, or the result of a convolution by it. What
holds in between: a packed copy serves only as long as the tensor is the same object at the same address, with
the same version counter and the same contents at ``SAMPLES`` places. The version counter sees every update in
place that autograd sees; the places see those made behind its back (``weight.data += ...``), unless they
change a few elements alone. A convolution packs a weight when two calls in a row saw it unchanged: one that
is new at every call costs a comparison.

The next file is ``program.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from hotloop import compat
from hotloop.ir.panels import pack_panels

__all__ = [
    "FINGERPRINT",
    "FINGERPRINTS",
    "FINGERPRINTS_NAME",
    "FINGERPRINT_NAME",
    "SAMPLES",
    "Convolution",
    "PackedWeight",
    "Panels",
    "keep_private",
]

#: Places of eight bytes, at equal distances from the first to the last, that tell whether a weight changed.
SAMPLES = 32

FINGERPRINT_NAME = "hotloop_fingerprint"

#: A number that hardly ever stays the same when the memory at one of the places changes: multiply and shift,
#: as in the finaliser of MurmurHash3 (Austin Appleby). All memory counts where there is little.
FINGERPRINT = f"""\
extern "C" i64 {FINGERPRINT_NAME}(const u8* memory, i64 bytes, i64 all) {{
    typedef u64 word __attribute__((aligned(1), may_alias));
    u64 hash = (u64)bytes;
    i64 last = bytes - 8;
    if (all || bytes <= {8 * SAMPLES}) {{
        u64 part[4] = {{1, 2, 3, 4}};
        i64 i = 0;
        for (; i + 32 <= bytes; i += 32)
            for (i64 k = 0; k < 4; k++) {{
                part[k] = (part[k] ^ ((const word*)(memory + i))[k]) * 0xff51afd7ed558ccdull;
                part[k] ^= part[k] >> 33;
            }}
        for (; i < bytes; i++)
            hash = (hash ^ memory[i]) * 0xff51afd7ed558ccdull;
        for (i64 k = 0; k < 4; k++)
            hash = (hash ^ part[k]) * 0xff51afd7ed558ccdull;
        return (i64)(hash ^ (hash >> 33));
    }}
    for (i64 i = 0; i < {SAMPLES}; i++) {{
        hash = (hash ^ *(const word*)(memory + last * i / {SAMPLES - 1})) * 0xff51afd7ed558ccdull;
        hash ^= hash >> 33;
    }}
    return (i64)hash;
}}
"""

Fingerprint = Callable[[int, int, int], int]

FINGERPRINTS_NAME = "hotloop_fingerprints"

#: The same for many weights in one call, at ``FEW`` places of each or, where a row says so, at all: rows of
#: address, bytes, and whether all of them count. What a look costs is the way to memory, page tables
#: included, so that all places are asked for before the first is waited for.
FEW = 4
FINGERPRINTS = (
    FINGERPRINT
    + f"""\
extern "C" i64 {FINGERPRINTS_NAME}(const i64* rows, i64 count) {{
    typedef u64 word __attribute__((aligned(1), may_alias));
    for (i64 r = 0; r < count; r++)
        for (i64 i = 0; i < {FEW}; i++)
            __builtin_prefetch((const u8*)rows[3 * r] + (rows[3 * r + 1] - 1) * i / {FEW - 1});
    u64 hash = (u64)count;
    for (i64 r = 0; r < count; r++) {{
        const u8* memory = (const u8*)rows[3 * r];
        i64 bytes = rows[3 * r + 1], last = bytes - 8;
        if (rows[3 * r + 2] || bytes <= {8 * FEW}) {{
            hash = (hash ^ (u64){FINGERPRINT_NAME}(memory, bytes, 1)) * 0xff51afd7ed558ccdull;
            continue;
        }}
        for (i64 i = 0; i < {FEW}; i++) {{
            hash = (hash ^ *(const word*)(memory + last * i / {FEW - 1})) * 0xff51afd7ed558ccdull;
            hash ^= hash >> 33;
        }}
    }}
    return (i64)(hash ^ (hash >> 33));
}}
"""
)

Fingerprints = Callable[[int, int], int]


def keep_private(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor that nobody else has: it stays as it is without being looked at."""
    tensor._hotloop_private = True  # type: ignore[attr-defined]
    return tensor


@dataclass(frozen=True)
class _Seen:
    """What tells one state of a weight from another. A tensor of inference mode has no version counter
    (``None`` stands for it): all of its memory is compared. A private one is compared by identity alone."""

    tensor: weakref.ref[torch.Tensor]
    version: int | None
    address: int
    nbytes: int
    fingerprint: int
    private: bool = False

    @staticmethod
    def of(weight: torch.Tensor, fingerprint: Fingerprint) -> _Seen:
        """The state that a weight is in."""
        if getattr(weight, "_hotloop_private", False):
            return _Seen(weakref.ref(weight), None, 0, 0, 0, True)
        version = None if weight.is_inference() else weight._version
        address, nbytes = weight.data_ptr(), weight.nbytes
        found = fingerprint(address, nbytes, version is None)
        return _Seen(weakref.ref(weight), version, address, nbytes, found)

    def still(self, weight: torch.Tensor, fingerprint: Fingerprint) -> bool:
        """Whether ``weight`` is the tensor that was seen, with nothing written to it since."""
        if self.private:
            return self.tensor() is weight
        return (
            self.tensor() is weight
            and self.version == (None if self.version is None else weight._version)
            and self.address == weight.data_ptr()
            and self.fingerprint == fingerprint(self.address, self.nbytes, self.version is None)
        )


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight in panels, and the state that it was packed in."""

    seen: _Seen
    panels: torch.Tensor


#: The packed weights that some program keeps, by the weight's identity and the form of its panels.
SharedPanels = weakref.WeakValueDictionary[tuple[Any, ...], PackedWeight]


class Panels:
    """A weight of a matrix product in panels (see ``ir/panels.py``), packed again when it has changed.

    Programs that multiply by one weight, such as those of a model for several lengths of its input, find each
    other's panels in ``shared``. Safe under threads: a call holds the panels that it got.
    """

    def __init__(
        self, fingerprint: Fingerprint, shared: SharedPanels, sizes: Sequence[int], strides: Sequence[int],
        panels: Sequence[int],
    ) -> None:  # fmt: skip
        self._fingerprint = fingerprint
        self._shared = shared
        self._form = (tuple(sizes), tuple(strides), tuple(panels))
        self._kept: PackedWeight | None = None

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """The panels of ``weight``, seen as a matrix of the sizes and strides given, in the sizes given."""
        kept = self._kept
        if kept is not None and kept.seen.still(weight, self._fingerprint):
            return kept.panels
        self._kept = None
        key = (id(weight), weight.dtype, *self._form)
        kept = self._shared.get(key)
        if kept is None or not kept.seen.still(weight, self._fingerprint):
            kept = self._shared[key] = self._pack(weight)
        self._kept = kept
        return kept.panels

    def _pack(self, weight: torch.Tensor) -> PackedWeight:
        sizes, strides, panels = self._form
        seen = _Seen.of(weight, self._fingerprint)
        with torch.inference_mode(False), torch.no_grad():
            plain = weight if weight.is_inference() else weight.detach()
            return PackedWeight(seen, pack_panels(plain.as_strided(sizes, strides), panels))

    @property
    def kept_bytes(self) -> int:
        """The bytes of the panels, 0 before there are any."""
        kept = self._kept
        return 0 if kept is None else kept.panels.nbytes


#: What follows a convolution, where the library's operator does not run: by the name that it has there.
_ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "none": lambda x: x,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "swish": functional.silu,
    "hardswish": functional.hardswish,
    "gelu": lambda x, algorithm: functional.gelu(x, approximate=algorithm),
    "leaky_relu": functional.leaky_relu,
}


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
        activation: str = "none",
        scalars: Sequence[float] = (),
        algorithm: str = "",
    ) -> None:
        self._fingerprint = fingerprint
        self._sizes = list(sizes)
        self._numbers = (list(padding), list(stride), list(dilation), groups)
        self._plain = (list(stride), list(padding), list(dilation), False, [0, 0], groups)
        self._post = (activation, list(scalars), algorithm)
        self._seen: _Seen | None = None
        self._kept: tuple[_Seen, torch.Tensor] | None = None
        self._packable = True

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x`` (N, C, H, W) in channels-last memory; weight (O, C / groups, KH, KW); bias (O,) or none;
        ``added`` lies as the result does."""
        kept = self._kept
        if kept is not None and kept[0].still(weight, self._fingerprint):
            return compat.packed_convolution(x, kept[1], bias, self._numbers, self._post, added)
        packed = self._pack(weight) if self._packable else None
        if packed is None:
            plain: torch.Tensor = torch.ops.aten.convolution.default(x, weight, bias, *self._plain)
            plain = plain if added is None else plain.add_(added)
            name, scalars, algorithm = self._post
            return _ACTIVATIONS[name](plain, *scalars, *([algorithm] if algorithm else []))
        return compat.packed_convolution(x, packed, bias, self._numbers, self._post, added)

    @property
    def kept_bytes(self) -> int:
        """The bytes of the packed copy, 0 without one."""
        kept = self._kept
        return 0 if kept is None else compat.packed_bytes(kept[1])

    def _pack(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The packed weight, or ``None`` where it is not known to have settled or cannot be packed."""
        if not compat.can_pack_convolution(weight.dtype):
            self._packable = False  # no instructions for this dtype
            return None
        self._kept = None
        seen = self._seen
        if seen is None or not seen.still(weight, self._fingerprint):
            self._seen = _Seen.of(weight, self._fingerprint)
            return None
        packed = compat.pack_convolution_weight(weight, self._sizes, *self._numbers)
        self._kept = (seen, packed)
        return packed
