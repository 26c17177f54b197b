"""Every elementwise operator against eager: dtypes, special values, scalars, broadcasting, promotion."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from check import check, lowered

from hotloop.ir.loops import Pointwise

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
SPECIAL = (
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1.0,
    -1.0,
    0.5,
    -0.5,
    2.0,
    -3.0,
    2.5,
    3.5,
    1e-30,
    60.0,
    -60.0,
)

Fn = Callable[..., Any]


def names(text: str) -> list[str]:
    return text.split()


def floats(dtype: torch.dtype, *shape: int, special: bool = True, scale: float = 2.0) -> torch.Tensor:
    """Normal numbers, the first of them replaced by every special value."""
    x = torch.randn(shape or (5, 9)) * scale
    if special:
        n = min(len(SPECIAL), x.numel())
        x.view(-1)[:n] = torch.tensor(SPECIAL[:n])
    return x.to(dtype)


def integers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """The whole range of the dtype, its ends included."""
    info = torch.iinfo(dtype)
    low, high = max(info.min, -(1 << 40)), min(info.max, 1 << 40)
    x = torch.randint(low, high, shape or (5, 9), dtype=torch.int64)
    x.view(-1)[:6] = torch.tensor([0, 1, info.min, info.max, 2, max(info.min, -1)])
    return x.to(dtype)


UNARY: dict[str, Fn] = {
    name: getattr(torch, name)
    for name in names(
        """
        abs acos acosh asin asinh atan atanh ceil cos cosh digamma erf erfc erfinv exp exp2 expm1
        floor frac lgamma log log10 log1p log2 neg positive reciprocal relu round rsqrt sgn sigmoid
        sign sin sinc sinh sqrt square tan tanh trunc isnan isinf isfinite isposinf isneginf signbit
        logical_not nan_to_num deg2rad rad2deg clone logit selu
        """
    )
}
UNARY |= {
    name: getattr(F, name)
    for name in names(
        """
        celu elu gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 silu softplus
        softshrink hardshrink softsign tanhshrink
        """
    )
}
UNARY |= {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus_beta": lambda x: F.softplus(x, beta=2.0, threshold=5.0),
    "elu_alpha": lambda x: F.elu(x, alpha=0.7),
    "celu_alpha": lambda x: F.celu(x, alpha=0.7),
    "leaky_slope": lambda x: F.leaky_relu(x, 0.3),
    "hardtanh_bounds": lambda x: F.hardtanh(x, -0.3, 1.7),
    "threshold": lambda x: F.threshold(x, 0.5, -7.3),
    "round_2": lambda x: torch.round(x, decimals=2),
    "round_-1": lambda x: torch.round(x, decimals=-1),
    "logit_eps": lambda x: torch.logit(x, 0.1),
    "nan_to_num_all": lambda x: torch.nan_to_num(x, 0.3, 5.5, -6.5),
    "clamp_both": lambda x: torch.clamp(x, -0.7, 1.3),
    "clamp_crossed": lambda x: torch.clamp(x, 1.3, -0.7),
    "clamp_min": lambda x: torch.clamp_min(x, 0.3),
    "clamp_max": lambda x: torch.clamp_max(x, 0.3),
    "entr": torch.special.entr,
    "ndtr": torch.special.ndtr,
    "rsub": lambda x: torch.rsub(x, 1.5, alpha=2),
    "add_alpha": lambda x: torch.add(x, 1.7, alpha=3),
    "div_scalar": lambda x: x / 3,
    "scalar_div": lambda x: 3 / x,
    "mul_scalar": lambda x: x * 0.1,
    "floor_div": lambda x: x // 0.7,
    "trunc_div": lambda x: torch.div(x, 0.7, rounding_mode="trunc"),
    "remainder": lambda x: x % 0.7,
    "remainder_negative": lambda x: x % -0.7,
    "fmod": lambda x: torch.fmod(x, 0.7),
    "eq": lambda x: x == 2.5,
    "lt": lambda x: x < 0.1,
    "ge": lambda x: x >= 0.1,
    "xlogy": lambda x: torch.xlogy(x, 2.0),
    "masked_fill": lambda x: x.masked_fill(x > 0.3, -1e4),
    "where_scalar": lambda x: torch.where(x > 0.3, x, 0.25),
    "where_minus_inf": lambda x: torch.where(x > 0.3, x, -math.inf),
}
# Where the function is ill-conditioned or infinitely steep near special values, plain numbers say enough.
PLAIN = {"lgamma", "digamma", "tan", "erfinv", "sinc", "floor_div", "trunc_div"}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str, dtype: torch.dtype) -> None:
    x = floats(dtype, special=name not in PLAIN)
    if name in ("erfinv", "logit", "logit_eps", "acos", "asin", "atanh"):
        x = floats(dtype, special=False, scale=0.3).clamp(-0.99, 0.99)
    check(UNARY[name], x)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, -1, -2, 0.5, -0.5, 1.5, 2.3, -3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_power_of_a_number(exponent: float, dtype: torch.dtype) -> None:
    check(lambda x: x**exponent, floats(dtype))
    check(lambda x: x**exponent, floats(dtype, special=False).abs())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_powers(dtype: torch.dtype) -> None:
    x, y = floats(dtype, special=False).abs(), floats(dtype, special=False)
    check(torch.pow, x, y)
    check(lambda t: 2**t, y)
    check(lambda t: 1**t, y)
    check(lambda t: 1.3**t, y)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_powers_of_integers_wrap(dtype: torch.dtype) -> None:
    for n in (0, 1, 2, 3, 5, 8, 13):
        check(lambda x, n=n: x**n, integers(dtype), exact=True)


BINARY: dict[str, Fn] = {
    name: getattr(torch, name)
    for name in names(
        """
        add sub mul div maximum minimum fmax fmin atan2 hypot copysign logaddexp logaddexp2 xlogy
        heaviside eq ne lt le gt ge logical_and logical_or logical_xor fmod remainder floor_divide
        nextafter
        """
    )
}
BINARY |= {
    "sub_alpha": lambda a, b: torch.sub(a, b, alpha=0.3),
    "rsub_alpha": lambda a, b: torch.rsub(a, b, alpha=0.3),
    "add_alpha": lambda a, b: torch.add(a, b, alpha=0.3),
    "div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "lerp_low": lambda a, b: torch.lerp(a, b, 0.3),
    "lerp_high": lambda a, b: torch.lerp(a, b, 0.8),
    "clamp_low": lambda a, b: torch.clamp(a, min=b),
    "clamp_high": lambda a, b: torch.clamp(a, max=b),
    "xlog1py": torch.special.xlog1py,
    "prelu": lambda a, b: torch.prelu(a, b[0, 0]),
    "where": lambda a, b: torch.where(a > b, a, b),
    "masked_fill_tensor": lambda a, b: a.masked_fill(b > 0, b[0, 4]),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str, dtype: torch.dtype) -> None:
    if name == "nextafter" and dtype is torch.float16:
        pytest.skip("eager has no nextafter of float16")
    a, b = floats(dtype, 5, 9), floats(dtype, 5, 9).flip(1)
    if name in ("fmod", "remainder", "floor_divide", "div_trunc"):  # large quotients: eager itself is far off
        b = b.abs() + 0.5
    check(BINARY[name], a, b, own=name != "nextafter")
    check(BINARY[name], a[:, ::2], b.t()[::2].t(), own=name != "nextafter")
    check(BINARY[name], a.t(), b.t(), own=name != "nextafter")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ternary(dtype: torch.dtype) -> None:
    a, b, c = (floats(dtype, special=False) for _ in range(3))
    check(lambda x, y, z: torch.addcmul(x, y, z, value=0.3), a, b, c)
    check(lambda x, y, z: torch.addcdiv(x, y, z, value=0.3), a, b, c.abs() + 0.5)
    check(torch.addcmul, a, b, c)
    check(torch.lerp, a, b, c)
    check(torch.clamp, a, b, c)


BACKWARD: dict[str, Fn] = {
    "gelu": lambda g, x: torch.ops.aten.gelu_backward(g, x),
    "gelu_tanh": lambda g, x: torch.ops.aten.gelu_backward(g, x, approximate="tanh"),
    "silu": torch.ops.aten.silu_backward,
    "hardswish": torch.ops.aten.hardswish_backward,
    "hardsigmoid": torch.ops.aten.hardsigmoid_backward,
    "hardtanh": lambda g, x: torch.ops.aten.hardtanh_backward(g, x, -0.5, 1.5),
    "leaky_relu": lambda g, x: torch.ops.aten.leaky_relu_backward(g, x, 0.3, False),
    "elu": lambda g, x: torch.ops.aten.elu_backward(g, 0.7, 1.1, 0.9, False, x),
    "elu_of_result": lambda g, x: torch.ops.aten.elu_backward(g, 0.7, 1.1, 0.9, True, x.clamp(-0.7)),
    "softplus": lambda g, x: torch.ops.aten.softplus_backward(g, x, 2.0, 3.0),
    "threshold": lambda g, x: torch.ops.aten.threshold_backward(g, x, 0.3),
    "sigmoid": torch.ops.aten.sigmoid_backward,
    "tanh": torch.ops.aten.tanh_backward,
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", BACKWARD)
def test_backward_formulas(name: str, dtype: torch.dtype) -> None:
    check(BACKWARD[name], floats(dtype, special=False), floats(dtype, special=False))


INTEGER_UNARY: dict[str, Fn] = {
    "abs": torch.abs,
    "neg": torch.neg,
    "sign": torch.sign,
    "sgn": torch.sgn,
    "bitwise_not": torch.bitwise_not,
    "logical_not": torch.logical_not,
    "square": torch.square,
    "relu": torch.relu,
    "floor": torch.floor,
    "round": torch.round,
    "isnan": torch.isnan,
    "isfinite": torch.isfinite,
    "isposinf": torch.isposinf,
    "signbit": torch.signbit,
    "nan_to_num": torch.nan_to_num,
    "clamp": lambda x: x.clamp(-5, 100),
    "add": lambda x: x + 3,
    "rsub": lambda x: 3 - x,
    "mul": lambda x: x * 7,
    "floor_div": lambda x: x // 7,
    "floor_div_negative": lambda x: x // -7 if x.dtype.is_signed else x // 5,
    "trunc_div": lambda x: torch.div(x, 7, rounding_mode="trunc"),
    "remainder": lambda x: x % 7,
    "fmod": lambda x: torch.fmod(x, 7),
    "shl": lambda x: x << 3,
    "shr": lambda x: x >> 3,
    "eq": lambda x: x == 1,
    "lt_float": lambda x: x < 1.5,
    "masked_fill": lambda x: x.masked_fill(x > 3, 7),
}


@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("name", INTEGER_UNARY)
def test_integers(name: str, dtype: torch.dtype) -> None:
    check(INTEGER_UNARY[name], integers(dtype), exact=True)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integers_become_floats(dtype: torch.dtype) -> None:
    x = integers(dtype)
    for f in (torch.exp, torch.sin, torch.sigmoid, torch.rsqrt, torch.reciprocal):
        check(f, x % 7)
    check(lambda t: t / 3, x)
    check(lambda t: t * 0.5, x)
    check(lambda t: t.to(torch.bfloat16) * 3, x)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integer_pairs_wrap(dtype: torch.dtype) -> None:
    a, b = integers(dtype), integers(dtype).flip(1)
    for name in names(
        """
        add sub mul maximum minimum bitwise_and bitwise_or bitwise_xor eq ne lt le gt ge logical_and
        """
    ):
        check(getattr(torch, name), a, b, exact=True)
    shift = torch.randint(0, torch.iinfo(dtype).bits, (5, 9)).to(dtype)
    check(torch.bitwise_left_shift, a, shift, exact=True)
    check(torch.bitwise_right_shift, a, shift, exact=True)


def test_division_of_integers_by_a_tensor_is_left_to_pytorch() -> None:
    """A zero has to raise as eager's does; the machine's division would end the process."""
    a, b = integers(torch.int32), integers(torch.int32).clamp(1, 9)
    check(torch.floor_divide, a, b, own=False, exact=True)
    check(torch.remainder, a, b, own=False, exact=True)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        check(lambda x: x // 0, a, own=False)


def test_bools_have_logic_for_arithmetic() -> None:
    a, b = torch.rand(5, 9) > 0.5, torch.rand(5, 9) > 0.5
    for name in names(
        """
            add mul maximum minimum bitwise_and bitwise_or bitwise_xor eq ne lt le gt ge logical_and
            logical_or
            """
    ):
        check(getattr(torch, name), a, b, exact=True)
    for f in (torch.bitwise_not, torch.logical_not, torch.isnan, torch.isfinite, torch.sign):
        check(f, a, exact=True)
    check(lambda x, y: torch.where(x, y, ~y), a, b, exact=True)
    check(lambda x: x.float() * 2 + x, a)
    check(lambda x: x + 1, a, exact=True)


@pytest.mark.parametrize("source", (*FLOATS, *INTS, torch.bool), ids=str)
@pytest.mark.parametrize("target", (*FLOATS, *INTS, torch.bool), ids=str)
def test_conversions(source: torch.dtype, target: torch.dtype) -> None:
    if source is torch.bool:
        x = torch.rand(5, 9) > 0.5
    else:
        x = (torch.randn(5, 9) * 20).to(source) if source is not torch.uint8 else integers(source) % 120
    if target is torch.uint8 and source.is_floating_point:
        x = x.abs()  # what a negative float becomes is not defined
    check(lambda t: t.to(target), x, exact=True)


def test_an_explicit_conversion_is_not_an_implicit_rounding() -> None:
    program = lowered(lambda x: x.to(torch.bfloat16), torch.randn(3))
    assert "cast_bf16" in str(program) and "round_bf16" not in str(program)
    program = lowered(lambda x: x * 2, torch.randn(3, dtype=torch.bfloat16))
    assert "round_bf16(mul(cast_f32(" in str(program)


def test_bits_seen_as_another_dtype() -> None:
    check(lambda x: x.view(torch.int32) & 0xFF, torch.randn(4, 5), exact=True)
    check(lambda x: x.view(torch.bfloat16) * 2, integers(torch.int16) % 1000, exact=True)
    check(lambda x: x.view(torch.int16) + 1, torch.randn(4, 6), exact=True)
    check(lambda x: x.view(torch.int64) + 1, torch.randn(4, 6), exact=True)


def test_scalars_keep_the_compute_precision() -> None:
    """0.1 is not a bfloat16. Eager's products take the float, its sums and comparisons round it first."""
    x = torch.linspace(-3, 3, 301).to(torch.bfloat16)
    for f in (lambda t: t * 0.1, lambda t: t + 0.1, lambda t: t / 0.3, lambda t: t - 0.7, lambda t: 0.1 - t):
        check(f, x, exact=True)
    y = torch.tensor([0.1], dtype=torch.bfloat16)
    check(lambda t: t == 0.1, y, exact=True)
    check(lambda t: torch.clamp(t, max=0.1), x, exact=True)


