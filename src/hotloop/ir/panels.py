"""The packed form of a matrix product's right operand: panels of columns, each with its rows in a run.

What comes in: a matrix (K, N). What goes out: panels of ``width`` columns, the last one filled up with zeros.
What holds in between: a panel is its rows one after the other, ``group`` of them side by side:
element (k, c) is at ``panel[k // group, c * group + k % group]``. The group is one row, but for bfloat16 two,
so that a 32-bit lane holds what one instruction multiplies, or widens with one shift; rows that fill a group
up are zeros. A micro-kernel that computes ``width`` columns then reads its operand from first to last byte,
however the matrix lies.

The next file is ``kernel.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["PANEL_DTYPES", "PRODUCT_DTYPES", "pack_panels", "panel_count", "panel_group", "panel_sizes"]

#: The dtypes whose products are computed by panels.
PRODUCT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: The dtypes of panels: those of the products, and int8, which is widened for any of them.
PANEL_DTYPES = (*PRODUCT_DTYPES, torch.int8)


def panel_group(dtype: torch.dtype) -> int:
    """How many rows of a panel lie side by side."""
    return 2 if dtype is torch.bfloat16 else 1


def panel_count(columns: int, width: int) -> int:
    """How many panels hold so many columns."""
    return -(-columns // width)


def panel_sizes(
    rows: int, columns: int, width: int, dtype: torch.dtype, multiple: int = 1
) -> tuple[int, int, int]:
    """The sizes of the panels of a (rows, columns) matrix: (panels, groups of rows, width times group).

    ``multiple``: zeros fill the rows up to a multiple of so many.
    """
    group = panel_group(dtype)
    whole = max(multiple, group)
    return panel_count(columns, width), -(-rows // whole) * whole // group, width * group


def pack_panels(
    matrix: torch.Tensor, sizes: Sequence[int], memory: torch.Tensor | None = None
) -> torch.Tensor:
    """``matrix`` (K, N), however strided, in contiguous panels of the sizes that ``panel_sizes`` gives.

    ``memory``: of as many elements, is filled with them.
    """
    rows, columns = matrix.shape
    group = panel_group(matrix.dtype)
    count, groups, lanes = sizes
    width, whole = lanes // group, rows // group
    memory = matrix.new_empty(math.prod(sizes)) if memory is None else memory
    panels = memory.zero_().view(count, groups, width, group)
    inside = columns // width
    for first, stop, size in ((0, inside, width), (inside, count, columns % width)):
        if first < stop:
            part = matrix[:, first * width :][:, : (stop - first) * size].view(rows, stop - first, size)
            # In this order: the group, the row in it, the panel, the column in it.
            grouped = part[: whole * group].view(whole, group, stop - first, size)
            panels[first:stop, :whole, :size] = grouped.permute(2, 0, 3, 1)
            if rows > whole * group:
                rest = part[whole * group :].permute(1, 2, 0)
                panels[first:stop, whole, :size, : rows - whole * group] = rest
    return panels.view(count, groups, lanes)
