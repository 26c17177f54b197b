"""Matrix products by packed weights: right for every size, and with their elementwise neighbours inside."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from planned import LEVELS, Block, can_run, check, exact, planned, steps
from torch import nn
from torch.nn import functional as F

from hotloop.ir.interpret_kernel import run_schedule
from hotloop.ir.panels import PRODUCT_DTYPES, pack_panels, panel_count, panel_group, panel_sizes
from hotloop.schedule.tiles import TILES, slice_terms, tilings
from judge import assert_as_accurate

dtypes = pytest.mark.parametrize("dtype", PRODUCT_DTYPES, ids=["float32", "bfloat16", "float16"])


def test_panels_hold_the_matrix_and_zeros() -> None:
    for dtype, width, multiple in itertools.product(PRODUCT_DTYPES, (1, 3, 7, 8), (1, 4)):
        for m in (torch.randn(5, 7).to(dtype), torch.randn(7, 5).to(dtype).t()):
            sizes = panel_sizes(5, 7, width, dtype, multiple)
            panels = pack_panels(m, sizes)
            assert panels.shape == sizes and panels.is_contiguous() and len(panels) == panel_count(7, width)
            group = panel_group(dtype)
            rows = panels.unflatten(2, (width, group)).permute(1, 3, 0, 2).reshape(sizes[1] * group, -1)
            assert torch.equal(rows[:5, :7], m) and rows.count_nonzero() == m.count_nonzero()
            assert len(rows) == -(-5 // max(multiple, group)) * max(multiple, group)


@dtypes
@pytest.mark.parametrize("level", LEVELS)
def test_tiles_cover_rows_evenly(level: str, dtype: torch.dtype) -> None:
    lanes, shapes = TILES[level]
    for m in (1, 2, 7, 8, 9, 42, 128, 197):
        for n in (8, 16, 48, 100, 768, 50257):
            for tile in tilings(dtype, m, n, 64, level, 2, dtype):
                if tile.method == "amx":
                    assert (tile.height, tile.width, tile.multiple) == (32, 32, 32)
                    continue
                assert 1 <= tile.height <= m and tile.width % lanes == 0
                most = next(r for r, count, _ in shapes if lanes * count == tile.width)
                assert tile.height <= most and -(-m // tile.height) == -(-m // most)


SIZES = [
    (1, 8, 8), (1, 64, 48), (2, 9, 17), (7, 33, 50), (8, 384, 48), (9, 385, 64), (16, 100, 97), (21, 60, 148),
    (43, 769, 31), (128, 64, 10), (5, 1200, 200),
]  # fmt: skip


@dtypes
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_sizes(m: int, k: int, n: int, bias: bool, dtype: torch.dtype) -> None:
    check(nn.Linear(k, n, bias).to(dtype), torch.randn(m, k).to(dtype), kernels=["product"])


@dtypes
@pytest.mark.parametrize("threads", [1, 3, 16])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("m", "k", "n"), [(37, 20, 100), (8, 20, 16), (100, 9, 8), (3, 11, 130)])
def test_every_level_and_number_of_threads(
    m: int, k: int, n: int, level: str, threads: int, dtype: torch.dtype
) -> None:
    model = nn.Sequential(nn.Linear(k, n), nn.GELU()).to(dtype).eval().requires_grad_(False)
    x = torch.randn(m, k).to(dtype)
    made, args = planned(model, x, level=level, threads=threads)
    assert steps(made) == ["product"]
    assert_as_accurate(run_schedule(made, args, arena=True), [model(x)], exact(model, x))


@dtypes
@pytest.mark.parametrize("level", [level for level in LEVELS if can_run(level)])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 100, 50), (5, 385, 64), (50, 33, 100), (400, 61, 48)])
def test_every_level_that_this_processor_has(m: int, k: int, n: int, level: str, dtype: torch.dtype) -> None:
    model = nn.Linear(k, n).to(dtype).eval().requires_grad_(False)
    x = torch.randn(m, k).to(dtype)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="hotloop", options={"cpp.simd": level})
    with torch.no_grad():
        assert_as_accurate(compiled(x), model(x), exact(model, x))


@dtypes
def test_rows_that_vary(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(50, 70), nn.ReLU(), nn.Linear(70, 30)).to(dtype)
    model = model.eval().requires_grad_(False)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="hotloop", dynamic=True, fullgraph=True)
    with torch.no_grad():
        for m in (9, 2, 3, 8, 15, 16, 160, 161, 333, 1000):
            x = torch.randn(m, 50).to(dtype)
            assert_as_accurate(compiled(x), model(x), exact(model, x))


@dtypes
@pytest.mark.parametrize(("m", "k"), [(1, 7), (3, 33), (40, 5)])
def test_what_lies_behind_the_left_operand_is_not_multiplied(m: int, k: int, dtype: torch.dtype) -> None:
    """Rows of a number of elements that fills no group end before what is no number."""
    model = nn.Linear(k + 4, 40, bias=False).to(dtype).requires_grad_(False)
    model.weight = nn.Parameter(model.weight[:, :k].clone(), requires_grad=False)
    memory = torch.full((m, k + 1), float("nan")).to(dtype)
    memory[:, :k] = torch.randn(m, k)
    x = memory[:, :k]
    check(model, x, kernels=["product"] if k >= 8 else None)


@dtypes
def test_infinities_and_nan_come_through(dtype: torch.dtype) -> None:
    model = nn.Linear(33, 48, bias=False).to(dtype).requires_grad_(False)
    x = torch.randn(5, 33).to(dtype)
    x[1, 32], x[3, 7] = float("inf"), float("nan")
    check(model, x, kernels=["product"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_epilogue_sees_sums_that_are_not_rounded(dtype: torch.dtype) -> None:
    """As ``docs/numerics.md`` says: rounded once, in the end."""
    torch.manual_seed(0)
    model = Block(lambda p, x: (F.linear(x, p.w, p.b) * 3 - 1).sigmoid(), w=(48, 64), b=(48,)).to(dtype)
    model.requires_grad_(False)
    x = torch.randn(30, 64).to(dtype)
    check(model, x, kernels=["product"])
    truth = exact(model, x)().to(dtype)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="hotloop")
    with torch.no_grad():
        assert (compiled(x) == truth).float().mean() > 0.995 > (model(x) == truth).float().mean()
        eager = torch.compile(model, backend="hotloop", options={"precision": "eager"})
        torch.compiler.reset()
        assert_as_accurate(eager(x), model(x), exact(model, x))


@dtypes
def test_a_jump_in_the_epilogue_sees_rounded_values(dtype: torch.dtype) -> None:
    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = x @ p.w
        return torch.where(y.round() == y, y + 1, y.floor())

    model = Block(f, w=(24, 40))
    model.w = nn.Parameter(torch.randint(-2, 3, (24, 40)) * 0.5, requires_grad=False)
    check(model.to(dtype), torch.randint(-3, 4, (10, 24)).to(dtype))


@dtypes
def test_swiglu_runs_in_as_many_kernels_as_it_has_products(dtype: torch.dtype) -> None:
    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.silu(F.linear(x, p.gate)) * F.linear(x, p.up), p.down) + x

    model = Block(f, gate=(100, 32), up=(100, 32), down=(32, 100))
    check(model.to(dtype), torch.randn(2, 9, 32).to(dtype), kernels=["product", "product", "product"])


@dtypes
def test_gelu_block_with_residual(dtype: torch.dtype) -> None:
    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, p.w1, p.b1)), p.w2) + x

    model = Block(f, w1=(100, 32), b1=(100,), w2=(32, 100)).to(dtype)
    check(model, torch.randn(3, 7, 32).to(dtype), kernels=["product"] * 2)


def test_a_weight_that_lies_as_it_is_multiplied() -> None:
    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(p.b, x.view(-1, 24), p.w).view(2, 5, 40).tanh()

    check(Block(f, w=(24, 40), b=(40,)), torch.randn(2, 5, 24), kernels=["product"])


@pytest.mark.parametrize("size", [(40,), (1, 40), (10, 40), (10, 1), (1,), (), (1, 1)])
def test_biases_that_broadcast(size: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = Block(lambda p, x: torch.addmm(p.b, x, p.w), w=(24, 40), b=size).to(dtype)
        check(model, torch.randn(10, 24).to(dtype))


def test_several_results_and_a_product_that_leaves_the_graph() -> None:
    def f(p: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ p.w
        return y, y.exp(), (y > 0).sum(1), y.t() + 1

    check(Block(f, w=(24, 40)), torch.randn(10, 24))


def test_epilogues_that_do_not_fit_a_tile_stay_apart() -> None:
    def softmax(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ p.w, 1)

    def across(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = x @ p.w
        return y + y.t()

    def heads(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ p.w).view(4, 6, 3, 8).transpose(1, 2) * 2

    check(Block(softmax, w=(24, 40)), torch.randn(10, 24), kernels=["product", "loops"])
    check(Block(across, w=(24, 24)), torch.randn(24, 24), kernels=["product", "loops"])
    check(Block(heads, w=(16, 24)), torch.randn(24, 16))


def test_a_reader_of_the_results_memory_stays_apart() -> None:
    def bits(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ p.w).view(torch.int16) & 3

    model = Block(bits, w=(24, 40))
    nn.init.constant_(model.w, 3.0)
    check(model, torch.arange(240.0).view(10, 24), kernels=["product", "loops"])


def test_rows_of_a_larger_tensor_and_columns_of_one() -> None:
    check(Block(lambda p, x: x[:, 3:27] @ p.w, w=(24, 40)), torch.randn(10, 30), kernels=["product"])
    check(Block(lambda p, x: x.t() @ p.w, w=(24, 40)), torch.randn(24, 10))
    check(Block(lambda p, x: x[1::2] @ p.w, w=(24, 40)), torch.randn(10, 24), kernels=["product"])


def test_one_weight_used_twice_is_packed_once() -> None:
    made = check(Block(lambda p, x: (x @ p.w).relu() @ p.w, w=(24, 24)), torch.randn(10, 24))
    assert sum(b.packs is not None for b in made.program.buffers.values()) == 1


def test_what_is_float64_or_no_parameter_is_left_to_the_library() -> None:
    double = nn.Linear(24, 40).double()
    check(double, torch.randn(10, 24).double(), kernels=["aten.addmm.default"])
    check(Block(lambda p, x, w: x @ w), torch.randn(10, 24), torch.randn(24, 40), kernels=["aten.mm.default"])
    check(Block(lambda p, x: x @ p.w, w=(24, 2)), torch.randn(10, 24), kernels=["aten.mm.default"])
    made, _ = planned(nn.Linear(24, 40).requires_grad_(False), torch.randn(10, 24), weight_packing="off")
    assert steps(made) == ["aten.addmm.default"]


WEIGHTS = {
    "expanded": lambda: torch.randn(1, 1).expand(4096, 4096),
    "one row for all": lambda: torch.randn(1, 40).expand(24, 40),
    "columns of another": lambda: torch.randn(24, 90)[:, 3:43],
    "every other row": lambda: torch.randn(48, 40)[::2],
    "overlapping": lambda: torch.randn(200).as_strided((24, 40), (1, 2)),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_that_does_not_fill_its_memory_is_not_packed(name: str) -> None:
    model = Block(lambda p, x: (x @ p.w).relu())
    model.w = nn.Parameter(WEIGHTS[name](), requires_grad=False)
    check(model, torch.randn(10, model.w.shape[0]), kernels=["aten.mm.default", "loops"])


def test_a_weight_that_the_graph_writes_is_not_packed() -> None:
    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(24, 40), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.w
            self.w.mul_(2)
            return y + x @ self.w

    torch.compiler.reset()
    model, other = Moving(), Moving()
    other.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="hotloop")
    for _ in range(3):
        x = torch.randn(10, 24)
        torch.testing.assert_close(compiled(x), other(x))
    torch.testing.assert_close(model.w, other.w)


@dtypes
def test_long_sums_are_as_accurate_as_eagers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(4, 8000) + 1).to(dtype)
    check(nn.Linear(8000, 48).to(dtype), x, kernels=["product", "loops"])  # by two threads
    check(nn.Linear(8000, 400).to(dtype), x, kernels=["product"])


@dtypes
@pytest.mark.parametrize("threads", [2, 3, 16])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 4096, 40), (3, 1601, 17), (1, 9000, 100), (9, 2050, 64)])
def test_terms_are_divided_over_threads_that_rows_and_columns_leave_idle(
    m: int, k: int, n: int, threads: int, dtype: torch.dtype
) -> None:
    """Sums of slices are added in order: the same numbers however many threads run them."""
    model = nn.Sequential(nn.Linear(k, n), nn.GELU()).to(dtype).eval().requires_grad_(False)
    x = torch.randn(m, k).to(dtype)
    for level in ("avx512", "amx"):
        made, args = planned(model, x, level=level, threads=threads)
        assert set(steps(made)) <= {"product", "loops"}
        assert_as_accurate(run_schedule(made, args, arena=True), [model(x)], exact(model, x))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        torch.compiler.reset()
        compiled = torch.compile(model, backend="hotloop")
        with torch.no_grad():
            first = compiled(x)
            assert_as_accurate(first, model(x), exact(model, x))
            assert torch.equal(first, compiled(x))
    finally:
        torch.set_num_threads(before)


def test_slices_are_as_many_as_threads_are_idle() -> None:
    for k in (8, 1000, 1024, 1025, 4096, 20_000, 36_000):
        for threads in (1, 2, 3, 16, 64):
            for level in LEVELS:
                (first, *_) = tilings(torch.float32, 1, 100, k, level, threads, torch.float32)
                panels = panel_count(100, first.width)
                assert first.slices * panels <= max(threads, panels)
                size = slice_terms(k, first.slices)
                assert 0 < k - (first.slices - 1) * size <= size
                assert first.slices == 1 or size >= 512
    made, _ = planned(nn.Linear(4096, 40).requires_grad_(False), torch.randn(1, 4096), threads=4)
    assert steps(made) == ["product", "loops"]
    wide, _ = planned(nn.Linear(4096, 400).requires_grad_(False), torch.randn(1, 4096), threads=4)
    assert steps(wide) == ["product"]


@dtypes
@pytest.mark.parametrize("dynamic", [False, True])
def test_operands_of_every_layout_and_size(dynamic: bool, dtype: torch.dtype) -> None:
    """No rows, one row, batches, and rows that lie apart, upside down or transposed."""
    model = Block(lambda p, x: F.linear(x, p.w, p.b).relu(), w=(37, 29), b=(37,)).to(dtype)
    model = model.requires_grad_(False)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="hotloop", dynamic=dynamic)
    for x in (
        torch.randn(0, 29),
        torch.randn(1, 29),
        torch.randn(29),
        torch.randn(5, 1, 29),
        torch.randn(3, 7, 29),
        torch.randn(2, 0, 29),
        torch.randn(14, 58)[::2, ::2],
        torch.randn(29, 11).t(),
        torch.randn(4, 29, 3).transpose(1, 2),
        torch.randn(6, 29).expand(2, 6, 29),
        torch.randn(1, 29).expand(6, 29),
    ):
        x = x.to(dtype)
        with torch.no_grad():
            assert_as_accurate(compiled(x), model(x), exact(model, x))
