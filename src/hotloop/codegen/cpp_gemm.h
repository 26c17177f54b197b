// What comes in: cpp_memory.h's loads. What goes out: blocks of matrix products.
// What holds: operands narrower than f32 are widened to it, which is exact; sums of at most BLOCK terms are
// kept in registers, then added to the tile.

// @section multiply needs: memory, fma
#if defined(__AVX512F__)
constexpr int HL_TILE_LANES = 16;
#elif defined(__AVX__)
constexpr int HL_TILE_LANES = 8;
#else
constexpr int HL_TILE_LANES = 4;
#endif
// Rows of a panel that lie side by side: element (k, c) of C columns is panel[C * (k - k % G) + G * c + k % G].
template <class T> constexpr int panel_group = same<T, bf16> ? 2 : 1;
// W columns of G rows, widened.
template <int W, class T> HL void load_rows(const T* p, vec<f32, W>* row) {
    if constexpr (same<T, bf16>) {
        vec<u32, W> pair = load<W>((const u32*)p);
        row[0] = bitcast<f32>(pair << 16);
        row[1] = bitcast<f32>(pair & 0xffff0000u);
    } else row[0] = load<W>(p);
}
// tile[C r + c] (+)= sum over k < depth of left[stride r + k] * panel(k, c), for r < R and c < C.
template <int R, int C, class T>
static inline void multiply_tile(const f32* left, i64 stride, const T* panel, i64 depth, f32* tile, bool more) {
    constexpr int W = HL_TILE_LANES, N = C / W, G = panel_group<T>;
    // Few sums at once would wait for each other: then even and odd rows have their own.
    constexpr int S = R * N <= 8 ? 2 : 1, K = S > G ? S : G;
    typedef vec<f32, W> V;
    static_assert(C % W == 0, "whole vectors");
    V sum[S][R][N] = {};
    auto rows = [&](i64 k, auto count) __attribute__((always_inline)) {
        constexpr int COUNT = decltype(count)::value;
        V right[N][COUNT];
#pragma GCC unroll 16
        for (int j = 0; j < N; j++)
#pragma GCC unroll 2
            for (int g = 0; g < COUNT; g += G) load_rows<W>(panel + C * (k + g) + G * W * j, right[j] + g);
#pragma GCC unroll 2
        for (int g = 0; g < COUNT; g++)
#pragma GCC unroll 16
            for (int i = 0; i < R; i++) {
                V a = splat<V>(left[stride * i + k + g]);
#pragma GCC unroll 16
                for (int j = 0; j < N; j++) sum[g % S][i][j] = fma(a, right[j][g], sum[g % S][i][j]);
            }
    };
    i64 k = 0;
    for (; k + K <= depth; k += K) rows(k, number<K>{});
    for (; k < depth; k += G) rows(k, number<G>{});
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
#pragma GCC unroll 16
        for (int j = 0; j < N; j++) {
            f32* to = tile + C * i + W * j;
            V value = sum[0][i][j];
            if constexpr (S == 2) value = value + sum[1][i][j];
            store<W>(to, more ? load<W>(to) + value : value);
        }
}
// The tiles of R rows one after the other; those of what is left over are REST rows high, or, where REST is
// less than 0, of 8, 4, 2 and 1 rows.
template <int R, int C, int REST, class F> HL void each_tile(i64 rows, F tile) {
    i64 row = 0;
    for (; row + R <= rows; row += R) tile(row, number<R>{});
    if constexpr (REST > 0) { if (row < rows) tile(row, number<REST>{}); }
    if constexpr (REST < 0) {
        if constexpr (R > 8) if (rows - row >= 8) { tile(row, number<8>{}); row += 8; }
        if constexpr (R > 4) if (rows - row >= 4) { tile(row, number<4>{}); row += 4; }
        if constexpr (R > 2) if (rows - row >= 2) { tile(row, number<2>{}); row += 2; }
        if constexpr (R > 1) if (rows - row >= 1) tile(row, number<1>{});
    }
}
// W columns at a time of so many rows of a panel, one row after the other.
template <int C, class T> static inline void widen_panel(const T* panel, i64 depth, f32* to) {
    constexpr int W = HL_TILE_LANES, G = panel_group<T>;
    for (i64 k = 0; k < depth; k += G)
#pragma GCC unroll 16
        for (int c = 0; c < C; c += W) {
            vec<f32, W> row[G];
            load_rows<W>(panel + C * k + G * c, row);
            for (int g = 0; g < G; g++) store<W>(to + C * (k + g) + c, row[g]);
        }
}
// Rows of the left operand, `pitch` apart, with zeros up to `whole` terms.
template <class T>
static inline void widen_rows(const T* left, i64 stride, int rows, i64 terms, i64 whole, f32* to, i64 pitch) {
    constexpr int W = HL_TILE_LANES;
    for (int i = 0; i < rows; i++, left += stride, to += pitch) {
        i64 k = 0;
        for (; k + W <= terms; k += W) store<W>(to + k, load<W>(left + k));
        for (; k < whole; k++) to[k] = k < terms ? load<1>(left + k) : 0;
    }
}
// tile[C r + c] = sum over k < depth of left[stride r + k] * panel(k, c), for r < rows <= MOST and c < C.
template <int R, int C, int REST, int MOST, int BLOCK, class T>
static inline void multiply(const T* left, i64 stride, i64 rows, const T* panel, i64 depth, f32* tile) {
    constexpr int G = panel_group<T>;
    static_assert(BLOCK % G == 0, "whole groups");
    for (i64 first = 0; first < depth; first += BLOCK) {
        i64 terms = depth - first < BLOCK ? depth - first : BLOCK;
        const T* right = panel + C * first;
        if constexpr (same<T, f32>) {
            each_tile<R, C, REST>(rows, [&](i64 row, auto height) __attribute__((always_inline)) {
                multiply_tile<decltype(height)::value, C>(left + stride * row + first, stride, right, terms, tile + C * row, first);
            });
        } else {
            constexpr bool ONCE = MOST > 2 * R;  // for many tiles, the panel is widened once
            i64 whole = (terms + G - 1) / G * G;
            alignas(64) f32 strip[R * BLOCK], wide[ONCE ? BLOCK * C : 1];
            if constexpr (ONCE) widen_panel<C>(right, whole, wide);
            each_tile<R, C, REST>(rows, [&](i64 row, auto height) __attribute__((always_inline)) {
                constexpr int H = decltype(height)::value;
                widen_rows(left + stride * row + first, stride, H, terms, whole, strip, BLOCK);
                if constexpr (ONCE) multiply_tile<H, C>(strip, BLOCK, wide, whole, tile + C * row, first);
                else multiply_tile<H, C>(strip, BLOCK, right, whole, tile + C * row, first);
            });
        }
    }
}
