// What comes in: nothing; these are the words every generated C++ kernel is written with.
// What goes out: types, casts, masks, integer and float arithmetic, reductions.
// What holds: no #include; one spelling for every lane count, vec<T, 1> being the plain C type T.
// cpp_text.py cuts this file at its "@section" lines and pastes only what a kernel needs.
// Next: cpp_memory.h (loads and stores).
//
// Lane counts. A loop has one count W for all its dtypes. Choose W so that W elements of the widest
// dtype in the loop fill one register: wider vectors are correct, but g++ compares and selects them
// lane by lane. cpp_text.lanes(level, widest_bytes) gives the right W.

// @section core
typedef float f32; typedef double f64;
typedef __INT8_TYPE__ i8; typedef __INT16_TYPE__ i16; typedef __INT32_TYPE__ i32; typedef __INT64_TYPE__ i64;
typedef __UINT8_TYPE__ u8; typedef __UINT16_TYPE__ u16; typedef __UINT32_TYPE__ u32; typedef __UINT64_TYPE__ u64;
struct bf16 { u16 bits; };  // in memory only: in registers such a value is an f32 already rounded
struct f16 { u16 bits; };
#define HL static inline __attribute__((always_inline))
#if defined(__FMA__) || defined(__aarch64__)
#define HL_FMA 1
#else
#define HL_FMA 0
#endif
#ifdef __has_builtin
#define HL_HAS(builtin) __has_builtin(builtin)
#else
#define HL_HAS(builtin) 0
#endif

template <class T, int W> struct vec_of { typedef T type __attribute__((vector_size(W * sizeof(T)))); };
template <class T> struct vec_of<T, 1> { typedef T type; };
template <class T, int W> using vec = typename vec_of<T, W>::type;

template <class T> struct bare { typedef T type; };
template <class T> struct bare<T&> { typedef T type; };
template <class T> struct bare<const T> { typedef T type; };
template <class T> struct bare<const T&> { typedef T type; };
template <class...> using void_t = void;
template <class V, class = void> struct lanes_of { typedef V elem; static constexpr int count = 1; };
template <class V> struct lanes_of<V, void_t<decltype((*(V*)0)[0])>> {
    typedef typename bare<decltype((*(V*)0)[0])>::type elem;
    static constexpr int count = sizeof(V) / sizeof(elem);
};
template <class V> using elem = typename lanes_of<V>::elem;
template <class V> constexpr int width = lanes_of<V>::count;
template <class V, class T> using like = vec<T, width<V>>;  // as many lanes as V, of type T

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;
template <class T> constexpr bool is_float = same<T, f32> || same<T, f64>;
template <class T> constexpr bool is_small_float = same<T, bf16> || same<T, f16>;
template <class T> constexpr bool is_signed = T(-1) < T(0);
template <int N> struct number { static constexpr int value = N; };
template <int BYTES> struct ints;
template <> struct ints<1> { typedef i8 s; typedef u8 u; };
template <> struct ints<2> { typedef i16 s; typedef u16 u; };
template <> struct ints<4> { typedef i32 s; typedef u32 u; };
template <> struct ints<8> { typedef i64 s; typedef u64 u; };
template <class V> using sints = like<V, typename ints<sizeof(elem<V>)>::s>;
template <class V> using uints = like<V, typename ints<sizeof(elem<V>)>::u>;
template <class T> struct register_type { typedef T type; };
template <> struct register_type<bf16> { typedef f32 type; };
template <> struct register_type<f16> { typedef f32 type; };
template <class T, int W> using reg = vec<typename register_type<T>::type, W>;

// The largest register, in bytes; 0 where there are no vectors.
#if defined(__AVX512F__)
[[maybe_unused]] constexpr int native_bytes = 64;
#elif defined(__AVX2__)
[[maybe_unused]] constexpr int native_bytes = 32;
#else
[[maybe_unused]] constexpr int native_bytes = 16;
#endif

template <class V, class S> HL V splat(S value) {
    if constexpr (width<V> == 1) return V(value);
    else return (elem<V>)value - V{};  // c - 0 is c for every c, -0 and NaN too; c + 0 is not
}
template <class T, int W, class S> HL reg<T, W> broadcast(S value) { return splat<reg<T, W>>(value); }

