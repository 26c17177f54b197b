// golden_functions.py:60: return (x * 0.5).cumsum(0)
extern "C" i64 cpp_scan_mul_cumsum_0(const f32* __restrict in0, f32* __restrict out0) {
    for (i64 i0b = 0; i0b < 5; i0b++) {
        alignas(64) f64 row0[64];
        {
            const i64 i0_end0 = minimum<i64>(300, 64 * i0b + 64);
            i64 i0 = 64 * i0b;
            for (; i0 < i0_end0 - 3; i0 += 4)
                store<4>(row0 + i0 - 64 * i0b, splat<f64x4>(0.0));
            if (i0 < i0_end0)
                store_partial<4>(row0 + i0 - 64 * i0b, splat<f64x4>(0.0), i0_end0 - i0);
        }
        for (i64 i1 = 0; i1 < 64; i1++) {
            {
                const i64 i0_end1 = minimum<i64>(300, 64 * i0b + 64);
                i64 i0 = 64 * i0b;
                for (; i0 < i0_end1 - 3; i0 += 4) {
                    const f64x4 v1 = cast<f64>(load<4>(in0 + 300 * i1 + i0) * 0.5f);
                    const f64x4 v2 = load<4>(row0 + i0 - 64 * i0b) + v1;
                    store<4>(row0 + i0 - 64 * i0b, v2);
                    store<4>(out0 + 300 * i1 + i0, cast<f32>(v2));
                }
                if (i0 < i0_end1) {
                    const f64x4 v1 = cast<f64>(load_partial<4>(in0 + 300 * i1 + i0, i0_end1 - i0) * 0.5f);
                    const f64x4 v2 = load_partial<4>(row0 + i0 - 64 * i0b, i0_end1 - i0) + v1;
                    store_partial<4>(row0 + i0 - 64 * i0b, v2, i0_end1 - i0);
                    store_partial<4>(out0 + 300 * i1 + i0, cast<f32>(v2), i0_end1 - i0);
                }
            }
        }
    }
    return 0;
}
