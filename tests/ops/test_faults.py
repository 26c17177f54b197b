"""Faults that were found once, each as the smallest function that showed it.

What comes in: functions of tensors. What holds: compiled, they give eager's results, strides and aliases.
Most were found by sweep.py.
"""

from __future__ import annotations

import re

import pytest
import torch

from against_eager import Function, check

F = torch.nn.functional


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("size", [(5, 5), (5, 4), (3, 5)])
def test_a_product_of_quotients_of_positions(size: tuple[int, int]) -> None:
    """The weight of a window is (end0 - begin0) * (end1 - begin1), all four of them quotients."""
    check(lambda x: F.adaptive_avg_pool2d(x, (7, 7)), torch.randn(2, 4, *size))


EMPTY: dict[str, Function] = {
    "index": lambda x: x[torch.zeros(0, dtype=torch.int64)],
    "cumsum": lambda x: (x * 2).cumsum(0) + 1,
    "sort": lambda x: (x * 2).view(-1).sort()[0] + 1,
    "matmul": lambda x: (x + 1) @ (x + 2).t(),
    "cat": lambda x: torch.cat([x, x * 2]).sort(0).values,
}


@pytest.mark.parametrize("size", [(0,), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("name", EMPTY)
def test_library_calls_take_empty_results_of_kernels(name: str, size: tuple[int, ...]) -> None:
    if name == "matmul" and len(size) < 2:
        size = (*size, 4)
    check(EMPTY[name], torch.randn(size))


@pytest.mark.parametrize("name", ["ndtri", "bessel_j0", "i0e", "log_ndtr"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_special_functions_with_a_kernel_and_without(name: str, dynamic: bool) -> None:
    function = getattr(torch.special, name)
    check(lambda x: function(x) * 2, torch.rand(100), dynamic=dynamic)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_inverse_hyperbolic_functions_of_huge_arguments(dtype: torch.dtype) -> None:
    huge = torch.tensor([1e9, 1.1e9, 1e15, 1e19, 3e19, 1e30, 3e38, float("inf"), 2.0, float("nan")])
    if dtype is torch.float64:
        huge = torch.cat([huge.double(), torch.tensor([1e150, 1e160, 1e300], dtype=dtype)])
    check(torch.asinh, torch.cat([huge, -huge]).to(dtype))
    check(torch.acosh, huge.to(dtype))


def test_a_strided_view_of_memory_outside_the_input() -> None:
    memory = torch.randn(20)
    for fn in (lambda x: x.as_strided((2, 2), (1, 2), 0) + 1, lambda x: x.as_strided((3,), (5,)) * 2):
        check(fn, memory[5:15])


def test_a_position_in_storage_is_not_one_in_the_input() -> None:
    memory = torch.randn(20)
    fn = lambda x: x.as_strided((2,), (1,), 5) * 2  # noqa: E731
    compiled = torch.compile(fn, backend="hotloop", dynamic=False)
    for start in (5, 3, 0):  # one graph serves all: where an input begins is not guarded
        assert torch.equal(compiled(memory[start : start + 10]), fn(memory))


def test_empty_strided_keeps_gaps() -> None:
    check(lambda x: x.new_empty_strided((3, 2), (4, 1)) * 0 == 1, torch.randn(2))
    assert torch.compile(lambda x: x.new_empty_strided((3, 2), (4, 1)), backend="hotloop")(
        torch.randn(2)
    ).stride() == (4, 1)


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_conversions_there_and_back_of_dtypes_without_promotion(dtype: torch.dtype) -> None:
    if dtype.is_floating_point:
        check(lambda x: (x.to(dtype).float() * 2, x.to(dtype).float().to(dtype).float() + 1), torch.randn(9))
    else:
        check(lambda x: (x.to(dtype).to(torch.int64), x.to(dtype)), torch.arange(9))


def test_stages_compute_with_real_values() -> None:
    """A verifier that asks for a value in AOTAutograd's fake mode makes Dynamo break the graph in silence."""
    fn = lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect") * 2  # noqa: E731
    x = torch.randn(2, 3, 6, 6)
    compiled = torch.compile(fn, backend="hotloop", dynamic=False, fullgraph=True)
    assert torch.equal(compiled(x), fn(x))


def repeated(count: int, step: Function) -> Function:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for i in range(count):
            x = step(x, i)
        return x

    return fn


DEEP: dict[str, Function] = {
    "add": repeated(700, lambda x, i: x + i % 3),
    "sin": repeated(150, lambda x, i: (x * 0.5 + 1).sin()),
    "roll": repeated(100, lambda x, i: x.roll(1, -1)),
    "transpose": repeated(60, lambda x, i: x.reshape(6, 10).t().reshape(15, 4).t()),
    "index": repeated(20, lambda x, i: x[torch.tensor([1, 2, 3, 0])]),
    "norm": repeated(40, lambda x, i: x - x.mean(-1, keepdim=True) + i),
}


@pytest.mark.parametrize("name", DEEP)
def test_depth_has_no_limit(name: str) -> None:
    """Chains of operators that fold into each other, longer than Python's stack and any sensible text."""
    check(DEEP[name], torch.randn(4, 15))


REFUSED: dict[str, tuple[Function, torch.Tensor]] = {
    "a number beyond float16": (lambda x: x.clamp(max=1e10), torch.ones(3, dtype=torch.float16)),
    "a number beyond int8": (lambda x: x.clamp(min=1000), torch.ones(3, dtype=torch.int8)),
    "a fill beyond float32": (lambda x: torch.full_like(x, 1e300), torch.ones(3)),
    "a mask's value beyond float16": (lambda x: x.masked_fill(x > 0, 1e5), torch.ones(3).half()),
    "alpha beyond int8": (lambda x: torch.add(x, x, alpha=1000), torch.ones(3, dtype=torch.int8)),
    "a pad beyond float16": (lambda x: F.pad(x, (1, 1), value=1e5), torch.ones(3).half()),
    "the end of a linspace": (lambda x: x + torch.linspace(0, 1e5, 3, dtype=x.dtype), torch.ones(3).half()),
    "integers less bools": (lambda x: x - (x > 0), torch.ones(3, dtype=torch.int64)),
    "floats less True": (lambda x: x - True, torch.ones(3)),
    "True less floats": (lambda x: True - x, torch.ones(3)),
    "interpolation of integers": (lambda x: torch.lerp(x, x, 0.5), torch.ones(3, dtype=torch.int8)),
    "distances in bfloat16": (lambda x: torch.cdist(x, x, 1.0), torch.ones(2, 2).bfloat16()),
    "unpooled integers": (lambda x: F.max_unpool2d(x, x * 0, 2), torch.ones(1, 1, 2, 2, dtype=torch.int64)),
    "unfolded integers": (lambda x: F.unfold(x, 2), torch.ones(1, 1, 2, 2, dtype=torch.int64)),
    "index_reduce of bools": (
        lambda x: x.index_reduce(0, torch.tensor([0]), x[:1], "amax"),
        torch.ones(3, dtype=torch.bool),
    ),
    "the largest of bools": (lambda x: x.argmax(), torch.tensor([False, True])),
    "the least of bools": (lambda x: x.argmin(1), torch.eye(2).bool()),
    "K0 in bfloat16": (torch.special.modified_bessel_k0, torch.ones(3).bfloat16()),
    "Chebyshev in float16": (lambda x: torch.special.chebyshev_polynomial_t(x, 3), torch.ones(3).half()),
    "a write to what is read, add_": (lambda x: x[1:].add_(x[:-1]), torch.ones(9)),
    "a write to what is read, +=": (lambda x: x[1:].__iadd__(x[:-1]), torch.ones(9)),
    "a write to what is read, copy_": (lambda x: x[1:].copy_(x[:-1]), torch.ones(9)),
    "a write to what is read, slices": (lambda x: x.__setitem__(slice(1, None), x[:-1]), torch.ones(9)),
    "a write to what is read, out": (lambda x: torch.add(x[1:], 1, out=x[:-1]), torch.ones(9)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_is_refused(name: str) -> None:
    fn, x = REFUSED[name]
    with pytest.raises(RuntimeError) as eager:
        fn(x.clone())
    with pytest.raises(Exception, match=re.escape(str(eager.value).splitlines()[0][:60])):
        torch.compile(fn, backend="hotloop", dynamic=False)(x.clone())


def test_a_write_to_what_another_input_shares() -> None:
    memory = torch.randn(20)
    fn = lambda x, y: x.add_(y)  # noqa: E731
    compiled = torch.compile(fn, backend="hotloop", dynamic=False)
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        compiled(memory[:10], memory[5:15])
    check(fn, memory[:10], memory[10:])


def test_operators_without_points_read_nothing() -> None:
    check(lambda x, y: torch.logical_xor(x, y.reshape(-1)), torch.randn(4, 1), torch.zeros(0, 0, 0))


CONJUGATES: dict[str, Function] = {
    "imaginary part": lambda x: torch.fft.fft(x).conj().imag * 2,
    "real part of a slice": lambda x: torch.fft.fft(x).conj()[1:].real + 1,
    "negative of a lazy conjugate": lambda x: (torch.fft.fft(x).conj().imag[1:] * 2).sum(),
    "as pairs": lambda x: torch.view_as_real(torch.fft.fft(x).conj().resolve_conj()) * 2,
    "product": lambda x: (torch.fft.fft(x).conj() * torch.fft.fft(x)).real,
}


@pytest.mark.parametrize("name", CONJUGATES)
def test_conjugates_that_are_views(name: str) -> None:
    """The memory of a lazy conjugate holds other numbers than it shows."""
    check(CONJUGATES[name], torch.randn(9))
    x = torch.randn(9, requires_grad=True)
    compiled = torch.compile(CONJUGATES[name], backend="hotloop", dynamic=False)
    (got,) = torch.autograd.grad(compiled(x).square().sum(), x)
    (want,) = torch.autograd.grad(CONJUGATES[name](x).square().sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_an_input_that_is_a_lazy_negative() -> None:
    z = torch.randn(9, dtype=torch.complex64)
    for fn in (lambda x: x + 1, lambda x: x.cumsum(0) * 2, lambda x: x[2:5].exp()):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="hotloop", dynamic=False)
        torch.testing.assert_close(compiled(z.conj().imag), fn(z.conj().imag))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16], ids=str)
def test_numbers_written_to_dtypes_without_kernels(dtype: torch.dtype) -> None:
    x, mask = torch.tensor([1, 2, 3]).to(dtype), torch.tensor([True, False, True])
    check(lambda x: torch.full_like(x, 2), x)
    if dtype.is_complex:
        check(lambda x, m: (x.masked_fill(m, 2.0), x.index_fill(0, m.long(), 3)), x, mask)
        check(lambda x: F.pad(x, (1, 1), value=2.0), x)


WRITES: dict[str, Function] = {
    "whole": lambda o, z: (o.copy_(z + z), o + 1)[1],
    "slice": lambda o, z: (o[1:].add_(z[1:]), o[0] * 1)[1],
    "transposed": lambda o, z: (o.t().mul_(z), o + 1)[1],
    "both": lambda o, z: (o.mul_(2), z.mul_(o), o + z)[2],
    "exchanged": lambda o, z: (lambda kept: (o.copy_(z), z.copy_(kept), o + z)[2])(o.clone()),
    "by position": lambda o, z: (o.index_put_((torch.tensor([0, 2]),), z[:2]), o + 1)[1],
    "conjugate": lambda o, z: (o.copy_(z.conj()), o + 1)[1],
    "conjugate read before": lambda o, z: (lambda c: (o.mul_(2), c.real + z.imag)[1])(o.conj() * 1),
    "as pairs": lambda o, z: (torch.view_as_real(o).mul_(2), o + z)[1],
    "real part": lambda o, z: (o.real.mul_(2), o.imag.add_(1), o + z)[2],
}


@pytest.mark.parametrize("name", WRITES)
def test_complex_inputs_are_written_in_place(name: str) -> None:
    """Kernels see no complex numbers: PyTorch writes them."""
    check(WRITES[name], *(torch.randn(4, 4, dtype=torch.complex64) for _ in range(2)))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2], ids=str)
def test_inputs_of_dtypes_without_kernels_are_written_in_place(dtype: torch.dtype) -> None:
    def f(o: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = o.clone()
        o.copy_(z)
        z[1:].copy_(kept[1:])
        o[:, 0].fill_(1)
        return o.float() + z.float(), o.t().contiguous().float(), z.t()[1:].clone().float()

    check(f, *(torch.randint(9, (4, 4)).to(dtype) for _ in range(2)))


def test_a_view_that_pytorch_gives_keeps_the_memory_that_it_shows() -> None:
    """A lazy conjugate lies in the memory of its argument, which another value must not get meanwhile."""
    w = torch.randn(4, 4, dtype=torch.complex64)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.view_as_complex(x * 2)
        c = y.conj()
        return (c @ w).abs() + (torch.view_as_complex(x + 1) @ w).real, c.sum(0)

    check(f, torch.randn(4, 4, 2))
    linear = torch.nn.Linear(4, 4, dtype=torch.complex64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (linear(x).abs() + linear(x).conj().real).sum()

    got = torch.autograd.grad(torch.compile(loss, backend="hotloop")(w), list(linear.parameters()))
    torch.testing.assert_close(got, torch.autograd.grad(loss(w), list(linear.parameters())))


def test_a_conjugate_that_is_returned_stays_what_it_is() -> None:
    fn = torch.compile(lambda x: torch.view_as_complex(x * 2).conj(), backend="hotloop")
    x = torch.randn(50, 4, 2)
    first = fn(x)
    fn(torch.randn(50, 4, 2))
    torch.testing.assert_close(first, torch.view_as_complex(x * 2).conj())


def test_a_derivative_may_conjugate_a_number() -> None:
    z = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    (got,) = torch.autograd.grad(torch.compile(lambda z: (z * 2j).imag.sum(), backend="hotloop")(z), z)
    torch.testing.assert_close(got, torch.autograd.grad((z * 2j).imag.sum(), z)[0])


def by_rank(x: torch.Tensor) -> torch.Tensor:
    return x.gather(2, x.argsort(2))


#: Positions that are computed, and tested, though nothing is read at them: what is there is computed too.
TESTED: dict[str, Function] = {
    "arange": lambda x, i: (torch.arange(3)[i - 7] == 1) * x[: len(i)],
    "diagonal": lambda x, i: torch.diag(x[:3])[i - 7, 1],
    "matrix": lambda x, i: torch.diag_embed(x[:9].view(3, 3))[:, i - 7],
    "eye": lambda x, i: torch.eye(3)[i - 7] + x[:3],
    "by rank": lambda x, i: by_rank(x[:27].view(3, 3, 3).diag_embed()),
    "in a sum": lambda x, i: (torch.arange(3)[i - 7] * x[: len(i)]).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", TESTED)
def test_lanes_that_do_not_count_are_in_range(name: str) -> None:
    """The last vector of a row is partly filled, and 0 in a lane beyond it may not be a position at all."""
    x = torch.randn(40)
    for dynamic in (False, True):
        torch.compiler.reset()
        f = torch.compile(TESTED[name], backend="hotloop", dynamic=dynamic)
        for n in (1, 2, 3, 5, 7, 8, 9, 15, 17, 31, 33) if dynamic else (3, 9, 17):
            i = 7 + torch.arange(n) % 3
            torch.testing.assert_close(f(x, i), TESTED[name](x, i))


@pytest.mark.parametrize("narrow", [torch.uint8, torch.int8], ids=str)
def test_the_compiler_selects_between_a_widened_byte_and_memory(narrow: torch.dtype) -> None:
    """g++ 12 gives up on the instruction that it would make of them, with AVX-512."""

    def f(m: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = x.to(torch.int64)
        return torch.where(m, wide, y), torch.where(m, y, wide), torch.where(m, x.to(torch.int16), y)

    x = torch.arange(-128, 128).to(narrow)
    check(f, x % 3 == 0, x, torch.arange(256) * 7)
