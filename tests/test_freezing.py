"""Freezing: what depends on weights alone is computed once, and again when a weight has changed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop import backend
from hotloop.graph import freezing
from hotloop.runtime.frozen import FrozenProgram
from judge import assert_as_accurate, reference_of


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    with hotloop.config.patch(freezing=True, check=True):
        yield
    torch.compiler.reset()


@dataclass(frozen=True)
class Parts:
    """The operators of both graphs, before later stages change them."""

    main: list[str]
    prelude: list[str]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[Parts]:
    """What freezing made of each graph; nothing of graphs that it left whole."""
    found: list[Parts] = []

    def record(gm: torch.fx.GraphModule) -> freezing.Frozen | None:
        made = freezing.freeze(gm)
        if made is not None:
            found.append(Parts(targets(made.main), targets(made.prelude)))
        return made

    monkeypatch.setattr(backend, "freeze", record)
    return found


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[FrozenProgram]:
    """The frozen programs that are made."""
    found: list[FrozenProgram] = []

    def record(*args: Any) -> FrozenProgram:
        found.append(FrozenProgram(*args))
        return found[-1]

    monkeypatch.setattr(backend, "FrozenProgram", record)
    return found


def targets(gm: torch.fx.GraphModule) -> list[str]:
    return [str(n.target).removeprefix("aten.") for n in gm.graph.nodes if n.op == "call_function"]


def check(model: nn.Module, *inputs: torch.Tensor, times: int = 3, **options: Any) -> Callable[..., Any]:
    """Several calls give eager's result."""
    model = model.eval().requires_grad_(False)
    compiled = torch.compile(model, backend="hotloop", options=options or None, **DYNAMIC[False])
    for _ in range(times):
        again(compiled, model, *inputs)
    return compiled


def again(compiled: Callable[..., Any], model: nn.Module, *inputs: torch.Tensor) -> None:
    with torch.no_grad():
        assert_as_accurate(compiled(*inputs), model(*inputs), reference_of(model, *inputs))


DYNAMIC: dict[bool, dict[str, Any]] = {False: {"dynamic": False}, True: {"dynamic": True}}


def norm(features: int, kind: type[nn.Module] = nn.BatchNorm2d) -> nn.Module:
    made: Any = kind(features)
    made.running_mean.normal_()
    made.running_var.uniform_(0.5, 2)
    nn.init.normal_(made.weight)
    nn.init.normal_(made.bias)
    return made


def block(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(8, 16, 3, **options), norm(16), nn.ReLU())


X = torch.randn(2, 8, 9, 11)


# --- batch norms and their like -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"groups": 4}, {"stride": 2, "padding": 1}])
def test_a_batch_norm_goes_into_the_convolution(options: Any, parts: list[Parts]) -> None:
    check(block(**options), X)
    assert parts[0].main == ["convolution.default", "relu.default"]


@pytest.mark.parametrize("dims", [1, 3])
def test_in_other_dimensions(dims: int, parts: list[Parts]) -> None:
    conv, kind = {1: (nn.Conv1d, nn.BatchNorm1d), 3: (nn.Conv3d, nn.BatchNorm3d)}[dims]
    check(nn.Sequential(conv(4, 6, 3), norm(6, kind)), torch.randn(2, 4, *[7] * dims))
    assert parts[0].main.count("convolution.default") == 1
    assert not {"mul.Tensor", "add.Tensor", "sub.Tensor"} & set(parts[0].main)


