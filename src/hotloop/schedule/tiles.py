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

__all__ = ["TILES", "Tiling", "choose_tiling", "slice_terms", "tile_shapes", "tilings"]

#: Smaller products are bound by what a call costs.
LEAST = 8
#: The rows that share a block: its tiles' sums stay in the L1 cache, and what a block reads of the right
#: operand stays in L2.
BLOCK_ROWS = 160
#: The same where each block widens what it reads of the right operand: 1024 rows of bfloat16, or by int8,
#: took 0.98 of the time with blocks of 320.
WIDENING_ROWS = 320

#: Bytes of rows that stay in the L2 cache beside a panel and what is written.
KEPT_ROWS = 1 << 20

#: Each thread has rows of its own where a product has at most so many columns for a row of the left operand:
#: what it reads, writes and reads again in the next product stays in its L2 cache, which pays for a weight
#: that all threads read. Two threads, pairs of products from D to H to D columns, Gflop/s: 1024 rows, D 128,
#: H 512, 300 for 245; 1024, 768, 3072, 316 for 298; 128, 128, 512, 255 for 232; 128, 768, 768, 307 for 311;
#: 128, 768, 3072, 292 for 308.
OWNED = 5
#: A block has at least so many then, or reading panels takes too long: 128, 768, 768, in blocks of 32, 292.
LEAST_OWNED = 48
#: How much more than its share a thread may have to do.
UNEVEN = 1.02

#: Where the number of rows varies, a block has at least so many.
USUAL_ROWS = 64
#: A slice of the terms has at least so many: fewer are summed before another thread has begun.
SLICE_TERMS = 512
#: AMX multiplies so many terms at once, other methods fewer.
WHOLE_TERMS = 32
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
    ``rows`` rows share a block, ``rest`` of the last one, or of all, in no whole tile (``None``: not known).
    ``multiple``: a panel's rows are filled up with zeros to a multiple of so many. ``rows_first``: a block
    goes through all panels, and threads have as many blocks each, so that rows stay in their L2 caches.
    ``slices``: so many parts of the terms are summed apart, by threads that would have nothing to do, and
    then added up.
    """

    height: int
    width: int
    rows: int
    rest: int | None
    method: str = "fma"
    multiple: int = 1
    rows_first: bool = False
    slices: int = 1


def choose_tiling(
    dtype: torch.dtype, m: IndexLike, n: int, k: int, level: str, threads: int, left: torch.dtype
) -> Tiling | None:
    """The tiling of an (m, k) by (k, n) product by a lasting weight of this dtype, or ``None``: a call of the
    library. ``left``: the dtype of the rows."""
    if level not in TILES or dtype not in PANEL_DTYPES or min(sz.hint(m) * LEAST, k, n) < LEAST:
        return None
    return tilings(dtype, m, n, k, level, threads, left)[0]


def tilings(
    dtype: torch.dtype, m: IndexLike, n: int, k: int, level: str, threads: int, left: torch.dtype
) -> list[Tiling]:
    """Every tiling that may be the best, the most likely one first; ``left``: the dtype of the rows."""
    found = []
    rows = m if isinstance(m, int) else max(sz.hint(m), USUAL_ROWS)
    for tile in tile_shapes(dtype, m, n, level, threads):
        height = tile.height
        rest = m % height if isinstance(m, int) else None
        tiles = max(1, -(-rows // height))
        widens = dtype is not torch.float32 and tile.method == "fma"
        fewest = -(-rows // (WIDENING_ROWS if widens else BLOCK_ROWS))
        # As many blocks as it takes to have work for every thread.
        blocks = max(fewest, min(-(-4 * threads // panel_count(n, tile.width)), tiles))
        found.append(replace(tile, rows=-(-tiles // blocks) * height, rest=rest))
        if isinstance(m, int):
            idle = min(threads // (blocks * panel_count(n, tile.width)), k // SLICE_TERMS)
            found[-1] = replace(found[-1], slices=-(-k // slice_terms(k, max(1, idle))))
        owned = _owned(tile, m, k * left.itemsize, threads) if isinstance(m, int) else None
        if owned is not None:
            first = n <= OWNED * rows and owned.rows >= LEAST_OWNED and not widens
            found.insert(len(found) - first, owned)
    return found


def _owned(tile: Tiling, m: int, row_bytes: int, threads: int) -> Tiling | None:
    """The tile in blocks of which every thread has as many, each for all panels, or ``None``."""
    kept = max(1, KEPT_ROWS // row_bytes)
    share = -(-m // threads)
    blocks = threads * -(-share // min(BLOCK_ROWS, kept))
    if m < blocks * tile.height or blocks == 1:
        return None
    rows = -(-m // blocks)
    if m % blocks:
        rows = -(-rows // tile.height) * tile.height  # the last block alone has a rest
    if -(-m // rows) != blocks or rows * blocks > m * UNEVEN:
        return None
    return replace(tile, rows=rows, rest=(rows if m % rows == 0 else m) % tile.height, rows_first=True)


def slice_terms(k: int, slices: int) -> int:
    """The terms of each slice but the last: a multiple of what any method multiplies at once."""
    return -(-k // slices // WHOLE_TERMS) * WHOLE_TERMS


def tile_shapes(dtype: torch.dtype, rows: IndexLike, columns: int, level: str, threads: int) -> list[Tiling]:
    """Tiles for a product of so many rows and columns, the most likely one first; of a block they tell only
    its tiles.

    The width does not depend on the rows: products of several numbers of rows by a weight share its panels.
    """
    if dtype is torch.bfloat16 and level == "amx":
        # Few rows wait for the weight to come from memory: any instructions will do, on panels in one form.
        if isinstance(rows, int) and rows <= FEW_ROWS:
            return [Tiling(max(1, rows), 32, 0, None, "fma", 32)]
        return [Tiling(32, 32, 0, None, "amx", 32)]
    lanes, shapes = TILES[level]
    method = "dot" if dtype is torch.bfloat16 and level == "avx512_bf16" else "fma"

    def time(shape: tuple[int, int, float]) -> float:
        """How long the thread with most columns to do takes, those that fill a panel up included."""
        _, count, slowness = shape
        panels = panel_count(columns, lanes * count)
        longest = -(-panels // threads) if panels > threads else panels / threads
        return longest * lanes * count * slowness

    found = []
    for most, count, _ in sorted(shapes, key=time):
        if isinstance(rows, int):
            most = -(-rows // -(-rows // most))  # as many tiles, of about equal height
        found.append(Tiling(most, lanes * count, 0, None, method))
    return found
