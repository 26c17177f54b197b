// What comes in: cpp_prelude.h's words. What goes out: transcendental functions of vectors and scalars.
// What holds: float32 functions written out here are within 2 units in the last place over the whole
// range, subnormals, infinities, NaN and -0 included (tests/codegen/test_cpp_math.py sweeps them).
// Everything else is Sleef's, which libtorch_cpu exports, for vectors and the C library's for scalars.
// Polynomials are minimax fits (iteratively reweighted least squares in extended precision, the
// coefficients rounded one after the other); each says its interval and its largest relative error.
// Without fused multiply-add (the scalar level) all functions are the C library's.
// Next: cpp_text.py.

// @section library needs: core
// NAME(v): Sleef's function SLEEF, ULP being its suffix, of vectors; the C library's of scalars.
#if defined(__AVX2__) || defined(__aarch64__)
#define HL_SLEEF 1
#if defined(__AVX512F__)
#define HL_PER_F32 16
#define HL_PER_F64 8
#define HL_F32(NAME, ULP) Sleef_##NAME##f16_##ULP
#define HL_F64(NAME, ULP) Sleef_##NAME##d8_##ULP
#elif defined(__AVX2__)
#define HL_PER_F32 8
#define HL_PER_F64 4
#define HL_F32(NAME, ULP) Sleef_##NAME##f8_##ULP
#define HL_F64(NAME, ULP) Sleef_##NAME##d4_##ULP
#else
#define HL_PER_F32 4
#define HL_PER_F64 2
#define HL_F32(NAME, ULP) Sleef_##NAME##f4_##ULP
#define HL_F64(NAME, ULP) Sleef_##NAME##d2_##ULP
#endif
#define HL_LIBRARY1(NAME, SLEEF, ULP) \
    extern "C" vec<f32, HL_PER_F32> HL_F32(SLEEF, ULP)(vec<f32, HL_PER_F32>); \
    extern "C" vec<f64, HL_PER_F64> HL_F64(SLEEF, ULP)(vec<f64, HL_PER_F64>); \
    template <class V> HL V NAME(V v) { \
        if constexpr (width<V> == 1) { if constexpr (same<V, f32>) return __builtin_##SLEEF##f(v); else return __builtin_##SLEEF(v); } \
        else if constexpr (same<elem<V>, f32>) return chunks<HL_PER_F32>(v, [](vec<f32, HL_PER_F32> p) { return HL_F32(SLEEF, ULP)(p); }); \
        else return chunks<HL_PER_F64>(v, [](vec<f64, HL_PER_F64> p) { return HL_F64(SLEEF, ULP)(p); }); \
    }
#define HL_LIBRARY2(NAME, SLEEF, ULP) \
    extern "C" vec<f32, HL_PER_F32> HL_F32(SLEEF, ULP)(vec<f32, HL_PER_F32>, vec<f32, HL_PER_F32>); \
    extern "C" vec<f64, HL_PER_F64> HL_F64(SLEEF, ULP)(vec<f64, HL_PER_F64>, vec<f64, HL_PER_F64>); \
    template <class V> HL V NAME(V a, V b) { \
        if constexpr (width<V> == 1) { if constexpr (same<V, f32>) return __builtin_##SLEEF##f(a, b); else return __builtin_##SLEEF(a, b); } \
        else if constexpr (same<elem<V>, f32>) \
            return chunks2<HL_PER_F32>(a, b, [](vec<f32, HL_PER_F32> p, vec<f32, HL_PER_F32> q) { return HL_F32(SLEEF, ULP)(p, q); }); \
        else return chunks2<HL_PER_F64>(a, b, [](vec<f64, HL_PER_F64> p, vec<f64, HL_PER_F64> q) { return HL_F64(SLEEF, ULP)(p, q); }); \
    }
#else
#define HL_LIBRARY1(NAME, SLEEF, ULP) \
    template <class V> HL V NAME(V v) { \
        return map(v, [](elem<V> x) { if constexpr (same<elem<V>, f32>) return __builtin_##SLEEF##f(x); else return __builtin_##SLEEF(x); }); \
    }
#define HL_LIBRARY2(NAME, SLEEF, ULP) \
    template <class V> HL V NAME(V a, V b) { \
        return map2(a, b, [](elem<V> x, elem<V> y) { if constexpr (same<elem<V>, f32>) return __builtin_##SLEEF##f(x, y); else return __builtin_##SLEEF(x, y); }); \
    }
#endif
template <class V> constexpr bool inlined = HL_FMA && same<elem<V>, f32>;

// @section float_tools needs: fma, masks, compare
// c0 + c1 x + c2 x^2 + ... by Horner's rule.
template <class V> HL V poly(V, elem<V> c) { return splat<V>(c); }
template <class V, class... C> HL V poly(V x, elem<V> c, C... rest) { return fma(poly(x, rest...), x, splat<V>(c)); }
// |x|, and the sign of `of` put on a value that is not negative.
template <class V> HL V magnitude(V x) { return bitcast<f32>(bitcast<u32>(x) & 0x7fffffffu); }
template <class V> HL V signed_as(V x, V of) { return bitcast<f32>(bitcast<u32>(x) | (bitcast<u32>(of) & 0x80000000u)); }
// Adding 1.5 * 2^23 to a small float rounds it to an integer, which then stands in the low bits.
[[maybe_unused]] constexpr f32 rounder = 12582912.0f;
// p * 2^n for n in [-150, 128], rounded once, where the low 9 bits of t hold n + 254. The power is
// two factors, as neither 2^128 nor 2^-150 is a float: 2^floor(n/2) and 2^ceil(n/2).
template <class V> HL V scale(V p, V t) {
#ifdef __AVX512F__
    if constexpr (width<V> == 16 && !HL_HAS(__builtin_elementwise_fma))
        return (V)__builtin_ia32_scalefps512_mask(p, t - (rounder + 254), p, -1, 4);
#endif
    auto both = bitcast<u32>(t) << 23;
    auto one = (both >> 1) & 0x7f800000u;
    return p * bitcast<f32>(one) * bitcast<f32>(both - one);
}

// @section exp needs: float_tools, library
HL_LIBRARY1(exp_library, exp, u10)
template <class V> HL V exp(V x) {
    if constexpr (!inlined<V>) return exp_library(x);
    else {
        // x = n ln2 + r; e^x = 2^n e^r. Beyond the limits the result is infinite, or zero, anyway.
        // Zeros are selected rather than computed: a masked softmax takes e^-inf, and underflow costs 150 cycles.
        x = lesser(splat<V>(89), x);
        const auto gone = x <= splat<V>(-104);
        x = select(gone, splat<V>(0), x);
        V t = fma(x, splat<V>(0x1.715476p+0f), splat<V>(rounder + 254)), n = t - (rounder + 254);
        V r = fma(n, splat<V>(-0x1.62e430p-1f), x);
        r = fma(n, splat<V>(0x1.05c610p-29f), r);
        // |r| <= ln2 / 2, 3.1e-9
        V p = poly(r, 1.0f, 1.0f, 0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558b6p-5f, 0x1.1239a2p-7f, 0x1.6a4744p-10f);
        return select(gone, splat<V>(0), scale(p, t));
    }
}

// @section exp2 needs: float_tools, library
HL_LIBRARY1(exp2_library, exp2, u10)
template <class V> HL V exp2(V x) {
    if constexpr (!inlined<V>) return exp2_library(x);
    else {
        x = lesser(splat<V>(128), x);
        const auto gone = x <= splat<V>(-150);
        x = select(gone, splat<V>(0), x);
        V t = x + (rounder + 254), r = x - (t - (rounder + 254));
        // |r| <= 1/2, 3.0e-9
        V p = poly(r, 1.0f, 0x1.62e430p-1f, 0x1.ebfbdcp-3f, 0x1.c6af7ap-5f, 0x1.3b2ddap-7f, 0x1.5f0976p-10f, 0x1.4172bap-13f);
        return select(gone, splat<V>(0), scale(p, t));
    }
}

// @section expm1 needs: float_tools, library
HL_LIBRARY1(expm1_library, expm1, u10)
template <class V> HL V expm1(V x) {
    if constexpr (!inlined<V>) return expm1_library(x);
    else {
        // e^x - 1 = 2 (2^(n-1) (e^r - 1) + (2^(n-1) - 1/2)); halved, as 2^128 is no float.
        V y = lesser(splat<V>(89), x);
        y = greater(splat<V>(-18), y);
        V t = fma(y, splat<V>(0x1.715476p+0f), splat<V>(rounder + 126)), n = t - (rounder + 126);
        V r = fma(n, splat<V>(-0x1.62e430p-1f), y);
        r = fma(n, splat<V>(0x1.05c610p-29f), r);
        // |r| <= ln2 / 2, 1.4e-8 times r^2
        V q = poly(r, 0x1.fffffep-2f, 0x1.5554b4p-3f, 0x1.5556f2p-5f, 0x1.122560p-7f, 0x1.6b9caap-10f);
        V e = fma(r * r, q, r), half = bitcast<f32>(bitcast<u32>(t) << 23);
        V s = fma(half, e, half - 0.5f);
        return signed_as(s + s, x);  // -0
    }
}

// @section tanh needs: float_tools, library
HL_LIBRARY1(tanh_library, tanh, u10)
template <class V> HL V tanh(V x) {
    if constexpr (!inlined<V>) return tanh_library(x);
    else {
        V a = magnitude(x), u = a * a, limit = splat<V>(10);  // tanh 10 is 1 in float32
        // |x| <= 0.56: x + x^3 p(x^2), 1.4e-9
        V small = poly(u, -0x1.555548p-2f, 0x1.110c5ep-3f, -0x1.b905c4p-5f, 0x1.5811f6p-6f, -0x1.9454f0p-8f);
        small = fma(a * u, small, a);
        // Above: 1 - 2 / (e^2|x| + 1), the exponential as in exp but within a float's exponents.
        V y = lesser(limit, a);
        y += y;
        V t = fma(y, splat<V>(0x1.715476p+0f), splat<V>(rounder + 127)), n = t - (rounder + 127);
        V r = fma(n, splat<V>(-0x1.62e430p-1f), y);
        r = fma(n, splat<V>(0x1.05c610p-29f), r);
        V p = poly(r, 1.0f, 1.0f, 0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558b6p-5f, 0x1.1239a2p-7f, 0x1.6a4744p-10f);
        V large = 1.0f - 2.0f / fma(p, bitcast<f32>(bitcast<u32>(t) << 23), splat<V>(1));
        return signed_as(select(a < splat<V>(0.56f), small, large), x);
    }
}

// @section sigmoid, silu needs: exp
// 1 / (1 + e^-x), written for x < 0 as e^x / (1 + e^x), which keeps the smallest results.
template <class V> HL V sigmoid(V x) {
    auto below = x < splat<V>(0);
    V e = exp(select(below, x, -x)), one = splat<V>(1);
    return select(below, e, one) / (e + one);
}
template <class V> HL V silu(V x) { return x / (elem<V>(1) + exp(-x)); }

// @section log_tools needs: float_tools
// log of x = 2^e (1 + f), with 1 + f in [sqrt(1/2), sqrt 2).
template <class V> struct log_parts { V e, f; };
template <class V> HL log_parts<V> split_log(V x) {
    auto tiny = x < splat<V>(0x1p-126f);
    x = select(tiny, x * 0x1p23f, x);
    auto bits = bitcast<u32>(x) - 0x3f3504f3u;
    V e = convert<f32>(bitcast<i32>(bits) >> 23);
    return {e + select(tiny, splat<V>(-23), splat<V>(0)), bitcast<f32>((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f};
}
// (e ln2 + ln(1 + f)) / ln(base); UNIT = 1 / ln(base) and STEP = ln2 / ln(base), in two floats each.
template <class V> HL V join_log(V e, V f, f32 unit, f32 unit_low, f32 step, f32 step_low) {
    // f^2 q(f) = ln(1 + f) - f, 4.4e-9
    V q = poly(f, -0x1.fffff8p-2f, 0x1.555550p-2f, -0x1.000442p-2f, 0x1.99a416p-3f, -0x1.5420e2p-3f, 0x1.226b98p-3f,
               -0x1.0f7116p-3f, 0x1.088822p-3f, -0x1.3792b2p-4f);
    V r = fma(f * f * q, splat<V>(unit), e * step_low);
    if (unit_low != 0) r = fma(f, splat<V>(unit_low), r);
    return fma(e, splat<V>(step), fma(f, splat<V>(unit), r));
}
template <class V> HL V log_limits(V x, V zero_at, V r) {  // -inf, NaN below, +inf and NaN themselves
    V inf = splat<V>(__builtin_inff());
    r = select(x < inf, r, x);
    r = select(x == zero_at, -inf, r);
    return select(x < zero_at, splat<V>(__builtin_nanf("")), r);
}
template <class V> HL V log_base(V x, f32 unit, f32 unit_low, f32 step, f32 step_low) {
    auto p = split_log(x);
    return log_limits(x, splat<V>(0), join_log(p.e, p.f, unit, unit_low, step, step_low));
}

// @section log needs: log_tools, library
HL_LIBRARY1(log_library, log, u10)
template <class V> HL V log(V x) {
    if constexpr (!inlined<V>) return log_library(x);
    else return log_base(x, 1, 0, 0x1.62e430p-1f, -0x1.05c610p-29f);
}

// @section log2 needs: log_tools, library
HL_LIBRARY1(log2_library, log2, u10)
template <class V> HL V log2(V x) {
    if constexpr (!inlined<V>) return log2_library(x);
    else return log_base(x, 0x1.715476p+0f, 0x1.4ae0c0p-26f, 1, 0);
}

// @section log10 needs: log_tools, library
HL_LIBRARY1(log10_library, log10, u10)
template <class V> HL V log10(V x) {
    if constexpr (!inlined<V>) return log10_library(x);
    else return log_base(x, 0x1.bcb7b2p-2f, -0x1.5b235ep-27f, 0x1.344136p-2f, -0x1.ec10c0p-27f);
}

// @section log1p needs: log_tools, library
HL_LIBRARY1(log1p_library, log1p, u10)
template <class V> HL V log1p(V x) {
    if constexpr (!inlined<V>) return log1p_library(x);
    else {
        // 1 + x = 2^e (1 + f): e from the rounded sum, then f = x 2^-e + (2^-e - 1) from x itself, so
        // that nothing of a small x is lost. x 2^-e by its exponent bits: e = 0 leaves x untouched.
        typedef uints<V> U;
        U e = U((sints<V>)(bitcast<u32>(x + 1.0f) - 0x3f3504f3u) >> 23);
        U down = splat<U>(127) - e;
        down = select((sints<V>)down < splat<sints<V>>(0), splat<U>(0), down);
        V f = bitcast<f32>(bitcast<u32>(x) - (e << 23)) + (bitcast<f32>(down << 23) - 1.0f);
        V r = join_log(convert<f32>(bitcast<i32>(e)), f, 1, 0, 0x1.62e430p-1f, -0x1.05c610p-29f);
        return log_limits(x, splat<V>(-1), select(x == splat<V>(0), x, r));
    }
}

// @section erf needs: float_tools, library
HL_LIBRARY1(erf_library, erf, u10)
template <class V> HL V erf(V x) {
    if constexpr (!inlined<V>) return erf_library(x);
    else {
        V a = magnitude(x), u = x * x, limit = splat<V>(3.95f);  // erf 3.95 is 1 in float32
        // |x| <= 0.95: x + x p(x^2), 9.1e-10
        V small = poly(u, 0x1.06eba8p-3f, -0x1.812740p-2f, 0x1.ce2d64p-4f, -0x1.b80124p-6f, 0x1.544b08p-8f, -0x1.a61810p-11f, 0x1.4fa924p-14f);
        small = fma(x, small, x);
        // Above: 1 - 2^q(|x|), q fitted to log2 erfc with the error weighed as it comes out, 1.5e-9
        V t = lesser(limit, a);
        V z = poly(t, -0x1.3fa7eep-12f, -0x1.a075e8p+0f, -0x1.d6bdaap-1f, -0x1.32ccecp-3f, 0x1.0626d4p-5f, -0x1.1ea746p-8f, 0x1.26a7a2p-12f);
        V s = z + (rounder + 127), r = z - (s - (rounder + 127));
        V p = poly(r, 1.0f, 0x1.62e430p-1f, 0x1.ebfbdcp-3f, 0x1.c6af7ap-5f, 0x1.3b2ddap-7f, 0x1.5f0976p-10f, 0x1.4172bap-13f);
        V large = fma(-p, bitcast<f32>(bitcast<u32>(s) << 23), splat<V>(1));
        return select(a < splat<V>(0.95f), small, signed_as(large, x));
    }
}

// @section trigonometric needs: float_tools, library
// x = n pi/2 + r with pi/2 in four floats. Above the limit the C library takes over, lane by lane.
[[maybe_unused]] constexpr f32 quadrant_limit = 0x1p17f;
template <class V> struct quadrants { uints<V> n; V r; };
template <class V> HL quadrants<V> reduce_angle(V x) {
    V t = fma(x, splat<V>(0x1.45f306p-1f), splat<V>(rounder)), n = t - rounder;
    V a = fma(n, splat<V>(-0x1.921fb6p+0f), x);  // exact: both are multiples of 2^-23, |a| < 1
    V p = n * 0x1.777a5cp-25f, p_low = fma(n, splat<V>(0x1.777a5cp-25f), -p);
    V b = a + p, lost = (a - b) + p;  // exact: a and p have few enough bits
    return {bitcast<u32>(t), b + (lost + fma(n, splat<V>(0x1.ee59dap-50f), p_low))};
}
template <class V> HL V sine_or_cosine(uints<V> n, V r) {
    V u = r * r;
    // |r| <= pi/4: sine 1.6e-10, cosine 1.1e-10
    V s = fma(r * u, poly(u, -0x1.555556p-3f, 0x1.111176p-7f, -0x1.a05bb2p-13f, 0x1.7cd428p-19f), r);
    V c = fma(u * u, poly(u, 0x1.55554ap-5f, -0x1.6c0c1ap-10f, 0x1.99e0e4p-16f), fma(u, splat<V>(-0.5f), splat<V>(1)));
    typedef uints<V> U;
    V v = select((n & 1u) != splat<U>(0), c, s);
    return bitcast<f32>(bitcast<u32>(v) ^ ((n & 2u) << 30));
}

// @section sin needs: trigonometric
HL_LIBRARY1(sin_library, sin, u10)
static __attribute__((noinline, cold, unused)) void sin_each(f32* x, int n) { for (int k = 0; k < n; k++) x[k] = __builtin_sinf(x[k]); }
template <class V> HL V sin(V x) {
    if constexpr (!inlined<V>) return sin_library(x);
    else {
        if (__builtin_expect(any(magnitude(x) > splat<V>(quadrant_limit)), 0)) {
            f32 each[width<V>]; __builtin_memcpy(each, &x, sizeof x); sin_each(each, width<V>);
            V r; __builtin_memcpy(&r, each, sizeof r); return r;
        }
        auto q = reduce_angle(x);
        return select(x == splat<V>(0), x, sine_or_cosine(q.n, q.r));  // -0
    }
}

// @section cos needs: trigonometric
HL_LIBRARY1(cos_library, cos, u10)
static __attribute__((noinline, cold, unused)) void cos_each(f32* x, int n) { for (int k = 0; k < n; k++) x[k] = __builtin_cosf(x[k]); }
template <class V> HL V cos(V x) {
    if constexpr (!inlined<V>) return cos_library(x);
    else {
        if (__builtin_expect(any(magnitude(x) > splat<V>(quadrant_limit)), 0)) {
            f32 each[width<V>]; __builtin_memcpy(each, &x, sizeof x); cos_each(each, width<V>);
            V r; __builtin_memcpy(&r, each, sizeof r); return r;
        }
        auto q = reduce_angle(x);
        return sine_or_cosine(q.n + 1u, q.r);
    }
}

// @section pow needs: float_tools, library, round
HL_LIBRARY2(pow_library, pow, u10)
// float32 powers in float64: 2^(y log2 |x|), whose error of 2^-43 times 150 leaves the last bit right.
template <class V> HL V pow_lanes(V x, V y) {
    typedef like<V, f64> D;
    typedef uints<D> U;
    V inf = splat<V>(__builtin_inff()), one = splat<V>(1), zero = splat<V>(0), size = magnitude(x);
    D a = convert<f64>(size), d = convert<f64>(y);
    U bits = bitcast<u64>(a) - 0x3fe6a09e667f3bcdull + (1023ull << 52);
    D e = bitcast<f64>((bits >> 52) | 0x4330000000000000ull) - (0x1p52 + 1023);
    D m = bitcast<f64>((bits & 0x000fffffffffffffull) + 0x3fe6a09e667f3bcdull);
    D s = (m - 1.0) / (m + 1.0);
    // log2 m = s p(s^2), 8.3e-14
    D l = fma(s, poly(s * s, 0x1.71547652b8244p+1, 0x1.ec709dc55404ap-1, 0x1.2776c276e47edp-1, 0x1.a61a46659eb15p-2,
                      0x1.47915e6370e45p-2, 0x1.21ec1674ed1d8p-2), e);
    l = select(a < splat<D>(__builtin_inf()), l, a);
    l = select(a == splat<D>(0), splat<D>(-__builtin_inf()), l);
    D z = select(a == splat<D>(1), splat<D>(0), d * l);
    z = lesser(splat<D>(300), z);
    z = greater(splat<D>(-300), z);
    D t = z + (0x1.8p52 + 1023), r = z - (t - (0x1.8p52 + 1023));
    // |r| <= 1/2, 1.9e-9
    D p = poly(r, 0x1.000000026255ap+0, 0x1.62e430c82a7d8p-1, 0x1.ebfbdadb01b10p-3, 0x1.c6aed46019e90p-5,
               0x1.3b2dbc738970bp-7, 0x1.5f4597c6303a5p-10, 0x1.41d305e830f90p-13) * bitcast<f64>(bitcast<u64>(t) << 52);
    V v = convert<f32>(p);
    auto whole = trunc(y) == y;
    auto odd = mask_and(whole, trunc(y * 0.5f) != y * 0.5f);
    V negative = select(mask_or(whole, mask_or(x == zero, x == -inf)), v, splat<V>(__builtin_nanf("")));
    negative = select(odd, -negative, negative);
    v = select(bitcast<i32>(x) < splat<sints<V>>(0), negative, v);
    return select(mask_or(x == one, y == zero), one, v);
}
template <class V> HL V pow(V x, V y) {
    constexpr int N = native_bytes / 8;
    if constexpr (!inlined<V>) return pow_library(x, y);
    else if constexpr (width<V> <= N) return pow_lanes(x, y);
    else return chunks2<N>(x, y, [](vec<f32, N> a, vec<f32, N> b) { return pow_lanes(a, b); });
}

// @section tan needs: library
HL_LIBRARY1(tan, tan, u10)
// @section asin needs: library
HL_LIBRARY1(asin, asin, u10)
// @section acos needs: library
HL_LIBRARY1(acos, acos, u10)
// @section atan needs: library
HL_LIBRARY1(atan, atan, u10)
// @section half_exp needs: exp, arith
// e^a / 2 for large a, finite wherever that is a number, though e^a may not be: e^(a - c) times e^c / 2, with a
// c for which the difference is exact and the factor almost so. The library's sinh and cosh give up where e^a does.
template <class V> constexpr elem<V> large_exp = same<elem<V>, f32> ? 88 : 709;
template <class V> HL V half_exp(V a) {
    if constexpr (same<elem<V>, f32>) return exp(a - splat<V>(0x1.00ce64p+6f)) * splat<V>(0x1.8a54b0p+91f);
    else return exp(a - splat<V>(0x1.40000000253d8p+9)) * splat<V>(0x1.40a4ba1fbb258p+922);
}
// @section sinh needs: half_exp, library
HL_LIBRARY1(sinh_library, sinh, u10)
template <class V> HL V sinh(V x) {
    V y = sinh_library(x), a = abs(x);
    const auto large = a > splat<V>(large_exp<V>);
    return __builtin_expect(any(large), 0) ? select(large, copysign(half_exp(a), x), y) : y;
}
// @section cosh needs: half_exp, library
HL_LIBRARY1(cosh_library, cosh, u10)
template <class V> HL V cosh(V x) {
    V y = cosh_library(x), a = abs(x);
    const auto large = a > splat<V>(large_exp<V>);
    return __builtin_expect(any(large), 0) ? select(large, half_exp(a), y) : y;
}
// @section asinh needs: library
HL_LIBRARY1(asinh, asinh, u10)
// @section acosh needs: library
HL_LIBRARY1(acosh, acosh, u10)
// @section atanh needs: library
HL_LIBRARY1(atanh, atanh, u10)
// @section erfc needs: library
HL_LIBRARY1(erfc, erfc, u15)
// @section atan2 needs: library
HL_LIBRARY2(atan2, atan2, u10)
// @section hypot needs: library
HL_LIBRARY2(hypot, hypot, u05)

// @section nextafter needs: core
template <class V> HL V nextafter(V a, V b) {
    return map2(a, b, [](elem<V> x, elem<V> y) {
        if constexpr (same<elem<V>, f32>) return __builtin_nextafterf(x, y); else return __builtin_nextafter(x, y); });
}
// @section ldexp needs: core
// x 2^n, n an i32 vector.
template <class V> HL V ldexp(V x, like<V, i32> n) {
    return map2(x, n, [](elem<V> a, i32 b) {
        if constexpr (same<elem<V>, f32>) return __builtin_ldexpf(a, b); else return __builtin_ldexp(a, b); });
}
// @section lgamma needs: core
extern "C" double lgamma_r(double, int*);  // not lgamma, which writes a global
template <class V> HL V lgamma(V v) { return map(v, [](elem<V> x) { int sign; return elem<V>(lgamma_r(x, &sign)); }); }
// @section digamma needs: core
// Recurrence up to 10, then the asymptotic series ln x - 1/2x - sum B_2k / (2k x^2k); reflected below 0.
static __attribute__((noinline, unused)) f64 digamma_of(f64 x) {
    if (x == 0) return __builtin_copysign(__builtin_inf(), -x);
    f64 sum = 0;
    if (x < 0) {
        if (__builtin_trunc(x) == x) return __builtin_nan("");
        f64 fraction = x - __builtin_trunc(x);  // of pi x, for an accurate tangent
        sum = -3.14159265358979323846 / __builtin_tan(3.14159265358979323846 * fraction);
        x = 1 - x;
    }
    while (x < 10) { sum -= 1 / x; x += 1; }
    f64 u = 1 / (x * x), tail = 0;
    if (x < 1e17)
        tail = u * (1.0 / 12 - u * (1.0 / 120 - u * (1.0 / 252 - u * (1.0 / 240 - u * (1.0 / 132 - u * (691.0 / 32760 - u * (1.0 / 12)))))));
    return sum + (__builtin_log(x) - 0.5 / x - tail);
}
template <class V> HL V digamma(V v) { return map(v, [](elem<V> x) { return elem<V>(digamma_of(x)); }); }
// @section erfinv needs: core
// Winitzki's approximation (2e-3), then three of Halley's steps, each cubing the error.
static __attribute__((noinline, unused)) f64 erfinv_of(f64 x) {
    f64 a = __builtin_fabs(x);
    if (!(a < 1)) return a == 1 ? __builtin_copysign(__builtin_inf(), x) : __builtin_nan("");
    if (a < 1e-8) return x * 0.88622692545275801365;  // sqrt(pi) / 2
    f64 l = __builtin_log1p(-a * a), c = 2 / (3.14159265358979323846 * 0.147) + l / 2;
    f64 y = __builtin_sqrt(__builtin_sqrt(c * c - l / 0.147) - c);
    for (int k = 0; k < 3; k++) {
        f64 off = a < 0.5 ? __builtin_erf(y) - a : (1 - a) - __builtin_erfc(y);
        f64 u = off * 0.88622692545275801365 * __builtin_exp(y * y);
        y -= u / (1 + y * u);
    }
    return __builtin_copysign(y, x);
}
template <class V> HL V erfinv(V v) { return map(v, [](elem<V> x) { return elem<V>(erfinv_of(x)); }); }
