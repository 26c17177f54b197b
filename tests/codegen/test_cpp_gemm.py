"""Products of bfloat16 by instructions that this processor may not have: the loops around them, emulated.

What comes in: the vocabulary's text of ``multiply_amx``, its five instructions replaced by C++ that does what
Intel's manual says of them. What holds: the sums are those of float64. ``schedule/test_products.py`` runs the
instructions themselves, where the processor has them.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from hotloop.codegen import cpp
from hotloop.ir.panels import pack_panels, panel_sizes
from hotloop.runtime.build import Builder
from hotloop.runtime.cache import Cache
from hotloop.runtime.toolchain import detect_simd, find_toolchain

EMULATED = """
struct emulated_tile { u8 rows, bytes; u8 memory[16][64]; };
static emulated_tile tiles[8];
static void configure(const amx_shapes& shapes) {
    for (int t = 0; t < 8; t++) {
        tiles[t] = {};
        tiles[t].rows = shapes.rows[t];
        tiles[t].bytes = u8(shapes.bytes[t]);
    }
}
static void tile_load(int t, const void* from, i64 pitch) {
    for (int r = 0; r < tiles[t].rows; r++)
        __builtin_memcpy(tiles[t].memory[r], (const u8*)from + pitch * r, tiles[t].bytes);
}
static void tile_store(int t, void* to, i64 pitch) {
    for (int r = 0; r < tiles[t].rows; r++)
        __builtin_memcpy((u8*)to + pitch * r, tiles[t].memory[r], tiles[t].bytes);
}
static void tile_product(int a, int b, int sum) {
    bool fits = tiles[sum].rows && tiles[sum].rows == tiles[a].rows && tiles[b].rows == tiles[a].bytes / 4;
    if (!fits) __builtin_trap();
    for (int r = 0; r < tiles[sum].rows; r++)
        for (int c = 0; c < tiles[sum].bytes / 4; c++)
            for (int k = 0; k < 2 * tiles[b].rows; k++) {
                f32 x = load<1>((const bf16*)tiles[a].memory[r] + k);
                f32 y = load<1>((const bf16*)tiles[b].memory[k / 2] + 2 * c + k % 2);
                ((f32*)tiles[sum].memory[r])[c] += x * y;
            }
}
static void tile_zero(int t) { for (auto& row : tiles[t].memory) for (u8& byte : row) byte = 0; }
"""


def emulated(text: str) -> str:
    """The text with every instruction on tiles replaced."""
    text = text.replace('asm volatile("ldtilecfg %0" : : "m"(shapes));', "configure(shapes);")
    text = text.replace('asm volatile("tilerelease" : :);', "")
    for name, parameters, lines in (
        ("LOAD", "T, FROM, P", 2),
        ("STORE", "T, TO, P", 2),
        ("PRODUCT", "A, B, S", 1),
        ("ZERO", "T", 1),
    ):
        defined = f"#define HL_TILE_{name}({parameters}) tile_{name.lower()}({parameters})\n"
        text = re.sub(rf"#define HL_TILE_{name}\b(.*\n){{{lines}}}", defined, text)
    head, tail = text.split("static inline void amx_configure", 1)
    return f"{head}{EMULATED}static inline void amx_configure{tail}"


@pytest.mark.skipif(detect_simd() in ("scalar", "neon"), reason="text for x86 with vectors")
def test_the_loops_around_tiles(tmp_path: Path) -> None:
    function = cpp.function_source(
        "product",
        'extern "C" i64 product(const bf16* left, const bf16* panel, f32* tile, i64 rows, i64 depth) {\n'
        "    multiply_amx<32, 32, -1, 160, 384>(left, depth + 3, rows, panel, depth, tile);\n"
        "    return 0;\n}\n",
    )
    text = emulated(cpp.unit_text([function]))
    assert "asm" not in text.split("amx_configure", 1)[1]
    builder = Builder(find_toolchain(), Cache(tmp_path), 1, detect_simd())
    (library,) = builder.build([cpp.Source("emulated", text, ("product",))])
    address, number = ctypes.c_void_p, ctypes.c_int64
    run = library.function("product", [address, address, address, number, number])
    torch.manual_seed(0)
    for rows in (1, 15, 16, 17, 31, 32, 33, 64, 100):
        for depth in (8, 31, 32, 33, 100, 2048, 2049, 4100):
            left = torch.randn(rows, depth + 3).bfloat16()
            left[:, depth:] = float("nan")  # behind a row's end
            matrix = torch.randn(depth, 32).bfloat16()
            panels = pack_panels(matrix, panel_sizes(depth, 32, 32, torch.bfloat16, 32))
            tile = torch.full((rows + 1, 32), float("nan"))
            run(left.data_ptr(), panels.data_ptr(), tile.data_ptr(), rows, depth)
            exact = left[:, :depth].double() @ matrix.double()
            assert (tile[:rows] - exact).abs().max() < 1e-6 * depth**0.5 * exact.abs().max() + 1e-4
            assert tile[rows].isnan().all()
