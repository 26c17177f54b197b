// golden_functions.py:48: return torch.cat((x, y * 2), dim=1)
extern "C" i64 cpp_fused_mul_cat_0(
        const f32* __restrict in0,
        const f32* __restrict in1,
        f32* __restrict out0) {
#pragma omp parallel for schedule(static)
    for (i64 i0 = 0; i0 < 512; i0++) {
        for (i64 i1_0 = 0; i1_0 < 96; i1_0 += 8)
            store<8>(out0 + 256 * i0 + i1_0, load<8>(in0 + 100 * i0 + i1_0));
        {
            const i64 i1_0 = 92;
            store<8>(out0 + 256 * i0 + i1_0, load<8>(in0 + 100 * i0 + i1_0));
        }
        for (i64 i1_1 = 0; i1_1 < 152; i1_1 += 8)
            store<8>(out0 + 256 * i0 + i1_1 + 100, load<8>(in1 + 156 * i0 + i1_1) * 2.0f);
        {
            const i64 i1_1 = 148;
            store<8>(out0 + 256 * i0 + i1_1 + 100, load<8>(in1 + 156 * i0 + i1_1) * 2.0f);
        }
    }
    return 0;
}