class Scaled(nn.Module):
    """Numbers and rows of one number a channel, on either side."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(8, 6, 3, bias=False)
        self.a = nn.Parameter(torch.randn(6, 1, 1))
        self.b = nn.Parameter(torch.randn(1, 6, 1, 1))
        self.d = nn.Parameter(torch.randn(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (2 + self.a * (self.c(x) / self.b - self.d) * 3).relu()


def test_numbers_and_channels(parts: list[Parts]) -> None:
    check(Scaled(), X)
    assert parts[0].main == ["convolution.default", "relu.default"]


class NotFolded(nn.Module):
    """What looks like a scale of channels and is none."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.c = nn.Conv2d(8, 9, 3, padding=1)
        self.t = nn.ConvTranspose2d(8, 9, 3, padding=1)
        self.columns = nn.Parameter(torch.randn(9, 1))
        self.all = nn.Parameter(torch.randn(1, 9, 9, 9))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.c(x)
        return {
            "rows": lambda: y * self.columns,
            "all": lambda: y + self.all,
            "activation": lambda: y * y.mean((2, 3), keepdim=True),
            "twice": lambda: (y * 2, y.relu()),
            "reversed": lambda: 1 - y,
            "divided": lambda: 1 / y.abs().add(1),
            "transposed": lambda: self.t(x) * 2,
            "broadcast": lambda: y[:, :1] * self.all,
        }[self.what]()


@pytest.mark.parametrize(
    "what", ["rows", "all", "activation", "twice", "reversed", "divided", "transposed", "broadcast"]
)
def test_what_is_no_scale_of_channels_stays(what: str) -> None:
    check(NotFolded(what), torch.randn(2, 8, 9, 9))


def test_layers_of_one_weight(parts: list[Parts]) -> None:
    conv = nn.Conv2d(8, 8, 3, padding=1)
    check(nn.Sequential(conv, norm(8), conv, norm(8), conv), X)
    assert parts[0].main == ["convolution.default"] * 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_network(dynamic: bool) -> None:
    model = nn.Sequential(block(), nn.Conv2d(16, 8, 1), norm(8), nn.Hardswish(), nn.AdaptiveAvgPool2d(1))
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(8, 12)).eval().requires_grad_(False)
    compiled = torch.compile(model, backend="hotloop", **DYNAMIC[dynamic])
    for batch in (2, 3, 5):
        for _ in range(3):
            again(compiled, model, torch.randn(batch, 8, 9, 11))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    check(block().to(dtype), X.to(dtype))


# --- what is computed once ----------------------------------------------------------------------------------


class Derived(nn.Module):
    """Work on weights alone, and work that only looks like it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(24, 16))
        self.g = nn.Parameter(torch.randn(24))
        self.register_buffer("positions", torch.arange(16.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight = F.normalize(self.w, dim=1) * self.g.exp()[:, None]
        wide = self.positions[:, None] * torch.ones(4096)  # larger than what it is made of: stays in a loop
        return F.linear(x, weight), wide.sum() + x, x + torch.ones(3, 16)


def test_a_weight_that_is_computed(parts: list[Parts], programs: list[FrozenProgram]) -> None:
    check(Derived(), torch.randn(3, 16))
    assert "exp.default" in parts[0].prelude
    assert not {"exp.default", "pow.Tensor_Scalar"} & set(parts[0].main)
    assert 0 < programs[0].kept_bytes < 16 * 4096 * 4


def test_weights_cast_by_autocast(parts: list[Parts]) -> None:
    model = nn.Linear(32, 32).requires_grad_(False)
    x = torch.randn(4, 32)
    compiled = torch.compile(model, backend="hotloop", dynamic=False)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(compiled(x), model(x))
    assert len(parts[0].prelude) == 2  # weight and bias, once


class Leaves(nn.Module):
    """A computed weight that the caller gets, and may write."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w = self.w * 2
        return x @ w, w, w.t()


def test_what_leaves_the_graph_is_new_at_each_call() -> None:
    model, x = Leaves().requires_grad_(False), torch.randn(3, 16)
    compiled = torch.compile(model, backend="hotloop", dynamic=False)
    for _ in range(3):
        result = compiled(x)
        assert_as_accurate(result, model(x), reference_of(model, x))
        result[1].zero_()


