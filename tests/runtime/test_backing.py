"""Plain weights whose memory was given back: parameters behave as if nothing had happened."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop import backend, compat
from hotloop.backend import weight_memory
from hotloop.runtime import backing
from hotloop.runtime.changes import Seen
from hotloop.runtime.packing import PackedWeight
from judge import assert_as_accurate, reference_of

pytestmark = pytest.mark.skipif(backing.sys.platform != "linux", reason="the memory of Linux")

X = torch.randn(5, 256)
BYTES = 256 * 512 * 4


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    gc.collect()
    with hotloop.config.patch(freezing=True, weight_packing="replace"):
        yield
    torch.compiler.reset()


class Net(nn.Module):
    """Two matrix products; each weight has half a megabyte."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(256, 512)
        self.b = nn.Linear(512, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu()) * 2


def settled(net: nn.Module, x: torch.Tensor = X) -> Callable[[torch.Tensor], torch.Tensor]:
    """The compiled module, after calls that packed its weights."""
    net = net.eval().requires_grad_(False)
    compiled = torch.compile(net, backend="hotloop", fullgraph=True, dynamic=False)
    again(compiled, net, x)
    return compiled


def again(compiled: Callable[..., Any], net: nn.Module, x: torch.Tensor = X, times: int = 3) -> None:
    for _ in range(times):
        with torch.no_grad():
            actual = compiled(x)
            assert_as_accurate(actual, net(x), reference_of(copy.deepcopy(net).double(), x))


def seen(w: torch.Tensor) -> Seen:
    """The state of a weight, told by its first element."""
    return Seen.of((w,), lambda state, weights: int(w[0]), 1)


def resident(t: torch.Tensor) -> int:
    """The bytes of a tensor's whole pages that are in memory."""
    found = 0
    page = backing.mmap.PAGESIZE
    first, stop = t.data_ptr(), t.data_ptr() + t.nbytes
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            start, end = (int(word, 16) for word in head.groups())
            inside = first <= start and end <= stop + page
        elif inside and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def mapped(t: torch.Tensor) -> bool:
    """Whether a tensor's memory shows a file without a name."""
    middle = t.data_ptr() + t.nbytes // 2
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(word, 16) for word in line.split()[0].split("-"))
        if start <= middle < stop:
            return line.endswith("(deleted)")
    return False


def released(t: torch.Tensor) -> bool:
    """Whether a tensor's memory was given back."""
    return id(t) in backend._backing(hotloop.config.cache_dir)._records


def pages(t: torch.Tensor) -> int:
    """The bytes of a tensor's whole pages."""
    page = backing.mmap.PAGESIZE
    return (t.data_ptr() + t.nbytes) // page * page - -(-t.data_ptr() // page) * page


def test_memory_is_given_back_and_values_stay() -> None:
    net = Net()
    before = copy.deepcopy(net.state_dict())
    given = weight_memory().given_back
    compiled = torch.compile(net.requires_grad_(False), backend="hotloop", fullgraph=True, dynamic=False)
    for _ in range(4):
        compiled(X)
    assert mapped(net.a.weight) and mapped(net.b.weight)
    assert resident(net.a.weight) + resident(net.b.weight) <= 2 * 33 * backing.mmap.PAGESIZE  # looked at
    assert weight_memory().given_back - given == pages(net.a.weight) + pages(net.b.weight)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    again(compiled, net)
    del net, value, compiled
    torch.compiler.reset()
    gc.collect()
    assert weight_memory().given_back == given


def test_without_freezing_weights_stay() -> None:
    net = Net()
    with hotloop.config.patch(freezing=False):
        settled(net)
    assert not released(net.a.weight)


# --- what is done with a parameter --------------------------------------------------------------------------


def _merge(net: Net) -> None:
    net.a.weight.data += torch.randn(512, 2) @ torch.randn(2, 256)


def _step(net: Net) -> None:
    net.requires_grad_(True)
    with torch.enable_grad():
        net(X).square().mean().backward()
    torch.optim.AdamW(net.parameters(), lr=0.1).step()
    net.zero_grad()
    net.requires_grad_(False)


def _tie(net: Net) -> None:
    net.b.weight = nn.Parameter(net.a.weight.detach().t().contiguous(), requires_grad=False)


def _tie_memory(net: Net) -> None:
    net.b.weight = nn.Parameter(net.a.weight.detach().view(256, 512), requires_grad=False)


UPDATES: dict[str, Callable[[Net], object]] = {
    "in place": lambda net: net.a.weight.mul_(2),
    "data": lambda net: net.a.weight.data.mul_(3),
    "element": lambda net: net.a.weight[3, 1].add_(7),
    "init": lambda net: nn.init.normal_(net.b.weight),
    "load_state_dict": lambda net: net.load_state_dict(Net().state_dict()),
    "own state_dict": lambda net: net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()}),
    "assign": lambda net: net.load_state_dict(Net().state_dict(), assign=True),
    "set data": lambda net: setattr(net.a.weight, "data", torch.randn(512, 256)),
    "storage": lambda net: net.a.weight.untyped_storage().copy_(torch.randn(512, 256).untyped_storage()),
    "low-rank merge": _merge,
    "optimizer step": _step,
    "tie": _tie,
    "tie memory": _tie_memory,
    "to": lambda net: net.to(torch.float64).to(torch.float32),
}

