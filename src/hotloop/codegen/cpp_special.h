// What comes in: cpp_math.h's words. What goes out: special functions of vectors and scalars.
// What holds: all are computed in float64, whose errors of a few units in the last place leave a float32 right.
// At the infinities, at poles and outside of their domains they give what PyTorch's give: NaN, more often
// than mathematics would. Expansions are named in the formulas of the Digital Library of Mathematical
// Functions (DLMF); Chebyshev coefficients were computed from the definitions with 40 digits.
// Next: cpp_random.h.

// @section special_tools needs: convert, masks, compare, fma, float_tools
// A function of float64 vectors, of one or two arguments, for any vector, part by part.
template <class V, class F> HL V in_double(V x, F f) {
    constexpr int N = native_bytes / 8;
    if constexpr (same<elem<V>, f64>) return f(x);
    else if constexpr (width<V> <= N) return convert<f32>(f(convert<f64>(x)));
    else return chunks<N>(x, [&](vec<f32, N> part) { return convert<f32>(f(convert<f64>(part))); });
}
template <class V, class F> HL V in_double2(V x, V y, F f) {
    constexpr int N = native_bytes / 8;
    if constexpr (same<elem<V>, f64>) return f(x, y);
    else if constexpr (width<V> <= N) return convert<f32>(f(convert<f64>(x), convert<f64>(y)));
    else return chunks2<N>(x, y, [&](vec<f32, N> a, vec<f32, N> b) { return convert<f32>(f(convert<f64>(a), convert<f64>(b))); });
}
// c0 + c1 T1(t) + c2 T2(t) + ... by Clenshaw's recurrence (DLMF 3.11.15), |t| <= 1.
template <int N, class V> HL V chebyshev(V t, const f64 (&c)[N]) {
    V a = splat<V>(0), b = a, twice = t + t;
    for (int k = N - 1; k > 0; k--) { V next = fma(twice, a, splat<V>(c[k]) - b); b = a; a = next; }
    return fma(t, a, splat<V>(c[0]) - b);
}
// c0 + c1 u + c2 u^2 + ... + c(N-1) u^(N-1), of the first N of the coefficients.
template <int N, class V> HL V series(V u, const f64* c) {
    V p = splat<V>(c[N - 1]);
    for (int k = N - 2; k >= 0; k--) p = fma(p, u, splat<V>(c[k]));
    return p;
}
template <class V> HL V absolute(V x) { return select(x < splat<V>(0), -x, x); }

// @section bessel_i_tools needs: special_tools, exp, sqrt
// I0: the series (DLMF 10.25.2) in u = x^2/4 up to 9, above it sqrt(x) e^-x I0(x) as a Chebyshev series in 18/x - 1.
[[maybe_unused]] constexpr f64 i0_series[] = {
    1.0, 1.0, 0.25, 0.027777777777777776, 0.001736111111111111,
    6.944444444444444e-05, 1.9290123456790124e-06, 3.936759889140842e-08, 6.151187326782565e-10, 7.594058428126624e-12,
    7.594058428126623e-14, 6.276081345559193e-16, 4.358389823304995e-18, 2.5789288895295828e-20, 1.3157800456783586e-22,
    5.8479113141260385e-25, 2.2843403570804838e-27, 7.904291893012054e-30, 2.4395962632753253e-32, 6.757884385804225e-35,
    1.6894710964510564e-37, 3.8310002187098785e-40, 7.915289708078262e-43, 1.4962740468957016e-45, 2.5976979980828152e-48,
    4.156316796932504e-51, 6.14839762859838e-54};
[[maybe_unused]] constexpr f64 i0_far[] = {
    0.4018574931184143, 0.0029662428974560552, 5.2821557783771084e-05, 1.893635121427782e-06, 1.1108819445021809e-07,
    9.936160244068964e-09, 1.2832373792180359e-09, 2.0460366457583477e-10, 2.815242380304224e-11, -6.31215524771799e-13,
    -2.3983928738970107e-12, -8.936444522698169e-13, -1.0646196287265392e-13, 5.093059866817273e-14, 2.5806919566087297e-14,
    1.3129427940910974e-15, -2.6197970981496504e-15, -7.008282438474887e-16, 1.9776121515207122e-16, 1.2165571753482123e-16,
    -1.0282237082481282e-17, -1.8028674941270244e-17};
