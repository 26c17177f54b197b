// What comes in: cpp_memory.h's loads. What goes out: blocks of matrix products.
// What holds: operands narrower than f32 are widened to it, which is exact; sums of at most BLOCK terms are
// kept in registers, then added to the tile.

// @section multiply needs: memory, fma, convert
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
    } else if constexpr (same<T, i8>) row[0] = convert<f32>(load<W>(p));
    else row[0] = load<W>(p);
}
// What memory is asked for while a tile is computed, so that none waits for it: of what the right operand's next
// tiles read some lines, for every FETCH_TERMS terms, and of the left operand the terms that follow, in the end the first
// ones of the next tile's rows. Without it a product of 128 rows ran at 0.65 to 0.83 of the processor's peak.
struct ahead { const u8* right; int lines; const f32* left; };
constexpr int FETCH_TERMS = 16, FETCH_BYTES = 64;
// tile[C r + c] (+)= sum over k < depth of left[stride r + k] * panel(k, c), for r < R and c < C. ONCE: no other tile
// reads the panel, so that this one waits for memory.
template <int R, int C, bool ONCE, class T>
static inline void multiply_tile(const f32* left, i64 stride, const T* panel, i64 depth, f32* tile, bool more, ahead& next) {
    constexpr int W = HL_TILE_LANES, N = C / W, G = panel_group<T>;
    // Few sums at once would wait for each other: then even and odd rows have their own.
    constexpr int S = R * N <= 8 ? 2 : 1, K = S > G ? S : G;
    typedef vec<f32, W> V;
    static_assert(C % W == 0, "whole vectors");
    V sum[S][R][N] = {};
    auto rows = [&](i64 k, auto count) __attribute__((always_inline)) {
        constexpr int COUNT = decltype(count)::value;
        // The next page is asked for early, since the processor's own guesses end where a page does: four rows by
        // 4096 x 4096 read 55 GB/s for 47, eight 50 for 41.
        if constexpr (ONCE)
#pragma GCC unroll 16
            for (int at = 0; at < int(C * COUNT * sizeof(T)); at += 64)
                __builtin_prefetch((const u8*)(panel + C * k) + 4096 + at);
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
    if constexpr (!ONCE)
        while (k + FETCH_TERMS <= depth) {
            for (int n = 0; n < next.lines; n++, next.right += FETCH_BYTES) __builtin_prefetch(next.right, 0, 2);
            const f32* from = k + 2 * FETCH_TERMS < depth ? left + k + 2 * FETCH_TERMS : next.left + k + 2 * FETCH_TERMS - depth;
#pragma GCC unroll 16
            for (int i = 0; i < R; i++) __builtin_prefetch(from + stride * i);
            for (i64 stop = k + FETCH_TERMS; k < stop; k += K) rows(k, number<K>{});
        }
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
template <int R, int C, int REST, int MOST, int BLOCK, class L, class T>
static inline void multiply(const L* left, i64 stride, i64 rows, const T* panel, i64 depth, f32* tile) {
    constexpr int G = panel_group<T>;
    constexpr bool ONCE = MOST <= R;
    static_assert(BLOCK % FETCH_TERMS == 0 && FETCH_TERMS % G == 0, "whole groups");
    // As many blocks as it takes, of about equal depth.
    i64 blocks = (depth + BLOCK - 1) / BLOCK;
    i64 block = ((depth - 1) / blocks / FETCH_TERMS + 1) * FETCH_TERMS;
    i64 tiles = (rows + R - 1) / R;
    for (i64 first = 0; first < depth; first += block) {
        i64 terms = depth - first < block ? depth - first : block;
        const T* right = panel + C * first;
        // What follows this block in memory is what this thread reads next, in this panel or another.
        ahead next = {(const u8*)(right + C * terms), int((C * FETCH_TERMS * sizeof(T) / FETCH_BYTES + tiles - 1) / tiles), nullptr};
        if constexpr (same<T, f32>) {
            each_tile<R, C, REST>(rows, [&](i64 row, auto height) __attribute__((always_inline)) {
                constexpr int H = decltype(height)::value;
                next.left = row + H < rows ? left + stride * (row + H) + first : left + first + terms;
                multiply_tile<H, C, ONCE>(left + stride * row + first, stride, right, terms, tile + C * row, first, next);
            });
        } else {
            // For many tiles, the panel is widened once; rows that vary decide at run time.
            constexpr bool MANY = MOST > 2 * R, FEW = !MANY || REST < 0;
            i64 whole = (terms + G - 1) / G * G;
            constexpr bool NARROW = !same<L, f32>;
            alignas(64) f32 strip[NARROW ? R * BLOCK : 1], wide[MANY ? BLOCK * C : 1];
            next.left = strip;
            auto all = [&](const auto* from) __attribute__((always_inline)) {
                each_tile<R, C, REST>(rows, [&](i64 row, auto height) __attribute__((always_inline)) {
                    constexpr int H = decltype(height)::value;
                    if constexpr (NARROW) {
                        widen_rows(left + stride * row + first, stride, H, terms, whole, strip, BLOCK);
                        multiply_tile<H, C, ONCE>(strip, BLOCK, from, whole, tile + C * row, first, next);
                    } else {
                        next.left = row + H < rows ? left + stride * (row + H) + first : left + first + terms;
                        multiply_tile<H, C, ONCE>(left + stride * row + first, stride, from, terms, tile + C * row, first, next);
                    }
                });
            };
            if constexpr (FEW)
                if (!MANY || rows <= 2 * R) { all(right); continue; }
            if constexpr (MANY) { widen_panel<C>(right, whole, wide); all((const f32*)wide); }
        }
    }
}

// @section attend needs: multiply, reduce, exp
// Rows of numbers, `stride` apart.
struct rows_of { const f32* at; i64 stride; };
// Lane i of vector j and lane j of vector i change places.
template <int W> HL void transpose(vec<f32, W>* row) {
#ifdef __clang__
    f32 all[W][W];
    for (int i = 0; i < W; i++) store<W>(all[i], row[i]);
    for (int i = 0; i < W; i++) for (int j = 0; j < W; j++) row[i][j] = all[j][i];
#else
#pragma GCC unroll 4
    for (int step = 1; step < W; step *= 2) {
        vec<i32, W> even, odd;
        for (int k = 0; k < W; k++) even[k] = k & step ? W + k - step : k, odd[k] = k & step ? W + k : k + step;
#pragma GCC unroll 16
        for (int i = 0; i < W; i++)
            if (!(i & step)) {
                vec<f32, W> first = row[i], second = row[i + step];
                row[i] = __builtin_shuffle(first, second, even), row[i + step] = __builtin_shuffle(first, second, odd);
            }
    }
#endif
}
// Panels of C columns, each a row of `rows`, with zeros in columns that have none: element (k, c) of the first panel is
// rows(c, k).
template <int C> static inline void pack_columns(rows_of rows, i64 count, i64 depth, f32* to) {
    constexpr int W = HL_TILE_LANES;
    for (i64 first = 0; first < count; first += C, to += C * depth)
        for (i64 c = 0; c < C; c += W) {
            const f32* from = rows.at + rows.stride * (first + c);
            i64 there = count - first - c, k = 0;
            if (there >= W)
                for (; k + W <= depth; k += W) {
                    vec<f32, W> part[W];
#pragma GCC unroll 16
                    for (int i = 0; i < W; i++) part[i] = load<W>(from + rows.stride * i + k);
                    transpose<W>(part);
#pragma GCC unroll 16
                    for (int i = 0; i < W; i++) store<W>(to + C * (k + i) + c, part[i]);
                }
            for (; k < depth; k++)
                for (i64 i = 0; i < W; i++) to[C * k + c + i] = i < there ? from[rows.stride * i + k] : 0;
        }
}
// Panels of C of the columns of `rows`, with zeros in columns that are none; there are whole vectors of columns.
template <int C> static inline void pack_rows(rows_of rows, i64 count, i64 columns, f32* to) {
    constexpr int W = HL_TILE_LANES;
    typedef vec<f32, W> V;
    for (i64 first = 0; first < columns; first += C)
        for (i64 k = 0; k < count; k++, to += C)
#pragma GCC unroll 16
            for (i64 c = 0; c < C; c += W)
                store<W>(to + c, first + c < columns ? load<W>(rows.at + rows.stride * k + first + c) : splat<V>(0.0f));
}
// e^x for x <= 0, and 0 where that is less than 2^-126; NaN stays. A third of exp's time, and as accurate.
template <class V> HL V exp_below(V x) {
    x = greater(splat<V>(-88), x);
    V t = fma(x, splat<V>(0x1.715476p+0f), splat<V>(rounder + 127)), n = t - (rounder + 127);
    V r = fma(n, splat<V>(-0x1.62e430p-1f), x);
    r = fma(n, splat<V>(0x1.05c610p-29f), r);
    V p = poly(r, 1.0f, 1.0f, 0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558b6p-5f, 0x1.1239a2p-7f, 0x1.6a4744p-10f);
    return p * bitcast<f32>(bitcast<u32>(t) << 23);
}
// The first `seen` of a row's `keys` scores, C of them every `pitch`, become the numerators of their softmax, the others 0.
// Gives what they add up to.
template <int C, bool MASKED>
static inline f32 weigh(f32* row, i64 pitch, i64 keys, i64 seen, const f32* mask, f32 scale) {
    constexpr int W = HL_TILE_LANES;
    typedef vec<f32, W> V;
    const V lowest = splat<V>(-__builtin_inff());
    V most = lowest, sum = splat<V>(0.0f);
    auto each = [&](auto visit) __attribute__((always_inline)) {
        for (i64 first = 0; first < seen; first += C) {
            f32* part = row + first / C * pitch;
#pragma GCC unroll 16
            for (int c = 0; c < C; c += W)
                if (first + c < seen) visit(part + c, first + c);
        }
    };
    each([&](f32* at, i64 k) __attribute__((always_inline)) {
        V score = load<W>(at) * scale;
        if (k + W > seen) {
            if constexpr (MASKED) score = score + load_partial<W>(mask + k, seen - k);
            score = select(mask_first<W>(seen - k), score, lowest);
        } else if constexpr (MASKED) score = score + load<W>(mask + k);
        most = greater(most, score);
        store<W>(at, score);
    });
    f32 greatest = hmax(most);  // NaN makes the sum NaN, whether it is seen here or not
    const bool none = greatest == -__builtin_inff();
    if (none) {  // as eager, no weights, unless a score is NaN
        bool nan = false;
        each([&](f32* at, i64) { for (int i = 0; i < W; i++) nan |= at[i] != at[i]; });
        sum = splat<V>(nan ? __builtin_nanf("") : 1.0f / W);
    } else
        each([&](f32* at, i64) __attribute__((always_inline)) {
            V weight = exp_below(load<W>(at) - greatest);
            sum = sum + weight;
            store<W>(at, weight);
        });
    for (i64 k = none ? 0 : (seen + W - 1) / W * W; k < keys; k += W) store<W>(row + k / C * pitch + k % C, splat<V>(0.0f));
    return hsum(sum);
}
// Attention of `rows` queries, the first of which is number `from`, to the keys of one head; see ir/kernel.py. R x C
// scores are summed at once, and S x T sums of values. A block of BLOCK rows has all its scores in memory: panels of
// keys, BLOCK rows of C each.
template <int R, int C, int S, int T, int BLOCK, bool CAUSAL, bool MASKED>
static inline void attend(rows_of query, rows_of key, rows_of value, rows_of mask, i64 from, i64 rows, i64 keys, i64 depth, i64 columns, f32 scale, f32* work, f32* tile) {
    constexpr int W = HL_TILE_LANES;
    i64 panels = (keys + C - 1) / C;
    f32* const right = work;
    f32* const values = right + panels * C * depth;
    f32* const scores = values + (columns + T - 1) / T * T * keys;
    f32* const sums = scores + panels * C * BLOCK;
    pack_columns<C>(key, keys, depth, right);
    pack_rows<T>(value, keys, columns, values);
    f32 inverse[BLOCK];
    for (i64 first = 0; first < rows; first += BLOCK) {
        i64 count = rows - first < BLOCK ? rows - first : BLOCK;
        i64 seen = CAUSAL && from + first + count < keys ? from + first + count : keys;
        ahead none = {nullptr, 0, query.at + query.stride * first};
        for (i64 p = 0; p * C < seen; p++)
            each_tile<R, C, -1>(count, [&](i64 row, auto height) __attribute__((always_inline)) {
                multiply_tile<decltype(height)::value, C, false>(
                    query.at + query.stride * (first + row), query.stride, right + p * C * depth, depth, scores + C * (BLOCK * p + row), false, none);
            });
        for (i64 row = 0; row < count; row++)
            inverse[row] = 1 / weigh<C, MASKED>(scores + C * row, C * BLOCK, seen, CAUSAL && from + first + row < seen ? from + first + row + 1 : seen,
                                               MASKED ? mask.at + mask.stride * (first + row) : nullptr, scale);
        none.left = scores;
        for (i64 t = 0; t * T < columns; t++) {
            each_tile<S, T, -1>(count, [&](i64 row, auto height) __attribute__((always_inline)) {
                for (i64 k = 0; k < seen; k += C)
                    multiply_tile<decltype(height)::value, T, false>(
                        scores + BLOCK * k + C * row, C, values + T * (t * keys + k), seen - k < C ? seen - k : C, sums + T * row, k, none);
            });
            for (i64 row = 0; row < count; row++)
                for (i64 c = 0; c < T && t * T + c < columns; c += W)
                    store<W>(tile + columns * (first + row) + t * T + c, load<W>(sums + T * row + c) * inverse[row]);
        }
    }
}

// @section multiply_dot needs: multiply
// The same for bf16 by AVX512-BF16: two terms an instruction, which takes subnormal numbers for zeros.
HL vec<f32, 16> dot_pairs(vec<f32, 16> sum, vec<u32, 16> a, vec<u32, 16> b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
template <int R, int C>
static inline void multiply_pairs(const bf16* left, i64 stride, const bf16* panel, i64 depth, f32* tile, bool more) {
    constexpr int N = C / 16;
    vec<f32, 16> sum[R][N] = {};
    auto pair = [&](i64 k, auto whole) __attribute__((always_inline)) {
        vec<u32, 16> right[N];
#pragma GCC unroll 16
        for (int j = 0; j < N; j++) right[j] = load<16>((const u32*)(panel + C * k + 32 * j));
#pragma GCC unroll 16
        for (int i = 0; i < R; i++) {
            u32 bits = 0;
            __builtin_memcpy(&bits, left + stride * i + k, 2 * decltype(whole)::value);
            vec<u32, 16> a = splat<vec<u32, 16>>(bits);
#pragma GCC unroll 16
            for (int j = 0; j < N; j++) sum[i][j] = dot_pairs(sum[i][j], a, right[j]);
        }
    };
    i64 k = 0;
    for (; k + 2 <= depth; k += 2) pair(k, number<2>{});
    if (k < depth) pair(k, number<1>{});
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
#pragma GCC unroll 16
        for (int j = 0; j < N; j++) {
            f32* to = tile + C * i + 16 * j;
            store<16>(to, more ? load<16>(to) + sum[i][j] : sum[i][j]);
        }
}
template <int R, int C, int REST, int MOST, int BLOCK>
static inline void multiply_dot(const bf16* left, i64 stride, i64 rows, const bf16* panel, i64 depth, f32* tile) {
    for (i64 first = 0; first < depth; first += BLOCK) {
        i64 terms = depth - first < BLOCK ? depth - first : BLOCK;
        each_tile<R, C, REST>(rows, [&](i64 row, auto height) __attribute__((always_inline)) {
            multiply_pairs<decltype(height)::value, C>(
                left + stride * row + first, stride, panel + C * first, terms, tile + C * row, first);
        });
    }
}

// @section multiply_amx needs: multiply
// The same for bf16 by AMX, 32 rows by 32 columns at once in tiles 0 to 3, of 16 by 16 sums each; 4 and 5 hold
// 16 rows of the left operand, 6 and 7 16 columns of a panel, 32 terms deep. A panel has zeros up to a multiple
// of 32 terms. Sums of up to AMX_BLOCK terms stay in a tile: their rounding errors are far below bf16's own.
constexpr i64 AMX_BLOCK = 2048;
struct amx_shapes { u8 palette, start, none[14]; u16 bytes[16]; u8 rows[16]; };
static inline void amx_configure(int upper, int lower) {
    amx_shapes shapes = {};
    shapes.palette = 1;
    for (int t = 0; t < 8; t++) {
        bool is_lower = t == 2 || t == 3 || t == 5;
        shapes.rows[t] = u8(t >= 6 ? 16 : is_lower ? lower : upper);
        shapes.bytes[t] = shapes.rows[t] ? 64 : 0;
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes));
}
#define HL_TILE_LOAD(TILE, FROM, PITCH) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #TILE : : "r"(FROM), "r"(i64(PITCH)) : "memory")
#define HL_TILE_STORE(TILE, TO, PITCH) \
    asm volatile("tilestored %%tmm" #TILE ", (%0,%1,1)" : : "r"(TO), "r"(i64(PITCH)) : "memory")
#define HL_TILE_PRODUCT(A, B, SUM) asm volatile("tdpbf16ps %%tmm" #B ", %%tmm" #A ", %%tmm" #SUM : :)
#define HL_TILE_ZERO(TILE) asm volatile("tilezero %%tmm" #TILE : :)
// 32 terms: `left` has rows `pitch` bytes apart, and `right` pairs of rows 4 C bytes apart. TWO: rows 16 on too.
template <int C, bool TWO> HL void amx_step(const bf16* left, i64 pitch, const bf16* right) {
    HL_TILE_LOAD(4, left, pitch);
    HL_TILE_LOAD(6, right, 4 * C);
    HL_TILE_PRODUCT(4, 6, 0);
    HL_TILE_LOAD(7, right + 32, 4 * C);
    HL_TILE_PRODUCT(4, 7, 1);
    if constexpr (TWO) {
        HL_TILE_LOAD(5, (const u8*)left + 16 * pitch, pitch);
        HL_TILE_PRODUCT(5, 6, 2);
        HL_TILE_PRODUCT(5, 7, 3);
    }
}
// tile (+)= the products of `rows` rows, 32 at most, as the tiles are configured. `rest`: the last terms of these
// rows, 32 of each, with zeros in the end, where depth is no multiple of 32.
template <int C, bool TWO>
static inline void amx_tile(const bf16* left, i64 stride, const bf16* panel, i64 depth, const bf16* rest, i64 rows, f32* tile, bool more) {
    alignas(64) f32 part[32 * 32];
    for (i64 c = 0; c < C; c += 32) {
        HL_TILE_ZERO(0); HL_TILE_ZERO(1);
        if constexpr (TWO) { HL_TILE_ZERO(2); HL_TILE_ZERO(3); }
        const bf16* right = panel + 2 * c;
        i64 k = 0;
        for (; k + 32 <= depth; k += 32) amx_step<C, TWO>(left + k, 2 * stride, right + C * k);
        if (k < depth) amx_step<C, TWO>(rest, 64, right + C * k);
        f32* to = more ? part : tile + c;
        i64 pitch = more ? 32 : C;
        HL_TILE_STORE(0, to, 4 * pitch); HL_TILE_STORE(1, to + 16, 4 * pitch);
        if constexpr (TWO) { HL_TILE_STORE(2, to + 16 * pitch, 4 * pitch); HL_TILE_STORE(3, to + 16 * pitch + 16, 4 * pitch); }
        if (more)
            for (i64 r = 0; r < rows; r++)
                for (i64 j = 0; j < 32; j += 16)
                    store<16>(tile + C * r + c + j, load<16>(tile + C * r + c + j) + load<16>(part + 32 * r + j));
    }
}
template <int R, int C, int REST, int MOST, int BLOCK>
static inline void multiply_amx(const bf16* left, i64 stride, i64 rows, const bf16* panel, i64 depth, f32* tile) {
    static_assert(C % 32 == 0 && R == 32, "whole tiles");
    alignas(64) bf16 rest[32 * 32];
    int configured = 0;
    for (i64 first = 0; first < depth; first += AMX_BLOCK) {
        i64 terms = depth - first < AMX_BLOCK ? depth - first : AMX_BLOCK, last = terms % 32;
        for (i64 row = 0; row < rows; row += 32) {
            int height = rows - row < 32 ? int(rows - row) : 32;
            if (height != configured) amx_configure(height < 16 ? height : 16, height < 16 ? 0 : height - 16);
            configured = height;
            const bf16* from = left + stride * row + first;
            for (i64 r = 0; last && r < height; r++)
                for (i64 k = 0; k < 32; k++) rest[32 * r + k].bits = k < last ? from[stride * r + terms - last + k].bits : 0;
            auto product = height > 16 ? amx_tile<C, true> : amx_tile<C, false>;
            product(from, stride, panel + C * first, terms, rest, height, tile + C * row, first);
        }
    }
    asm volatile("tilerelease" : :);
}
