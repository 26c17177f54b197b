// What comes in: cpp_prelude.h's words, a 64-bit key and counters. What goes out: random bits.
// What holds: the bits depend on the key and the counter alone, not on lanes, threads or the processor;
// ir/evaluate.py computes the same ones.
// Next: cpp_text.py.

// @section threefry needs: convert
// Threefry-2x32 with 20 rounds: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
template <class V> struct random_words { V a, b; };
template <int N, class U> HL U turned_left(U v) { return (v << N) | (v >> (32 - N)); }
template <int R0, int R1, int R2, int R3, class U> HL void threefry_rounds(U& a, U& b) {
    a += b; b = turned_left<R0>(b) ^ a;
    a += b; b = turned_left<R1>(b) ^ a;
    a += b; b = turned_left<R2>(b) ^ a;
    a += b; b = turned_left<R3>(b) ^ a;
}
// The two words of the block counter + HALF * 2^63.
template <int HALF, class I> HL random_words<like<I, i32>> threefry(i64 key, I counter) {
    typedef like<I, u32> U;
    const u32 k0 = u32(key), k1 = u32(u64(key) >> 32), k2 = k0 ^ k1 ^ 0x1bd11bdau;
    U a = convert<u32>(counter), b = splat<U>(u32(HALF) << 31);
    if constexpr (sizeof(elem<I>) == 8) b |= convert<u32>(counter >> 32);
    a += k0; b += k1;
    threefry_rounds<13, 15, 26, 6>(a, b);  a += k1; b += k2 + 1;
    threefry_rounds<17, 29, 16, 24>(a, b); a += k2; b += k0 + 2;
    threefry_rounds<13, 15, 26, 6>(a, b);  a += k0; b += k1 + 3;
    threefry_rounds<17, 29, 16, 24>(a, b); a += k1; b += k2 + 4;
    threefry_rounds<13, 15, 26, 6>(a, b);  a += k2; b += k0 + 5;
    return {bitcast<i32>(a), bitcast<i32>(b)};
}

// @section probability needs: masks
// A probability: one outside [0, 1], or NaN, is recorded in *error (3).
template <class V> HL V probability(V p, i64* error) {
    auto good = mask_and(p >= splat<V>(0), p <= splat<V>(1));
    if (__builtin_expect(!all(good), 0)) __atomic_store_n(error, i64(3), __ATOMIC_RELAXED);
    return p;
}