class Counts(nn.Module):
    """A buffer that the call itself writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.calls.exp() + 1
        self.calls.add_(0.25)
        return x * scale


def test_a_buffer_that_is_written_is_no_constant() -> None:
    model = Counts()
    other = copy.deepcopy(model)
    compiled = torch.compile(model, backend="hotloop", dynamic=False)
    for _ in range(4):
        x = torch.randn(3, 4)
        torch.testing.assert_close(compiled(x), other(x))


def test_training_is_not_frozen(parts: list[Parts]) -> None:
    model = block()
    other = copy.deepcopy(model)
    compiled = torch.compile(model, backend="hotloop", dynamic=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    for _ in range(3):
        for run, optimizer in zip((compiled, other), optimizers, strict=True):
            optimizer.zero_grad()
            run(X).square().mean().backward()
            optimizer.step()
    assert not parts
    torch.testing.assert_close(model[0].weight, other[0].weight, rtol=1e-3, atol=1e-4)


def test_nothing_to_freeze(parts: list[Parts]) -> None:
    check(nn.Linear(16, 24), torch.randn(3, 16))
    assert not parts


def test_off_by_default(parts: list[Parts]) -> None:
    check(block(), X, freezing=False)
    assert not parts


# --- updates ------------------------------------------------------------------------------------------------


def _swap(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.randn_like(model[0].weight), requires_grad=False)


UPDATES: list[Callable[[Any], Any]] = [
    lambda m: m[0].weight.mul_(2),
    lambda m: m[0].weight.data.mul_(3),
    lambda m: m[1].running_var.add_(1),
    lambda m: m[1].bias.data.zero_(),
    lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    lambda m: setattr(m[0].weight, "data", torch.randn_like(m[0].weight)),
    _swap,
]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("update", UPDATES)
def test_an_update_is_noticed_at_once(update: Callable[[Any], Any], inference: bool) -> None:
    with torch.inference_mode(inference):
        model = block().eval().requires_grad_(False)
        compiled = torch.compile(model, backend="hotloop", dynamic=False)
        for _ in range(3):
            for _ in range(3):
                torch.testing.assert_close(compiled(X), model(X), rtol=1e-4, atol=1e-4)
            with torch.no_grad():
                update(model)
        torch.testing.assert_close(compiled(X), model(X), rtol=1e-4, atol=1e-4)


def test_values_are_kept_while_weights_stay(programs: list[FrozenProgram]) -> None:
    compiled = check(block(), X)
    kept = programs[0]._kept
    assert kept is not None and programs[0].kept_bytes == 4 * (16 * 8 * 9 + 16)
    compiled(X)
    assert programs[0]._kept is kept


def test_threads_see_every_update() -> None:
    model = block().eval().requires_grad_(False)
    compiled = check(model, X)
    faults: list[Exception] = []

    def call(expected: torch.Tensor) -> None:
        try:
            for _ in range(20):
                with torch.no_grad():
                    torch.testing.assert_close(compiled(X), expected, rtol=1e-4, atol=1e-4)
        except Exception as error:  # noqa: BLE001 - carried to the main thread
            faults.append(error)

    for _ in range(3):
        with torch.no_grad():
            model[1].weight.add_(0.25)
            threads = [threading.Thread(target=call, args=(model(X),)) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not faults, faults[0]


# --- with other options -------------------------------------------------------------------------------------


def test_the_next_process_finds_the_graph(parts: list[Parts]) -> None:
    for _ in range(2):
        torch.compiler.reset()
        model = block().eval().requires_grad_(False)
        with hotloop.config.patch(check=False):
            compiled = torch.compile(model, backend="hotloop", dynamic=False)
            for _ in range(3):
                again(compiled, model, X)


@pytest.mark.parametrize(
    "options", [{"weight_packing": "off"}, {"unfused": True}, {"max_autotune": True}, {"memory_pool": False}]
)
def test_with(options: dict[str, Any]) -> None:
    check(nn.Sequential(block(), nn.Flatten(), nn.Linear(16 * 7 * 9, 24)), X, **options)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise backend.MissingCompilerError("no compiler")

    monkeypatch.setattr(backend, "_toolchain", missing)
    backend._builder.cache_clear()
    model = block().eval().requires_grad_(False)
    with hotloop.config.patch(missing_toolchain="eager"):
        compiled = torch.compile(model, backend="hotloop", dynamic=False)
        with pytest.warns(RuntimeWarning, match="uncompiled"):
            again(compiled, model, X)
        model[0].weight.data.mul_(2)
        again(compiled, model, X)
