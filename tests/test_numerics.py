"""The promises of docs/numerics.md that no test of a single stage holds, from end to end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LOW = pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])
LEVELS = pytest.mark.parametrize("level", ["auto", "scalar"])


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(fn: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    options = {name.replace("__", "."): value for name, value in options.items()}
    return torch.compile(fn, backend="hotloop", fullgraph=True, dynamic=False, options=options)(*inputs)


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, zeros: bool = True) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    if want.is_floating_point() and zeros:
        known = ~want.isnan()
        assert torch.equal(got.signbit()[known], want.signbit()[known])


# --- low precision ----------------------------------------------------------------------------------------


def chain(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a + b) * c - a


@LOW
def test_intermediates_stay_in_float32(dtype: torch.dtype) -> None:
    a, b, c = (torch.randn(1000).to(dtype) for _ in range(3))
    got = compiled(chain, a, b, c)
    assert_same_bits(got, chain(a.float(), b.float(), c.float()).to(dtype))
    assert not torch.equal(got, chain(a, b, c)), "the example does not tell the two apart"


@LOW
def test_precision_eager_rounds_after_every_operator(dtype: torch.dtype) -> None:
    a, b, c = (torch.randn(1000).to(dtype) for _ in range(3))
    assert_same_bits(compiled(chain, a, b, c, precision="eager"), chain(a, b, c))


Unary = Callable[[torch.Tensor], torch.Tensor]

UNARY: dict[str, Unary] = {
    "abs": torch.abs,
    "neg": torch.neg,
    "square": torch.square,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "floor": torch.floor,
    "round": torch.round,
    "frac": torch.frac,
    "relu": torch.relu,
    "relu6": functional.relu6,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "hardtanh": functional.hardtanh,
    "leaky_relu": functional.leaky_relu,
    "softshrink": functional.softshrink,
    "softsign": functional.softsign,
    "add_number": lambda a: a + 0.1,
    "number_minus": lambda a: 1.7 - a,
    "mul_number": lambda a: a * 0.3,
    "div_number": lambda a: a / 0.7,
    "number_over": lambda a: 1.3 / a,
    "remainder_number": lambda a: a % 0.3,
    "floor_divide_number": lambda a: a // 0.3,
    "clamp": lambda a: a.clamp(-0.5, 0.7),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "fmin": torch.fmin,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "copysign": torch.copysign,
    "hypot": torch.hypot,
    "where": lambda a, b: torch.where(a > 0.1, a, b * 2),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "largest": lambda a, b: torch.stack([a, b]).amax(0),
}
FUNCTIONS: dict[str, Unary] = {
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "sin": torch.sin,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "elu": functional.elu,
    "softplus": functional.softplus,
    "mish": functional.mish,
    "logsigmoid": functional.logsigmoid,
}


def differing(fn: Callable[..., list[torch.Tensor]], names: list[str], dtype: torch.dtype) -> dict[str, int]:
    """How many of 4096 elements of each result are not eager's."""
    x, y = torch.randn(4096).to(dtype), torch.randn(4096).to(dtype)
    pairs = zip(compiled(fn, x, y, precision="eager"), fn(x, y), strict=True)
    counts = [int(((got != want) & ~(got.isnan() & want.isnan())).sum()) for got, want in pairs]
    return {name: count for name, count in zip(names, counts, strict=True) if count}


@LOW
def test_precision_eager_gives_the_bits_of_eager(dtype: torch.dtype) -> None:
    """Each operator stands between others, which take what it rounds to."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        z = x + y
        middle = [*(f(z) for f in UNARY.values()), *(f(z, y) for f in BINARY.values())]
        return [m * y + x for m in middle]

    assert differing(fn, [*UNARY, *BINARY], dtype) == {}


@LOW
def test_precision_eager_of_functions(dtype: torch.dtype) -> None:
    """Two float32 functions that are right to a unit in the last place rarely round to different values."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        z = x + y
        return [f(z) * y + x for f in FUNCTIONS.values()]

    assert max(differing(fn, list(FUNCTIONS), dtype).values(), default=0) <= 8