// I1(x) / x, and sqrt(x) e^-x I1(x).
[[maybe_unused]] constexpr f64 i1_series[] = {
    0.5, 0.25, 0.041666666666666664, 0.003472222222222222, 0.00017361111111111112,
    5.787037037037037e-06, 1.3778659611992944e-07, 2.460474930713026e-09, 3.417326292656981e-11, 3.7970292140633116e-13,
    3.451844740057556e-15, 2.615033893982997e-17, 1.676303778194229e-19, 9.21046031974851e-22, 4.385933485594529e-24,
    1.827472285664387e-26, 6.718648109060246e-29, 2.195636636947793e-31, 6.419990166514014e-34, 1.6894710964510563e-36,
    4.022550229645372e-39, 8.706818678886087e-42, 1.7207151539300568e-44, 3.1172375976993783e-47, 5.195395996165631e-50,
    7.992916917177893e-53, 1.1385921534441443e-55};
[[maybe_unused]] constexpr f64 i1_far[] = {
    0.39039397498658324, -0.008631093053706084, -8.522006240267897e-05, -2.5593967597081994e-06, -1.3734215695611146e-07,
    -1.1620372141436659e-08, -1.448463429479005e-09, -2.272557230034176e-10, -3.1589230978748625e-11, 3.146275763490443e-13,
    2.4863757512749347e-12, 9.518106337078094e-13, 1.205769696165132e-13, -5.129578503954719e-14, -2.7224771252977275e-14,
    -1.6582962778963559e-15, 2.6849416813578626e-15, 7.527841189660529e-16, -1.9552783571730093e-16, -1.2756287844383302e-16,
    9.177091823916197e-18, 1.867071655444374e-17};
// `scaled`: times e^-|x|. The exponential of a large x is taken in halves: e^x overflows before I0 does.
template <bool scaled, class V> HL V bessel_i0_of(V x) {
    V a = absolute(x), near = splat<V>(9), c = select(a < near, a, near), u = c * c * 0.25;
    V low = series<27>(u, i0_series);
    V high = chebyshev(18.0 / select(a < near, near, a) - 1.0, i0_far) / sqrt(a);
    if constexpr (scaled) return select(a <= near, low * exp(-a), high);
    else { V half = exp(a * 0.5); return select(a <= near, low, high * half * half); }
}
template <bool scaled, class V> HL V bessel_i1_of(V x) {
    V a = absolute(x), near = splat<V>(9), c = select(a < near, a, near), u = c * c * 0.25;
    V low = x * series<27>(u, i1_series);
    V high = chebyshev(18.0 / select(a < near, near, a) - 1.0, i1_far) / sqrt(a);
    high = select(x < splat<V>(0), -high, high);
    if constexpr (scaled) return select(a <= near, low * exp(-a), high);
    else { V half = exp(a * 0.5); return select(a <= near, low, high * half * half); }
}

// @section bessel_i0, bessel_i0_scaled, bessel_i1, bessel_i1_scaled needs: bessel_i_tools
template <class V> HL V bessel_i0(V v) { return in_double(v, [](auto x) { return bessel_i0_of<false>(x); }); }
template <class V> HL V bessel_i0_scaled(V v) { return in_double(v, [](auto x) { return bessel_i0_of<true>(x); }); }
template <class V> HL V bessel_i1(V v) { return in_double(v, [](auto x) { return bessel_i1_of<false>(x); }); }
template <class V> HL V bessel_i1_scaled(V v) { return in_double(v, [](auto x) { return bessel_i1_of<true>(x); }); }

