"""Whether weights have changed: each kind of change is seen, by the compiled function and by Python alike."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hotloop import backend, compat
from hotloop.config import resolve
from hotloop.runtime.changes import Look, Seen, keep_private
from hotloop.runtime.packing import Kept, PackedWeight, Packer, Panels, Weights


@pytest.fixture(scope="module")
def look() -> Look:
    return backend._look(resolve(None, None, {}))


@pytest.fixture(params=["compiled", "Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are asked by the compiled function, or by Python where torch has no functions for it."""
    if request.param == "Python":
        monkeypatch.setattr(compat, "tensor_calls", lambda: None)
    elif compat.tensor_calls() is None:
        pytest.skip("this torch has no functions that tell the state of a tensor")


@pytest.mark.skipif(sys.platform != "linux", reason="the library's name on Linux")
def test_this_torch_has_functions_that_tell_the_state_of_a_tensor() -> None:
    assert compat.tensor_calls() is not None


def weights(count: int = 5) -> list[torch.Tensor]:
    """Weights of which the first two are large, and the last but one is an inference tensor."""
    found: list[torch.Tensor] = [nn.Parameter(torch.randn(64, 48), requires_grad=False) for _ in range(count)]
    found[2] = torch.randn(3)
    with torch.inference_mode():
        found[-2] = torch.randn(40, 40)
    return found


def _replace(ws: list[torch.Tensor], k: int, new: torch.Tensor) -> None:
    ws[k] = new


def _assign_inference(ws: list[torch.Tensor]) -> None:
    with torch.inference_mode():
        other = torch.randn(64, 48)
    ws[0].data = other


def _inference_element(ws: list[torch.Tensor]) -> None:
    with torch.inference_mode():
        ws[-2][7, 3] += 1  # at none of the places


def _through_numpy(ws: list[torch.Tensor]) -> None:
    ws[1].detach().numpy()[:] += 1


CHANGES: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "in place": lambda ws: ws[0].mul_(2),
    "one element": lambda ws: ws[1][17, 5].add_(1),
    "by a view": lambda ws: ws[4].view(-1)[100:101].zero_(),
    "behind autograd's back": lambda ws: ws[0].data.add_(1),
    "the last of it behind autograd's back": lambda ws: ws[0].data.view(-1)[-1:].add_(1),
    "a small one": lambda ws: ws[2].data[1:2].add_(1),
    "other data": lambda ws: setattr(ws[1], "data", ws[1].data.clone()),
    "data of inference mode": _assign_inference,
    "an element of inference mode": _inference_element,
    "another tensor with the same data": lambda ws: _replace(ws, 4, nn.Parameter(ws[4], requires_grad=False)),
    "two change places": lambda ws: ws.__setitem__(slice(0, 2), ws[1::-1]),
    "other memory": lambda ws: ws[0].set_(torch.randn(64, 48)),
    "its storage": lambda ws: ws[0].untyped_storage().copy_(torch.randn(64, 48).untyped_storage()),
    "NumPy": _through_numpy,
    "a tied one": lambda ws: _replace(ws, 1, ws[0]),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str, look: Look) -> None:
    ws = weights()
    seen = Seen.of(ws, look, 32)
    assert seen.still(tuple(ws)) and seen.still(tuple(ws))
    with torch.no_grad():
        CHANGES[change](ws)
    assert not seen.still(tuple(ws))
    again = Seen.of(ws, look, 32)
    assert again.still(tuple(ws))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("places", [1, 4, 5, 7, 32])
