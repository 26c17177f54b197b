"""Weights in blocks, kept from call to call until the weight changes.

What comes in: a weight at each call. What goes out: its panels, or the result of a convolution by it. What
holds in between: a packed copy serves only as long as the weight is what it was (see ``changes.py``). A
convolution packs a weight when two calls in a row saw it unchanged: one that is new at every call costs a
comparison.

The next file is ``program.py``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from hotloop import compat
from hotloop.ir.panels import pack_panels
from hotloop.runtime.backing import Backing
from hotloop.runtime.changes import Fingerprint, Seen
from hotloop.runtime.pool import prefer_huge_pages

__all__ = ["PLACES", "Convolution", "Kept", "PackedWeight", "Panels", "WeightMemory"]

#: At so many places a weight's contents tell whether it changed; see ``changes.py``.
PLACES = 32


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight in panels, and the state that it was packed in."""

    seen: Seen
    panels: torch.Tensor

    @property
    def kept_bytes(self) -> int:
        """The bytes of the panels, with what fills them up."""
        return self.panels.untyped_storage().nbytes()


@dataclass(frozen=True)
class WeightMemory:
    """Bytes that the programs of a process hold beside the weights: ``packed`` in panels and the library's
    blocks, ``frozen`` in values computed from weights; ``given_back`` of plain weights, whose pages are on
    disk."""

    packed: int
    frozen: int
    given_back: int


class Kept:
    """Everything that the programs of a process keep of weights, for programs to share and to count.

    ``panels``: the packed weights that some program keeps, by the weight's identity and the panels' form.
    """

    def __init__(self) -> None:
        self.panels = weakref.WeakValueDictionary[tuple[Any, ...], PackedWeight]()
        self.packed = weakref.WeakSet[Any]()
        self.frozen = weakref.WeakSet[Any]()
        self.backings = weakref.WeakSet[Backing]()

    @property
    def memory(self) -> WeightMemory:
        """What is held now, each byte counted once."""
        packed, frozen = (sum(k.kept_bytes for k in list(of)) for of in (self.packed, self.frozen))
        return WeightMemory(packed, frozen, sum(b.given_back for b in list(self.backings)))


class Panels:
    """A weight of a matrix product in panels (see ``ir/panels.py``), packed again when it has changed.

    Programs that multiply by one weight, such as those of a model for several lengths of its input, find each
    other's panels in ``shared``. With ``backing``, the memory of a weight that two calls in a row saw
    unchanged is given back. Safe under threads: a call holds the panels that it got.
    """

    def __init__(
        self, fingerprint: Fingerprint, shared: Kept, backing: Backing | None, sizes: Sequence[int],
        strides: Sequence[int], panels: Sequence[int],
    ) -> None:  # fmt: skip
        self._fingerprint = fingerprint
        self._shared, self._backing = shared, backing
        self._form = (tuple(sizes), tuple(strides), tuple(panels))
        self._kept: PackedWeight | None = None
        self._released: PackedWeight | None = None

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """The panels of ``weight``, seen as a matrix of the sizes and strides given, in the sizes given."""
        kept = self._kept
        if kept is not None and kept.seen.still((weight,), self._fingerprint):
            if self._backing is not None and self._released is not kept:
                self._released = kept
                seen = kept.seen
                self._backing.release(weight, partial(seen.still, (weight,), self._fingerprint))
            return kept.panels
        self._kept = self._released = None
        key = (id(weight), weight.dtype, *self._form)
        kept = self._shared.panels.get(key)
        if kept is None or not kept.seen.still((weight,), self._fingerprint):
            kept = self._shared.panels[key] = self._pack(weight)
            self._shared.packed.add(kept)
        self._kept = kept
        return kept.panels

    def _pack(self, weight: torch.Tensor) -> PackedWeight:
        sizes, strides, panels = self._form
        seen = Seen.of((weight,), self._fingerprint, PLACES)
        with torch.inference_mode(False), torch.no_grad():
            plain = weight if weight.is_inference() else weight.detach()
            memory = plain.new_empty(math.prod(panels))
            # Two threads read panels of 64 MiB at 55 GB/s for 48, of 180 MiB at 32 for 24.
            prefer_huge_pages(memory.data_ptr(), memory.nbytes)
            return PackedWeight(seen, pack_panels(plain.as_strided(sizes, strides), panels, memory))

    @property
    def kept_bytes(self) -> int:
        """The bytes of the panels, 0 before there are any."""
        kept = self._kept
        return 0 if kept is None else kept.kept_bytes


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
        backing: Backing | None,
        sizes: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        activation: str = "none",
        scalars: Sequence[float] = (),
        algorithm: str = "",
    ) -> None:
        self._fingerprint, self._backing = fingerprint, backing
        self._sizes = list(sizes)
        self._numbers = (list(padding), list(stride), list(dilation), groups)
        self._plain = (list(stride), list(padding), list(dilation), False, [0, 0], groups)
        self._post = (activation, list(scalars), algorithm)
        self._seen: Seen | None = None
        self._kept: tuple[Seen, torch.Tensor] | None = None
        self._released: tuple[Seen, torch.Tensor] | None = None
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
        if kept is not None and kept[0].still((weight,), self._fingerprint):
            if self._backing is not None and self._released is not kept:
                self._released = kept
                seen = kept[0]
                self._backing.release(weight, partial(seen.still, (weight,), self._fingerprint))
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
        self._kept = self._released = None
        seen = self._seen
        if seen is None or not seen.still((weight,), self._fingerprint):
            self._seen = Seen.of((weight,), self._fingerprint, PLACES)
            return None
        packed = compat.pack_convolution_weight(weight, self._sizes, *self._numbers)
        self._kept = (seen, packed)
        return packed
