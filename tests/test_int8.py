"""Products by int8 weights with scales: written in several ways, read as int8, judged by float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop import backend
from hotloop.runtime.toolchain import choose_simd
from hotloop.schedule.tiles import TILES
from judge import assert_as_accurate, reference_of

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
kernels = pytest.mark.skipif(str(choose_simd("auto")) not in TILES, reason="no vectors")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    with hotloop.config.patch(check=True):
        yield
    torch.compiler.reset()


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The host programs that are linked."""
    found: list[str] = []
    original = backend.link

    def link(functions: Any, host: str, *rest: Any) -> Any:
        found.append(host)
        return original(functions, host, *rest)

    monkeypatch.setattr(backend, "link", link)
    return found


Form = Callable[["Layer", torch.Tensor], torch.Tensor]

FORMS: dict[str, Form] = {
    "cast, multiplied, scaled": lambda m, x: F.linear(x, m.w.to(x.dtype)) * m.s,
    "scaled from the left": lambda m, x: m.s * F.linear(x, m.w.to(x.dtype)),
    "scaled before": lambda m, x: x @ (m.w.to(x.dtype) * m.s[:, None]).T,
    "scale first": lambda m, x: F.linear(x, m.s.unsqueeze(1) * m.w.to(x.dtype)),
    "with a bias": lambda m, x: F.linear(x, m.w.to(x.dtype) * m.s[:, None], m.b),
    "scaled, then a bias": lambda m, x: F.linear(x, m.w.to(x.dtype)) * m.s + m.b,
    "no scale": lambda m, x: F.linear(x, m.w.to(x.dtype)),
    "no scale, a bias": lambda m, x: F.linear(x, m.w.to(x.dtype), m.b).relu(),
    "float32 scales after": lambda m, x: F.linear(x, m.w.to(x.dtype)) * m.s.to(m.wide),
    "a sequence": lambda m, x: F.gelu(F.linear(torch.stack([x, x]), m.w.to(x.dtype)) * m.s),
    "transposed, then cast": lambda m, x: x.matmul(m.w.t().to(x.dtype)) * m.s,
    "wide scales with an axis": lambda m, x: (x @ m.w.t().to(x.dtype)) * m.column.to(x.dtype).view(-1) + m.b,
    "transposed, then scaled": lambda m, x: x @ (m.w.t().to(x.dtype) * m.s),
    "scaled, then transposed": lambda m, x: torch.addmm(m.b, x, (m.w.to(x.dtype) * m.s[:, None]).t()),
    "cast twice": lambda m, x: F.linear(x, m.w.to(m.wide).to(x.dtype) * m.s[:, None]),
    "one scale": lambda m, x: F.linear(x, m.s[5] * m.w.to(x.dtype), m.b),
    "a number": lambda m, x: F.linear(x, m.w.to(x.dtype) * 0.375),
    "stored the other way": lambda m, x: x @ (m.other.to(x.dtype) * m.s),
    "cast in halves": lambda m, x: F.linear(x, m.w.half().to(x.dtype).mul(m.s.unsqueeze(1))),
    "transposed": lambda m, x: x.matmul(m.w.to(x.dtype).transpose(0, 1)) * m.s,
}


