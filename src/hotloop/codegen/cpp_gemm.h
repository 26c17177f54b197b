// What comes in: cpp_memory.h's loads. What goes out: tiles of matrix products.
// What holds: sums of at most BLOCK terms are kept in registers, then added to the tile.

// @section multiply needs: memory, fma
#if defined(__AVX512F__)
constexpr int HL_TILE_LANES = 16;
#elif defined(__AVX__)
constexpr int HL_TILE_LANES = 8;
#else
constexpr int HL_TILE_LANES = 4;
#endif
// tile[C r + c] = sum over k < depth of left[stride r + k] * panel[C k + c], for r < R and c < C.
template <int R, int C, int BLOCK>
static inline void multiply(const f32* left, i64 stride, const f32* panel, i64 depth, f32* tile) {
    constexpr int W = HL_TILE_LANES, N = C / W;
    typedef vec<f32, W> V;
    static_assert(C % W == 0, "whole vectors");
    for (i64 first = 0; first < depth; first += BLOCK) {
        i64 last = depth - first < BLOCK ? depth : first + BLOCK;
        V sum[R][N] = {};
        for (i64 k = first; k < last; k++) {
            V right[N];
#pragma GCC unroll 16
            for (int j = 0; j < N; j++) right[j] = load<W>(panel + C * k + W * j);
#pragma GCC unroll 16
            for (int i = 0; i < R; i++) {
                V a = splat<V>(left[stride * i + k]);
#pragma GCC unroll 16
                for (int j = 0; j < N; j++) sum[i][j] = fma(a, right[j], sum[i][j]);
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < R; i++)
#pragma GCC unroll 16
            for (int j = 0; j < N; j++) {
                f32* to = tile + C * i + W * j;
                store<W>(to, first ? load<W>(to) + sum[i][j] : sum[i][j]);
            }
    }
}
