// golden_functions.py:40: return x.t() + y
extern "C" i64 cpp_fused_add_0(const f32* __restrict in0, const f32* __restrict in1, f32* __restrict out0) {
#pragma omp parallel for collapse(2) schedule(static)
    for (i64 i0t = 0; i0t < 8; i0t++) {
        for (i64 i1t = 0; i1t < 5; i1t++) {
            {
                alignas(64) f32 tile0[4096];
                transpose(in0 + 32768 * i1t + 64 * i0t, 512, minimum<i64>(300, 64 * i1t + 64) - 64 * i1t, 64, tile0, 64);
                for (i64 i0 = 64 * i0t; i0 < 64 * i0t + 64; i0++) {
                    {
                        const i64 i1_end0 = minimum<i64>(300, 64 * i1t + 64);
                        i64 i1 = 64 * i1t;
                        for (; i1 < i1_end0 - 7; i1 += 8)
                            store<8>(out0 + 300 * i0 + i1, load<8>(in1 + 300 * i0 + i1) + load<8>(tile0 + 64 * i0 + i1 - 4096 * i0t - 64 * i1t));
                        if (i1 < i1_end0) {
                            const f32x8 t0 = load_partial<8>(tile0 + 64 * i0 + i1 - 4096 * i0t - 64 * i1t, i1_end0 - i1);
                            store_partial<8>(out0 + 300 * i0 + i1, load_partial<8>(in1 + 300 * i0 + i1, i1_end0 - i1) + t0, i1_end0 - i1);
                        }
                    }
                }
            }
        }
    }
    return 0;
}