// Same bits, another type of the same size.
template <class T, class V> HL like<V, T> bitcast(V v) {
    static_assert(sizeof(T) == sizeof(elem<V>), "bitcast keeps the size");
    if constexpr (width<V> > 1) return (like<V, T>)v;
    else { T r; __builtin_memcpy(&r, &v, sizeof r); return r; }
}
// The function of each lane, for what has no vector form.
template <class V, class F> HL V map(V v, F f) {
    if constexpr (width<V> == 1) return f(v);
    else { V r; for (int k = 0; k < width<V>; k++) r[k] = f(v[k]); return r; }
}
template <class V, class U, class F> HL V map2(V a, U b, F f) {
    if constexpr (width<V> == 1) return f(a, b);
    else { V r; for (int k = 0; k < width<V>; k++) r[k] = f(a[k], b[k]); return r; }
}
// The upper half of the lanes (the lower one is its first lanes), and all of them turned by N places.
#if HL_HAS(__builtin_shufflevector)
#define HL_SHUFFLES 1
template <int FROM, class V> HL vec<elem<V>, width<V> / 2> half_of(V v) {
    constexpr int H = width<V> / 2, k = FROM * H;
    static_assert(H == 2 || H == 4 || H == 8, "half a register at least");
    if constexpr (H == 2) return __builtin_shufflevector(v, v, k, k + 1);
    else if constexpr (H == 4) return __builtin_shufflevector(v, v, k, k + 1, k + 2, k + 3);
    else return __builtin_shufflevector(v, v, k, k + 1, k + 2, k + 3, k + 4, k + 5, k + 6, k + 7);
}
template <int N, class V> HL V turned(V v) {
    constexpr int W = width<V>;
    if constexpr (W == 2) return __builtin_shufflevector(v, v, 1, 0);
    else if constexpr (W == 4) return __builtin_shufflevector(v, v, N, N + 1, (N + 2) % W, (N + 3) % W);
    else if constexpr (W == 8)
        return __builtin_shufflevector(v, v, N, N + 1, N + 2, N + 3, (N + 4) % W, (N + 5) % W, (N + 6) % W, (N + 7) % W);
    else
        return __builtin_shufflevector(v, v, N, N + 1, N + 2, N + 3, N + 4, N + 5, N + 6, N + 7, (N + 8) % W, (N + 9) % W,
            (N + 10) % W, (N + 11) % W, (N + 12) % W, (N + 13) % W, (N + 14) % W, (N + 15) % W);
}
#else
#define HL_SHUFFLES 0
#endif
// An operation on N lanes at a time, for vectors longer or shorter than the operation's own.
template <int N, class V, class F> HL V chunks(V a, F f) {
    typedef vec<elem<V>, N> P;
    if constexpr (width<V> == N) return f(a);
    else if constexpr (width<V> < N) {
        P p = {}; for (int k = 0; k < width<V>; k++) p[k] = a[k];
        p = f(p);
        V r; for (int k = 0; k < width<V>; k++) r[k] = p[k];
        return r;
    } else {
        P p[width<V> / N]; __builtin_memcpy(p, &a, sizeof a);
        for (P& part : p) part = f(part);
        V r; __builtin_memcpy(&r, p, sizeof r); return r;
    }
}
template <int N, class V, class F> HL V chunks2(V a, V b, F f) {
    typedef vec<elem<V>, N> P;
    if constexpr (width<V> == N) return f(a, b);
    else if constexpr (width<V> < N) {
        P p = {}, q = {}; for (int k = 0; k < width<V>; k++) { p[k] = a[k]; q[k] = b[k]; }
        p = f(p, q);
        V r; for (int k = 0; k < width<V>; k++) r[k] = p[k];
        return r;
    } else {
        P p[width<V> / N], q[width<V> / N];
        __builtin_memcpy(p, &a, sizeof a); __builtin_memcpy(q, &b, sizeof b);
        for (int k = 0; k < width<V> / N; k++) p[k] = f(p[k], q[k]);
        V r; __builtin_memcpy(&r, p, sizeof r); return r;
    }
}

// @section convert needs: core
// The lanes of v as T, by C's rules. g++ before 14 takes half-filled registers apart lane by lane, so the
// conversions between sizes that loops are made of are spelled out for AVX2.
template <class R, class V> HL R low_lanes(V v) {  // same bits from lane 0 up, in a longer or shorter vector
    if constexpr (sizeof(R) >= 16 && sizeof(V) == 8) { i64 q; __builtin_memcpy(&q, &v, 8); return (R)vec<i64, 2>{q, 0}; }
    else if constexpr (sizeof(R) >= 16 && sizeof(V) == 4) { i32 q; __builtin_memcpy(&q, &v, 4); return (R)vec<i32, 4>{q, 0, 0, 0}; }
    else if constexpr (sizeof(R) == 8) { i64 q = ((vec<i64, sizeof(V) / 8>)v)[0]; R r; __builtin_memcpy(&r, &q, 8); return r; }
    else if constexpr (sizeof(R) == 4) { i32 q = ((vec<i32, sizeof(V) / 4>)v)[0]; R r; __builtin_memcpy(&r, &q, 4); return r; }
    else return (R)v;
}
#if defined(__AVX2__) && !defined(__clang__)
#ifdef __AVX512F__  // g++ 12 merges what half a register is widened to with memory by a mask, and then gives up
#define HL_UNMERGED(V) asm("" : "+v"(V))
#else
#define HL_UNMERGED(V)
#endif
#define HL_WIDEN(LANES, FROM, TO, SIGNED, UNSIGNED, REGISTER) \
    if constexpr (W == LANES && sizeof(S) == FROM && sizeof(T) == TO && !is_float<T>) { \
        auto r = low_lanes<REGISTER>(v); R w; \
        if constexpr (is_signed<S>) w = (R)SIGNED(r); else w = (R)UNSIGNED(r); \
        HL_UNMERGED(w); return w; \
    } else
#define HL_WIDEN512(LANES, FROM, TO, SIGNED, UNSIGNED, REGISTER, WIDE) \
    if constexpr (W == LANES && sizeof(S) == FROM && sizeof(T) == TO && !is_float<T>) { \
        if constexpr (is_signed<S>) return (R)SIGNED((REGISTER)v, WIDE{}, -1); else return (R)UNSIGNED((REGISTER)v, WIDE{}, -1); \
    } else