class Layer(nn.Module):
    """A layer by an int8 weight, in one of the forms."""

    def __init__(self, form: Form, dtype: torch.dtype, k: int = 72, n: int = 100) -> None:
        super().__init__()
        self.form = form
        self.wide = torch.float32
        self.register_buffer("w", torch.randint(-128, 128, (n, k), dtype=torch.int8))
        self.register_buffer("other", torch.randint(-128, 128, (k, n), dtype=torch.int8))
        self.register_buffer("s", torch.rand(n).to(dtype))
        self.register_buffer("column", torch.rand(n, 1))
        self.register_buffer("b", torch.randn(n).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.form(self, x)


def check(compiled: Any, layer: Layer, x: torch.Tensor) -> None:
    exact = copy.deepcopy(layer).double()
    exact.wide = torch.float64
    assert_as_accurate(compiled(x), layer(x), reference_of(exact, x))


@kernels
@DTYPES
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, dtype: torch.dtype, hosts: list[str]) -> None:
    layer = Layer(FORMS[form], dtype)
    for m in (1, 7, 90):
        hosts.clear()
        compiled = torch.compile(layer, backend="hotloop", fullgraph=True, dynamic=False)
        for _ in range(2):
            check(compiled, layer, torch.randn(m, 72).to(dtype))
        (host,) = hosts
        strides = (100, 1) if form == "stored the other way" else (1, 72)
        assert f"rt.panels((72, 100), {strides}" in host and "torch.ops" not in host


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_itself(dtype: torch.dtype, hosts: list[str]) -> None:
    layer = Layer(lambda m, x: torch.ops.aten._weight_int8pack_mm(x, m.w, m.s), dtype, 128, 64)
    exact = copy.deepcopy(layer).double()
    exact.form = lambda m, x: F.linear(x, m.w.double()) * m.s
    compiled = torch.compile(layer, backend="hotloop", fullgraph=True, dynamic=False)
    for m in (1, 33):
        x = torch.randn(m, 128).to(dtype)
        assert_as_accurate(compiled(x), layer(x), reference_of(exact, x))
    assert all("rt.panels" in h and "torch.ops" not in h for h in hosts)


@kernels
def test_rows_that_vary(hosts: list[str]) -> None:
    layer = Layer(FORMS["cast, multiplied, scaled"], torch.float32)
    compiled = torch.compile(layer, backend="hotloop", fullgraph=True, dynamic=True)
    for m in (2, 3, 17, 200):
        check(compiled, layer, torch.randn(m, 72))
    assert any("rt.panels" in h for h in hosts)


@kernels
@pytest.mark.parametrize("freezing", [False, True])
def test_updates_of_weight_and_scales(freezing: bool) -> None:
    layer = Layer(FORMS["scaled before"], torch.bfloat16, 256, 512)
    x = torch.randn(5, 256).to(torch.bfloat16)
    updates: list[Callable[[], Any]] = [
        lambda: layer.w.fill_(3),
        lambda: layer.w.random_(-128, 127),
        lambda: layer.s.mul_(2),
        lambda: layer.load_state_dict({k: v.flip(0) for k, v in layer.state_dict().items()}),
        lambda: setattr(layer, "w", torch.randint(-128, 128, (512, 256), dtype=torch.int8)),
    ]
    packing = "replace" if freezing else "auto"
    with hotloop.config.patch(freezing=freezing, weight_packing=packing):
        compiled = torch.compile(layer, backend="hotloop", fullgraph=True, dynamic=False)
        for update in updates:
            for _ in range(3):
                check(compiled, layer, x)
            update()
        check(compiled, layer, x)


