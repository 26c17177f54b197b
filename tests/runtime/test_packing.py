"""Packed weights: kept while a weight stays as it is, never after it has changed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hotloop import backend, compat
from hotloop.runtime.packing import Convolution, Panels
from judge import assert_as_accurate, reference_of

X = torch.randn(2, 8, 9, 11)

pytestmark = pytest.mark.skipif(
    not compat.can_pack_convolution(torch.float32), reason="this build of torch has no oneDNN"
)


class Net(nn.Module):
    """Two convolutions, of which the second reads what the first gives."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(8, 16, 3)
        self.b = nn.Conv2d(16, 4, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu()) * 2


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Convolution]:
    """Every convolution of the programs that are linked from now on."""
    found: list[Convolution] = []
    original = backend.Runtime.convolution

    def convolution(self: backend.Runtime, *numbers: object, **how: bool) -> Convolution:
        found.append(original(self, *numbers, **how))
        return found[-1]

    monkeypatch.setattr(backend.Runtime, "convolution", convolution)
    torch._dynamo.reset()
    return found


def compiled_net() -> tuple[Net, Callable[[torch.Tensor], torch.Tensor]]:
    net = Net().eval().requires_grad_(False)
    return net, torch.compile(net, backend="hotloop", fullgraph=True, dynamic=False)


def settle(net: nn.Module, compiled: Callable[[torch.Tensor], torch.Tensor], times: int = 3) -> None:
    """Calls until the weights are packed, and compares each result with eager's."""
    for _ in range(times):
        torch.testing.assert_close(compiled(X), net(X))


def packed(made: list[Convolution]) -> int:
    return sum(c.kept_bytes > 0 for c in made)


def test_a_weight_that_stays_is_packed_at_the_second_call(made: list[Convolution]) -> None:
    net, compiled = compiled_net()
    settle(net, compiled, 1)
    assert len(made) == 2 and packed(made) == 0
    settle(net, compiled, 1)
    assert packed(made) == 2
    before = [c._kept for c in made]
    settle(net, compiled, 3)
    assert all(c._kept is kept for c, kept in zip(made, before, strict=True))


def _optimizer_step(net: Net) -> None:
    net.requires_grad_(True)
    net(X).square().mean().backward()
    torch.optim.SGD(net.parameters(), lr=0.5).step()
    net.requires_grad_(False)


def _low_rank_merge(net: Net) -> None:
    delta = torch.randn(16, 2) @ torch.randn(2, 8 * 9)
    net.a.weight.data += delta.view_as(net.a.weight)


def _tie(net: Net) -> None:
    net.b.weight = nn.Parameter(torch.randn(4, 16, 1, 1), requires_grad=False)


def _element(net: Net) -> None:
    net.a.weight[3, 1, 2, 0] += 7.0


def _swap_data(net: Net) -> None:
    net.a.weight.data = torch.randn_like(net.a.weight)


UPDATES = [
    lambda net: net.a.weight.mul_(2),
    lambda net: net.a.weight.data.mul_(3),
    lambda net: net.a.weight.detach().add_(1),
    lambda net: nn.init.normal_(net.b.weight),
    lambda net: net.load_state_dict(Net().state_dict()),
    lambda net: net.a.weight.view(-1)[5:9].zero_(),
    lambda net: net.a.weight.untyped_storage().copy_(torch.randn(16, 8, 3, 3).untyped_storage()),
    _element,
    _optimizer_step,
    _low_rank_merge,
    _swap_data,
    _tie,
]


@pytest.mark.parametrize("update", UPDATES)
def test_an_update_is_noticed_at_once(update: Callable[[Net], object], made: list[Convolution]) -> None:
    net, compiled = compiled_net()
    with torch.no_grad():
        settle(net, compiled)
    assert packed(made) == 2
    for _ in range(3):
        with torch.set_grad_enabled(update is _optimizer_step):
            update(net)
        with torch.no_grad():
            settle(net, compiled)