typedef vec<char, 16> char16; typedef vec<i16, 8> short8; typedef vec<i32, 4> int4;
typedef vec<i16, 16> short16; typedef vec<i32, 8> int8; typedef vec<i32, 16> int16; typedef vec<long long, 8> long8;
template <class T, class V> HL like<V, T> convert(V v) {
    typedef elem<V> S; typedef like<V, T> R;
    [[maybe_unused]] constexpr int W = width<V>;
    if constexpr (W == 1) return T(v);
    else if constexpr (same<S, T>) return v;
    else if constexpr (sizeof(S) == sizeof(T) && !is_float<S> && !is_float<T>) return (R)v;
    else if constexpr ((sizeof(S) < 4 && is_float<T>) || (sizeof(T) < 4 && is_float<S>)) return convert<T>(convert<i32>(v));
#ifdef __AVX512F__
    else if constexpr (W == 8 && same<S, f32> && same<T, f64>) return (R)__builtin_ia32_cvtps2pd512_mask(v, R{}, -1, 4);
    else if constexpr (W == 8 && same<S, i32> && same<T, f64>) return (R)__builtin_ia32_cvtdq2pd512_mask(v, R{}, -1);
#endif
    else if constexpr (is_float<S> || is_float<T>) return __builtin_convertvector(v, R);
    else
#ifdef __AVX512F__
    HL_WIDEN512(16, 2, 4, __builtin_ia32_pmovsxwd512_mask, __builtin_ia32_pmovzxwd512_mask, short16, int16)
    HL_WIDEN512(16, 1, 4, __builtin_ia32_pmovsxbd512_mask, __builtin_ia32_pmovzxbd512_mask, char16, int16)
    HL_WIDEN512(8, 4, 8, __builtin_ia32_pmovsxdq512_mask, __builtin_ia32_pmovzxdq512_mask, int8, long8)
#endif
    HL_WIDEN(8, 2, 4, __builtin_ia32_pmovsxwd256, __builtin_ia32_pmovzxwd256, short8)
    HL_WIDEN(8, 1, 4, __builtin_ia32_pmovsxbd256, __builtin_ia32_pmovzxbd256, char16)
    HL_WIDEN(8, 1, 2, __builtin_ia32_pmovsxbw128, __builtin_ia32_pmovzxbw128, char16)
    HL_WIDEN(4, 4, 8, __builtin_ia32_pmovsxdq256, __builtin_ia32_pmovzxdq256, int4)
    HL_WIDEN(4, 2, 8, __builtin_ia32_pmovsxwq256, __builtin_ia32_pmovzxwq256, short8)
    HL_WIDEN(4, 1, 8, __builtin_ia32_pmovsxbq256, __builtin_ia32_pmovzxbq256, char16)
    HL_WIDEN(4, 2, 4, __builtin_ia32_pmovsxwd128, __builtin_ia32_pmovzxwd128, short8)
    HL_WIDEN(4, 1, 4, __builtin_ia32_pmovsxbd128, __builtin_ia32_pmovzxbd128, char16)
    if constexpr (W == 8 && sizeof(T) == 1 && sizeof(S) == 2) {
        auto r = (vec<i16, 8>)(v & S(255));
        return low_lanes<R>(__builtin_ia32_packuswb128(r, r));
    } else if constexpr (W == 4 && sizeof(T) <= 2 && sizeof(S) == 4) {
        auto r = (vec<i32, 4>)(v & S(sizeof(T) == 1 ? 255 : 65535));
        auto h = __builtin_ia32_packusdw128(r, r);
        if constexpr (sizeof(T) == 2) return low_lanes<R>(h);
        else return low_lanes<R>(__builtin_ia32_packuswb128((vec<i16, 8>)h, (vec<i16, 8>)h));
    } else if constexpr (W == 4 && sizeof(T) == 4 && sizeof(S) == 8) {
        auto r = __builtin_ia32_permvarsi256((vec<i32, 8>)v, vec<i32, 8>{0, 2, 4, 6, 0, 2, 4, 6});
        return (R)__builtin_ia32_vextractf128_si256((vec<i32, 8>)r, 0);
    } else if constexpr (W == 8 && sizeof(T) == 1 && sizeof(S) == 4) return convert<T>(convert<i16>(v));
    else if constexpr (sizeof(T) < 4 && sizeof(S) == 8) return convert<T>(convert<i32>(v));
    else if constexpr (W == 8 && sizeof(T) == 8 && sizeof(S) < 4) return convert<T>(convert<i32>(v));
    else return __builtin_convertvector(v, R);
}
#else
template <class T, class V> HL like<V, T> convert(V v) {
    if constexpr (width<V> == 1) return T(v); else return __builtin_convertvector(v, like<V, T>);
}
#endif

// @section compare needs: core
// lesser is a < b ? a : b and greater a > b ? a : b, so b where either is NaN: one instruction.
template <class V> HL V lesser(V a, V b) {
#if defined(__AVX2__) && !defined(__clang__)
#ifdef __AVX512F__
    if constexpr (same<V, vec<f32, 16>>) return (V)__builtin_ia32_minps512_mask(a, b, a, -1, 4);
    else if constexpr (same<V, vec<f64, 8>>) return (V)__builtin_ia32_minpd512_mask(a, b, a, -1, 4);
    else
#endif
    if constexpr (same<V, vec<f32, 8>>) return (V)__builtin_ia32_minps256(a, b);
    else if constexpr (same<V, vec<f64, 4>>) return (V)__builtin_ia32_minpd256(a, b);
    else if constexpr (same<V, vec<f32, 4>>) return (V)__builtin_ia32_minps(a, b);
    else
#endif
    return a < b ? a : b;
}
template <class V> HL V greater(V a, V b) {
#if defined(__AVX2__) && !defined(__clang__)
#ifdef __AVX512F__
    if constexpr (same<V, vec<f32, 16>>) return (V)__builtin_ia32_maxps512_mask(a, b, a, -1, 4);
    else if constexpr (same<V, vec<f64, 8>>) return (V)__builtin_ia32_maxpd512_mask(a, b, a, -1, 4);
    else
#endif
    if constexpr (same<V, vec<f32, 8>>) return (V)__builtin_ia32_maxps256(a, b);
    else if constexpr (same<V, vec<f64, 4>>) return (V)__builtin_ia32_maxpd256(a, b);
    else if constexpr (same<V, vec<f32, 4>>) return (V)__builtin_ia32_maxps(a, b);
    else
#endif
    return a > b ? a : b;
}

