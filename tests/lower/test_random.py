"""Random operators through lowering: what they become, and that the numbers are what they should be.

Whether compiled kernels give the same numbers, and how seeds behave, is ``tests/test_random_numbers.py``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from check import lowered
from torch.fx.experimental.proxy_tensor import make_fx

from hotloop.config import Config
from hotloop.dumps import Log
from hotloop.ir import expr as ex
from hotloop.ir.interpret import run_program
from hotloop.ir.loops import Extern, LoopProgram, Pointwise
from hotloop.lower.lower import lower

X = torch.rand(64, 33)

OWN: dict[str, Callable[[torch.Tensor], Any]] = {
    "rand": lambda x: torch.rand(64, 33),
    "rand_like": lambda x: torch.rand_like(x, dtype=torch.float64),
    "randn": lambda x: torch.randn(64, 33, dtype=torch.bfloat16),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(7, (64, 33)),
    "randint_low": lambda x: torch.randint(-5, 2**30, (64, 33)),
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "bernoulli": torch.bernoulli,
    "bernoulli_p": lambda x: torch.bernoulli(x, 0.3),
    "dropout": lambda x: torch.native_dropout(x, 0.3, True),
    "dropout_in_eval": lambda x: torch.native_dropout(x, 0.3, False),
    "uniform": lambda x: torch.empty_like(x).uniform_(-3, 5),
    "normal": lambda x: torch.empty_like(x).normal_(2, 3),
    "normal_of_sizes": lambda x: torch.normal(2.0, 3.0, (64, 33)),
    "exponential": lambda x: torch.empty_like(x).exponential_(2),
    "cauchy": lambda x: torch.empty_like(x).cauchy_(1, 2),
    "geometric": lambda x: torch.empty_like(x).geometric_(0.3),
    "log_normal": lambda x: torch.empty_like(x).log_normal_(0.1, 0.5),
    "random_": lambda x: torch.empty_like(x).random_(100),
    "empty": lambda x: torch.rand(0, 4),
    "one": lambda x: torch.rand(()),
}


def externs(program: LoopProgram) -> list[str]:
    return [str(op.target) for op in program.ops if isinstance(op, Extern)]


@pytest.mark.parametrize("name", OWN)
def test_only_the_keys_are_drawn_by_pytorch(name: str) -> None:
    program = lowered(OWN[name], X)
    drawn = {"dropout_in_eval": []}.get(name, ["aten.randint.low", "aten.unbind.int"])
    assert externs(program) == drawn
    for got, want in zip(run_program(program, [X]), _list(OWN[name](X)), strict=True):
        assert isinstance(got, torch.Tensor)
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())


def _list(x: Any) -> list[torch.Tensor]:
    return list(x) if isinstance(x, tuple) else [x]


LEFT: dict[str, Callable[[torch.Tensor], Any]] = {
    "complex": lambda x: torch.rand(3, dtype=torch.complex64),
    "too many integers": lambda x: torch.randint(-(2**40), 2**40, (5,)),
    "deviations in a tensor": lambda x: torch.normal(x, x),
    "permutation": lambda x: torch.randperm(10),
    "multinomial": lambda x: torch.multinomial(x, 3),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_pytorch(name: str) -> None:
    assert len(externs(lowered(LEFT[name], X))) == 1


def test_each_operator_has_a_key_of_its_own() -> None:
    program = lowered(lambda x: (torch.rand(9), torch.rand(9), torch.randn(9)), X)
    keys = [{n.args[0].buffer for n in ex.walk(op.body) if n.op == "random"} for op in program.ops
            if isinstance(op, Pointwise)]  # fmt: skip
    assert keys == [{"key0"}, {"key1"}, {"key2"}]
    drawn = [op for op in program.ops if isinstance(op, Extern)]
    assert program.ops[:2] == tuple(drawn), "drawn once, before everything else"
    a, b, _ = run_program(program, [X])
    assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and not torch.equal(a, b)


def test_the_fallback_leaves_them_to_pytorch_in_order() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(64, 33) * x, torch.randn_like(x)

    gm = make_fx(f, tracing_mode="fake")(X)
    config = Config(fallback_random=True)
    program = lower(gm, config, Log(config))
    assert externs(program) == ["aten.rand.default", "aten.randn_like.default"]
    torch.manual_seed(3)
    want = f(X)
    torch.manual_seed(3)
    for got, expected in zip(run_program(program, [X]), want, strict=True):
        assert isinstance(got, torch.Tensor) and torch.equal(got, expected)


def test_bad_arguments_are_pytorchs_to_refuse() -> None:
    for f, message in (
        (lambda x: torch.bernoulli(x, 1.5), r"in \[0, 1\]"),
        (lambda x: torch.empty_like(x).normal_(0, -1), "std"),
        (lambda x: torch.empty_like(x).exponential_(-1), "lambda"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run_program(lowered(f, X), [X])


def test_dropout_keeps_what_eager_keeps_of_special_values() -> None:
    x = torch.tensor([float("nan"), float("inf"), 1.0, -0.0]).repeat(50)
    out, mask = run_program(lowered(lambda x: torch.native_dropout(x, 0.5, True), x), [x])
    assert isinstance(out, torch.Tensor) and isinstance(mask, torch.Tensor)
    torch.testing.assert_close(out, x * mask * 2, rtol=0, atol=0, equal_nan=True)
