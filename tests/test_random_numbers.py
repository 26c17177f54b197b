"""Random numbers from end to end: their distributions, seeds, and that nothing else decides them.

What comes in: compiled functions that draw. What goes out: nothing. What holds: with a seed, the numbers are
the same whatever the threads, the vectors and the fusions; without one they are new at each call; a mask that
the forward pass saw is the one that the backward pass sees. Seeds are fixed, so that no test fails by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
N = 1_000_000


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(fn: Callable[..., Any], backend: str = "hotloop", **options: Any) -> Callable[..., Any]:
    options = {name.replace("__", "."): value for name, value in options.items()}
    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=False, options=options)


def seeded(f: Callable[..., Any], *args: Any, seed: int = 7) -> Any:
    torch.manual_seed(seed)
    return f(*args)


# --- distributions ----------------------------------------------------------------------------------------


def kolmogorov(x: Tensor, distribution: Callable[[Tensor], Tensor]) -> float:
    """The largest distance of the empirical distribution from this one, times the root of the count."""
    ordered = x.double().sort().values
    expected = distribution(ordered)
    steps = torch.arange(len(ordered) + 1, dtype=F64) / len(ordered)
    worst = torch.maximum((expected - steps[:-1]).abs().max(), (expected - steps[1:]).abs().max())
    return float(worst) * math.sqrt(len(ordered))


def normal_distribution(x: Tensor) -> Tensor:
    return 0.5 * torch.special.erfc(-x / math.sqrt(2))


CONTINUOUS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor], float, float]] = {
    # what draws, its distribution, mean, variance
    "rand": (lambda: torch.rand(N), lambda x: x, 1 / 2, 1 / 12),
    "rand_f64": (lambda: torch.rand(N, dtype=F64), lambda x: x, 1 / 2, 1 / 12),
    "randn": (lambda: torch.randn(N), normal_distribution, 0, 1),
    "randn_f64": (lambda: torch.randn(N, dtype=F64), normal_distribution, 0, 1),
    "uniform": (lambda: torch.empty(N).uniform_(-2, 6), lambda x: (x + 2) / 8, 2, 64 / 12),
    "normal": (lambda: torch.empty(N).normal_(3, 2), lambda x: normal_distribution((x - 3) / 2), 3, 4),
    "exponential": (lambda: torch.empty(N).exponential_(2), lambda x: 1 - (-2 * x).exp(), 1 / 2, 1 / 4),
    "log_normal": (
        lambda: torch.empty(N).log_normal_(0, 0.5),
        lambda x: normal_distribution(x.log() / 0.5),
        math.exp(0.125),
        (math.exp(0.25) - 1) * math.exp(0.25),
    ),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_distributions(name: str) -> None:
    draw, distribution, mean, variance = CONTINUOUS[name]
    x = seeded(compiled(draw)).double()
    assert kolmogorov(x, distribution) < 1.95, "less likely than one in a thousand"
    assert abs(float(x.mean()) - mean) < 4 * math.sqrt(variance / N)
    assert float(x.var()) == pytest.approx(variance, rel=0.02)


def test_cauchy() -> None:
    x = seeded(compiled(lambda: torch.empty(N).cauchy_(1, 2))).double()
    assert kolmogorov(x, lambda x: torch.atan((x - 1) / 2) / math.pi + 0.5) < 1.95


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=str)
def test_rand_is_never_one(dtype: torch.dtype) -> None:
    x = seeded(compiled(lambda: torch.rand(N, dtype=dtype)))
    assert x.dtype is dtype and float(x.min()) >= 0 and float(x.max()) < 1
    steps = {BF16: 2**8, F16: 2**11}.get(dtype)
    if steps is not None:  # every multiple of the unit comes up, as often as any other
        counts = torch.bincount((x.double() * steps).long(), minlength=steps)
        assert float(((counts - N / steps) ** 2 / (N / steps)).sum()) < steps + 4 * math.sqrt(2 * steps)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_normal_numbers_in_low_precision(dtype: torch.dtype) -> None:
    x = seeded(compiled(lambda: torch.randn(N, dtype=dtype)))
    assert x.dtype is dtype
    assert abs(float(x.double().mean())) < 5e-3 and float(x.double().var()) == pytest.approx(1, rel=0.01)


def test_far_normal_numbers() -> None:
    """As many beyond four deviations as there should be, on both sides, and all finite."""
    x = seeded(compiled(lambda: torch.randn(20 * N)))
    assert bool(x.isfinite().all())
    expected = 20 * N * 0.5 * math.erfc(4 / math.sqrt(2))
    for count in (int((x > 4).sum()), int((x < -4).sum())):
        assert abs(count - expected) < 4 * math.sqrt(expected)


@pytest.mark.parametrize(("low", "high"), [(0, 2), (-3, 4), (0, 1000), (5, 6), (-(2**30), 2**30)])
def test_integers(low: int, high: int) -> None:
    x = seeded(compiled(lambda: torch.randint(low, high, (N,))))
    assert x.dtype is torch.int64 and int(x.min()) >= low and int(x.max()) < high
    bins = min(high - low, 64)
    counts = torch.bincount((x - low) * bins // (high - low), minlength=bins).double()
    expected = torch.full((bins,), N / bins, dtype=F64)
    if high - low < 2**20:  # the bins may differ by one integer
        expected = N * torch.bincount(torch.arange(high - low) * bins // (high - low)).double() / (high - low)
    assert float(((counts - expected) ** 2 / expected).sum()) < bins + 4 * math.sqrt(2 * bins)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, F32, BF16], ids=str)
def test_integers_of_other_dtypes(dtype: torch.dtype) -> None:
    x = seeded(compiled(lambda: torch.randint(3, 9, (10_000,), dtype=dtype)))
    assert x.dtype is dtype and sorted(set(x.tolist())) == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("p", [0.0, 1e-4, 0.1, 0.5, 0.9, 1.0])
def test_events(p: float) -> None:
    x = torch.full((N,), p)
    f = compiled(lambda x: (torch.bernoulli(x), torch.bernoulli(x, p), torch.empty_like(x).bernoulli_(p)))
    for got in seeded(f, x):
        assert set(got.unique().tolist()) <= {0.0, 1.0}
        assert abs(float(got.double().mean()) - p) <= 4 * math.sqrt(p * (1 - p) / N)


def test_geometric() -> None:
    x = seeded(compiled(lambda: torch.empty(N, dtype=torch.int64).geometric_(0.25)))
    assert int(x.min()) == 1
    for k in range(1, 12):
        p = 0.25 * 0.75 ** (k - 1)
        assert abs(float((x == k).double().mean()) - p) < 4 * math.sqrt(p * (1 - p) / N)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


def test_operators_calls_and_neighbours_are_independent() -> None:
    f = compiled(lambda: (torch.rand(N), torch.rand(N), torch.randn(N), torch.randn(N)))
    torch.manual_seed(5)
    first, second = f(), f()
    for a, b in ((0, 1), (2, 3), (0, 2)):
        assert abs(correlation(first[a], first[b])) < 4 / math.sqrt(N)
    for before, after in zip(first, second, strict=True):
        assert abs(correlation(before, after)) < 4 / math.sqrt(N)
        for lag in (1, 2, 8, 16, 1024):
            assert abs(correlation(before[lag:], before[:-lag])) < 4 / math.sqrt(N - lag)


def test_seeds_next_to_each_other_are_independent() -> None:
    f = compiled(lambda: torch.rand(N))
    assert abs(correlation(seeded(f, seed=1), seeded(f, seed=2))) < 4 / math.sqrt(N)


# --- dropout ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_dropout(p: float, dtype: torch.dtype) -> None:
    x = (torch.rand(300, 1001) + 1).to(dtype).requires_grad_()
    y = seeded(compiled(lambda x: F.dropout(x * 1, p)), x)
    kept = y != 0
    assert abs(float(kept.double().mean()) - (1 - p)) <= 4 * math.sqrt(p * (1 - p) / x.numel())
    scale = 1 / (1 - p) if p < 1 else 0.0
    torch.testing.assert_close(y, torch.where(kept, x * scale, 0).to(dtype))
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (kept * scale).to(dtype), msg="the backward pass saw another mask")


@pytest.mark.parametrize(
    "name", ["dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"]
)
def test_other_dropouts(name: str) -> None:
    sizes = {"dropout1d": (64, 8, 5), "dropout3d": (16, 8, 2, 3, 4)}.get(name, (64, 8, 5, 5))
    x = (torch.rand(sizes) + 1).requires_grad_()
    y = seeded(compiled(lambda x: getattr(F, name)(x, 0.5, training=True)), x)
    if not name.endswith("alpha_dropout"):
        whole = y.reshape(*sizes[:2], -1) != 0
        assert bool((whole.all(-1) | ~whole.any(-1)).all()), "a channel is kept or dropped as a whole"
        assert 0.35 < float(whole.double().mean()) < 0.65
    y.sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())


def test_random_leaky_slopes() -> None:
    x = torch.randn(100_000, requires_grad=True)
    y = seeded(compiled(lambda x: F.rrelu(x, 0.1, 0.4, training=True)), x)
    slopes = (y / x).detach()
    assert bool((slopes[x > 0] == 1).all())
    below = slopes[x < 0]
    assert kolmogorov((below - 0.1) / 0.3, lambda u: u.clamp(0, 1)) < 1.95
    y.sum().backward()
    torch.testing.assert_close(x.grad, slopes)


# --- seeds ------------------------------------------------------------------------------------------------


def draws(x: Tensor) -> tuple[Tensor, ...]:
    noise, kept = torch.randn(4, 1000), F.dropout(x, 0.5)
    return torch.rand_like(x), noise, noise * x, kept, torch.randint(9, (50,)), torch.bernoulli(x)


X = torch.rand(4, 1000)


def equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> list[bool]:
    return [torch.equal(s, t) for s, t in zip(a, b, strict=True)]


def test_a_seed_gives_the_same_numbers_and_each_call_others() -> None:
    f = compiled(draws)
    torch.manual_seed(1)
    first, second = f(X), f(X)
    torch.manual_seed(1)
    assert all(equal(f(X), first)) and all(equal(f(X), second))
    assert not any(equal(first, second))
    assert not any(equal(seeded(f, X, seed=2), first))


def test_a_call_moves_the_generator_on_and_a_state_that_was_kept_gives_the_same_numbers() -> None:
    f = compiled(draws)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    got = f(X)
    assert not torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(before)
    assert all(equal(f(X), got))


def test_a_graph_without_random_numbers_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    compiled(lambda x: F.dropout(x, 0.5, training=False) + 1)(X)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_graph_from_the_cache_draws_anew() -> None:
    one = seeded(compiled(draws), X, seed=1)
    torch._dynamo.reset()
    assert not any(equal(seeded(compiled(draws), X, seed=2), one))
    torch._dynamo.reset()
    assert all(equal(seeded(compiled(draws), X, seed=1), one))


def test_random_numbers_do_not_disturb_those_of_pytorch() -> None:
    """What PyTorch draws itself comes from the same generator, in the same order at each call."""
    f = compiled(lambda x: (torch.rand(5), torch.randperm(20), torch.multinomial(x, 3)))
    assert all(equal(seeded(f, X), seeded(f, X)))
    assert sorted(seeded(f, X)[1].tolist()) == list(range(20))


# --- what does not decide the numbers ---------------------------------------------------------------------

EXACT = (0, 3, 4, 5)  # of ``draws``: all but the normal ones, which are computed with logarithms and cosines


@pytest.mark.parametrize("level", ["scalar", "avx2"])
def test_vectors_do_not_decide(level: str) -> None:
    a, b = seeded(compiled(draws), X), seeded(compiled(draws, cpp__simd=level), X)
    assert [equal(a, b)[k] for k in EXACT] == [True] * len(EXACT)
    for k in (1, 2):
        torch.testing.assert_close(a[k], b[k], rtol=1e-5, atol=1e-6)


def test_threads_do_not_decide() -> None:
    big = torch.rand(500, 1000)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return torch.randn_like(x) + x, F.dropout(x, 0.3), torch.rand_like(x).sum(0)

    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch._dynamo.reset()
            results.append(seeded(compiled(f, cpp__threads=threads), big))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert equal(results[0], other)[:2] == [True, True]
        torch.testing.assert_close(other[2], results[0][2])


def test_fusion_does_not_decide() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        r = torch.rand(64, 65)
        kept = F.dropout(x, 0.4)
        # The same numbers turned, reduced, repeated, gathered and returned.
        return (
            r.t() * 2, r.sum(1), r + x, (r[:, None, :] * kept[None, :2]).sum(1), kept.softmax(-1), r,
            r.reshape(65, 64).cumsum(0), torch.cat([r, kept])[5:100:3],
        )  # fmt: skip

    x = torch.rand(64, 65)
    together = seeded(compiled(f), x)
    torch._dynamo.reset()
    apart = seeded(compiled(f, backend="hotloop_unfused"), x)
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(together[5], apart[5]) and torch.equal(together[0], together[5].t() * 2)


def test_layout_does_not_decide() -> None:
    x = torch.rand(4, 8, 6, 5)
    f = compiled(lambda x: torch.rand_like(x))
    a, b = seeded(f, x), seeded(f, x.to(memory_format=torch.channels_last))
    assert b.is_contiguous(memory_format=torch.channels_last) and torch.equal(a, b)


def test_symbolic_sizes_do_not_decide() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return F.dropout(x, 0.5) + torch.rand_like(x), torch.rand(x.shape[1] * 2, 7, dtype=F64)

    symbolic = torch.compile(f, backend="hotloop", dynamic=True)
    for sizes in ((5, 7), (6, 9), (100, 33)):
        x = torch.rand(sizes)
        got = seeded(symbolic, x)
        torch._dynamo.reset()
        assert all(equal(got, seeded(compiled(f), x)))


def test_repeated_layers_share_a_function(caplog: pytest.LogCaptureFixture) -> None:
    from hotloop.runtime import program

    found: list[str] = []
    original = program.Runtime.kernel

    def kernel(self: Any, name: str) -> Any:
        found.append(name)
        return original(self, name)

    def layers(x: Tensor) -> Tensor:
        for _ in range(6):
            x = F.layer_norm(F.dropout(x, 0.1), (1000,)) + x @ torch.eye(1000)
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program.Runtime, "kernel", kernel)
        compiled(layers)(X)
    assert len(found) <= 5, found


# --- eager's numbers --------------------------------------------------------------------------------------


def test_the_fallback_gives_eagers_numbers() -> None:
    f = compiled(draws, fallback_random=True)
    torch.manual_seed(1)
    want, after = draws(X), torch.rand(3)
    torch.manual_seed(1)
    assert all(equal(f(X), want))
    assert torch.equal(torch.rand(3), after)


@pytest.mark.parametrize("bad", [-0.5, 1.5, math.nan])
def test_a_probability_that_is_none_raises(bad: float) -> None:
    f = compiled(torch.bernoulli)
    x = torch.full((40,), 0.5)
    f(x)
    x[17] = bad
    for each in (f, torch.bernoulli):
        with pytest.raises(RuntimeError):
            each(x)


# --- activations computed again ---------------------------------------------------------------------------


@pytest.mark.parametrize("preserve", [True, False])
def test_checkpoints_with_eagers_numbers(preserve: bool) -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout((x @ w).sin(), 0.5)

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = checkpoint(block, x, w, use_reentrant=False, preserve_rng_state=preserve)
        return checkpoint(block, y, w, use_reentrant=False, preserve_rng_state=preserve)

    x, w = torch.randn(40, 40, dtype=F64), torch.randn(40, 40, dtype=F64, requires_grad=True)
    want = seeded(f, x, w)
    (expected,) = torch.autograd.grad(want.square().sum(), w)
    got = seeded(compiled(f, fallback_random=True), x, w)
    torch.testing.assert_close(got, want)
    (gradient,) = torch.autograd.grad(got.square().sum(), w)
    if preserve:  # otherwise eager draws other masks in its backward pass, and says so
        torch.testing.assert_close(gradient, expected)


def test_a_checkpoint_of_dropout_alone() -> None:
    def f(x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout(x.sin(), 0.5).exp(), x, use_reentrant=False)

    x = torch.rand(1000, requires_grad=True)
    y = seeded(compiled(f), x)
    y.sum().backward()
    kept = y != 1
    assert 400 < int(kept.sum()) < 600
    torch.testing.assert_close(x.grad, kept * 2 * x.cos() * y)


NOISE: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "randint": lambda x: torch.randint(1, 9, x.shape).to(x),
    "uniform": lambda x: torch.empty_like(x).uniform_(1, 2),
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.3),
    "rrelu": lambda x: F.rrelu(-torch.ones_like(x), training=True),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", NOISE)
def test_the_backward_pass_sees_the_noise_of_the_forward_pass(name: str, again: bool, dynamic: bool) -> None:
    def part(x: Tensor) -> Tensor:
        return x.exp() * NOISE[name](x)

    def f(x: Tensor) -> Tensor:
        return checkpoint(part, x, use_reentrant=False) if again else part(x)

    g = torch.compile(f, backend="hotloop", dynamic=dynamic)
    for sizes in ((20, 30), (21, 40)):
        x = torch.rand(sizes, requires_grad=True)
        y = g(x)
        y.sum().backward()
        torch.testing.assert_close(x.grad, y.detach())  # the derivative of exp(x) * noise