// @section iota needs: core
// start, start + step, start + 2 step, ...
template <class T, int W> HL vec<T, W> iota(T start, T step = 1) {
    if constexpr (W == 1) return start;
    else {
        typedef vec<typename ints<sizeof(T)>::u, W> U;
        vec<T, W> r;
        if constexpr (is_float<T>) { for (int k = 0; k < W; k++) r[k] = start + step * T(k); }
        else { U u = {}; for (int k = 0; k < W; k++) u[k] = k;
               r = (vec<T, W>)(splat<U>(start) + u * splat<U>(step)); }
        return r;
    }
}

// @section masks needs: convert
// A comparison of vec<T, W> gives W signed integers as wide as T, 0 or -1; for W = 1 a bool. Every
// function here takes masks of any width, so the printer may write `auto m = a < b;` throughout.
// mask<W> is the canonical one (i32 lanes), for masks that must have a name for their type.
template <int W> struct mask_of { typedef vec<i32, W> type; };
template <> struct mask_of<1> { typedef bool type; };
template <int W> using mask = typename mask_of<W>::type;

template <class S, class M> HL auto mask_as(M m) {  // with lanes of S bytes' signed integer
    if constexpr (width<M> == 1) return bool(m);
    else if constexpr (sizeof(elem<M>) == sizeof(S)) return (sints<like<M, S>>)m;
    else return convert<elem<sints<like<M, S>>>>(m);
}
template <class M> HL mask<width<M>> canonical(M m) { return mask_as<i32>(m); }
template <class V, class M> HL V select(M m, V a, V b) {
    static_assert(width<M> == width<V>, "one lane count per loop");
    if constexpr (width<V> == 1) return m ? a : b;
    else {
        auto k = mask_as<elem<V>>(m);
        if constexpr (sizeof(V) > native_bytes)  // g++ would do `?:` lane by lane here
            return (V)((k & (sints<V>)a) | (~k & (sints<V>)b));
        else return k ? a : b;
    }
}
template <class A, class B> HL auto mask_and(A a, B b) {
    if constexpr (width<A> == 1) return bool(bool(a) & bool(b));
    else if constexpr (sizeof(A) == sizeof(B)) return a & (A)b;
    else return mask_as<i32>(a) & mask_as<i32>(b);
}
template <class A, class B> HL auto mask_or(A a, B b) {
    if constexpr (width<A> == 1) return bool(bool(a) | bool(b));
    else if constexpr (sizeof(A) == sizeof(B)) return a | (A)b;
    else return mask_as<i32>(a) | mask_as<i32>(b);
}
template <class A, class B> HL auto mask_xor(A a, B b) {
    if constexpr (width<A> == 1) return bool(a) != bool(b);
    else if constexpr (sizeof(A) == sizeof(B)) return a ^ (A)b;
    else return mask_as<i32>(a) ^ mask_as<i32>(b);
}
template <class A> HL A mask_not(A a) { if constexpr (width<A> == 1) return !a; else return ~a; }
template <int W> HL mask<W> mask_splat(bool b) { if constexpr (W == 1) return b; else return splat<mask<W>>(-i32(b)); }
template <int W> HL mask<W> mask_first(i64 n) {  // the first n lanes
    if constexpr (W == 1) return n > 0;
    else { mask<W> k; for (int i = 0; i < W; i++) k[i] = i; return k < splat<mask<W>>(n < W ? n : W); }
}
template <class V> HL auto to_mask(V v) { return v != splat<V>(0); }  // a cast to bool: NaN is true
template <class T, class M> HL auto mask_to(M m) {  // a cast from bool: 0 or 1
    typedef like<M, typename register_type<T>::type> V;
    return select(m, splat<V>(1), splat<V>(0));
}
template <class M> HL bool any(M m) {
    if constexpr (width<M> == 1) return m;
#if defined(__AVX512F__) && !defined(__clang__)
    else if constexpr (sizeof(M) == 64) return __builtin_ia32_ptestmd512((vec<i32, 16>)m, (vec<i32, 16>)m, -1) != 0;
#endif
#ifdef __AVX2__
    else if constexpr (sizeof(M) == 32) return !__builtin_ia32_ptestz256((vec<long long, 4>)m, (vec<long long, 4>)m);
#endif
    else if constexpr (sizeof(M) <= 8) {
        typename ints<sizeof(M)>::u bits; __builtin_memcpy(&bits, &m, sizeof m); return bits != 0;
    } else {
        auto q = (vec<i64, sizeof(M) / 8>)m;
        i64 bits = 0; for (int k = 0; k < int(sizeof(M) / 8); k++) bits |= q[k];
        return bits != 0;
    }
}
template <class M> HL bool all(M m) { return !any(mask_not(m)); }

