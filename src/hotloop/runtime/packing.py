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
from typing import Any

import torch
from torch.nn import functional

from hotloop import compat
from hotloop.ir.panels import pack_panels
from hotloop.runtime.backing import Backing
from hotloop.runtime.changes import Look, Seen
from hotloop.runtime.pool import prefer_huge_pages

__all__ = ["PLACES", "Convolution", "Kept", "PackedWeight", "Packer", "Panels", "WeightMemory", "Weights"]

#: At so many places a weight's contents tell whether it changed; see ``changes.py``.
PLACES = 32


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight packed, the state that it was packed in, and what its program is given: the address of panels,
    or blocks of the library."""

    seen: Seen
    packed: torch.Tensor
    given: Any
    kept_bytes: int


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


class Packer:
    """A weight of a program in another form, made again when it has changed.

    With ``backing``, the memory of a weight that two calls in a row saw unchanged is given back. Safe under
    threads: a call holds what it got, what is kept is replaced as a whole, and the worst that two calls at
    once can do is to pack the same weight twice.
    """

    def __init__(self, look: Look, shared: Kept, backing: Backing | None) -> None:
        self._look, self._shared, self._backing = look, shared, backing
        self._kept: PackedWeight | None = None
        self._settled: PackedWeight | None = None

    def settle(self, weight: torch.Tensor) -> PackedWeight | None:
        """The weight as it is now, packed; ``None`` where it is used as it is."""
        kept = self._kept
        if kept is not None and kept.seen.still((weight,)):
            if self._settled is not kept:
                self._settled = kept
                if self._backing is not None:
                    self._backing.release(weight, kept.seen)
            return kept
        self._kept = self._settled = None
        self._kept = kept = self._pack(weight)
        return kept

    @property
    def settled(self) -> bool:
        """Whether a look at the weight would do nothing, if it is unchanged."""
        return self._settled is not None

    @property
    def seen(self) -> Seen | None:
        """The state that the weight was in when it was packed."""
        return None if self._kept is None else self._kept.seen

    @property
    def kept_bytes(self) -> int:
        """The bytes of what is kept, 0 before there is anything."""
        kept = self._kept
        return 0 if kept is None else kept.kept_bytes

    def _pack(self, weight: torch.Tensor) -> PackedWeight | None:
        raise NotImplementedError


class Weights:
    """All packed weights of a program: looked at together, and each by itself where the whole has changed.

    Arguments:
        packers: one for each weight of a call.
    """

    def __init__(self, look: Look, packers: Sequence[Packer]) -> None:
        self._look, self.packers = look, tuple(packers)
        self._known: tuple[Seen, tuple[tuple[Any, ...], Any]] | None = None

    def __call__(self, *weights: torch.Tensor) -> tuple[tuple[Any, ...], Any]:
        """What the program is given of each weight, and what has to live as long as that is used."""
        known = self._known
        if known is not None and known[0].still(weights):
            return known[1]
        self._known = None
        # Before each is looked at: what changes from now on, the next call sees.
        seen = Seen.of(weights, self._look, PLACES) if self._all_settled() else None
        kept = tuple(packer.settle(w) for packer, w in zip(self.packers, weights, strict=True))
        found = tuple(None if k is None else k.given for k in kept), kept
        if seen is not None and self._all_settled():
            self._known = seen, found
        return found

    def _all_settled(self) -> bool:
        return all(packer.settled for packer in self.packers)


class Panels(Packer):
    """A weight of a matrix product in panels (see ``ir/panels.py``): seen as a matrix of the sizes and
    strides given, in panels of the sizes given. The program is given their address.

    Programs that multiply by one weight, such as those of a model for several lengths of its input, find each
    other's panels in ``shared``.
    """

    def __init__(
        self, look: Look, shared: Kept, backing: Backing | None, sizes: Sequence[int], strides: Sequence[int],
        panels: Sequence[int],
    ) -> None:  # fmt: skip
        super().__init__(look, shared, backing)
        self._form = (tuple(sizes), tuple(strides), tuple(panels))

    def _pack(self, weight: torch.Tensor) -> PackedWeight:
        key = (id(weight), weight.dtype, *self._form)
        kept = self._shared.panels.get(key)
        if kept is None or not kept.seen.still((weight,)):
            kept = self._shared.panels[key] = self._packed(weight)
            self._shared.packed.add(kept)
        return kept

    def _packed(self, weight: torch.Tensor) -> PackedWeight:
        sizes, strides, panels = self._form
        seen = Seen.of((weight,), self._look, PLACES)
        with torch.inference_mode(False), torch.no_grad():
            plain = weight if weight.is_inference() else weight.detach()
            memory = plain.new_empty(math.prod(panels))
            # Two threads read panels of 64 MiB at 55 GB/s for 48, of 180 MiB at 32 for 24.
            prefer_huge_pages(memory.data_ptr(), memory.nbytes)
            packed = pack_panels(plain.as_strided(sizes, strides), panels, memory)
        return PackedWeight(seen, packed, packed.data_ptr(), packed.untyped_storage().nbytes())


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


class Convolution(Packer):
    """One convolution of a program: its numbers, and its weight in blocks once two calls in a row saw that
    unchanged. The program is given the blocks, and hands them back with what is convolved."""

    def __init__(
        self,
        look: Look,
        shared: Kept,
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
        super().__init__(look, shared, backing)
        self._sizes = list(sizes)
        self._numbers = (list(padding), list(stride), list(dilation), groups)
        self._plain = (list(stride), list(padding), list(dilation), False, [0, 0], groups)
        self._post = (activation, list(scalars), algorithm)
        self._seen: Seen | None = None
        self._packable = True

    def __call__(
        self,
        packed: torch.Tensor | None,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``packed``: what ``Weights`` gives; ``x`` (N, C, H, W) in channels-last memory; weight
        (O, C / groups, KH, KW); bias (O,) or none; ``added`` lies as the result does."""
        if packed is not None:
            return compat.packed_convolution(x, packed, bias, self._numbers, self._post, added)
        plain: torch.Tensor = torch.ops.aten.convolution.default(x, weight, bias, *self._plain)
        plain = plain if added is None else plain.add_(added)
        name, scalars, algorithm = self._post
        return _ACTIVATIONS[name](plain, *scalars, *([algorithm] if algorithm else []))

    @property
    def settled(self) -> bool:
        """As for others, or for want of instructions for the dtype."""
        return super().settled or not self._packable

    def _pack(self, weight: torch.Tensor) -> PackedWeight | None:
        """The packed weight, or ``None`` where it is not known to have settled or cannot be packed."""
        self._packable = compat.can_pack_convolution(weight.dtype)
        if not self._packable:
            return None
        seen = self._seen
        if seen is None or not seen.still((weight,)):
            self._seen = Seen.of((weight,), self._look, PLACES)
            return None
        packed = compat.pack_convolution_weight(weight, self._sizes, *self._numbers)
        kept = PackedWeight(seen, packed, packed, compat.packed_bytes(packed))
        self._shared.packed.add(kept)
        return kept
