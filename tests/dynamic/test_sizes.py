"""One compiled function for all sizes, operator by operator.

What comes in: the functions that static shapes are tested with, and sizes below, at and above the vector
widths. What goes out: nothing. What holds: one compile, eager's accuracy at every size; and the same programs
give the same results when they are interpreted, before and after scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import check_sizes, counted

from hotloop import backend
from hotloop.codegen.host import print_host
from hotloop.ir.interpret import run_program
from hotloop.ir.interpret_kernel import run_schedule
from hotloop.ir.verify import verify_program, verify_schedule
from judge import assert_as_accurate, reference_of

Shapes = Callable[[int, int, int], tuple[Any, ...]]

#: Rows, columns, and one more: no two alike, or Dynamo would take them for one size.
SIZES = (
    (5, 7, 3),
    (2, 100, 33),
    (3, 2, 8),
    (31, 17, 2),
    (8, 16, 64),
    (64, 257, 5),
    (129, 15, 7),
    (16, 33, 9),
)


def _r(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def rope(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
    half = y.shape[-1] // 2
    rotated = torch.cat((-y[..., half:], y[..., :half]), dim=-1)
    return y * cos + rotated * sin


def causal(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool).tril()
    return torch.softmax(x.masked_fill(~mask, float("-inf")), -1)


def heads(x: torch.Tensor) -> torch.Tensor:
    b, s, _ = x.shape
    split = x.view(b, s, 4, -1).transpose(1, 2) * 2
    return split.reshape(b, 4 * s, -1).softmax(-1), split.transpose(1, 2).reshape(b * s, -1).sum(1)


CASES: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "chain": (
        lambda a, b, c, d: ((a + b) + c) * d + 1,
        lambda m, n, k: (_r(m, n), _r(m, n), _r(1, n), _r(m, 1)),
    ),
    "bfloat16": (lambda x, y: F.gelu(x * 2) + y, lambda m, n, k: (_r(m, n).bfloat16(), _r(n).bfloat16())),
    "softmax": (lambda x: torch.softmax(x * 0.125, -1), lambda m, n, k: (_r(m, n),)),
    "softmax_first": (lambda x: torch.softmax(x, 0), lambda m, n, k: (_r(m, n),)),
    "softmax_middle": (lambda x: torch.softmax(x, 1), lambda m, n, k: (_r(m, n, k),)),
    "log_softmax": (lambda x: F.log_softmax(x, -1), lambda m, n, k: (_r(m, n),)),
    "layer_norm": (
        lambda x, w, b: F.gelu(F.layer_norm(x, (x.shape[-1],), w, b)),
        lambda m, n, k: (_r(m, n), _r(n), _r(n)),
    ),
    "layer_norm_rows": (lambda x, w: F.layer_norm(x, (40,), w), lambda m, n, k: (_r(m, n, 40), _r(40))),
    "cross_entropy": (
        lambda x, y: F.cross_entropy(x, y),
        lambda m, n, k: (_r(m, n), torch.randint(0, n, (m,))),
    ),
    "rope": (
        rope,
        lambda m, n, k: (_r(m, n, 2 * k + 12), _r(2 * k + 12), _r(n, 2 * k + 12), _r(n, 2 * k + 12)),
    ),
    "causal": (causal, lambda m, n, k: (_r(3, n, n),)),
    "heads": (heads, lambda m, n, k: (_r(m, n, 4 * k),)),
    "sum_rows": (lambda x: x.sum(1), lambda m, n, k: (_r(m, n),)),
    "sum_columns": (lambda x: x.sum(0), lambda m, n, k: (_r(m, n),)),
    "mean_all": (lambda x: (x * 2).mean(), lambda m, n, k: (_r(m, n),)),
    "mean_middle": (lambda x: (x + 1).mean(1), lambda m, n, k: (_r(m, n, k),)),
    "variance": (lambda x: (x.var(), x.std(1), x.var(0)), lambda m, n, k: (_r(m, n),)),
    "extremes": (lambda x: (x.argmax(1), *x.max(0), x.argmin(), x.amin(0)), lambda m, n, k: (_r(m, n),)),
    "transpose": (lambda x, y: x.t() + y, lambda m, n, k: (_r(m, n), _r(n, m))),
    "transpose_copy": (lambda x: (x.t() + 1).contiguous(), lambda m, n, k: (_r(m, n),)),
    "flat": (lambda x: (x * 2).view(-1)[3:] + 1, lambda m, n, k: (_r(m, n, k),)),
    "cat": (lambda x, y: torch.cat([x, y], 1) * 2, lambda m, n, k: (_r(m, n), _r(m, k))),
    "cat_rows": (lambda x, y: torch.cat([x, y, x], 0).relu(), lambda m, n, k: (_r(m, n), _r(k, n))),
    "stack": (lambda x, y: torch.stack([x, y], 1) * 2, lambda m, n, k: (_r(m, n), _r(m, n))),
    "pad": (lambda x: F.pad(x, (1, 2, 3, 0)) + 1, lambda m, n, k: (_r(m, n),)),
    "slice": (lambda x: x[:, 1:] + x[:, :-1], lambda m, n, k: (_r(m, n + 1),)),
    "steps": (lambda x: x[::2, 1::3] * 2, lambda m, n, k: (_r(2 * m, 3 * n),)),
    "halves": (lambda x: x.chunk(2, -1)[0] * F.gelu(x.chunk(2, -1)[1]), lambda m, n, k: (_r(m, 2 * n),)),
    "flip": (lambda x: x.flip(0) + x.flip(1), lambda m, n, k: (_r(m, n),)),
    "roll": (lambda x: torch.roll(x, (3, 1), (0, 1)) - x, lambda m, n, k: (_r(m, n),)),
    "repeat": (lambda x: x.repeat(2, 3) + 1, lambda m, n, k: (_r(m, n),)),
    "expand": (lambda x, y: x[:, None, :] * y[None, :, None], lambda m, n, k: (_r(m, n), _r(k))),
    "unfold": (lambda x: x.unfold(1, 2, 1) * 2, lambda m, n, k: (_r(m, n + 1),)),
    "made": (
        lambda x: x + torch.arange(x.shape[1]) * x.shape[0] + torch.full((x.shape[0], 1), 0.5),
        lambda m, n, k: (_r(m, n),),
    ),
    "embedding": (
        lambda i, t, w: F.layer_norm(F.embedding(i, t), (24,), w),
        lambda m, n, k: (torch.randint(0, 11, (m, n)), _r(11, 24), _r(24)),
    ),
    "gather": (
        lambda x, i: x.gather(1, i) + 1,
        lambda m, n, k: (_r(m, n), torch.randint(0, n, (m, k))),
    ),
    "index": (
        lambda x, i: x[i] + x[-1],
        lambda m, n, k: (_r(m, n), torch.randint(-m, m, (k,))),
    ),
    "integers": (
        lambda x, y: (x // y, x % y, x << 1),
        lambda m, n, k: (torch.arange(-n, n), torch.full((2 * n,), 3)),
    ),
    "linear": (
        lambda x, w, b: F.relu(F.linear(x, w, b)) + 1,
        lambda m, n, k: (_r(m, n, 16), _r(24, 16), _r(24)),
    ),
    "attention": (
        lambda q, k, v: (q @ k.transpose(-1, -2) * 0.5).softmax(-1) @ v,
        lambda m, n, k: (_r(2, m, 8), _r(2, n, 8), _r(2, n, 8)),
    ),
    "convolution": (
        lambda x, w: F.max_pool2d(F.relu(F.conv2d(x, w, padding=1)), 2),
        lambda m, n, k: (_r(m % 13 + 2, 3, 10, 2 * k + 10), _r(6, 3, 3, 3)),  # PyTorch guards on 16 images
    ),
    "group_norm": (
        lambda x, w, b: F.group_norm(x, 3, w, b),
        lambda m, n, k: (_r(m, 12, n, 10), _r(12), _r(12)),
    ),
    "avg_pool": (lambda x: F.avg_pool2d(F.relu(x), 2) + 1, lambda m, n, k: (_r(m, 4, 2 * n, 10),)),
    "upsample": (lambda x: F.interpolate(x, scale_factor=2.0), lambda m, n, k: (_r(2, 4, n, k),)),
    "scan": (lambda x: x.cumsum(0) + 1, lambda m, n, k: (_r(m, n),)),
    "numbers": (
        lambda x: (x * x.shape[0] + x.shape[1] / 3, x.numel(), x.shape[0] * 2 + 1),
        lambda m, n, k: (_r(m, n),),
    ),
    "two": (lambda x, y: (x + y, (x + y).sin(), (x * y).sum(-1)), lambda m, n, k: (_r(m, n), _r(m, n))),
}
#: Cases whose weights have sizes that do not change.
STATIC_WEIGHTS = ("embedding", "linear", "convolution", "group_norm", "layer_norm_rows")


def inputs_of(name: str, sizes: Sequence[tuple[int, int, int]] = SIZES) -> list[tuple[Any, ...]]:
    made = [CASES[name][1](*s) for s in sizes]
    for given in made:
        if name in STATIC_WEIGHTS:
            for t in given[1:]:
                torch._dynamo.mark_static(t)
    return made


@pytest.mark.parametrize("name", CASES)
def test_one_compile_serves_all_sizes(name: str) -> None:
    check_sizes(CASES[name][0], inputs_of(name))


#: Functions of tensors whose sizes guards tie together, with sizes that keep the guards.
GUARDED: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "a difference that is one broadcasts": (
        lambda x, y: x[..., x.shape[-1] // 2 :] * y,
        lambda m, n, k: (_r(m, n, 2), _r(1, n, n)),
    ),
    "a quotient that is one broadcasts": (
        lambda x, y: x[: x.shape[0] // 5] + y,
        lambda m, n, k: (_r(5, n), _r(m, n)),
    ),
    "a view of an input that a guard makes one": (
        lambda x: (x.diagonal().unflatten(2, (-1, 2)), x + 1),
        lambda m, n, k: (_r(2 * m, 2 * m, n, k),),
    ),
    "a view of a result that a guard makes one": (
        lambda x: ((y := x * 2).t().unflatten(1, (-1, 2)), y),
        lambda m, n, k: (_r(2 * m, n),),
    ),
}


@pytest.mark.parametrize("name", GUARDED)
def test_guards_say_what_sizes_do_not(name: str) -> None:
    f, shapes = GUARDED[name]
    for same in (SIZES[3:5], SIZES[5:]):
        with counted():
            g = torch.compile(f, backend="hotloop", dynamic=True)
            for sizes in same:
                given = shapes(*sizes)
                assert_as_accurate(g(*given), f(*given), check_stride=True)


@pytest.fixture
def plans() -> Iterator[list[Any]]:
    """The schedules that are printed inside, with what their host programs are called with."""
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:

        def noted(plan: Any, name: str) -> Any:
            made.append(plan)
            return print_host(plan, name)

        load = backend.load_program

        def recorded(*args: Any) -> Any:
            call = load(*args)

            def run(given: Any) -> Any:
                made.append(list(given))
                return call(given)

            return run

        patch.setattr(backend, "print_host", noted)
        patch.setattr(backend, "load_program", recorded)
        yield made


@pytest.mark.parametrize("name", CASES)
def test_the_interpreters_agree(name: str, plans: list[Any]) -> None:
    f, inputs = CASES[name][0], inputs_of(name, SIZES[:4])
    torch._dynamo.reset()
    g = torch.compile(f, backend="hotloop", dynamic=True)
    for given in inputs:
        g(*given)
    plan, *calls = plans
    verify_program(plan.program)
    verify_schedule(plan)
    for given, args in zip(inputs, calls, strict=True):
        want, reference = g(*given), reference_of(f, *given)
        for got in (
            run_program(plan.program, args), run_schedule(plan, args), run_schedule(plan, args, arena=True)
        ):  # fmt: skip
            assert_as_accurate(got, want if isinstance(want, tuple) else [want], reference)