// @section small_floats needs: masks
// bfloat16 and float16 <-> float32. To the nearest, ties to even, subnormals exact, NaN stays NaN.
template <class U> HL like<U, f32> bf16_from_bits(U u) {
    if constexpr (width<U> == 1) return bitcast<f32>(u32(u) << 16);
    else return (like<U, f32>)(convert<u32>(u) << 16);
}
template <class V> HL uints<V> rounded_bf16(V v) {  // still in the upper half of 32 bits
    auto u = bitcast<u32>(v);
    return select(v == v, (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u, splat<uints<V>>(0x7fc00000u));
}
template <class V> HL V round_bf16(V v) { return bitcast<f32>(rounded_bf16(v)); }
template <class V> HL like<V, u16> bf16_bits(V v) {
    return convert<u16>(rounded_bf16(v) >> 16);
}
template <class U> HL like<U, f32> f16_from_bits(U h) {
#if defined(__F16C__) && defined(__clang__) && !HL_HAS(__builtin_ia32_vcvtph2ps256)
    if constexpr (width<U> == 1) { _Float16 x; __builtin_memcpy(&x, &h, 2); return f32(x); }
    else return __builtin_convertvector((like<U, _Float16>)h, like<U, f32>);
#else
#ifdef __F16C__
    constexpr int W = width<U>;
    typedef vec<i16, 8> h8;
    if constexpr (W == 8) return (vec<f32, 8>)__builtin_ia32_vcvtph2ps256((h8)h);
    else if constexpr (W < 8) {
        vec<u16, 8> wide = {};
        if constexpr (W == 1) wide[0] = h; else for (int k = 0; k < W; k++) wide[k] = h[k];
        auto r = __builtin_ia32_vcvtph2ps256((h8)wide);
        if constexpr (W == 1) return r[0];
        else { like<U, f32> out; for (int k = 0; k < W; k++) out[k] = r[k]; return out; }
    }
#ifdef __AVX512F__
    else if constexpr (W == 16)
        return (vec<f32, 16>)__builtin_ia32_vcvtph2ps512_mask((vec<i16, 16>)h, vec<f32, 16>{}, -1, 4);
#endif
    else
#endif
    {
        typedef like<U, u32> I;
        I u = convert<u32>(h);
        I magnitude = (u & 0x7fffu) << 13;
        I scaled = bitcast<u32>(bitcast<f32>(magnitude) * 0x1p112f);  // exponents 15 -> 127 apart
        I r = select(magnitude >= splat<I>(0x7c00u << 13), magnitude | 0x7f800000u, scaled);
        return bitcast<f32>(r | ((u & 0x8000u) << 16));
    }
#endif
}
template <class V> HL like<V, u16> f16_bits(V v) {
#ifdef __F16C__
    constexpr int W = width<V>;
    if constexpr (W == 8) return (vec<u16, 8>)__builtin_ia32_vcvtps2ph256(v, 0);
    else if constexpr (W < 8) {
        vec<f32, 8> wide = {};
        if constexpr (W == 1) wide[0] = v; else for (int k = 0; k < W; k++) wide[k] = v[k];
        auto r = (vec<u16, 8>)__builtin_ia32_vcvtps2ph256(wide, 0);
        if constexpr (W == 1) return r[0];
        else { like<V, u16> out; for (int k = 0; k < W; k++) out[k] = r[k]; return out; }
    }
#ifdef __AVX512F__
    else if constexpr (W == 16)
        return (vec<u16, 16>)__builtin_ia32_vcvtps2ph512_mask(v, 0, vec<i16, 16>{}, -1);
#endif
    else
#endif
    {
        typedef uints<V> I;
        I bits = bitcast<u32>(v), u = bits & 0x7fffffffu;
        I normal = (u + 0xc8000fffu + ((u >> 13) & 1u)) >> 13;
        I tiny = bitcast<u32>(bitcast<f32>(u) + 0.5f) - 0x3f000000u;  // the addition rounds to 2^-24
        I special = select(u > splat<I>(0x7f800000u), splat<I>(0x7e00u), splat<I>(0x7c00u));
        I r = select(u < splat<I>(0x38800000u), tiny, select(u >= splat<I>(0x47800000u), special, normal));
        r |= (bits >> 16) & 0x8000u;
        return convert<u16>(r);
    }
}
template <class V> HL V round_f16(V v) { return f16_from_bits(f16_bits(v)); }
// The same for T, which is one of the two.
template <class T, class U> HL like<U, f32> from_bits(U u) {
    if constexpr (same<T, bf16>) return bf16_from_bits(u); else return f16_from_bits(u);
}
template <class T, class V> HL like<V, u16> to_bits(V v) {
    if constexpr (same<T, bf16>) return bf16_bits(v); else return f16_bits(v);
}

// @section cast needs: small_floats
// cast<T>(v): the lanes of v as T, as eager PyTorch casts on a CPU. Casts to bf16 and f16 give the
// rounded value as f32. Casts from and to bool are mask_to<T> and to_mask.
template <class T, class V> HL reg<T, width<V>> cast(V v) {
    typedef elem<V> S;
    if constexpr (same<T, bf16>) return round_bf16(cast<f32>(v));
    else if constexpr (same<T, f16>) return round_f16(cast<f32>(v));
    else if constexpr (same<T, S>) return v;
    // A float goes to a small integer through i32, to u32 through i64: out of range wraps, as eager's.
    else if constexpr (is_float<S> && !is_float<T> && sizeof(T) < 4) return cast<T>(cast<i32>(v));
    else if constexpr (is_float<S> && same<T, u32>) return cast<u32>(cast<i64>(v));
    else return convert<T>(v);
}

// @section fma needs: core
// a * b + c, rounded once. The kernels are compiled without contraction, so this is the only way.
template <class V> HL V fma(V a, V b, V c) {
    typedef elem<V> T;
    constexpr int W = width<V>;
    if constexpr (W == 1) { if constexpr (same<T, f32>) return __builtin_fmaf(a, b, c); else return __builtin_fma(a, b, c); }
#if HL_HAS(__builtin_elementwise_fma)
    else return __builtin_elementwise_fma(a, b, c);
#else
#ifdef __FMA__
    else if constexpr (same<T, f32> && W == 4) return (V)__builtin_ia32_vfmaddps(a, b, c);
    else if constexpr (same<T, f32> && W == 8) return (V)__builtin_ia32_vfmaddps256(a, b, c);
    else if constexpr (same<T, f64> && W == 2) return (V)__builtin_ia32_vfmaddpd(a, b, c);
    else if constexpr (same<T, f64> && W == 4) return (V)__builtin_ia32_vfmaddpd256(a, b, c);
#endif
#ifdef __AVX512F__
    else if constexpr (same<T, f32> && W == 16) return (V)__builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4);
    else if constexpr (same<T, f64> && W == 8) return (V)__builtin_ia32_vfmaddpd512_mask(a, b, c, -1, 4);
#endif
#ifdef __FMA__
    else if constexpr (sizeof(V) > native_bytes) {
        constexpr int N = native_bytes / int(sizeof(T));
        vec<T, N> p[W / N], q[W / N], r[W / N];
        __builtin_memcpy(p, &a, sizeof a); __builtin_memcpy(q, &b, sizeof b); __builtin_memcpy(r, &c, sizeof c);
        for (int k = 0; k < W / N; k++) p[k] = fma(p[k], q[k], r[k]);
        V out; __builtin_memcpy(&out, p, sizeof out); return out;
    }
#endif
    else { V r; for (int k = 0; k < W; k++) r[k] = fma(a[k], b[k], c[k]); return r; }
#endif
}

