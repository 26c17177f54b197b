// golden_functions.py:44: return relu(linear(x, weight, bias))
extern "C" i64 cpp_fused_relu_0(const f32* __restrict in0, f32* __restrict out0) {
    for (i64 i0b = 0; i0b < 2; i0b++) {
        for (i64 i0 = 1024 * i0b; i0 < 1024 * i0b + 1024; i0 += 8)
            store<8>(out0 + i0, maximum(splat<f32x8>(0.0f), load<8>(in0 + i0)));
    }
    return 0;
}