// @section bessel_k_tools needs: bessel_i_tools, log
// K0(x) = -ln(x/2) I0(x) + sum (H_k - gamma) u^k / k!^2 (DLMF 10.31.2) up to 1.5, above it sqrt(x) e^x K0(x) as a
// Chebyshev series in 3/x - 1; K1 likewise (10.31.1).
[[maybe_unused]] constexpr f64 k0_series[] = {
    -0.5772156649015329, 0.42278433509846713, 0.23069608377461678, 0.0348921574564389, 0.0026147876188052093,
    0.00011848039364109726, 3.6126241031992037e-06, 7.935096521304209e-08, 1.3167486730385647e-09, 1.709994072705808e-11,
    1.785934656987074e-13, 1.5330343403208473e-15};
[[maybe_unused]] constexpr f64 k0_far[] = {
    1.2109672344196714, -0.03962922544633739, 0.002439120141915826, -0.00024140409874978767, 3.1246108378268916e-05,
    -4.839137919888442e-06, 8.546651903068591e-07, -1.6713425666116112e-07, 3.54831899376514e-08, -8.065151203709493e-09,
    1.9424822797695176e-09, -4.918475007995527e-10, 1.3011877267797357e-10, -3.578670402252456e-11, 1.0190714590671667e-11,
    -2.994445970206688e-12, 9.053508445283851e-13, -2.8096285921699505e-13, 8.931050875790733e-14, -2.9026024499635966e-14,
    9.629684287799079e-15, -3.2566125015573414e-15, 1.1212655772675035e-15, -3.9260545848440943e-16, 1.3966140769039506e-16,
    -5.042875900920105e-17, 1.8467515241227214e-17};
[[maybe_unused]] constexpr f64 k1_series[] = {
    0.03860783245076643, -0.16819608377461678, -0.04539379174021391, -0.0047955474598326405, -0.000278839872991632,
    -1.0355619223177857e-05, -2.6788647852279523e-07, -5.113215008984695e-09, -7.50512186647297e-11, -8.739821824232205e-13,
    -8.27478683812568e-15, -6.496602830252822e-17};
[[maybe_unused]] constexpr f64 k1_far[] = {
    1.3925173928334924, 0.13424318075799324, -0.004534572968945711, 0.00037359124157242043, -4.409447502905232e-05,
    6.454417370721999e-06, -1.09696587008466e-06, 2.085814955691458e-07, -4.3340790679191155e-08, 9.684484300571312e-09,
    -2.3002630264215606e-09, 5.757246584191471e-10, -1.5081828320023085e-10, 4.113032582292903e-11, -1.1626428652179237e-11,
    3.3942510843662907e-12, -1.0203434106240921e-12, 3.1502406325917104e-13, -9.967464382390739e-14, 3.2258631186685094e-14,
    -1.0661270381602677e-14, 3.592874456897516e-15, -1.2330652219630033e-15, 4.304701957270192e-16, -1.5270996776320786e-16,
    5.499938626455412e-17, -2.0093330090499644e-17};
template <bool scaled, class V> HL V bessel_k0_of(V x) {
    V near = splat<V>(1.5), c = select(x < near, x, near), u = c * c * 0.25;
    V low = series<12>(u, k0_series) - log(x * 0.5) * series<12>(u, i0_series);
    V high = chebyshev(3.0 / select(x < near, near, x) - 1.0, k0_far) / sqrt(x);
    V e = exp(scaled ? x : -x);
    return select(x <= near, scaled ? low * e : low, scaled ? high : high * e);
}
template <bool scaled, class V> HL V bessel_k1_of(V x) {
    V near = splat<V>(1.5), c = select(x < near, x, near), u = c * c * 0.25;
    V low = 1.0 / x + x * (log(x * 0.5) * series<12>(u, i1_series) + series<12>(u, k1_series));
    V high = chebyshev(3.0 / select(x < near, near, x) - 1.0, k1_far) / sqrt(x);
    V e = exp(scaled ? x : -x);
    low = select(x == splat<V>(0), splat<V>(__builtin_inf()), low);
    return select(x <= near, scaled ? low * e : low, scaled ? high : high * e);
}

