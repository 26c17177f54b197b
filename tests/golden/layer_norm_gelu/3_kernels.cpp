// golden_functions.py:31: y = layer_norm(x, (x.shape[-1],), weight, bias)
// golden_functions.py:32: return gelu(y)
extern "C" i64 cpp_red_native_layer_norm_gelu_0(
        const f32* __restrict in0,
        const f32* __restrict in1,
        const f32* __restrict in2,
        f32* __restrict out0) {
#pragma omp parallel for schedule(static)
    for (i64 i0 = 0; i0 < 512; i0++) {
        f32x8 acc0_a = splat<f32x8>(0.0f);
        f32x8 acc0_b = splat<f32x8>(0.0f);
        f32x8 acc0_c = splat<f32x8>(0.0f);
        f32x8 acc0_d = splat<f32x8>(0.0f);
        for (i64 i1_block0 = 0; i1_block0 < 768; i1_block0 += 512) {
            const i64 i1_stop0 = minimum<i64>(i1_block0 + 512, 768);
            f32x8 acc0_part0_a = splat<f32x8>(0.0f);
            f32x8 acc0_part0_b = splat<f32x8>(0.0f);
            f32x8 acc0_part0_c = splat<f32x8>(0.0f);
            f32x8 acc0_part0_d = splat<f32x8>(0.0f);
            for (i64 i1 = i1_block0; i1 < i1_stop0; i1 += 32) {
                acc0_part0_a += load<8>(in0 + 768 * i0 + i1);
                acc0_part0_b += load<8>(in0 + 768 * i0 + i1 + 8);
                acc0_part0_c += load<8>(in0 + 768 * i0 + i1 + 16);
                acc0_part0_d += load<8>(in0 + 768 * i0 + i1 + 24);
            }
            acc0_a += acc0_part0_a;
            acc0_b += acc0_part0_b;
            acc0_c += acc0_part0_c;
            acc0_d += acc0_part0_d;
        }
        const f32 acc0 = hsum((acc0_a + acc0_b) + (acc0_c + acc0_d));
        f32x8 acc1_a = splat<f32x8>(0.0f);
        f32x8 acc1_b = splat<f32x8>(0.0f);
        f32x8 acc2_a = splat<f32x8>(0.0f);
        f32x8 acc2_b = splat<f32x8>(0.0f);
        const f32 t0 = acc0 / 768.0f;
        for (i64 i1_block1 = 0; i1_block1 < 768; i1_block1 += 256) {
            const i64 i1_stop1 = minimum<i64>(i1_block1 + 256, 768);
            f32x8 acc1_part0_a = splat<f32x8>(0.0f);
            f32x8 acc1_part0_b = splat<f32x8>(0.0f);
            f32x8 acc2_part0_a = splat<f32x8>(0.0f);
            f32x8 acc2_part0_b = splat<f32x8>(0.0f);
            for (i64 i1 = i1_block1; i1 < i1_stop1; i1 += 16) {
                const f32x8 t1 = load<8>(in0 + 768 * i0 + i1) - t0;
                acc1_part0_a += t1;
                const f32x8 t2 = load<8>(in0 + 768 * i0 + i1 + 8) - t0;
                acc1_part0_b += t2;
                acc2_part0_a += t1 * t1;
                acc2_part0_b += t2 * t2;
            }
            acc1_a += acc1_part0_a;
            acc1_b += acc1_part0_b;
            acc2_a += acc2_part0_a;
            acc2_b += acc2_part0_b;
        }
        const f32 acc1 = hsum(acc1_a + acc1_b);
        const f32 acc2 = hsum(acc2_a + acc2_b);
        const f32 t3 = t0 + acc1 / 768.0f;
        const f32 t4 = (acc2 - acc1 * (acc1 / 768.0f) <= acc2 * 3.8146973e-06f) ? 0.0f : acc2 - acc1 * (acc1 / 768.0f);
        const f32 t5 = 1.0f / sqrt(((acc2 == __builtin_inff()) ? acc2 : t4) / 768.0f + 1.0e-05f);
        for (i64 i1 = 0; i1 < 768; i1 += 8) {
            const f32x8 t6 = (load<8>(in0 + 768 * i0 + i1) - t3) * t5 * load<8>(in2 + i1) + load<8>(in1 + i1);
            store<8>(out0 + 768 * i0 + i1, t6 * 0.5f * (1.0f + erf(t6 * 0.70710677f)));
        }
    }
    return 0;
}
