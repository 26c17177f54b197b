"""Convolutions as matrix products, and with what follows them: right, NaN as in eager, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hotloop import backend, compat
from hotloop.graph import convolutions
from hotloop.ir.kernel import KernelCall
from hotloop.runtime.packing import Convolution
from hotloop.runtime.toolchain import detect_simd
from judge import assert_as_accurate, reference_of

pytestmark = pytest.mark.skipif(
    compat.pointwise_convolution(False) is None or detect_simd() == "scalar",
    reason="this build of torch has no oneDNN, or products have no kernels",
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The operators of each graph after this pass, views left out."""
    found: list[list[str]] = []
    original = convolutions.with_what_follows
    views = {"permute", "view", "t"}

    def record(gm: torch.fx.GraphModule) -> bool:
        changed = original(gm)
        names = [str(n.target).partition(".")[2] for n in gm.graph.nodes if n.op == "call_function"]
        found.append([n.removesuffix(".default") for n in names if n.partition(".")[0] not in views])
        return changed

    monkeypatch.setattr(convolutions, "with_what_follows", record)
    return found


class Net(nn.Module):
    """A convolution, and a function of its result and of another tensor of the same layout."""

    def __init__(self, follow: Callable[..., Any], kernel: int = 3, **options: Any) -> None:
        super().__init__()
        self.a = nn.Conv2d(8, 16, kernel, padding=kernel // 2, **options)
        self.b = nn.Conv2d(8, 16, 3, padding=1)
        self.follow = follow

    def forward(self, x: torch.Tensor) -> Any:
        # The sums make each result an intermediate one: what leaves the graph lies as in eager.
        out = self.follow(self.a(x), self.b(x))
        return [t.sum(3) for t in out] if isinstance(out, tuple) else out.sum(3)


X = torch.randn(2, 8, 9, 11)


def check(model: nn.Module, x: torch.Tensor = X, times: int = 3) -> None:
    """The first call, with plain weights, and those by packed ones give eager's result."""
    model = model.eval().requires_grad_(False)
    compiled = torch.compile(model, backend="hotloop", fullgraph=True, dynamic=False)
    for _ in range(times):
        assert_as_accurate(compiled(x), model(x), reference_of(model, x))


# --- products -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_single_pixels_are_a_product(bias: bool, batch: int, last: bool, graphs: list[list[str]]) -> None:
    model = Net(lambda a, b: (a + b).relu(), kernel=1, bias=bias)
    memory = torch.channels_last if last else torch.contiguous_format
    check(model.to(memory_format=memory), torch.randn(batch, 8, 9, 11).to(memory_format=memory))
    assert ("addmm" if bias else "mm") in graphs[0]
    assert graphs[0].count("convolution") + graphs[0].count("_convolution_pointwise") == 1


def test_the_activation_is_in_its_kernel() -> None:
    plans = []
    settle = backend.settle

    def record(*args: Any) -> Any:
        plans.append(settle(*args))
        return plans[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "settle", record)
        check(nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU(), nn.Conv2d(16, 8, 3)), times=1)
    names = [step.kernel.name for step in plans[0].steps if isinstance(step, KernelCall)]
    assert any("convolution" in name and "relu" in name for name in names), names


@pytest.mark.parametrize(
    "options",
    [{"stride": 2}, {"groups": 2}, {"padding": 1}, {"out_channels": 4}, {"kernel_size": (1, 2)}],
)
def test_others_are_none(options: dict[str, Any], graphs: list[list[str]]) -> None:
    given = {"in_channels": 8, "out_channels": 16, "kernel_size": 1, **options}
    check(nn.Sequential(nn.Conv2d(**given), nn.ReLU(), nn.AdaptiveAvgPool2d(1)))
    assert "convolution" in graphs[0] and "addmm" not in graphs[0]


def test_an_image_of_one_pixel_and_one_row() -> None:
    for size in ((1, 1), (1, 7), (7, 1)):
        torch.compiler.reset()
        model = nn.Sequential(nn.Conv2d(8, 16, 1), nn.GELU(), nn.Conv2d(16, 8, 1))
        check(model, torch.randn(2, 8, *size))


