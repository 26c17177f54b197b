"""Runs a function compiled and eagerly on the same inputs, and compares all that a caller can see.

What comes in: a function and its tensors, which may share memory. What goes out: nothing, or an assertion.
What holds: results are as accurate as eager's and have its strides; inputs hold afterwards what eager leaves
in them; results share memory with each other and with the inputs exactly where eager's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from judge import assert_as_accurate, reference_of

__all__ = ["Function", "check"]

Function = Callable[..., Any]


def copies(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same values, strides, offsets and sharing, in other memory."""
    kept: dict[int, torch.UntypedStorage] = {}
    found = []
    for x in inputs:
        storage = x.untyped_storage()
        memory = kept.setdefault(storage.data_ptr(), storage.clone())
        found.append(torch.empty(0, dtype=x.dtype).set_(memory, x.storage_offset(), x.shape, x.stride()))
    return found


def sharing(tensors: Sequence[Any]) -> set[tuple[int, int]]:
    """The pairs that lie in one storage."""
    places = [
        t.untyped_storage().data_ptr() if isinstance(t, torch.Tensor) and t.numel() else -1 - i
        for i, t in enumerate(tensors)
    ]
    return {(i, j) for i in range(len(places)) for j in range(i) if places[i] == places[j]}


def check(fn: Function, *inputs: torch.Tensor, dynamic: bool = False) -> None:
    """Compare ``fn`` compiled with ``fn``."""
    mine, eagers = copies(inputs), copies(inputs)
    want = tree_leaves(fn(*eagers))
    got = tree_leaves(torch.compile(fn, backend="hotloop", dynamic=dynamic)(*mine))
    assert_as_accurate(got, want, lambda: tree_leaves(reference_of(fn, *copies(inputs))()), check_stride=True)
    assert_as_accurate(mine, eagers, what="input after the call")
    assert sharing([*got, *mine]) == sharing([*want, *eagers])
