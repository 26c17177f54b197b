// golden_functions.py:52: return x.sum(0)
extern "C" i64 cpp_red_sum_0(const f32* __restrict in0, f32* __restrict out0) {
#pragma omp parallel for schedule(static)
    for (i64 i0b = 0; i0b < 4; i0b++) {
        for (i64 i0 = 64 * i0b; i0 < 64 * i0b + 64; i0 += 32) {
            f32x8 acc0_a = splat<f32x8>(0.0f);
            f32x8 acc0_b = splat<f32x8>(0.0f);
            f32x8 acc0_c = splat<f32x8>(0.0f);
            f32x8 acc0_d = splat<f32x8>(0.0f);
            for (i64 i1_block0 = 0; i1_block0 < 2048; i1_block0 += 256) {
                const i64 i1_stop0 = minimum<i64>(i1_block0 + 256, 2048);
                f32x8 acc0_part0_a = splat<f32x8>(0.0f);
                f32x8 acc0_part0_b = splat<f32x8>(0.0f);
                f32x8 acc0_part0_c = splat<f32x8>(0.0f);
                f32x8 acc0_part0_d = splat<f32x8>(0.0f);
                for (i64 i1_block1 = i1_block0; i1_block1 < i1_stop0; i1_block1 += 16) {
                    const i64 i1_stop1 = minimum<i64>(i1_block1 + 16, i1_stop0);
                    f32x8 acc0_part1_a = splat<f32x8>(0.0f);
                    f32x8 acc0_part1_b = splat<f32x8>(0.0f);
                    f32x8 acc0_part1_c = splat<f32x8>(0.0f);
                    f32x8 acc0_part1_d = splat<f32x8>(0.0f);
                    for (i64 i1 = i1_block1; i1 < i1_stop1; i1++) {
                        acc0_part1_a += load<8>(in0 + 256 * i1 + i0);
                        acc0_part1_b += load<8>(in0 + 256 * i1 + i0 + 8);
                        acc0_part1_c += load<8>(in0 + 256 * i1 + i0 + 16);
                        acc0_part1_d += load<8>(in0 + 256 * i1 + i0 + 24);
                    }
                    acc0_part0_a += acc0_part1_a;
                    acc0_part0_b += acc0_part1_b;
                    acc0_part0_c += acc0_part1_c;
                    acc0_part0_d += acc0_part1_d;
                }
                acc0_a += acc0_part0_a;
                acc0_b += acc0_part0_b;
                acc0_c += acc0_part0_c;
                acc0_d += acc0_part0_d;
            }
            store<8>(out0 + i0, acc0_a);
            store<8>(out0 + i0 + 8, acc0_b);
            store<8>(out0 + i0 + 16, acc0_c);
            store<8>(out0 + i0 + 24, acc0_d);
        }
    }
    return 0;
}