KINDS: dict[str, dict[str, Any]] = {
    "auto": {"freezing": False, "weight_packing": "auto"},
    "freezing": {"freezing": True, "weight_packing": "auto"},
    "replace": {"freezing": True, "weight_packing": "replace"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("update", UPDATES)
def test_an_update_gives_eagers_result_at_once(update: str, kind: str) -> None:
    net = Net()
    with hotloop.config.patch(KINDS[kind]):
        compiled = settled(net)
        for _ in range(2):
            with torch.no_grad():
                UPDATES[update](net)
            again(compiled, net)
    assert kind != "replace" or update == "tie memory" or mapped(net.a.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_other_dtypes_by_to(kind: str) -> None:
    net = Net()
    with hotloop.config.patch(KINDS[kind]):
        compiled = settled(net)
        for dtype in (torch.bfloat16, torch.float64, torch.float32):
            net.to(dtype)
            again(compiled, net, X.to(dtype))


class Tied(nn.Module):
    """A row of the table goes in, and the table is what the result is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 256)
        self.head = nn.Linear(256, 512, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x).tanh())


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_is_read_as_it_lies_stays(kind: str) -> None:
    net, x = Tied().requires_grad_(False), torch.randint(0, 512, (7,))
    with hotloop.config.patch(KINDS[kind]):
        compiled = torch.compile(net, backend="hotloop", fullgraph=True, dynamic=False)
        for _ in range(3):
            for _ in range(3):
                assert_as_accurate(compiled(x), net(x), reference_of(copy.deepcopy(net).double(), x))
            net.table.weight.mul_(1.5)
    assert not released(net.table.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_shared_with_processes_later(kind: str) -> None:
    net, x = nn.Linear(4096, 4096), torch.randn(3, 4096)  # in pages of its own
    with hotloop.config.patch(KINDS[kind]):
        compiled = settled(net, x)
        net.share_memory()
        again(compiled, net, x)
        net.weight.mul_(2)
        again(compiled, net, x)
    assert net.weight.is_shared()


READS: dict[str, Callable[[Net], torch.Tensor]] = {
    "read": lambda net: net.a.weight + 0,
    "numpy": lambda net: torch.from_numpy(net.a.weight.numpy().copy()),
    "deepcopy": lambda net: copy.deepcopy(net).a.weight,
    "state_dict": lambda net: net.state_dict()["a.weight"],
    "view": lambda net: net.a.weight.view(-1)[:],
    "data": lambda net: net.a.weight.data,
    "script": lambda net: torch.jit.trace(net, X).a.weight,
    "pointer": lambda net: torch.frombuffer(
        bytearray(ctypes.string_at(net.a.weight.data_ptr(), BYTES)), dtype=torch.float32
    ),
}


@pytest.mark.parametrize("read", READS)
def test_every_read_gives_the_values(read: str) -> None:
    net = Net()
    expected = net.a.weight.detach().clone()
    compiled = settled(net)
    assert mapped(net.a.weight)
    assert torch.equal(READS[read](net).reshape(512, 256), expected)
    again(compiled, net)


def test_it_is_saved_and_loaded() -> None:
    net = Net()
    settled(net)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    for name, value in torch.load(file).items():
        assert torch.equal(value, net.state_dict()[name])


def test_views_outlive_the_parameter() -> None:
    net = Net()
    view, expected = net.a.weight.detach()[3:], net.a.weight.detach()[3:].clone()
    settled(net)
    assert mapped(view)
    del net
    torch.compiler.reset()
    gc.collect()
    assert torch.equal(view, expected)


def test_a_weight_that_is_gone_is_counted_no_more() -> None:
    keep = backing.Backing(hotloop.config.cache_dir)
    w = torch.full((1 << 24,), 3.0)  # in pages of its own
    keep.release(w, seen(w))
    assert mapped(w) and keep.given_back == pages(w)
    view = w[5:]
    del w
    assert keep.given_back > 0 and bool((view == 3).all())
    del view
    assert keep.given_back == 0


def test_bytes_are_those_of_the_storages() -> None:
    net = nn.Sequential(nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 130))
    before = weight_memory()
    with hotloop.config.patch(weight_packing="auto"):
        settled(net, torch.randn(20, 300))
    found = [t for t in gc.get_objects() if type(t) is PackedWeight]
    taken = sum({t.packed.data_ptr(): t.packed.untyped_storage().nbytes() for t in found}.values())
    assert weight_memory().packed == taken
    assert weight_memory().packed - before.packed > sum(w.nbytes for w in (net[0].weight, net[2].weight))
    assert weight_memory().given_back == before.given_back


@pytest.mark.skipif(
    not compat.can_pack_convolution(torch.float32), reason="this build of torch has no oneDNN"
)
def test_bytes_of_blocks_are_those_that_the_library_took() -> None:
    weight = torch.randn(1003, 257, 3, 3)  # odd numbers of channels, which blocks of 16 fill up

    class Info(ctypes.Structure):
        _fields_ = [(f"part{k}", ctypes.c_size_t) for k in range(10)]  # struct mallinfo2 of glibc

    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        pytest.skip("the C library does not tell")
    ask.restype = Info

    def allocated() -> int:
        found = ask()
        return int(found.part4 + found.part7)  # hblkhd and uordblks: by mmap, and in heaps

    def pack() -> torch.Tensor:
        return compat.pack_convolution_weight(weight, [1, 257, 9, 9], [0, 0], [1, 1], [1, 1], 1)

    packed = [pack()]
    before = allocated()
    packed += [pack() for _ in range(16)]
    taken = (allocated() - before) / 16
    said = compat.packed_bytes(packed[0])
    assert said >= weight.nbytes
    assert said <= taken < said + 16384  # pages of its own, aligned


def test_values_that_were_computed_and_their_sources_go_too() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(512, 512))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.w.to(torch.bfloat16)).relu()

    net, x = Cast(), torch.randn(9, 512).to(torch.bfloat16)
    before = weight_memory()
    compiled = settled(net, x)
    after = weight_memory()
    assert mapped(net.w)
    frozen = 512 * 512 * 2
    assert after.frozen - before.frozen == frozen
    assert pages(net.w) < after.given_back - before.given_back <= pages(net.w) + frozen
    for _ in range(2):
        net.w.mul_(0.5)
        again(compiled, net, x)


@pytest.mark.skipif(
    not compat.can_pack_convolution(torch.float32), reason="this build of torch has no oneDNN"
)
def test_convolutions() -> None:
    net = nn.Sequential(nn.Conv2d(64, 128, 3), nn.ReLU())
    x = torch.randn(1, 64, 9, 11)
    before = weight_memory().packed
    compiled = settled(net, x)
    assert mapped(net[0].weight)
    assert weight_memory().packed - before == net[0].weight.nbytes  # 64 channels fill the library's blocks
    net[0].weight.mul_(2)
    again(compiled, net, x)


# --- where memory stays -------------------------------------------------------------------------------------


def test_memory_of_others_stays(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"\1" * 4 * BYTES)
    net = Net()
    net.a.weight = nn.Parameter(torch.from_file(str(file), True, 256 * 512).view(512, 256), False)
    net.b.weight = nn.Parameter(net.b.weight.detach().share_memory_(), False)
    compiled = settled(net)
    net.a.weight.fill_(0.5)
    again(compiled, net)
    assert file.read_bytes()[:BYTES] == torch.full((512, 256), 0.5).numpy().tobytes()  # still the file's


def test_inference_tensors_stay() -> None:
    with torch.inference_mode():
        net = Net()
        compiled = settled(net)
        net.a.weight.mul_(2)
        again(compiled, net)
    assert not released(net.a.weight)


def test_a_full_disk_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    net = Net()
    monkeypatch.setattr(backend, "_backing", backing.Backing)
    with monkeypatch.context() as patched:
        patched.setattr(backing.os, "fsync", full)
        with pytest.warns(RuntimeWarning, match="stay in memory beside their packed copies.*No space left"):
            compiled = settled(net)
    net.a.weight.mul_(2)
    again(compiled, net)
    assert not mapped(net.a.weight)


def test_a_disk_that_is_memory_is_one_warning() -> None:
    keep = backing.Backing("/dev/shm")
    if not Path("/dev/shm").is_dir():
        pytest.skip("no such folder")
    w = torch.ones(1 << 24)  # in pages of its own
    with pytest.warns(RuntimeWarning, match="/dev/shm is in memory itself"):
        keep.release(w, seen(w))
    assert not mapped(w) and keep.given_back == 0


def test_a_write_between_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.zeros(1 << 24)  # in pages of its own
    monkeypatch.setattr(backing.os, "fsync", lambda _: w.data.fill_(3))
    keep = backing.Backing(hotloop.config.cache_dir)
    keep.release(w, seen(w))
    assert not mapped(w) and bool((w == 3).all())


def test_threads() -> None:
    net = Net()
    compiled = settled(net)
    faults: list[Exception] = []

    def call(expected: torch.Tensor) -> None:
        try:
            for _ in range(20):
                assert torch.equal(compiled(X), expected)
        except Exception as error:  # noqa: BLE001 - carried to the main thread
            faults.append(error)

    for _ in range(3):
        net.a.weight.add_(0.25)
        expected = net(X)
        other = torch.compile(copy.deepcopy(net), backend="hotloop", fullgraph=True, dynamic=False)(X)
        assert_as_accurate(other, expected, reference_of(copy.deepcopy(net).double(), X))
        threads = [threading.Thread(target=call, args=(other,)) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not faults, faults[0]