// @section bessel_k0, bessel_k0_scaled, bessel_k1, bessel_k1_scaled needs: bessel_k_tools
template <class V> HL V bessel_k0(V v) { return in_double(v, [](auto x) { return bessel_k0_of<false>(x); }); }
template <class V> HL V bessel_k0_scaled(V v) { return in_double(v, [](auto x) { return bessel_k0_of<true>(x); }); }
template <class V> HL V bessel_k1(V v) { return in_double(v, [](auto x) { return bessel_k1_of<false>(x); }); }
template <class V> HL V bessel_k1_scaled(V v) { return in_double(v, [](auto x) { return bessel_k1_of<true>(x); }); }

// @section erfcx needs: special_tools, exp, erfc
// e^(x^2) erfc x up to 25, the square as a sum of two numbers; above it the asymptotic series (DLMF 7.12.1).
[[maybe_unused]] constexpr f64 erfcx_far[] = {1, -0.5, 0.75, -1.875, 6.5625, -29.53125, 162.421875};
template <class V> HL V erfcx(V v) {
    return in_double(v, [](auto x) {
        typedef decltype(x) D;
        D y = select(x < splat<D>(-28), splat<D>(-28), x);
        y = select(y > splat<D>(25), splat<D>(25), y);
        D square = y * y, rest = fma(y, y, -square), e = exp(square);
        D low = e * (rest + 1.0) * erfc(y);
        D w = 1.0 / (x * x);
        D high = series<7>(w, erfcx_far);
        return select(x > splat<D>(25), high / x * 0.56418958354775628695, low);  // 1 / sqrt(pi)
    });
}

// @section zeta needs: core
// sum (q + k)^-s by Euler and Maclaurin's formula (DLMF 25.11.7): terms up to q + k > 10, then an integral, half a term,
// and derivatives with the Bernoulli numbers, B_2j / (2j)!.
[[maybe_unused]] constexpr f64 bernoulli_over_factorial[] = {
    1.0 / 12, -1.0 / 720, 1.0 / 30240, -1.0 / 1209600, 1.0 / 47900160, -5.2841901386874931848e-10,
    1.3382536530684678833e-11, -3.3896802963225828668e-13, 8.5860620562778445641e-15, -2.1748686985580618731e-16};
static __attribute__((noinline, unused)) f64 zeta_of(f64 s, f64 q) {
    if (s == 1) return __builtin_inf();
    if (s < 1 || q != q) return __builtin_nan("");
    if (q <= 0) {
        if (q == __builtin_floor(q)) return __builtin_inf();
        if (s != __builtin_floor(s)) return __builtin_nan("");
    }
    f64 sum = 0, a = q;
    for (int k = 0; k < 10 || a <= 10; k++, a += 1) {
        f64 term = __builtin_pow(a, -s);
        sum += term;
        if (__builtin_fabs(term) < 1e-17 * __builtin_fabs(sum) && a > 0) return sum;
    }
    f64 power = __builtin_pow(a, -s);
    sum += power * a / (s - 1) + 0.5 * power;
    f64 factor = s * power / a;
    for (int j = 0; j < 10; j++) {
        f64 term = bernoulli_over_factorial[j] * factor;
        sum += term;
        if (__builtin_fabs(term) < 1e-17 * __builtin_fabs(sum)) break;
        factor *= (s + 2 * j + 1) * (s + 2 * j + 2) / (a * a);
    }
    return sum;
}
template <class V> HL V zeta(V s, V q) { return map2(s, q, [](f64 a, f64 b) { return elem<V>(zeta_of(a, b)); }); }

