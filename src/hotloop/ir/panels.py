"""The packed form of a matrix product's right operand: panels of columns, each with its rows in a run.

What comes in: a matrix (K, N). What goes out: panels (ceil(N / width), K, width), the last one filled up with
zeros. What holds in between: ``panels[p, k, c] == matrix[k, p * width + c]``. A micro-kernel that computes
``width`` columns then reads its operand from first to last byte, however the matrix lies.

The next file is ``kernel.py``.
"""

from __future__ import annotations

import torch

__all__ = ["pack_panels", "panel_count"]


def panel_count(columns: int, width: int) -> int:
    """How many panels hold so many columns."""
    return -(-columns // width)


def pack_panels(matrix: torch.Tensor, width: int) -> torch.Tensor:
    """``matrix`` (K, N), however strided, in panels (ceil(N / width), K, width) of its dtype, contiguous."""
    rows, columns = matrix.shape
    whole = columns // width
    panels = matrix.new_empty((panel_count(columns, width), rows, width))
    panels[:whole] = matrix[:, : whole * width].reshape(rows, whole, width).transpose(0, 1)
    if whole < len(panels):
        panels[whole].zero_()
        panels[whole, :, : columns - whole * width] = matrix[:, whole * width :]
    return panels
