"""Operators of hotloop's own, registered with PyTorch: what a graph pass writes in the place of several.

What comes in: tensors. What goes out: the same results as those of the operators that they stand for, also
where nobody has a kernel for them and PyTorch runs them. What holds in between: a graph that has such
operators runs everywhere, and its fake tensors are PyTorch's own.

The next file is ``rewrite.py``.
"""

from __future__ import annotations

import torch

__all__ = ["int8_linear"]

_library = torch.library.Library("hotloop", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "int8_linear(Tensor x, Tensor weight, Tensor? scale=None) -> Tensor"
)


def _int8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` (M, K) times the transpose of an int8 ``weight`` (N, K), row n scaled by ``scale[n]``.

    The result (M, N) and ``scale`` (N,) have the dtype of ``x``. A kernel scales the sums; here, where memory
    is less of a matter than the range of float16, the weight is scaled before it is multiplied.
    """
    own = weight.to(x.dtype)
    return torch.mm(x, (own if scale is None else own * scale[:, None]).t())


_library.impl(  # type: ignore[no-untyped-call]
    "int8_linear", _int8_linear, "CompositeImplicitAutograd"
)

int8_linear = torch.ops.hotloop.int8_linear.default