def test_memory_is_compared_at_each_place(places: int, look: Look) -> None:
    w = torch.zeros(2000)
    step = w.nbytes // places
    at = [*(step * k // 4 for k in range(places - 1)), 1998]
    for k in at:
        seen = Seen.of((w,), look, places)
        w.data[k + 1] += 1
        assert not seen.still((w,))


@pytest.mark.usefixtures("way")
def test_a_tensor_that_died_is_not_mistaken_for_one_that_lives(look: Look) -> None:
    storage = torch.randn(64, 48)
    for _ in range(50):
        w = storage.detach()
        seen = Seen.of((w,), look, 32)
        assert seen.still((w,))
        del w
        gc.collect()
        w = storage.detach()  # the same memory and version, as a rule at the same address
        assert not seen.still((w,))


@pytest.mark.usefixtures("way")
def test_what_nobody_else_has_is_compared_by_identity(look: Look) -> None:
    w, other = keep_private(torch.zeros(100)), torch.zeros(100)
    seen = Seen.of((w, other), look, 4)
    w.add_(1)
    assert seen.still((w, other)) and not seen.still((other, w))
    other.add_(1)
    assert not seen.still((w, other))


@pytest.mark.usefixtures("way")
def test_a_tensor_without_elements(look: Look) -> None:
    w = torch.empty(0, 5)
    seen = Seen.of((w,), look, 32)
    assert seen.still((w,))
    w.data = torch.empty(3, 5)
    assert not seen.still((w,))


@pytest.mark.usefixtures("way")
def test_no_weight(look: Look) -> None:
    assert Seen.of((), look, 32).still(())


def test_swapped_tensors(look: Look) -> None:
    """What tensors are made of may be exchanged where nothing refers to them weakly, as a look does."""
    w, other = torch.randn(64, 48), torch.randn(64, 48)
    seen = Seen.of((w,), look, 32)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(w, other)
    assert seen.still((w,))


# --- all weights of a program -------------------------------------------------------------------------------


class _Plain(Packer):
    """A packer that counts, and gives the sum of a weight."""

    packed = 0

    def _pack(self, weight: torch.Tensor) -> PackedWeight:
        self.packed += 1
        total = weight.sum()
        return PackedWeight(Seen.of((weight,), self._look, 32), total, float(total), 4)


@pytest.fixture
def counted(look: Look) -> tuple[list[int], Look]:
    """A look that counts its calls."""
    calls = [0]

    def counting(state: int, objects: int) -> int:
        calls[0] += 1
        return look(state, objects)

    return calls, counting


@pytest.mark.usefixtures("way")
def test_weights_that_stay_are_one_look(counted: tuple[list[int], Look]) -> None:
    calls, look = counted
    ws = weights(20)
    packers = [_Plain(look, Kept(), None) for _ in ws]
    together = Weights(look, packers)
    expected = tuple(float(w.sum()) for w in ws)
    for _ in range(3):
        assert together(*ws)[0] == expected
    before = calls[0]
    for _ in range(4):
        assert together(*ws)[0] == expected
    assert calls[0] == before + 4
    assert [p.packed for p in packers] == [1] * 20


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("change", CHANGES)
def test_those_that_changed_are_packed_again(change: str, look: Look) -> None:
    ws = weights()
    packers = [_Plain(look, Kept(), None) for _ in ws]
    together = Weights(look, packers)
    for _ in range(3):
        for _ in range(4):
            assert together(*ws)[0] == tuple(float(w.sum()) for w in ws)
        before = [p.packed for p in packers]
        with torch.no_grad():
            CHANGES[change](ws)
        assert together(*ws)[0] == tuple(float(w.sum()) for w in ws)
        # One is packed again, or the two of which each is the other now.
        assert sum(p.packed for p in packers) - sum(before) <= (2 if change == "two change places" else 1)


def test_what_was_given_outlives_a_change(look: Look) -> None:
    """A call that runs while another packs again still has its panels."""
    with torch.no_grad():
        w = torch.randn(24, 40)  # transposed, a matrix of 40 rows in one panel of 24 columns
        panels = Panels(look, Kept(), None, (40, 24), (1, 40), (1, 40, 24))
        together = Weights(look, [panels])
        (address,), owners = together(w)
        w.add_(1)
        (other,), _ = together(w)
        assert other != address and owners[0].packed.data_ptr() == address
