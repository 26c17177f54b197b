// golden_functions.py:36: return look_up(ids, table) * 8.0
extern "C" i64 cpp_fused_embedding_mul_0(
        const i64* __restrict in0,
        const f32* __restrict in1,
        f32* __restrict out0) {
    i64 error = 0;
#pragma omp parallel for schedule(static)
    for (i64 i0 = 0; i0 < 64; i0++) {
        for (i64 i1 = 0; i1 < 128; i1++) {
            const i64 t0 = in0[128 * i0 + i1];
            for (i64 i2 = 0; i2 < 64; i2 += 8) {
                const i64 at0 = in_range(t0, 1000, &error);
                store<8>(out0 + 8192 * i0 + 64 * i1 + i2, load<8>(in1 + 64 * at0 + i2) * 8.0f);
            }
        }
    }
    return error;
}
