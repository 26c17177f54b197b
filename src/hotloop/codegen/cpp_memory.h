// What comes in: cpp_prelude.h's words. What goes out: loads, stores, gathers and transposed tiles.
// What holds: a lane that a mask leaves out neither reads nor writes memory; no address need be aligned.
// Next: cpp_math.h (transcendental functions).

// @section memory needs: small_floats
// Unaligned. bf16 and f16 come as f32 and are rounded when stored. bool is stored as u8, 0 or 1, and
// has its own two functions. The _partial forms touch n elements only, and read 0 in the other lanes.
template <class T, int W> struct memory_of { typedef T type __attribute__((vector_size(W * sizeof(T)), aligned(1), may_alias)); };
template <int W, class T> HL reg<T, W> load(const T* p) {
    if constexpr (is_small_float<T>) return from_bits<T>(load<W>(&p->bits));
    else if constexpr (W == 1) return *p;
    else return *(const typename memory_of<T, W>::type*)p;
}
template <int W, class T> HL void store(T* p, reg<T, W> v) {
    if constexpr (is_small_float<T>) store<W>(&p->bits, to_bits<T>(v));
    else if constexpr (W == 1) *p = v;
    else *(typename memory_of<T, W>::type*)p = v;
}
#if defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(__clang__)
#define HL_PARTIAL(BYTES, LANES, LOAD, STORE, TYPE, MASK) \
    if constexpr (sizeof(T) == BYTES && W == LANES) { \
        typedef TYPE E; typedef vec<E, W> B; \
        if constexpr (LOADS) v = (vec<T, W>)LOAD((const E*)p, B{}, MASK((u64(1) << n) - 1)); \
        else STORE((E*)p, (B)v, MASK((u64(1) << n) - 1)); \
        return true; \
    }
#else
#define HL_PARTIAL(BYTES, LANES, LOAD, STORE, TYPE, MASK)
#endif
// What the CPU has for the first n < W lanes; false where it has nothing. LOADS: into v, else from it.
template <bool LOADS, int W, class T, class P> HL bool partial_move(P* p, vec<T, W>& v, i64 n) {
    HL_PARTIAL(4, 16, __builtin_ia32_loadups512_mask, __builtin_ia32_storeups512_mask, float, u16)
    HL_PARTIAL(8, 8, __builtin_ia32_loadupd512_mask, __builtin_ia32_storeupd512_mask, double, u8)
    HL_PARTIAL(4, 8, __builtin_ia32_loadups256_mask, __builtin_ia32_storeups256_mask, float, u8)
    HL_PARTIAL(2, 16, __builtin_ia32_loaddquhi256_mask, __builtin_ia32_storedquhi256_mask, short, u16)
    HL_PARTIAL(2, 8, __builtin_ia32_loaddquhi128_mask, __builtin_ia32_storedquhi128_mask, short, u8)
    HL_PARTIAL(1, 16, __builtin_ia32_loaddquqi128_mask, __builtin_ia32_storedquqi128_mask, char, u16)
#ifdef __AVX2__
    if constexpr (LOADS && sizeof(T) == 4 && W == 8) {
        const vec<i32, 8> k = {0, 1, 2, 3, 4, 5, 6, 7};
        v = (vec<T, W>)__builtin_ia32_maskloadd256((const vec<i32, 8>*)p, k < i32(n));
        return true;
    } else if constexpr (LOADS && sizeof(T) == 8 && W == 4) {
        const vec<long long, 4> k = {0, 1, 2, 3};
        v = (vec<T, W>)__builtin_ia32_maskloadq256((const vec<long long, 4>*)p, k < (long long)n);
        return true;
    }
#endif
    (void)p; (void)v; (void)n;
    return false;
}
template <int STEP, class T> HL void copy_first(T* to, const T* from, i64 n) {  // n < 2 STEP elements
    if (n & STEP) { __builtin_memcpy(to, from, STEP * sizeof(T)); to += STEP; from += STEP; }
    if constexpr (STEP > 1) copy_first<STEP / 2>(to, from, n);
}
template <int W, class T> HL reg<T, W> load_partial(const T* p, i64 n) {
    if constexpr (is_small_float<T>) return from_bits<T>(load_partial<W>(&p->bits, n));
    else if constexpr (W == 1) return n > 0 ? *p : T(0);
    else {
        if (n >= W) return load<W>(p);
        vec<T, W> v = {};
        if (partial_move<true, W, T>(p, v, n)) return v;
        T part[W] = {};
        copy_first<W / 2>(part, p, n);
        return load<W>(part);
    }
}
template <int W, class T> HL void store_partial(T* p, reg<T, W> v, i64 n) {
    if constexpr (is_small_float<T>) store_partial<W>(&p->bits, to_bits<T>(v), n);
    else if constexpr (W == 1) { if (n > 0) *p = v; }
    else {
        if (n >= W) return store<W>(p, v);
        if (partial_move<false, W, T>(p, v, n)) return;
        T part[W]; store<W>(part, v);
        copy_first<W / 2>(p, part, n);
    }
}
template <int W> HL mask<W> load_mask(const void* p) {
    if constexpr (W == 1) return *(const u8*)p != 0;
    else return convert<i32>(load<W>((const u8*)p)) != vec<i32, W>{};
}
template <int W, class M> HL void store_mask(void* p, M m) {
    if constexpr (W == 1) *(u8*)p = m;
    else store<W>((u8*)p, (vec<u8, W>)(mask_as<i8>(m) & 1));
}
template <int W> HL mask<W> load_mask_partial(const void* p, i64 n) { return canonical(load_partial<W>((const u8*)p, n) != splat<vec<u8, W>>(0)); }
template <int W, class M> HL void store_mask_partial(void* p, M m, i64 n) {
    u8 part[W]; store_mask<W>(part, m);
    store_partial<W>((u8*)p, load<W>(part), n);
}