def test_data_that_returns_to_an_address_is_not_mistaken(made: list[Convolution]) -> None:
    net, compiled = compiled_net()
    settle(net, compiled)
    for _ in range(20):  # the allocator hands out the same memory again and again
        net.a.weight.data = torch.randn(16, 8, 3, 3)
        net.a.weight.data = torch.randn(16, 8, 3, 3)
        torch.testing.assert_close(compiled(X), net(X))


def test_dtype_and_layout_changes(made: list[Convolution]) -> None:
    net, compiled = compiled_net()
    settle(net, compiled)
    net.to(memory_format=torch.channels_last)
    settle(net, compiled)
    net.double()
    torch.testing.assert_close(compiled(X.double()), net(X.double()))
    net.float()
    settle(net, compiled)


def test_a_weight_that_is_new_at_every_call_is_never_packed(made: list[Convolution]) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, w).relu().sum((2, 3))

    compiled = torch.compile(f, backend="hotloop", fullgraph=True, dynamic=False)
    for _ in range(4):
        w = torch.randn(5, 8, 3, 3)
        torch.testing.assert_close(compiled(X, w), f(X, w))
    assert len(made) == 1 and packed(made) == 0


def test_weights_made_in_inference_mode_are_compared_whole(made: list[Convolution]) -> None:
    with torch.inference_mode():
        net, compiled = compiled_net()
        settle(net, compiled)
        assert packed(made) == 2
        for k in range(5):
            net.a.weight[k, 1, 2, k % 3] += 7.0  # no version counter, and not at one of the places
            settle(net, compiled)


WEIGHTS = {
    "every other filter": lambda: torch.randn(32, 8, 3, 3)[::2],
    "a part of larger filters": lambda: torch.randn(16, 8, 5, 5)[:, :, 1:4, 1:4],
    "one filter for all": lambda: torch.randn(1, 8, 3, 3).expand(16, 8, 3, 3),
    "one number": lambda: torch.randn(1, 1, 1, 1).expand(1024, 8, 3, 3),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_that_does_not_fill_its_memory(name: str, inference: bool, made: list[Convolution]) -> None:
    with torch.inference_mode(inference):
        weight = WEIGHTS[name]()
        net = nn.Conv2d(8, len(weight), 3).requires_grad_(False)
        net.weight = nn.Parameter(weight, requires_grad=False)
        compiled = torch.compile(net, backend="hotloop", fullgraph=True, dynamic=False)
        for k in range(4):
            settle(net, compiled)
            weight[-1, 5, 2, k % 3] = k  # the last elements, behind the parameter's back
    assert packed(made) == 0


@pytest.mark.parametrize("bias", [lambda: torch.randn(32)[::2], lambda: torch.randn(1).expand(16)])
def test_a_bias_with_strides(bias: Callable[[], torch.Tensor], made: list[Convolution]) -> None:
    net = nn.Conv2d(8, 16, 3).requires_grad_(False)
    net.bias = nn.Parameter(bias(), requires_grad=False)
    settle(net, torch.compile(net, backend="hotloop", fullgraph=True, dynamic=False))


def test_packing_can_be_switched_off(made: list[Convolution]) -> None:
    net = Net().eval().requires_grad_(False)
    compiled = torch.compile(net, backend="hotloop", options={"weight_packing": "off"})
    settle(net, compiled)
    assert not made


def test_training_packs_nothing(made: list[Convolution]) -> None:
    net = Net()
    other = copy.deepcopy(net)
    compiled = torch.compile(net, backend="hotloop", fullgraph=True, dynamic=False)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1) for n in (net, other)]
    for _ in range(4):
        for run, optimizer in zip((compiled, other), optimizers, strict=True):
            optimizer.zero_grad()
            run(X).square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(net.a.weight, other.a.weight)
    assert packed(made) == 0


