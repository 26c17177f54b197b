// golden_functions.py:20: t = a + b
// golden_functions.py:21: t = t + c
// golden_functions.py:22: t = t * d
// golden_functions.py:23: return t + e
extern "C" i64 cpp_fused_add_mul_0(
        const f32* __restrict in0,
        const f32* __restrict in1,
        const f32* __restrict in2,
        const f32* __restrict in3,
        const f32* __restrict in4,
        f32* __restrict out0) {
#pragma omp parallel for schedule(static)
    for (i64 i0 = 0; i0 < 1024; i0++) {
        for (i64 i1 = 0; i1 < 512; i1 += 8) {
            const f32x8 t0 = load<8>(in4 + 512 * i0 + i1) + load<8>(in3 + 512 * i0 + i1) + load<8>(in2 + i1);
            store<8>(out0 + 512 * i0 + i1, t0 * load<8>(in1 + 512 * i0 + i1) + load<8>(in0 + 512 * i0 + i1));
        }
    }
    return 0;
}