@LOW
def test_precision_eager_rounds_once_where_eager_s_own_kernel_rounds_again(dtype: torch.dtype) -> None:
    """Eager multiplies by alpha, or raises to the third power, in more than one rounding: ours is nearer."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [x.pow(3), torch.add(x, y, alpha=0.3), torch.xlogy(x, y.abs()), (x.abs() % 1).logit()]

    x, y = torch.randn(4096).to(dtype), torch.randn(4096).to(dtype)
    for got, exact in zip(compiled(fn, x, y, precision="eager"), fn(x.double(), y.double()), strict=True):
        assert int((got != exact.to(dtype)).sum()) <= 8


@LOW
def test_precision_eager_holds_through_rows(dtype: torch.dtype) -> None:
    """What a reduction gives is rounded before it is used, and what several passes share is rounded too."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x * w).abs() * 0.3
        return (y - y.amax(-1, keepdim=True)) * w + y.amin(-1, keepdim=True) * x

    x, w = torch.randn(64, 300).to(dtype), torch.randn(300).to(dtype)
    assert_same_bits(compiled(fn, x, w, precision="eager"), fn(x, w))


@LOW
def test_a_cast_that_was_written_is_done(dtype: torch.dtype) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a + b).to(dtype).float() * 3

    a, b = torch.randn(1000), torch.randn(1000)
    got = compiled(fn, a, b)
    assert_same_bits(got, fn(a, b))
    assert not torch.equal(got, (a + b) * 3)


JUMPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gt": lambda s: s > 1,
    "eq": lambda s: s == s.round(decimals=0),
    "floor": lambda s: (s * 8).floor(),
    "sign": lambda s: (s - 1).sign(),
    "where": lambda s: torch.where(s >= 1, s, -s),
    "isinf": lambda s: (s * 60000).isinf(),
    "remainder": lambda s: torch.remainder(s, 0.5),
    "to_int": lambda s: (s * 16).to(torch.int32),
    "any": lambda s: (s.view(-1, 2) == 1).any(-1),
    "argmax": lambda s: s.view(-1, 8).argmax(-1),
    "max_dim": lambda s: s.view(-1, 8).max(-1).indices,
}


@LOW
@pytest.mark.parametrize("name", JUMPS)
def test_operations_that_jump_see_rounded_values(name: str, dtype: torch.dtype) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return JUMPS[name](a + b)

    a = torch.linspace(0.5, 1.5, 4096).to(dtype)
    b = (torch.rand(4096) * 0.01).to(dtype)
    assert_same_bits(compiled(fn, a, b), fn(a, b))


# --- reductions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_sums_are_as_accurate_as_pairwise_ones(dim: int | None) -> None:
    x = torch.rand(2048, 3000)
    got, exact = compiled(lambda x: x.sum(dim), x), x.double().sum(dim)
    eager = float(((x.sum(dim) - exact).abs() / exact).max())
    assert float(((got - exact).abs() / exact).max()) <= max(eager, 4e-7)


#: Shapes and reduced dimensions: nests of short loops, long ones around short ones, columns, one long loop.
NESTS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((9, 9, 1, 9), (0, 1, 2, 3)), ((1000, 3), (0, 1)), ((5, 7, 11, 13), (0, 2)), ((40, 40, 3), (0, 1)),
    ((3, 700, 2), (1,)), ((2000, 17), (0, 1)), ((100_000,), (0,)), ((33, 3, 33, 3, 33), (0, 2, 4)),
]  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
@LEVELS
def test_sums_over_nested_loops_are_as_accurate_as_eagers(level: str, dynamic: bool) -> None:
    """Equal terms, whose rounding errors all point the same way, and random ones."""
    far = {}
    for shape, dims in NESTS:

        def fn(x: torch.Tensor, dims: tuple[int, ...] = dims) -> tuple[torch.Tensor, ...]:
            return x.sum(dims), (x * 0.75).mean(dims), x.to(torch.bfloat16).sum(dims, dtype=F32)

        f = torch.compile(fn, backend="hotloop", dynamic=dynamic, options={"cpp.simd": level})
        for wide in (False, True):  # a view of something wider has no loops that can be walked as one
            base = torch.empty([n + wide for n in shape])[tuple(slice(n) for n in shape)]
            for x in (base.fill_(1 / 3), base.uniform_()):
                exact = x.double().sum(dims), (x * 0.75).double().mean(dims), x.bfloat16().double().sum(dims)
                for k, (got, eager, true) in enumerate(zip(f(x), fn(x), exact, strict=True)):
                    error, theirs = (float(((t - true).abs() / true).max()) for t in (got, eager))
                    if error > 2 * theirs + 8 * torch.finfo(F32).eps:
                        far[shape, dims, wide, k] = (error, theirs)
    assert not far


