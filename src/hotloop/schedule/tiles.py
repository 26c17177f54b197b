"""Which matrix products are computed by kernels of our own, and in tiles of which size.

What comes in: a product's dtype and sizes, and the SIMD level. What goes out: a ``Tiling``, or ``None`` where
PyTorch's library is the better choice. What holds in between: this is the one place where that is decided,
and the constants here come from measurements (``benchmarks/products.py``; ``docs/matrix-products.md``).

The next file is ``products.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from hotloop.ir import sizes as sz
from hotloop.ir.index import IndexLike
from hotloop.ir.panels import PANEL_DTYPES, panel_count

__all__ = ["TILES", "Tiling", "choose_tiling", "tile_shapes", "tilings"]

#: Smaller products are bound by what a call costs.
LEAST = 8
#: The rows that share a block: its tiles' sums stay in the L1 cache, and what a block reads of the right
#: operand stays in L2.
BLOCK_ROWS = 160

#: Bytes of rows that stay in the L2 cache beside a panel and what is written.
KEPT_ROWS = 1 << 20

#: Where the number of rows varies, a block has at least so many.
USUAL_ROWS = 64
#: Products of so many rows take as long as it takes to read the weight.
FEW_ROWS = 8

_WIDE = ((8, 3, 1.0), (6, 4, 1.01), (12, 2, 1.14), (14, 1, 1.5))
#: By level: the lanes of a register, and for each tile its rows, its columns in registers, and the time that
#: a product takes with it. Measured with AVX-512, as shares of the peak: 8 x 48 0.97, 6 x 64 0.96, 12 x 32
#: 0.85.
TILES: Mapping[str, tuple[int, tuple[tuple[int, int, float], ...]]] = {
    "amx": (16, _WIDE),
    "avx512_bf16": (16, _WIDE),
    "avx512": (16, _WIDE),
    "avx2": (8, ((6, 2, 1.0), (4, 3, 1.01), (12, 1, 1.5))),
    "neon": (4, _WIDE),
}


@dataclass(frozen=True)
class Tiling:
    """How a product is cut up: ``height`` rows by ``width`` columns are summed in registers at once, and
    ``rows`` rows share a block, ``rest`` of the last one in no whole tile (``None``: not known).
    ``multiple``: a panel's rows are filled up with zeros to a multiple of so many. ``rows_first``: a block
    goes through all panels, so that its rows stay in the L2 cache.
    """

    height: int
    width: int
    rows: int
    rest: int | None
    method: str = "fma"
    multiple: int = 1
    rows_first: bool = False


def choose_tiling(
    dtype: torch.dtype, m: IndexLike, n: int, k: int, level: str, threads: int
) -> Tiling | None:
    """The tiling of an (m, k) by (k, n) product by a lasting weight of this dtype, or ``None``: a call of the
    library."""
    if level not in TILES or dtype not in PANEL_DTYPES or min(sz.hint(m) * LEAST, k, n) < LEAST:
        return None
    return tilings(dtype, m, n, k, level, threads)[0]


def tilings(dtype: torch.dtype, m: IndexLike, n: int, k: int, level: str, threads: int) -> list[Tiling]:
    """Every tiling that may be the best, the most likely one first."""
    found: list[tuple[float, list[Tiling]]] = []
    rows = m if isinstance(m, int) else max(sz.hint(m), USUAL_ROWS)
    for tile, slowness in tile_shapes(dtype, m, level):
        height = tile.height
        rest = m % height if isinstance(m, int) else None
        tiles = max(1, -(-rows // height))
        fewest = -(-rows // BLOCK_ROWS)
        panels = panel_count(n, tile.width)
        # As many blocks as it takes to have work for every thread.
        blocks = max(fewest, min(-(-4 * threads // panels), tiles))
        ways = [replace(tile, rows=-(-tiles // blocks) * height, rest=rest)]
        kept = max(1, KEPT_ROWS // (dtype.itemsize * k * height))
        blocks = -(-max(fewest, -(-tiles // kept)) // threads) * threads  # as many for each thread
        if isinstance(m, int) and 1 < blocks <= tiles:
            ways.append(replace(ways[0], rows=-(-tiles // blocks) * height, rows_first=True))
        found.append((slowness * _columns_a_thread(panels, tiles * height, ways[0], threads), ways))
    return [way for _, ways in sorted(found, key=lambda f: f[0]) for way in ways]


def _columns_a_thread(panels: int, rows: int, tiling: Tiling, threads: int) -> float:
    """The time that the thread with most to do takes: the columns of so many rows, filled-up ones too."""
    blocks = -(-rows // tiling.rows)
    longest = -(-panels * blocks // threads)
    return longest * tiling.rows * tiling.width


def tile_shapes(dtype: torch.dtype, rows: IndexLike, level: str) -> list[tuple[Tiling, float]]:
    """Tiles for a product of so many rows, each with the time it takes for as much as another; of a block
    they tell only its tiles."""
    if dtype is torch.bfloat16 and level == "amx":
        # Few rows wait for the weight to come from memory: any instructions will do, on panels in one form.
        if isinstance(rows, int) and rows <= FEW_ROWS:
            return [(Tiling(max(1, rows), 32, 0, None, "fma", 32), 1.0)]
        return [(Tiling(32, 32, 0, None, "amx", 32), 1.0)]
    lanes, shapes = TILES[level]
    method = "dot" if dtype is torch.bfloat16 and level == "avx512_bf16" else "fma"
    found = []
    for most, count, slowness in shapes:
        if isinstance(rows, int):
            most = -(-rows // -(-rows // most))  # as many tiles, of about equal height
        found.append((Tiling(most, lanes * count, 0, None, method), slowness))
    return found