OTHERS: dict[str, Form] = {
    "by row": lambda m, x: F.linear(x, m.w[:72].to(x.dtype) * m.s[:72]),
    "cast after": lambda m, x: F.linear(x, (m.w.to(m.wide) * m.column).to(x.dtype)),
    "cast after, transposed": lambda m, x: x @ m.w.t().to(m.wide).mul(m.column.view(-1)).to(x.dtype),
    "cast after, one scale": lambda m, x: F.linear(x, (m.w.to(m.wide) * m.column[3]).to(x.dtype)),
    "a number that is rounded": lambda m, x: F.linear(x, m.w.to(x.dtype) * 0.1),
    "scaled by term": lambda m, x: F.linear(x, m.w.to(x.dtype) * m.s[:72]),
    "scaled twice": lambda m, x: F.linear(x, m.w.to(x.dtype) * m.s[:, None] * m.s[:1]),
    "read besides": lambda m, x: F.linear(x, m.w.to(x.dtype)) * m.s + m.w.to(x.dtype).sum(1),
    "two readers": lambda m, x: F.linear(x, m.w.to(x.dtype)).relu() + F.linear(x, m.w.to(x.dtype)) * m.s,
    "another scale": lambda m, x: F.linear(x, m.w.to(x.dtype)) * x.sum(),
    "scale of all": lambda m, x: F.linear(x, m.w.to(x.dtype)) * m.s[0],
    "integers": lambda m, x: x.round().to(torch.int8).int() @ m.w.int().T,
    "written": lambda m, x: F.linear(x, m.w.copy_(m.w.flip(0)).to(x.dtype)),
    "a product of two": lambda m, x: F.linear(x, m.w.to(x.dtype) * m.w.to(x.dtype)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", OTHERS)
def test_what_only_looks_like_one(form: str, dtype: torch.dtype) -> None:
    layer = Layer(OTHERS[form], dtype)
    other = copy.deepcopy(layer)
    compiled = torch.compile(layer, backend="hotloop", dynamic=False)
    for _ in range(2):
        x = torch.randn(6, 72).to(dtype)
        before = copy.deepcopy(other)
        exact = before.double() if form != "integers" else before
        exact.wide = torch.float64
        expected = other(x)
        assert_as_accurate(compiled(x), expected, reference_of(exact, x))


class Written(Layer):
    """The weight is written after it is read: it does not last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.w.add_(1)
        return y


@DTYPES
@pytest.mark.parametrize("form", ["scaled before", "no scale, a bias", "transposed, then cast"])
def test_what_no_kernel_takes_is_computed_as_it_is_written(form: str, dtype: torch.dtype) -> None:
    """PyTorch's own operator for such products reads what is not there in bfloat16, of 72 terms."""
    layer = Written(FORMS[form], dtype)
    other = copy.deepcopy(layer)
    compiled = torch.compile(layer, backend="hotloop", dynamic=False)
    for _ in range(3):
        x = torch.randn(6, 72).to(dtype)
        exact = copy.deepcopy(other).double()
        assert_as_accurate(compiled(x), other(x), reference_of(exact, x))
        assert torch.equal(layer.w, other.w)


def test_rows_of_a_tensor_whose_width_varies() -> None:
    layer = Layer(FORMS["scaled before"], torch.bfloat16)
    compiled = torch.compile(lambda x: layer(x[:, :72]), backend="hotloop", dynamic=True)
    for width in (90, 91, 100):
        x = torch.randn(6, width).bfloat16()
        exact = copy.deepcopy(layer).double()
        assert_as_accurate(compiled(x), layer(x[:, :72]), reference_of(exact, x[:, :72]))


def two_terms(dtype: torch.dtype) -> torch.Tensor:
    """Rows that add up two columns of a weight: the sum of two numbers that are rounded, or not."""
    x = torch.zeros(36, 72)
    x[torch.arange(36), 2 * torch.arange(36)] = x[torch.arange(36), 2 * torch.arange(36) + 1] = 1
    return x.to(dtype)


@pytest.mark.parametrize("form", ["cast after", "cast after, transposed", "cast after, one scale"])
def test_a_cast_after_the_scale_is_performed(form: str) -> None:
    """These sums of two have eager's bits exactly where the scaled weight is rounded as it is written."""
    layer, x = Layer(OTHERS[form], torch.bfloat16), two_terms(torch.bfloat16)
    unrounded = (x.double() @ (layer.w.double() * layer.column.double()).t()).bfloat16()
    compiled = torch.compile(layer, backend="hotloop", dynamic=False)
    assert torch.equal(compiled(x), layer(x)) and not torch.equal(layer(x), unrounded)


@pytest.mark.parametrize("form", ["scaled before", "cast, multiplied, scaled", "with a bias"])
def test_precision_eager_rounds_after_every_operator(form: str) -> None:
    layer, x = Layer(FORMS[form], torch.bfloat16), two_terms(torch.bfloat16)
    compiled = torch.compile(layer, backend="hotloop", dynamic=False, options={"precision": "eager"})
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("options", [{"weight_packing": "off"}, {"unfused": True}, {"max_autotune": True}])
def test_options(options: dict[str, Any]) -> None:
    layer = Layer(FORMS["cast, multiplied, scaled"], torch.float32)
    compiled = torch.compile(layer, backend="hotloop", options=options, dynamic=False)
    check(compiled, layer, torch.randn(9, 72))


def test_special_values() -> None:
    layer = Layer(FORMS["cast, multiplied, scaled"], torch.float32)
    layer.s[3], layer.s[5] = float("nan"), 0
    x = torch.randn(4, 72)
    x[1, 2], x[2, 3] = float("inf"), float("nan")
    layer.w[:, 2] = 1
    compiled = torch.compile(layer, backend="hotloop", dynamic=False)
    torch.testing.assert_close(compiled(x).isfinite(), layer(x).isfinite())
    torch.testing.assert_close(compiled(x).isnan(), layer(x).isnan())
