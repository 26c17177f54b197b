"""Memory is handed out again only when nobody holds it, and every tensor handed out is as new."""

from __future__ import annotations

import gc
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from hotloop.runtime.pool import OutputPool, give_back, storage_bytes

N = 1024
NBYTES = 4 * N * N


def _make(pool: OutputPool, value: float | None = None) -> torch.Tensor:
    tensor = pool.empty((N, N), (N, 1), torch.float32, NBYTES)
    return tensor if value is None else tensor.fill_(value)


def _square(tensor: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(N, requires_grad=True)
    return (tensor * weight).sum()  # the product saves the tensor for the gradient of weight


def _cycle(tensor: torch.Tensor) -> object:
    holder: dict[str, object] = {"tensor": tensor}
    holder["self"] = holder
    return holder


# Everything through which somebody can still see the memory, and a way to read it.
HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda t: t,
    "view": lambda t: t[3:5],
    "transpose": lambda t: t.t(),
    "as_strided": lambda t: t.as_strided((2,), (1,), 7),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "alias": lambda t: torch.ops.aten.alias(t),
    "view of another dtype": lambda t: t.view(torch.int32),
    "list": lambda t: [t],
    "reference cycle": _cycle,
    "parameter": lambda t: torch.nn.Parameter(t),
    "numpy": lambda t: t.numpy(),
    "numpy view": lambda t: t.numpy()[2:4, ::2],
    "memoryview": lambda t: memoryview(t.numpy()),
    "numpy by protocol": lambda t: numpy.asarray(t),
    "frombuffer": lambda t: torch.frombuffer(memoryview(t.numpy()).cast("B"), dtype=torch.uint8),
    "dlpack capsule": lambda t: t.__dlpack__(),
    "tensor from dlpack": lambda t: torch.from_dlpack(t),
    "numpy from dlpack": lambda t: numpy.from_dlpack(t),
    "untyped storage": lambda t: t.untyped_storage(),
    "typed storage": lambda t: t.storage(),
    "storage in a container": lambda t: {"storage": (t.untyped_storage(),)},
    "set_": lambda t: torch.empty(0).set_(t.untyped_storage(), 0, (4,), (1,)),
    "saved for backward": _square,
    "closure": lambda t: lambda: t,
    "thread local": lambda t: setattr(_LOCAL, "tensor", t) or _LOCAL,
    "lazy clone": lambda t: torch._lazy_clone(t),
    "storage, the weak way": lambda t: weakref.ref(t.untyped_storage()),
    "hook's argument": lambda t: t.register_hook(lambda g: t) if t.requires_grad else (t,),
    "sparse values": lambda t: torch.sparse_coo_tensor(torch.zeros(1, N, dtype=torch.long), t, (1, N)),
    "nested": lambda t: torch.nested.nested_tensor_from_jagged(t, torch.tensor([0, 4, N])),
}
_LOCAL = threading.local()


@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.filterwarnings("ignore")
def test_held_memory_is_not_handed_out(name: str) -> None:
    pool = OutputPool(threshold=1)
    tensor = _make(pool, 1.0)
    address = tensor.data_ptr()
    holder = HOLDERS[name](tensor)
    del tensor
    others = [_make(pool, 2.0) for _ in range(3)]
    assert address not in [other.data_ptr() for other in others]
    assert len({other.data_ptr() for other in others}) == 3
    if hasattr(_LOCAL, "tensor"):
        assert torch.equal(_LOCAL.tensor, torch.ones(N, N))
        del _LOCAL.tensor
    if isinstance(holder, torch.Tensor) and holder.dtype == torch.float32 and holder.layout == torch.strided:
        if name == "saved for backward":
            holder.backward()
        elif name != "nested":
            assert bool((holder == 1.0).all())
    del holder, others
    gc.collect()
    # Let go, the memory serves again: at once, unless it was exchanged or shared meanwhile.
    addresses = []
    for _ in range(4):
        again = _make(pool)
        addresses.append(again.data_ptr())
        del again
    assert len(set(addresses)) <= 4 and pool.info().reused >= 4


def test_memory_serves_again() -> None:
    pool = OutputPool(threshold=1)
    first = _make(pool)
    address = first.data_ptr()
    del first
    for _ in range(5):
        again = _make(pool)
        assert again.data_ptr() == address
        del again
    assert (pool.info().reused, pool.info().fresh, pool.info().slots) == (5, 1, 1)


def test_untyped_storage_taken_and_dropped_does_not_leak_the_slot() -> None:
    pool = OutputPool(threshold=1)
    first = _make(pool)
    address = first.data_ptr()
    assert first.untyped_storage().nbytes() == NBYTES
    first.numpy()
    del first
    assert _make(pool).data_ptr() == address