@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
@pytest.mark.parametrize("n", [300, 3267, 100_000])
def test_sums_of_equal_terms_are_as_accurate_as_eagers(n: int, dynamic: bool) -> None:
    """On average over many numbers: where all roundings of a sum err to one side, short blocks count."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(1), x.mT.sum(0), x.mT.contiguous().sum(0)

    x = torch.rand(64, 1, generator=torch.Generator().manual_seed(n)).expand(64, n).contiguous()
    exact = x.double().sum(1)
    f = torch.compile(fn, backend="hotloop", dynamic=dynamic)
    for got, eager in zip(f(x), fn(x), strict=True):
        error, theirs = (float(((t - exact).abs() / exact).mean()) for t in (got, eager))
        assert error <= 1.25 * theirs + 0.25 * torch.finfo(F32).eps


def test_a_variance_beyond_the_range_of_the_dtype_is_infinite() -> None:
    """And what is normalised by it is 0; where its input is not finite it is NaN."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.var(-1), torch.var_mean(x, -1)[0], torch.nn.functional.layer_norm(x, x.shape[-1:])

    wide = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    one_large = wide.index_fill(1, torch.tensor([7]), 1e25)
    for x in (wide * 1e20, one_large, (wide * 1e20).bfloat16(), wide.double() * 1e160):
        torch._dynamo.reset()
        for got, eager in zip(compiled(fn, x), fn(x), strict=True):
            assert_same_bits(got, eager.nan_to_num(nan=0.0, posinf=float("inf")), zeros=False)
    for number in (float("inf"), float("nan")):
        assert all(bool(t.isnan().all()) for t in compiled(fn, torch.full((2, 40), number)))


def test_the_same_call_gives_the_same_bits() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(), x.sum(0), torch.softmax(x, -1), x.var(1)

    x = torch.randn(512, 1023)
    f = torch.compile(fn, backend="hotloop", dynamic=False)
    first = [t.clone() for t in f(x)]
    for _ in range(20):
        for a, b in zip(f(x), first, strict=True):
            assert torch.equal(a, b)


@LOW
def test_low_precision_sums_are_rounded_once(dtype: torch.dtype) -> None:
    x = torch.rand(64, 3000).to(dtype)
    assert_same_bits(compiled(lambda x: x.sum(1), x), x.double().sum(1).float().to(dtype))


# --- fused multiply-add -----------------------------------------------------------------------------------


@LEVELS
def test_products_and_sums_are_not_contracted(level: str) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return a * b + c

    for dtype in (F32, F64):
        a, b = torch.randn(1003).to(dtype), torch.randn(1003).to(dtype)
        assert_same_bits(compiled(fn, a, b, -(a * b), cpp__simd=level), torch.zeros(1003, dtype=dtype))


# --- integers ---------------------------------------------------------------------------------------------


@LEVELS
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers_wrap(dtype: torch.dtype, level: str) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a + b, a - b, a * b, -a, a.abs(), a << (b & 3), a.sum(), a.cumsum(0)

    info = torch.iinfo(dtype)
    a = torch.randint(info.min, info.max, (1001,), dtype=dtype)
    a[:2] = torch.tensor([info.min, info.max], dtype=dtype)
    b = a.flip(0)
    for got, want in zip(compiled(fn, a, b, cpp__simd=level), fn(a, b), strict=True):
        assert_same_bits(got, want)


def test_division_of_integers_by_zero_raises() -> None:
    a, b = torch.arange(100), torch.arange(100) - 50
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        torch.floor_divide(a, b)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(lambda a, b: torch.floor_divide(a, b), a, b)


def test_lowest_integer_divided_by_minus_one_wraps() -> None:
    lowest = torch.iinfo(torch.int64).min
    a, b = torch.full((9,), lowest), torch.full((9,), -1)
    assert compiled(lambda a, b: torch.floor_divide(a, b), a, b).tolist() == [lowest] * 9
    assert compiled(torch.remainder, a, b).tolist() == [0] * 9


# --- NaN, infinities, zeros -------------------------------------------------------------------------------