@pytest.mark.parametrize("update", [lambda m: m.a.weight.mul_(2), lambda m: m.a.weight.data.add_(1)])
def test_an_update_is_noticed(update: Callable[[Net], Any]) -> None:
    model = Net(lambda a, b: F.silu(a) + b, kernel=1).eval().requires_grad_(False)
    compiled = torch.compile(model, backend="hotloop", fullgraph=True, dynamic=False)
    for _ in range(3):
        for _ in range(3):
            assert_as_accurate(compiled(X), model(X), reference_of(model, X))
        update(model)
    assert_as_accurate(compiled(X), model(X), reference_of(model, X))


# --- with what follows --------------------------------------------------------------------------------------

FOLLOWERS: dict[str, Callable[..., Any]] = {
    "sigmoid": lambda a, b: a.sigmoid(),
    "tanh": lambda a, b: a.tanh(),
    "silu": lambda a, b: F.silu(a),
    "hardswish": lambda a, b: F.hardswish(a),
    "gelu": lambda a, b: F.gelu(a),
    "gelu by tanh": lambda a, b: F.gelu(a, approximate="tanh"),
    "leaky_relu": lambda a, b: F.leaky_relu(a, 0.2),
    "leaky_relu as it is": lambda a, b: F.leaky_relu(a),
    "sum": lambda a, b: (b.relu() + a, b.relu()),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", FOLLOWERS)
def test_it_is_one_call(name: str, bias: bool, graphs: list[list[str]]) -> None:
    check(Net(FOLLOWERS[name], bias=bias))
    expected = "_convolution_pointwise.binary" if name == "sum" else "_convolution_pointwise"
    assert expected in graphs[0], graphs
    assert not {"silu", "tanh", "sigmoid", "hardswish", "gelu", "leaky_relu"} & set(graphs[0])


STAYING: dict[str, Callable[..., Any]] = {
    "relu": lambda a, b: a.relu(),
    "relu6": lambda a, b: F.relu6(a),
    "hardsigmoid": lambda a, b: F.hardsigmoid(a),
    "twice": lambda a, b: (F.silu(a), a + 1),
    "with itself": lambda a, b: a + a,
    "sum and silu": lambda a, b: (F.silu(a + b.relu()), b.relu()),
    "sum and relu": lambda a, b: (a + b.relu()).relu(),
    "a row": lambda a, b: a + b[:1],
    "scaled": lambda a, b: torch.add(a, b.relu(), alpha=2),
}


@pytest.mark.parametrize("name", STAYING)
def test_it_stays_apart(name: str, graphs: list[list[str]]) -> None:
    check(Net(STAYING[name]))
    assert not any("_convolution_pointwise" in n for n in graphs[0])


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("name", [*FOLLOWERS, *STAYING])
def test_nan_and_infinities_are_eagers(name: str, kernel: int) -> None:
    model = Net({**FOLLOWERS, **STAYING}[name], kernel=kernel).eval().requires_grad_(False)
    x = X.clone()
    x[0, :, 2, 3] = float("nan")
    if "gelu" not in name:  # eager's own is NaN at infinity
        x[0, :, 7, 9], x[1, 3, 5, 5] = float("inf"), -float("inf")
    compiled = torch.compile(model, backend="hotloop", fullgraph=True, dynamic=False)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_results_that_leave_lie_as_in_eager() -> None:
    for follow in FOLLOWERS.values():
        torch.compiler.reset()

        class Direct(Net):
            def forward(self, x: torch.Tensor) -> Any:
                return self.follow(self.a(x), self.b(x))

        model = Direct(follow).eval().requires_grad_(False)
        compiled = torch.compile(model, backend="hotloop", fullgraph=True, dynamic=False)
        for _ in range(3):
            actual, expected = compiled(X), model(X)
            assert_as_accurate(actual, expected, reference_of(model, X))
            pairs = zip(actual, expected, strict=True) if isinstance(actual, tuple) else [(actual, expected)]
            assert all(a.stride() == e.stride() for a, e in pairs)


def test_where_the_library_cannot_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Convolution, "_pack", lambda self, weight: None)
    for follow in FOLLOWERS.values():
        torch.compiler.reset()
        check(Net(follow))


def test_dynamic_sizes() -> None:
    model = Net(lambda a, b: F.silu(a) + b, kernel=1).eval().requires_grad_(False)
    compiled = torch.compile(model, backend="hotloop", fullgraph=True, dynamic=True)
    for batch in (2, 3, 2, 5):
        x = torch.randn(batch, 8, 9, 11)
        assert_as_accurate(compiled(x), model(x), reference_of(model, x))