// @section polynomials needs: special_tools, round
// Orthogonal polynomials (DLMF 18.9) of degree n, a float that is cut to an integer; 0 for a negative degree, and for
// one that int64 cannot hold. next(k, p, before) is p_(k+1) from p_k and p_(k-1); a NaN stays one.
template <class V, class F> HL V recurrence(V n, V first, F next) {
    n = trunc(n);
    const V one = splat<V>(1);
    auto held = n < splat<V>(0x1p63);
    V before = one, p = first, k = one;
    auto live = mask_and(mask_and(one < n, held), p == p);
    for (; any(live); k += 1.0, live = mask_and(live, mask_and(k < n, p == p))) {
        V after = next(k, p, before);
        before = select(live, p, before);
        p = select(live, after, p);
    }
    p = select(n >= one, p, select(n == splat<V>(0), one, splat<V>(0)));
    return select(held, p, splat<V>(0));
}
// Chebyshev's four kinds: p_1 is x, 2x, 2x - 1, 2x + 1. High degrees by their definitions as functions of an angle.
[[maybe_unused]] constexpr f64 high_degree = 512;
static __attribute__((noinline, unused)) f64 chebyshev_of_high_degree(int kind, f64 x, f64 n) {
    f64 m = f64(i64(n)), angle = __builtin_acos(x), half = 0.5 * angle, turn = x < 0 && i64(n) % 2 ? -1 : 1;
    bool end = x == 1 || x == -1;
    if (kind == 0) return end ? turn : __builtin_cos(m * angle);
    if (kind == 1) return end ? turn * (m + 1) : __builtin_sin((m + 1) * angle) / __builtin_sin(angle);
    if (kind == 2) return end ? (x > 0 ? 1 : turn * (2 * m + 1)) : __builtin_cos((m + 0.5) * angle) / __builtin_cos(half);
    return end ? (x < 0 ? turn : 2 * m + 1) : __builtin_sin((m + 0.5) * angle) / __builtin_sin(half);
}
template <int kind, class V> HL V chebyshev_polynomial(V x, V n) {
    V first = kind == 0 ? x : kind == 1 ? x + x : kind == 2 ? x + x - 1.0 : x + x + 1.0;
    auto high = mask_and(mask_and(n > splat<V>(high_degree), n < splat<V>(0x1p63)), absolute(x) <= splat<V>(1));
    V low = recurrence(select(high, splat<V>(1), n), first, [=](V, V p, V before) { return (x + x) * p - before; });
    if (!any(high)) return low;
    V safe = select(high, x, splat<V>(0)), degree = select(high, n, splat<V>(0));
    return select(high, map2(safe, degree, [](f64 a, f64 b) { return chebyshev_of_high_degree(kind, a, b); }), low);
}
#define HL_POLYNOMIAL(NAME, VALUE) \
    template <class V> HL V NAME(V v, V degree) { \
        return in_double2(v, degree, [](auto x, auto n) { typedef decltype(x) D; (void)sizeof(D); return VALUE; }); \
    }
HL_POLYNOMIAL(chebyshev_polynomial_t, chebyshev_polynomial<0>(x, n))
HL_POLYNOMIAL(chebyshev_polynomial_u, chebyshev_polynomial<1>(x, n))
HL_POLYNOMIAL(chebyshev_polynomial_v, chebyshev_polynomial<2>(x, n))
HL_POLYNOMIAL(chebyshev_polynomial_w, chebyshev_polynomial<3>(x, n))
HL_POLYNOMIAL(shifted_chebyshev_polynomial_t, chebyshev_polynomial<0>(x + x - 1.0, n))
HL_POLYNOMIAL(shifted_chebyshev_polynomial_u, chebyshev_polynomial<1>(x + x - 1.0, n))
HL_POLYNOMIAL(shifted_chebyshev_polynomial_v, chebyshev_polynomial<2>(x + x - 1.0, n))
HL_POLYNOMIAL(shifted_chebyshev_polynomial_w, chebyshev_polynomial<3>(x + x - 1.0, n))
HL_POLYNOMIAL(hermite_polynomial_h, recurrence(n, x + x, [=](D k, D p, D before) { return 2.0 * (x * p - k * before); }))
HL_POLYNOMIAL(hermite_polynomial_he, recurrence(n, x, [=](D k, D p, D before) { return x * p - k * before; }))
HL_POLYNOMIAL(laguerre_polynomial_l, recurrence(n, 1.0 - x, [=](D k, D p, D before) { return ((k + k + 1.0 - x) * p - k * before) / (k + 1.0); }))
HL_POLYNOMIAL(legendre_polynomial_p, recurrence(n, x, [=](D k, D p, D before) { return ((k + k + 1.0) * x * p - k * before) / (k + 1.0); }))