def special(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([0.0, -0.0, 1.0, -1.5, inf, -inf, nan, 2.5, 3.0], dtype=dtype)
    a, b = torch.meshgrid(values, values, indexing="ij")
    return a.reshape(-1).contiguous(), b.reshape(-1).contiguous()


SPECIAL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda a, b: a + b,
    "mul_by_one": lambda a, b: a * 1,
    "add_zero": lambda a, b: a + 0,
    "sub_zero": lambda a, b: a - 0,
    "div": lambda a, b: a / b,
    "relu": lambda a, b: torch.relu(a),
    "clamp": lambda a, b: a.clamp(-1, 1),
    "clamp_at_zero": lambda a, b: a.clamp(0, 1),
    "clamp_max_at_zero": lambda a, b: a.clamp(max=0),
    "clamp_min_at_zero": lambda a, b: a.clamp_min(0),
    "relu6": lambda a, b: functional.relu6(a),
    "hardtanh_at_zero": lambda a, b: functional.hardtanh(a, -1, 0),
    "sign": lambda a, b: a.sign(),
    "copysign": torch.copysign,
    "round": lambda a, b: a.round(),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "floor_divide": torch.floor_divide,
    "sqrt": lambda a, b: a.sqrt(),
    "lt": lambda a, b: a < b,
    "ne": lambda a, b: a != b,
    "to_bool": lambda a, b: a.bool(),
    "where": lambda a, b: torch.where(a > b, a, b),
    "nan_to_num": lambda a, b: a.nan_to_num(),
    "amax": lambda a, b: a.view(9, 9).amax(0),
    "amin": lambda a, b: b.view(9, 9).amin(1),
    "argmax": lambda a, b: b.view(9, 9).argmax(1),
    "argmin": lambda a, b: a.view(9, 9).argmin(0),
    "any": lambda a, b: a.view(9, 9).any(0),
}


@LEVELS
@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
def test_special_values(dtype: torch.dtype, level: str) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(f(a, b) for f in SPECIAL.values())

    a, b = special(dtype)
    for name, got, want in zip(SPECIAL, compiled(fn, a, b, cpp__simd=level), fn(a, b), strict=True):
        try:
            # Which of 0.0 and -0.0 is larger, PyTorch leaves open.
            assert_same_bits(got, want, zeros=name not in ("amax", "amin"))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("name", ["maximum", "minimum", "fmax", "fmin"])
def test_extremes_of_nan(name: str) -> None:
    f = getattr(torch, name)
    a, b = special(F32)
    assert_same_bits(compiled(f, a, b), f(a, b), zeros=False)


# --- random numbers, indices ------------------------------------------------------------------------------


def test_random_numbers_of_pytorch_are_those_of_eager() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sigmoid()
        # The second draw needs nothing of the first, yet must come after it.
        return torch.bernoulli(y), torch.randn(64), y * x, torch.nn.functional.dropout(x, 0.5)

    x = torch.randn(64)
    torch.manual_seed(1)
    want, after = fn(x), torch.rand(3)
    torch.manual_seed(1)
    for got, expected in zip(compiled(fn, x, fallback_random=True), want, strict=True):
        torch.testing.assert_close(got, expected)
    assert torch.equal(torch.rand(3), after)


@pytest.mark.parametrize("bad", [-1, 10])
def test_an_index_out_of_range_raises(bad: int) -> None:
    table, at = torch.randn(10, 32), torch.tensor([1, bad, 3])
    with pytest.raises((IndexError, RuntimeError)):
        torch.nn.functional.embedding(at, table)
    with pytest.raises(IndexError, match=f"index {bad} is out of bounds for a dimension with size 10"):
        compiled(torch.nn.functional.embedding, at, table)


INTO_NOTHING = """
import torch
def f(t, i):
    return torch.nn.functional.embedding(i, t) + 1
def error(f):
    try:
        f(torch.empty(0, 4), torch.tensor([0, 1]))
    except Exception as e:
        return type(e), str(e)
assert error(f) is not None and error(torch.compile(f, backend="hotloop")) == error(f), error(f)
"""


def test_an_index_into_an_empty_tensor_raises() -> None:
    """In a process of its own: a wrong answer here is a crash."""
    done = subprocess.run([sys.executable, "-c", INTO_NOTHING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