// @section round needs: core
// To an integral value: floor, ceil, trunc, and round to nearest with ties to even.
#if HL_HAS(__builtin_elementwise_roundeven)
#define HL_ROUND(NAME, CLANG, BUILTIN, MODE) \
    template <class V> HL V NAME(V v) { return CLANG(v); }
#elif defined(__AVX2__) && !defined(__clang__)
#ifdef __AVX512F__
#define HL_ROUND512(MODE) \
    else if constexpr (same<T, f32> && width<V> == 16) return (V)__builtin_ia32_rndscaleps_mask(v, MODE, v, -1, 4); \
    else if constexpr (same<T, f64> && width<V> == 8) return (V)__builtin_ia32_rndscalepd_mask(v, MODE, v, -1, 4);
#else
#define HL_ROUND512(MODE)
#endif
#define HL_ROUND(NAME, CLANG, BUILTIN, MODE) \
    template <class V> HL V NAME(V v) { \
        typedef elem<V> T; \
        if constexpr (same<T, f32> && width<V> == 1) return BUILTIN##f(v); \
        else if constexpr (same<T, f64> && width<V> == 1) return BUILTIN(v); \
        HL_ROUND512(MODE) \
        else if constexpr (same<T, f32> && width<V> == 4) return (V)__builtin_ia32_roundps(v, MODE); \
        else if constexpr (same<T, f64> && width<V> == 2) return (V)__builtin_ia32_roundpd(v, MODE); \
        else if constexpr (same<T, f32>) return chunks<8>(v, [](vec<f32, 8> p) { return (vec<f32, 8>)__builtin_ia32_roundps256(p, MODE); }); \
        else return chunks<4>(v, [](vec<f64, 4> p) { return (vec<f64, 4>)__builtin_ia32_roundpd256(p, MODE); }); \
    }