def test_every_tensor_is_as_new() -> None:
    pool = OutputPool(threshold=1)
    first = _make(pool, 1.0)
    address = first.data_ptr()
    first.label = "mine"  # type: ignore[attr-defined]
    first.requires_grad_()
    with torch.no_grad():
        first.add_(1).mul_(2)
    reference = weakref.ref(first)
    del first
    assert reference() is None
    again = _make(pool)
    assert again.data_ptr() == address
    assert type(again) is torch.Tensor and not hasattr(again, "label")
    assert not again.requires_grad and again.is_leaf and again.grad_fn is None and again._version == 0
    assert not again._is_view() and again._base is None
    again.resize_(N, N).requires_grad_().sum().backward()
    assert torch.equal(again.grad, torch.ones(N, N))  # type: ignore[arg-type]


def test_other_shapes_over_the_same_memory() -> None:
    pool = OutputPool(threshold=1)
    first = _make(pool)
    address = first.data_ptr()
    del first
    forms: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = [
        ((N * N,), (1,), torch.float32),
        ((2, N // 2, N), (1, 2, N), torch.float32),
        ((N, N, 4), (4 * N, 4, 1), torch.uint8),
        ((N, N), (1, N), torch.int32),
        ((N, 2 * N), (2 * N, 1), torch.bfloat16),
    ]
    for sizes, strides, dtype in forms:
        tensor = pool.empty(sizes, strides, dtype, NBYTES)
        assert tensor.data_ptr() == address
        assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (sizes, strides, dtype)
        assert tensor._version == 0 and not tensor._is_view()
        del tensor


def test_inference_mode_is_kept_apart() -> None:
    pool = OutputPool(threshold=1)
    address = _make(pool).data_ptr()
    with torch.inference_mode():
        inside = _make(pool)
    assert inside.data_ptr() == address and inside.is_inference()
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        inside.add_(1).mul(torch.ones(1, requires_grad=True))
    del inside
    normal = _make(pool)
    assert normal.data_ptr() == address and not normal.is_inference()
    (normal.fill_(2.0).mul(torch.ones(1, requires_grad=True))).sum().backward()


@pytest.mark.skipif(sys.platform == "win32", reason="shared memory of POSIX")
def test_memory_shared_with_other_processes_is_let_go() -> None:
    pool = OutputPool(threshold=1)
    tensor = _make(pool, 1.0)
    tensor.share_memory_()
    shared = tensor.data_ptr()
    del tensor
    again = _make(pool)
    assert not again.is_shared() and again.data_ptr() != shared
    assert pool.info().bytes == NBYTES


def test_resized_storage_is_let_go() -> None:
    pool = OutputPool(threshold=1)
    tensor = _make(pool)
    tensor.resize_(2 * N, N)
    del tensor
    again = _make(pool)
    assert again.untyped_storage().nbytes() == NBYTES
    again.untyped_storage().resize_(0)
    del again
    assert _make(pool, 3.0).sum().item() == 3.0 * N * N
    assert pool.info().bytes == NBYTES


def test_small_outputs_are_left_to_torch() -> None:
    pool = OutputPool(threshold=1 << 20)
    assert pool.empty((4,), (1,), torch.float32, 16).shape == (4,)
    assert pool.empty((0, 5), (5, 1), torch.float32, 0).shape == (0, 5)
    assert pool.arena(100).numel() == 100
    assert pool.info().slots == 0


def test_switched_off() -> None:
    pool = OutputPool(threshold=1, enabled=False)
    for _ in range(3):
        assert _make(pool, 1.0).shape == (N, N)
        assert pool.arena(1 << 20).numel() == 1 << 20
    assert (pool.info().slots, pool.info().reused) == (0, 0)


def test_bytes_are_bounded() -> None:
    pool = OutputPool(threshold=1, limit=3 * NBYTES)
    held = [_make(pool, float(index)) for index in range(10)]
    assert pool.info().bytes <= 3 * NBYTES
    assert [tensor[0, 0].item() for tensor in held] == list(range(10))
    held.clear()
    for n in range(1, 8):  # other sizes push out what was used longest ago
        pool.empty((n * 65536,), (1,), torch.float32, n * 262144)
        assert pool.info().bytes <= 3 * NBYTES
    assert pool.empty((4 * N, N), (N, 1), torch.float32, 4 * NBYTES).numel() == 4 * N * N
    assert pool.info().bytes <= 3 * NBYTES


def test_trim_gives_back_what_is_idle() -> None:
    pool = OutputPool(threshold=1)
    held = _make(pool, 1.0)
    tensor = _make(pool)
    del tensor
    assert (pool.info().bytes, pool.info().idle_bytes) == (2 * NBYTES, NBYTES)
    pool.trim()
    assert (pool.info().bytes, pool.info().idle_bytes, pool.info().slots) == (NBYTES, 0, 1)
    assert held.sum().item() == N * N


def test_many_held_outputs_cost_no_search() -> None:
    pool = OutputPool(threshold=1, limit=1 << 30)
    held = [pool.empty((64,), (1,), torch.float32, 256) for _ in range(5000)]
    start = time.perf_counter()
    held += [pool.empty((64,), (1,), torch.float32, 256) for _ in range(1000)]
    assert time.perf_counter() - start < 1.0
    assert len({tensor.data_ptr() for tensor in held}) == 6000


def test_wrong_size_is_not_kept() -> None:
    pool = OutputPool(threshold=1)
    assert pool.empty((8, 8), (8, 1), torch.float32, 1024).untyped_storage().nbytes() == 256
    assert pool.info().slots == 0


@pytest.mark.parametrize(
    ("sizes", "strides"),
    [((3, 4), (4, 1)), ((3, 4), (1, 3)), ((5,), (0,)), ((), ()), ((0, 3), (3, 1)), ((2, 3), (100, 7))],
)
def test_storage_bytes(sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.int8, torch.float64):
        expected = torch.empty_strided(sizes, strides, dtype=dtype).untyped_storage().nbytes()
        assert storage_bytes(sizes, strides, dtype.itemsize) == expected


def test_arenas_are_shared_by_graphs_of_like_size() -> None:
    pool = OutputPool(threshold=1)
    first = pool.arena(1_000_000)
    address = first.data_ptr()
    assert first.numel() >= 1_000_000 and first.dtype == torch.uint8
    inner = pool.arena(1_000_000)  # a re-entrant call has one of its own
    assert inner.data_ptr() != address
    del first
    smaller = pool.arena(700_000)
    assert smaller.data_ptr() == address
    assert pool.arena(100_000).data_ptr() not in (address, inner.data_ptr())


def test_reentrant_call_from_a_destructor() -> None:
    pool = OutputPool(threshold=1)
    seen: list[torch.Tensor] = []

    class Dying:
        def __del__(self) -> None:
            seen.append(_make(pool, 7.0))

    with pool._lock:  # a collection in the middle of a call runs the destructor here
        dying = Dying()
        del dying
    assert seen[0].sum().item() == 7.0 * N * N
    assert pool.info().slots == 0


def test_threads_never_share_a_held_tensor() -> None:
    pool = OutputPool(threshold=1)
    problems: list[str] = []

    def work(seed: int) -> None:
        held: list[tuple[float, torch.Tensor]] = []
        for step in range(150):
            value = float(seed * 1000 + step)
            held.append((value, pool.empty((64, 64), (64, 1), torch.float32, 16384).fill_(value)))
            if step % 3 == 2:
                expected, tensor = held.pop(0)
                if not bool((tensor == expected).all()):
                    problems.append(f"{seed} {step}")
        problems.extend(f"{seed} end" for value, tensor in held if not bool((tensor == value).all()))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert problems == [] and pool.info().reused > 0


def test_recursion_holds_each_level_apart() -> None:
    pool = OutputPool(threshold=1)

    def descend(depth: int) -> float:
        mine = pool.empty((64, 64), (64, 1), torch.float32, 16384).fill_(depth)
        below = descend(depth - 1) if depth else 0.0
        assert bool((mine == depth).all())
        return below + mine[0, 0].item()

    assert descend(20) == descend(20) == sum(range(21))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_fork_starts_afresh() -> None:
    pool = OutputPool(threshold=1)
    held = _make(pool, 1.0)
    with pool._lock:  # as if another thread were inside
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                mine = _make(pool)
                mine[0].fill_(2.0)  # one row: OpenMP's threads stayed in the parent
                good = pool.info().slots == 1 and mine.data_ptr() != held.data_ptr()
                status = 0 if good and held[0, 0].item() == 1.0 else 2
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults as Linux does")
def test_reuse_saves_the_page_faults() -> None:
    resource = pytest.importorskip("resource")
    pages = (32 << 20) // os.sysconf("SC_PAGE_SIZE")

    def faults(make: Callable[[], torch.Tensor]) -> int:
        make().fill_(1.0)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            make().fill_(2.0)
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    pool = OutputPool()
    sizes, strides, nbytes = (8 << 20,), (1,), 32 << 20
    assert faults(lambda: pool.empty(sizes, strides, torch.float32, nbytes)) < pages // 8


def test_pages_are_given_back_within_the_range_alone() -> None:
    page = mmap.PAGESIZE
    memory = torch.full((16 * page,), 7, dtype=torch.uint8)
    start = memory.data_ptr() + 100
    give_back(start, 10 * page)
    first, last = -(-start // page) * page, (start + 10 * page) // page * page
    inside = memory[first - memory.data_ptr() : last - memory.data_ptr()]
    outside = torch.cat([memory[: first - memory.data_ptr()], memory[last - memory.data_ptr() :]])
    assert outside.eq(7).all()
    if sys.platform.startswith("linux"):
        assert inside.eq(0).all()
    give_back(start, 10)  # no whole page: nothing to do