def call_in_threads(
    net: nn.Module, compiled: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, times: int
) -> None:
    """Four threads call between updates of the first weight, and compare with eager's result."""
    faults: list[Exception] = []

    def call(expected: torch.Tensor) -> None:
        try:
            for _ in range(times):
                with torch.no_grad():
                    torch.testing.assert_close(compiled(x), expected)
        except Exception as error:  # noqa: BLE001 - carried to the main thread
            faults.append(error)

    for _ in range(3):
        with torch.no_grad():
            net.a.weight.add_(0.25)
        threads = [threading.Thread(target=call, args=(net(x),)) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not faults, faults[0]


def test_threads_see_every_update(made: list[Convolution]) -> None:
    net, compiled = compiled_net()
    settle(net, compiled)
    call_in_threads(net, compiled, X, 20)


# --- matrix products ----------------------------------------------------------------------------------------

ROWS = torch.randn(5, 24)


class Products(nn.Module):
    """Two matrix products, of which the second reads what the first gives."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(24, 40)
        self.b = nn.Linear(40, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu()) * 2


def _merge_products(net: Products) -> None:
    net.a.weight.data += torch.randn(40, 2) @ torch.randn(2, 24)


def _step_products(net: Products) -> None:
    net.requires_grad_(True)
    net(ROWS).square().mean().backward()
    torch.optim.AdamW(net.parameters(), lr=0.1).step()
    net.requires_grad_(False)


def _tie_products(net: Products) -> None:
    net.b.weight = nn.Parameter(torch.randn(16, 40), requires_grad=False)


def _one_element(net: Products) -> None:
    net.a.weight[3, 1] += 7.0


PRODUCT_UPDATES = [
    lambda net: net.a.weight.mul_(2),
    lambda net: net.a.weight.data.mul_(3),
    lambda net: nn.init.normal_(net.b.weight),
    lambda net: net.load_state_dict(Products().state_dict()),
    lambda net: net.a.weight.view(-1)[5:9].zero_(),
    lambda net: setattr(net.a.weight, "data", torch.randn(40, 24)),
    lambda net: net.a.weight.untyped_storage().copy_(torch.randn(40, 24).untyped_storage()),
    _one_element,
    _merge_products,
    _step_products,
    _tie_products,
]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("update", PRODUCT_UPDATES)
def test_a_product_sees_an_update_at_once(update: Callable[[Products], object], inference: bool) -> None:
    if inference and update is _step_products:
        pytest.skip("inference mode has no gradients")
    torch._dynamo.reset()
    with torch.inference_mode(inference):
        net = Products().requires_grad_(False)
        compiled = torch.compile(net, backend="hotloop", fullgraph=True, dynamic=False)
        for _ in range(4):
            with torch.no_grad():
                for _ in range(2):
                    assert_as_accurate(compiled(ROWS), net(ROWS), reference_of(net, ROWS))
            with torch.set_grad_enabled(update is _step_products):
                update(net)
        assert_as_accurate(compiled(ROWS), net(ROWS), reference_of(net, ROWS))


def test_threads_multiply_by_the_weight_of_the_moment() -> None:
    torch._dynamo.reset()
    net = Products().requires_grad_(False)
    compiled = torch.compile(net, backend="hotloop", fullgraph=True, dynamic=False)
    call_in_threads(net, compiled, ROWS, 30)


def test_programs_for_several_sizes_share_what_they_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Panels] = []
    original = backend.Runtime.panels

    def panels(self: backend.Runtime, *numbers: object, **how: bool) -> Panels:
        found.append(original(self, *numbers, **how))
        return found[-1]

    monkeypatch.setattr(backend.Runtime, "panels", panels)
    torch._dynamo.reset()
    net = Products().requires_grad_(False)
    compiled = torch.compile(net, backend="hotloop", fullgraph=True, dynamic=False)
    inputs = [torch.randn(rows, 24) for rows in (3, 20, 70)]
    for _ in range(2):
        for x in inputs:
            assert_as_accurate(compiled(x), net(x), reference_of(net, x))
        assert len(found) == 6 and all(p.kept_bytes for p in found)
        assert len({id(p._kept) for p in found}) == 2  # one for each weight
        net.a.weight.mul_(2)  # noticed by each
        net.b.weight.data.add_(1)
