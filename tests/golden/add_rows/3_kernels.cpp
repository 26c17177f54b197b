// golden_functions.py:56: return table.index_add(0, ids, rows * 2.0)
extern "C" i64 cpp_fused_index_add_0(const f32* __restrict in0, f32* __restrict out0) {
#pragma omp parallel for schedule(static)
    for (i64 i0b = 0; i0b < 8; i0b++) {
        for (i64 i0 = 24000 * i0b; i0 < 24000 * i0b + 24000; i0 += 8)
            store<8>(out0 + i0, load<8>(in0 + i0));
    }
    return 0;
}

// golden_functions.py:56: return table.index_add(0, ids, rows * 2.0)
extern "C" i64 cpp_scatter_mul_index_add_1(
        const f32* __restrict in0,
        const i64* __restrict in1,
        f32* __restrict out0) {
    i64 error = 0;
    for (i64 i0b = 0; i0b < 3; i0b++) {
        for (i64 i1 = 0; i1 < 64; i1++) {
            const i64 t0 = in1[i1];
            for (i64 i0 = 64 * i0b; i0 < 64 * i0b + 64; i0 += 8) {
                const i64 at0 = in_range(t0, 1000, &error);
                store<8>(out0 + 192 * at0 + i0, load<8>(out0 + 192 * at0 + i0) + load<8>(in0 + 192 * i1 + i0) * 2.0f);
            }
        }
    }
    return error;
}
