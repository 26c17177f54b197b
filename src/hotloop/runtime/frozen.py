"""A frozen graph at run time: values that depend on weights alone, computed again when a weight has changed.

What comes in: the graph's inputs at each call. What goes out: what the main program gives. What holds in
between: the values served are those of the weights as they are, as far as ``changes.py`` can tell.

The next file is ``program.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotloop.runtime.backing import Backing
from hotloop.runtime.changes import Look, Seen, keep_private

__all__ = ["PLACES", "FrozenProgram"]

#: At so many places each weight's contents tell whether it changed: they are many, and looked at in one go.
PLACES = 4


@dataclass(frozen=True)
class _Kept:
    """Values, and the state of the weights that they were made from."""

    values: tuple[torch.Tensor, ...]
    seen: Seen


class FrozenProgram:
    """The callable of a graph in two parts.

    Safe under threads: a call holds the values that it got.

    Arguments:
        main: takes the inputs at ``kept``, then the frozen values, as one list.
        prelude: takes the inputs at ``sources`` and gives the frozen values, whose strides are ``strides``.
        look: the compiled function of ``changes.py``.
        backing: where the memory of weights goes that two calls in a row saw unchanged, if anywhere.
    """

    def __init__(
        self,
        main: Callable[[list[Any]], Any],
        prelude: Callable[..., Sequence[torch.Tensor]],
        kept: Sequence[int],
        sources: Sequence[int],
        strides: Sequence[Sequence[int]],
        look: Look,
        backing: Backing | None = None,
    ) -> None:
        self._main, self._prelude = main, prelude
        self._inputs, self._sources = tuple(kept), tuple(sources)
        self._strides = [tuple(s) for s in strides]
        self._look, self._backing = look, backing
        self._apart = [k for k, source in enumerate(sources) if source not in kept]
        self._kept: _Kept | None = None
        self._released: _Kept | None = None

    def __call__(self, args: list[Any]) -> Any:
        """What the graph gives for its inputs; the list is emptied."""
        weights = tuple([args[i] for i in self._sources])
        own = [args[i] for i in self._inputs]
        args.clear()
        kept = self._kept
        if kept is None or not kept.seen.still(weights):
            kept = self._compute(weights)
        elif self._backing is not None and self._released is not kept:
            self._released = kept
            for k in self._apart:  # the others are read by the main program too
                self._backing.release(weights[k], Seen.of((weights[k],), self._look, PLACES))
        return self._main([*own, *kept.values])

    @property
    def kept_bytes(self) -> int:
        """The bytes of the frozen values, 0 before there are any."""
        return 0 if self._kept is None else sum(v.untyped_storage().nbytes() for v in self._kept.values)

    def _compute(self, weights: Sequence[torch.Tensor]) -> _Kept:
        self._kept = self._released = None  # so that there are never two sets of values
        seen = Seen.of(weights, self._look, PLACES)
        with torch.inference_mode(False), torch.no_grad():
            plain = [w if w.is_inference() else w.detach() for w in weights]
            theirs = {w.untyped_storage().data_ptr() for w in plain}
            values = []
            for value, strides in zip(self._prelude(*plain), self._strides, strict=True):
                # In memory of its own, with the strides that the main graph announces.
                if value.stride() != strides or value.untyped_storage().data_ptr() in theirs:
                    value = torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)
                values.append(keep_private(value))
        kept = _Kept(tuple(values), seen)
        self._kept = kept
        return kept