ZERO_DIM = [torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64), torch.tensor(3), torch.tensor(True)]


@pytest.mark.parametrize("zero_dim", ZERO_DIM, ids=lambda t: str(t.dtype))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int32), ids=str)
def test_zero_dim_tensors_promote_by_category(zero_dim: torch.Tensor, dtype: torch.dtype) -> None:
    x = (torch.randn(7) * 5).to(dtype)
    for f in (torch.add, torch.mul, torch.div, torch.eq, torch.lt):
        check(f, x, zero_dim)
        check(f, zero_dim, x)
    check(torch.maximum, x, zero_dim)
    check(lambda a, b: torch.where(a > 0, a, b), x, zero_dim)


def test_mixed_dtypes_promote() -> None:
    f, h, b, i = torch.randn(5), torch.randn(5).half(), torch.randn(5).bfloat16(), torch.arange(1, 6) * 100003
    for x, y in ((f, h), (h, b), (f, i), (b, i), (i, i.int()), (i.to(torch.uint8), i.to(torch.int8))):
        check(torch.add, x, y)
        check(torch.mul, x, y)
        check(torch.lt, x, y)


@pytest.mark.parametrize(
    "shapes", [((3, 1), (1, 4)), ((4,), (2, 3, 4)), ((), (3,)), ((), ()), ((0, 3), (3,)), ((1,), ())]
)
def test_broadcasting(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (torch.randn(s) for s in shapes)
    check(torch.add, a, b)
    check(lambda x, y: torch.where(x > y, x, y * 2), a, b)


def test_results_have_eagers_strides() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    check(lambda t: t * 2, x)
    check(lambda t: t.permute(3, 1, 0, 2).relu(), x)
    check(lambda t: t[:, ::2] + 1, x)
    check(lambda t: t.expand(2, 3, 4, 5) + t.contiguous(), x)
    check(lambda t: t.clone(memory_format=torch.contiguous_format), x)


def test_complex_numbers_are_left_to_pytorch() -> None:
    x = torch.randn(4, dtype=torch.complex64)
    check(lambda t: t * t + 1, x, own=False)
    check(lambda t: torch.view_as_real(t) * 2, x, own=False)
    check(lambda t: torch.view_as_complex(t).abs(), torch.randn(4, 2), own=False)
    check(lambda t: t.conj() * 1, x, own=False)


def test_one_operation_for_each_operator() -> None:
    program = lowered(lambda a, b, c, d, e: ((a + b) + c) * d + e, *[torch.randn(4, 5) for _ in range(5)])
    assert [type(op) for op in program.ops] == [Pointwise] * 4
    assert [op.origin.target for op in program.ops] == ["aten.add.Tensor"] * 2 + [
        "aten.mul.Tensor",
        "aten.add.Tensor",
    ]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mantissas_and_exponents(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    x = torch.cat([floats(dtype).flatten(), torch.tensor([tiny, -tiny / 2, tiny / 8, 3 * tiny], dtype=dtype)])
    check(lambda x: tuple(torch.frexp(x)), x, exact=True)