// @section gather needs: memory
// p[0], p[stride], ...; and p[index] for a vector of indices. Both read memory lane by lane.
template <class V> HL V even_lanes(V a, V b) {  // a0 a2 ... and then b1 b3 ...
#if HL_SHUFFLES
    if constexpr (width<V> == 8 && sizeof(V) == 32) {  // a blend, which is cheap, and one shuffle
        V c = __builtin_shufflevector(a, b, 0, 9, 2, 11, 4, 13, 6, 15);
        return __builtin_shufflevector(c, c, 0, 2, 4, 6, 1, 3, 5, 7);
    } else if constexpr (width<V> == 4) return __builtin_shufflevector(a, b, 0, 2, 5, 7);
    else if constexpr (width<V> == 8) return __builtin_shufflevector(a, b, 0, 2, 4, 6, 9, 11, 13, 15);
    else if constexpr (width<V> == 16)
        return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23, 25, 27, 29, 31);
#endif
    return a;
}
template <class V> HL V reversed_lanes(V v) {
#if HL_SHUFFLES
    if constexpr (width<V> == 4) return __builtin_shufflevector(v, v, 3, 2, 1, 0);
    else if constexpr (width<V> == 8) return __builtin_shufflevector(v, v, 7, 6, 5, 4, 3, 2, 1, 0);
    else if constexpr (width<V> == 16)
        return __builtin_shufflevector(v, v, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#endif
    return v;
}
template <int W, class T> HL reg<T, W> load_strided(const T* p, i64 stride) {
    if constexpr (W == 1) return load<1>(p);
#if HL_SHUFFLES
    else if (__builtin_constant_p(stride) && stride == 2 && W >= 4) return even_lanes(load<W>(p), load<W>(p + W - 1));
    else if (__builtin_constant_p(stride) && stride == -1 && W >= 4) return reversed_lanes(load<W>(p - (W - 1)));
#endif
    else if constexpr (is_small_float<T>) {
        T part[W]; for (int k = 0; k < W; k++) part[k] = p[k * stride];
        return load<W>(part);
    } else { vec<T, W> r; for (int k = 0; k < W; k++) r[k] = p[k * stride]; return r; }
}
template <int W, class T> HL void store_strided(T* p, i64 stride, reg<T, W> v) {
    if constexpr (W == 1) store<1>(p, v);
    else { T part[W]; store<W>(part, v); for (int k = 0; k < W; k++) p[k * stride] = part[k]; }
}
template <int W, class T, class I> HL reg<T, W> gather(const T* p, I index) {
    if constexpr (W == 1) return load<1>(p + index);
    else if constexpr (is_small_float<T>) {
        T part[W]; for (int k = 0; k < W; k++) part[k] = p[index[k]];
        return load<W>(part);
    } else { vec<T, W> r; for (int k = 0; k < W; k++) r[k] = p[index[k]]; return r; }
}
template <int W, class T, class I> HL void scatter(T* p, I index, reg<T, W> v) {
    if constexpr (W == 1) store<1>(p + index, v);
    else { T part[W]; store<W>(part, v); for (int k = 0; k < W; k++) p[index[k]] = part[k]; }
}
// The lanes where m holds read p[k], the others are 0 and touch nothing.
template <int W, class T, class M> HL reg<T, W> load_where(const T* p, M m) {
    if constexpr (W == 1) return m ? load<1>(p) : reg<T, W>(0);
    else {
        if (__builtin_expect(all(m), 1)) return load<W>(p);
        T part[W] = {}; auto k = canonical(m);
        for (int i = 0; i < W; i++) if (k[i]) part[i] = p[i];
        return load<W>(part);
    }
}
// Records the first index that is out of range in *error, unless there is an error already: 1, then in 6 bits how
// many bits the size takes, the size, and the index in the bits that are left; 1 alone where it does not fit.
template <bool WRAPPED, class I> static __attribute__((noinline, cold)) void out_of_range(I index, i64 size, i64* error) {
    i64 at = 0;
    for (int k = 0; k < width<I>; k++) {
        if constexpr (width<I> == 1) at = index; else at = index[k];
        if (at < 0 || at >= size) break;
    }
    if (WRAPPED && at < 0) at -= size;
    const int bits = size > 0 ? 64 - __builtin_clzll(u64(size)) : 1, room = 56 - bits;
    const bool fits = room > 1 && at >> (room - 1) == at >> 63;
    i64 none = 0, found = fits ? i64(u64(at) << (8 + bits) | u64(size) << 8 | u64(bits) << 2 | 1) : 1;
    __atomic_compare_exchange_n(error, &none, found, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
// An index that must lie in 0 <= index < size: one outside is recorded in *error and replaced by 0, so that the access
// that follows stays inside.
template <bool WRAPPED, class I> HL I tested(I index, i64 size, i64* error) {
    auto bad = mask_or(index < splat<I>(0), index >= splat<I>(size));
    if (__builtin_expect(any(bad), 0)) { out_of_range<WRAPPED>(index, size, error); index = select(bad, splat<I>(0), index); }
    return index;
}
template <class I> HL I in_range(I index, i64 size, i64* error) { return tested<false>(index, size, error); }
// The same of an index to which size was added where it was negative.
template <class I> HL I in_range_wrapped(I index, i64 size, i64* error) { return tested<true>(index, size, error); }

// @section transpose needs: memory
// rows x columns elements, rows `stride` apart, turned: out[c * pitch + r] = p[r * stride + c].
#if HL_SHUFFLES
// Lanes of a and b in turn, from the lower and the upper half of each 16 bytes.
template <class V> HL V zip_low(V a, V b) {
    constexpr int W = width<V>;
    if constexpr (W == 16 && sizeof(V) == 16) return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    else if constexpr (W == 16) return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27);
    else if constexpr (W == 8 && sizeof(V) == 16) return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    else if constexpr (W == 8) return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
    else if constexpr (W == 4 && sizeof(V) == 16) return __builtin_shufflevector(a, b, 0, 4, 1, 5);
    else if constexpr (W == 4) return __builtin_shufflevector(a, b, 0, 4, 2, 6);
    else return __builtin_shufflevector(a, b, 0, 2);
}
template <class V> HL V zip_high(V a, V b) {
    constexpr int W = width<V>;
    if constexpr (W == 16 && sizeof(V) == 16) return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    else if constexpr (W == 16) return __builtin_shufflevector(a, b, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31);
    else if constexpr (W == 8 && sizeof(V) == 16) return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    else if constexpr (W == 8) return __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    else if constexpr (W == 4 && sizeof(V) == 16) return __builtin_shufflevector(a, b, 2, 6, 3, 7);
    else if constexpr (W == 4) return __builtin_shufflevector(a, b, 1, 5, 3, 7);
    else return __builtin_shufflevector(a, b, 1, 3);
}
// L lanes of one row, and with HALVES = 2 above them L lanes of the row L further on.
template <int HALVES, class T, int L> HL vec<T, HALVES * L> row_halves(const T* p, i64 stride) {
    vec<T, L> a = load<L>(p);
    if constexpr (HALVES == 1) return a;
    else {
        vec<T, L> b = load<L>(p + L * stride);
        if constexpr (L == 2) return __builtin_shufflevector(a, b, 0, 1, 2, 3);
        else if constexpr (L == 4) return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7);
        else return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    }
}
#endif
template <class E> static inline void transpose(const E* from, i64 stride, i64 rows, i64 columns, E* to, i64 pitch) {
    typedef typename ints<sizeof(E)>::u T;
    const T* p = (const T*)from; T* out = (T*)to;
#if HL_SHUFFLES
    constexpr int L = 16 / sizeof(T), HALVES = native_bytes >= 32 && L <= 8 ? 2 : 1, S = L * HALVES;
    typedef vec<T, S> V;
    // The last squares overlap those before.
    if (rows >= S && columns >= L) for (i64 y = 0; y < rows; y += S) for (i64 x = 0; x < columns; x += L) {
        i64 r = y + S <= rows ? y : rows - S, c = x + L <= columns ? x : columns - L;
        V a[L], b[L];
        for (int k = 0; k < L; k++) a[k] = row_halves<HALVES, T, L>(p + (r + k) * stride + c, stride);
        for (int round = 1; round < L; round *= 2) {  // each round deals the rows out like a pack of cards
            for (int k = 0; k < L / 2; k++) { b[2 * k] = zip_low(a[k], a[k + L / 2]); b[2 * k + 1] = zip_high(a[k], a[k + L / 2]); }
            for (int k = 0; k < L; k++) a[k] = b[k];
        }
        for (int k = 0; k < L; k++) store<S>(out + (c + k) * pitch + r, a[k]);
    }
    else
#endif
    for (i64 r = 0; r < rows; r++) for (i64 c = 0; c < columns; c++) out[c * pitch + r] = p[r * stride + c];
}