#else
#define HL_ROUND(NAME, CLANG, BUILTIN, MODE) \
    template <class V> HL V NAME(V v) { \
        return map(v, [](elem<V> x) { if constexpr (same<elem<V>, f32>) return BUILTIN##f(x); else return BUILTIN(x); }); \
    }
#endif
HL_ROUND(floor, __builtin_elementwise_floor, __builtin_floor, 9)
HL_ROUND(ceil, __builtin_elementwise_ceil, __builtin_ceil, 10)
HL_ROUND(trunc, __builtin_elementwise_trunc, __builtin_trunc, 11)
HL_ROUND(round, __builtin_elementwise_roundeven, __builtin_rint, 8)

// @section sqrt, rsqrt, reciprocal needs: core
template <class V> HL V sqrt(V v) {
    typedef elem<V> T;
    constexpr int W = width<V>;
    if constexpr (W == 1) { if constexpr (same<T, f32>) return __builtin_sqrtf(v); else return __builtin_sqrt(v); }
#if defined(__AVX2__) && !defined(__clang__)
#ifdef __AVX512F__
    else if constexpr (same<T, f32> && W == 16) return (V)__builtin_ia32_sqrtps512_mask(v, v, -1, 4);
    else if constexpr (same<T, f64> && W == 8) return (V)__builtin_ia32_sqrtpd512_mask(v, v, -1, 4);
#endif
    else if constexpr (same<T, f32> && W == 4) return (V)__builtin_ia32_sqrtps(v);
    else if constexpr (same<T, f32>) return chunks<8>(v, [](vec<f32, 8> p) { return (vec<f32, 8>)__builtin_ia32_sqrtps256(p); });
    else if constexpr (same<T, f64>) return chunks<4>(v, [](vec<f64, 4> p) { return (vec<f64, 4>)__builtin_ia32_sqrtpd256(p); });
#endif
    else return map(v, [](T x) { return sqrt(x); });
}
template <class V> HL V reciprocal(V v) { return elem<V>(1) / v; }
template <class V> HL V rsqrt(V v) { return elem<V>(1) / sqrt(v); }

// @section arith needs: masks
// + - * and negation for every dtype: integers wrap, which in C++ only unsigned ones do. For floats
// the plain operators say the same.
template <class V> HL V add(V a, V b) { if constexpr (is_float<elem<V>>) return a + b; else return V(uints<V>(a) + uints<V>(b)); }
template <class V> HL V sub(V a, V b) { if constexpr (is_float<elem<V>>) return a - b; else return V(uints<V>(a) - uints<V>(b)); }
template <class V> HL V mul(V a, V b) {
    if constexpr (is_float<elem<V>>) return a * b;
    else if constexpr (width<V> == 1) return V(u64(a) * u64(b));  // u16 * u16 would overflow an int
    else return V(uints<V>(a) * uints<V>(b));
}
template <class V> HL V neg(V a) { if constexpr (is_float<elem<V>>) return -a; else return V(uints<V>{} - uints<V>(a)); }
template <class V> HL V abs(V a) {
    if constexpr (is_float<elem<V>>) return bitcast<elem<V>>(bitcast<elem<uints<V>>>(a) & splat<uints<V>>(~0ull >> (65 - 8 * sizeof(elem<V>))));
    else if constexpr (!is_signed<elem<V>>) return a;
    else return select(a < splat<V>(0), neg(a), a);
}
template <class V> HL V sign(V a) {  // 0 for NaN, as torch.sign
    V one = splat<V>(1), zero = splat<V>(0);
    if constexpr (!is_signed<elem<V>>) return select(a != zero, one, zero);
    else return select(a > zero, one, select(a < zero, splat<V>(-1), zero));
}
template <class V> HL auto signbit(V a) {
    if constexpr (!is_signed<elem<V>>) return a < a;
    else return bitcast<elem<sints<V>>>(a) < splat<sints<V>>(0);
}
template <class V> HL V copysign(V a, V b) {
    typedef uints<V> U;
    U top = splat<U>(1ull << (8 * sizeof(elem<V>) - 1));
    return bitcast<elem<V>>((bitcast<elem<U>>(a) & ~top) | (bitcast<elem<U>>(b) & top));
}
template <class V> HL auto isnan(V a) { return a != a; }
template <class V> HL auto isinf(V a) { return abs(a) == splat<V>(__builtin_inff()); }
template <class V> HL auto isfinite(V a) { return abs(a) < splat<V>(__builtin_inff()); }

// @section minmax needs: masks, compare
// maximum and minimum give NaN where either is NaN, fmax and fmin the other one.
template <class V> HL V maximum(V a, V b) {
    V m = greater(a, b);  // b where either is NaN
    if constexpr (is_float<elem<V>>) return select(a == a, m, a); else return m;
}
template <class V> HL V minimum(V a, V b) {
    V m = lesser(a, b);
    if constexpr (is_float<elem<V>>) return select(a == a, m, a); else return m;
}
template <class V> HL V fmax(V a, V b) {
    V m = greater(a, b);
    if constexpr (is_float<elem<V>>) return select(b == b, m, a); else return m;
}
template <class V> HL V fmin(V a, V b) {
    V m = lesser(a, b);
    if constexpr (is_float<elem<V>>) return select(b == b, m, a); else return m;
}
template <class V> HL V clamp(V a, V low, V high) { return minimum(maximum(a, low), high); }

// @section bits needs: masks
// Shifts as torch's: by the width or more (or a negative amount) gives 0, or the sign for >>.
template <class V> HL V lshift(V a, V b) {
    typedef uints<V> U;
    constexpr int bits = 8 * sizeof(elem<V>);
    U by = U(b);
    return V(select(by < splat<U>(bits), U(U(a) << (by & U(splat<U>(bits - 1)))), splat<U>(0)));
}
template <class V> HL V rshift(V a, V b) {
    typedef uints<V> U;
    constexpr int bits = 8 * sizeof(elem<V>);
    U by = U(b), in = select(by < splat<U>(bits), by, splat<U>(bits - 1));
    V r = V(a >> V(in));
    if constexpr (is_signed<elem<V>>) return r; else return select(by < splat<U>(bits), r, splat<V>(0));
}
template <class V> HL V bit_and(V a, V b) { return V(a & b); }
template <class V> HL V bit_or(V a, V b) { return V(a | b); }
template <class V> HL V bit_xor(V a, V b) { return V(a ^ b); }
template <class V> HL V bit_not(V a) { return V(~a); }

// @section division needs: arith, round
// Integer division never traps: a zero divisor is recorded in *error (2) and taken as 1, and the
// lowest value divided by -1 wraps. trunc_div, fmod: the sign of a; floor_div, remainder: of b.
template <class V> HL V safe_quotient(V a, V b, i64* error) {
    auto zero = b == splat<V>(0);
    if (__builtin_expect(any(zero), 0)) __atomic_store_n(error, i64(2), __ATOMIC_RELAXED);
    if constexpr (is_signed<elem<V>>) {
        auto minus = b == splat<V>(-1);
        V q = V(a / select(mask_or(zero, minus), splat<V>(1), b));
        return select(minus, neg(a), q);
    } else return V(a / select(zero, splat<V>(1), b));
}
template <class V> HL V trunc_div(V a, V b, i64* error) { return safe_quotient(a, b, error); }
template <class V> HL V fmod(V a, V b, i64* error) { return sub(a, mul(safe_quotient(a, b, error), b)); }
template <class V> HL V floor_div(V a, V b, i64* error) {
    V q = safe_quotient(a, b, error);
    if constexpr (!is_signed<elem<V>>) return q;
    else {
        V r = sub(a, mul(q, b));
        return select(mask_and(r != splat<V>(0), (r ^ b) < splat<V>(0)), sub(q, splat<V>(1)), q);
    }
}
template <class V> HL V remainder(V a, V b, i64* error) {
    V r = fmod(a, b, error);
    if constexpr (!is_signed<elem<V>>) return r;
    else return select(mask_and(r != splat<V>(0), (r ^ b) < splat<V>(0)), add(r, b), r);
}
// Floats.
template <class V> HL V trunc_div(V a, V b) { return trunc(a / b); }
template <class V> HL V fmod(V a, V b) {
    return map2(a, b, [](elem<V> x, elem<V> y) {
        if constexpr (same<elem<V>, f32>) return __builtin_fmodf(x, y); else return __builtin_fmod(x, y); });
}
template <class V> HL V remainder(V a, V b) {
    V r = fmod(a, b), zero = splat<V>(0);
    return select(mask_and(r != zero, (b < zero) != (r < zero)), r + b, r);
}
template <class V> HL V floor_div(V a, V b) {  // Python's, as c10::div_floor_floating defines it
    V zero = splat<V>(0), one = splat<V>(1);
    V r = fmod(a, b), q = (a - r) / b;
    q = select(mask_and(r != zero, (b < zero) != (r < zero)), q - one, q);
    V f = floor(q);
    f = select(q - f > splat<V>(0.5), f + one, f);
    f = select(q != zero, f, copysign(zero, a / b));
    return select(b == zero, a / b, f);
}

// @section int_pow needs: arith
// Integer powers wrap; a negative exponent gives 0 except for the bases 1 and -1.
template <class V> HL V int_pow(V a, V b) {
    static_assert(!is_float<elem<V>>, "float powers are pow, in cpp_math.h");
    return map2(a, b, [](elem<V> base, elem<V> exponent) -> elem<V> {
        if (is_signed<elem<V>> && exponent < 0)
            return base == elem<V>(1) ? 1 : is_signed<elem<V>> && base == elem<V>(-1) ? (exponent & 1 ? -1 : 1) : 0;
        u64 r = 1, square = u64(base);
        for (u64 left = u64(exponent); left; left >>= 1, square *= square) if (left & 1) r *= square;
        return elem<V>(r); });
}

// @section reduce needs: arith, minmax
// Across the lanes of one vector, by halves: (a0 + a4) + (a2 + a6) and so on.
template <int STEP, class V, class F> HL elem<V> reduce_turned(V v, F f) {
    if constexpr (STEP == 0) return v[0];
#if HL_SHUFFLES
    else return reduce_turned<STEP / 2>(f(v, turned<STEP>(v)), f);
#endif
}
template <class V, class F> HL elem<V> reduce(V v, F f) {
    constexpr int W = width<V>;
    if constexpr (W == 1) return v;
#if HL_SHUFFLES
    else if constexpr (sizeof(V) == 16) return reduce_turned<W / 2>(v, f);
    else if constexpr (sizeof(V) > 16) return reduce(f(half_of<0>(v), half_of<1>(v)), f);
#endif
    else {
        vec<elem<V>, W / 2> low, high;
        if constexpr (W == 2) { low = v[0]; high = v[1]; }
        else for (int k = 0; k < W / 2; k++) { low[k] = v[k]; high[k] = v[k + W / 2]; }
        return reduce(f(low, high), f);
    }
}
template <class V> HL elem<V> hsum(V v) { return reduce(v, [](auto a, auto b) { return add(a, b); }); }
template <class V> HL elem<V> hprod(V v) { return reduce(v, [](auto a, auto b) { return mul(a, b); }); }
template <class V> HL elem<V> hmax(V v) { return reduce(v, [](auto a, auto b) { return maximum(a, b); }); }
template <class V> HL elem<V> hmin(V v) { return reduce(v, [](auto a, auto b) { return minimum(a, b); }); }
template <class V> HL elem<V> hand(V v) { return reduce(v, [](auto a, auto b) { return decltype(a)(a & b); }); }
template <class V> HL elem<V> hor(V v) { return reduce(v, [](auto a, auto b) { return decltype(a)(a | b); }); }
template <class V> HL elem<V> hxor(V v) { return reduce(v, [](auto a, auto b) { return decltype(a)(a ^ b); }); }

// @section arg_reduce needs: masks
// The largest (smallest) value and where it is: NaN beats every number, the first index wins a tie.
// Keep `value` and `index` (any signed integer of W lanes) as accumulators; start value at -inf (+inf,
// or the type's limit) and index at the largest integer, so that the first element always wins.
template <class V, class I> HL auto arg_beats(V a, I ai, V b, I bi, bool largest) {
    auto tie = a == b;
    auto better = largest ? a > b : a < b;
    if constexpr (is_float<elem<V>>) {
        auto an = a != a, bn = b != b;
        tie = mask_or(tie, mask_and(an, bn));
        better = mask_or(better, mask_and(an, mask_not(bn)));
    }
    return mask_or(better, mask_and(tie, ai < bi));
}
template <class V, class I> HL void argmax_step(V& value, I& index, V v, I i) {
    auto m = arg_beats(v, i, value, index, true); value = select(m, v, value); index = select(m, i, index);
}
template <class V, class I> HL void argmin_step(V& value, I& index, V v, I i) {
    auto m = arg_beats(v, i, value, index, false); value = select(m, v, value); index = select(m, i, index);
}
template <class V, class I> HL void hargmax(V value, I index, elem<V>& v, elem<I>& i) {
    if constexpr (width<V> == 1) { v = value; i = index; }
    else { v = value[0]; i = index[0];
           for (int k = 1; k < width<V>; k++) { elem<V> x = value[k]; elem<I> y = index[k]; argmax_step(v, i, x, y); } }
}
template <class V, class I> HL void hargmin(V value, I index, elem<V>& v, elem<I>& i) {
    if constexpr (width<V> == 1) { v = value; i = index; }
    else { v = value[0]; i = index[0];
           for (int k = 1; k < width<V>; k++) { elem<V> x = value[k]; elem<I> y = index[k]; argmin_step(v, i, x, y); } }
}

// @section parallel_for needs: core
// f(i) for each i in begin <= i < end, divided over torch's threads: what an OpenMP pragma does where the
// compiler's OpenMP is not torch's. f holds what it needs by value. With `threads` false: on this one.
extern "C" int torch_parallel_for(i64 begin, i64 end, i64 grain, void (*body)(i64, i64, void*), void* context);
template <class F> static inline void parallel_for(i64 begin, i64 end, F f, bool threads = true) {
    if (!threads) { for (i64 i = begin; i < end; i++) f(i); return; }
    torch_parallel_for(begin, end, 1, [](i64 first, i64 last, void* context) {
        const F own = *(const F*)context;  // a copy that nothing points to: the pointers in it stay in registers
        for (i64 i = first; i < last; i++) own(i);
    }, &f);
}
