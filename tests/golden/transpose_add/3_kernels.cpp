// golden_functions.py:40: return x.t() + y
extern "C" i64 cpp_fused_add_0(const f32* __restrict in0, const f32* __restrict in1, f32* __restrict out0) {
#pragma omp parallel for collapse(2) schedule(static)
    for (i64 i0t = 0; i0t < 16; i0t++) {
        for (i64 i1t = 0; i1t < 10; i1t++) {
            {
                const i64 i0_end0 = 32 * i0t + 32;
                const i64 i1_end0 = minimum<i64>(300, 32 * i1t + 32);
                i64 i0_square0 = 32 * i0t;
                for (; i0_square0 + 8 <= i0_end0; i0_square0 += 8) {
                    i64 i1_square0 = 32 * i1t;
                    for (; i1_square0 + 8 <= i1_end0; i1_square0 += 8) {
                        const i64 i1 = i1_square0;
                        f32x8 square0[8];
                        load_transposed<8>(in0 + 512 * i1 + i0_square0, 512, square0);
                        for (i64 i0 = i0_square0; i0 < i0_square0 + 8; i0++)
                            store<8>(out0 + 300 * i0 + i1, load<8>(in1 + 300 * i0 + i1) + square0[i0 - i0_square0]);
                    }
                    for (i64 i0 = i0_square0; i0 < i0_square0 + 8; i0++) {
                        for (i64 i1 = i1_square0; i1 < i1_end0; i1++)
                            out0[300 * i0 + i1] = in1[300 * i0 + i1] + in0[512 * i1 + i0];
                    }
                }
                for (i64 i0 = i0_square0; i0 < i0_end0; i0++) {
                    {
                        const i64 i1_end1 = minimum<i64>(300, 32 * i1t + 32);
                        i64 i1 = 32 * i1t;
                        for (; i1 < i1_end1 - 7; i1 += 8)
                            store<8>(out0 + 300 * i0 + i1, load<8>(in1 + 300 * i0 + i1) + load_strided<8>(in0 + 512 * i1 + i0, 512));
                        for (; i1 < i1_end1; i1++)
                            out0[300 * i0 + i1] = in1[300 * i0 + i1] + in0[512 * i1 + i0];
                    }
                }
            }
        }
    }
    return 0;
}
