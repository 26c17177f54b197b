"""How sizes come to vary: asked for, noticed, given as numbers, told by data; and what guards make of them.

What comes in: functions compiled the ways that ``torch.compile`` offers. What goes out: nothing. What holds:
results are eager's; as many compiles as the guards need, and no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import check_sizes, counted

from hotloop.codegen import host


@pytest.fixture
def data_dependent() -> Iterator[None]:
    """Dynamo keeps calls in the graph whose results' sizes are data."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def rows(*sizes: int, columns: int = 6) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(n, columns),) for n in sizes]


def work(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 2, -1) + x.sum(0)


# --- asked for ----------------------------------------------------------------------------------------------


def test_a_second_size_makes_it_vary() -> None:
    with counted() as found:
        g = torch.compile(work, backend="hotloop")
        for n in (5, 8, 2, 33, 100, 17):
            (x,) = rows(n)[0]
            torch.testing.assert_close(g(x), work(x))
    assert (found.static, found.symbolic, found.refused) == (1, 1, [])


def test_a_dimension_that_is_marked_varies_from_the_start() -> None:
    with counted() as found:
        g = torch.compile(work, backend="hotloop")
        for n in (5, 8, 2, 33):
            (x,) = rows(n)[0]
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(g(x), work(x))
    assert (found.static, found.symbolic, found.refused) == (0, 1, [])


def test_the_other_dimensions_stay_numbers() -> None:
    texts: list[str] = []
    with pytest.MonkeyPatch.context() as patch, counted():
        patch.setattr(
            "hotloop.backend.print_host",
            lambda plan, name: texts.append(str(plan)) or host.print_host(plan, name),
        )
        (x,) = rows(5)[0]
        torch._dynamo.mark_dynamic(x, 0)
        torch.compile(work, backend="hotloop")(x)
    (text,) = texts
    assert "6*" in text and text.count("vector for i1 in 0..6") >= 1


def test_sizes_beyond_those_of_32_bit_positions_are_compiled_again() -> None:
    with pytest.MonkeyPatch.context() as patch, counted() as found:
        patch.setattr("hotloop.ir.sizes.MOST", 100)
        g = torch.compile(work, backend="hotloop", dynamic=True)
        for n in (5, 100, 101, 40, 300, 101):
            (x,) = rows(n)[0]
            torch.testing.assert_close(g(x), work(x))
    assert (found.static, found.symbolic) == (2, 1)


def padded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    both = torch.cat((x * 2, y + 1), -1)
    return F.pad(both, (2, 3)) + F.pad(both.relu(), (3, 2))


def pooled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.avg_pool1d(x.exp(), 2), F.avg_pool1d(y.sin(), 3, 1)


@pytest.mark.parametrize("function", [padded, pooled])
def test_masks_are_cut_out_of_loops_where_sizes_vary_too(function: Any) -> None:
    texts: list[str] = []
    with pytest.MonkeyPatch.context() as patch, counted():
        patch.setattr(
            "hotloop.backend.print_host",
            lambda plan, name: texts.append(str(plan)) or host.print_host(plan, name),
        )
        inputs = [(torch.randn(4, n), torch.randn(4, m)) for n, m in ((40, 33), (7, 5), (64, 65))]
        g = torch.compile(function, backend="hotloop", dynamic=True)
        for x, y in inputs:
            torch.testing.assert_close(g(x, y), function(x, y))
    (text,) = texts
    assert "masked" not in text and "where" not in text


def test_sizes_of_0_and_1_are_compiled_apart() -> None:
    with counted() as found:
        g = torch.compile(work, backend="hotloop", dynamic=True)
        for n in (5, 0, 1, 7, 0, 1, 2):
            (x,) = rows(n)[0]
            torch.testing.assert_close(g(x), work(x))
    assert not found.refused and found.symbolic + found.static == 3


def test_one_graph_serves_0_and_1_too_where_nothing_is_assumed() -> None:
    def f(x: torch.Tensor) -> Any:
        joined = torch.cat([x, x * 2], 1)
        return (
            torch.softmax(x, -1).sum(0),
            x.t().contiguous() * 2,
            joined.mean(1),
            x.var(0),
            joined[:, 1:] + 1,
        )

    inputs = []
    for m, n in ((5, 7), (0, 3), (1, 100), (3, 1), (1, 1), (17, 33), (0, 1)):
        x = torch.randn(m, n)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        torch._dynamo.decorators.mark_unbacked(x, 1)
        inputs.append((x,))
    check_sizes(f, inputs, fullgraph=True, dynamic=None)


# --- guards -------------------------------------------------------------------------------------------------


def test_a_branch_on_a_size_is_compiled_for_either_side() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] % 8 == 0 else x + 1

    check_sizes(f, rows(8, 16, 64, 5, 7, 24, 31), compiles=2)


def test_a_guard_of_divisibility_serves_reshapes() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] % 4:
            return x
        return x.view(x.shape[0] // 4, 4, -1).sum(1) * 2

    texts: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "hotloop.backend.print_host",
            lambda plan, name: texts.append(str(plan)) or host.print_host(plan, name),
        )
        check_sizes(f, rows(8, 16, 64, 12))
    assert "%" not in texts[0]


def test_a_size_that_is_fixed_by_the_program_is_a_number() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y + x.shape[1]

    given = [(torch.randn(n, 6), torch.randn(6, n)) for n in (5, 9, 33)]
    for _, y in given:
        torch._dynamo.mark_static(y, 0)
    check_sizes(f, given)


def test_equal_sizes_are_one_size_until_they_are_not() -> None:
    given = [(torch.randn(m, 3), torch.randn(n, 3)) for m, n in ((5, 5), (7, 7), (4, 9))]
    check_sizes(lambda x, y: (x * 2, y + 1), given, compiles=2)


def test_other_strides_are_another_graph() -> None:
    check_sizes(
        lambda x: x.softmax(-1) + 1,
        [(torch.randn(5, 7),), (torch.randn(9, 4),), (torch.randn(7, 5).t(),), (torch.randn(4, 12).t(),)],
        compiles=2,
    )


def test_positions_whose_sign_is_not_known() -> None:
    def f(x: torch.Tensor, k: int) -> Any:
        at = (torch.arange(x.shape[0]) - k) // 3
        return at * 2, x[at % 4]

    check_sizes(f, [(torch.randn(n, 6), k) for n, k in ((9, 3), (20, 7), (33, 2))])


def test_strides_that_vary_by_themselves() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + x.sum(1, keepdim=True)

    check_sizes(
        f, [(torch.randn(m, n + extra)[:, :n],) for m, n, extra in ((5, 7, 2), (8, 3, 9), (31, 33, 5))]
    )


# --- numbers ------------------------------------------------------------------------------------------------


def test_whole_numbers_as_arguments() -> None:
    def f(x: torch.Tensor, n: int) -> Any:
        return x[:n] * n + n // 2, n * 2, torch.full((n,), n)

    check_sizes(f, [(torch.randn(40, 6), n) for n in (5, 7, 2, 33, 16)])


def test_fractions_as_arguments() -> None:
    check_sizes(
        lambda x, a: x * a + a, [(x, a) for (x,), a in zip(rows(5, 8, 33), (0.5, 2.25, -3.0), strict=True)]
    )


def test_arithmetic_on_sizes() -> None:
    def f(x: torch.Tensor) -> Any:
        m, n = x.shape
        return x / m + n**0.5, m // 3 * 2 + n % 4, max(m, 4) - min(n, 3), (m + n) / 2

    check_sizes(f, [(torch.randn(m, n),) for m, n in ((5, 7), (8, 9), (33, 6), (70, 34))])


def test_a_size_that_is_computed_in_floating_point() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x[: int(x.shape[0] * 0.75)] * 2

    check_sizes(f, rows(5, 8, 33, 100))


def test_what_sizes_cannot_say_is_compiled_for_each() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x[: 40 // (x.shape[1] - y.shape[1])] * 2

    with counted() as found:
        g = torch.compile(f, backend="hotloop", dynamic=True)
        for m, n in ((9, 4), (12, 7), (14, 6)):
            x, y = torch.randn(50, m), torch.randn(3, n)
            torch.testing.assert_close(g(x, y), f(x, y))
    assert len(found.refused) == 1 and "divisor" in found.refused[0]
    assert (found.symbolic, found.static) == (0, 3)


# --- sizes that data tell -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("data_dependent")
def test_nonzero() -> None:
    def f(x: torch.Tensor) -> Any:
        at = torch.nonzero(x > 0)
        return x[at[:, 0], at[:, 1]] * 2, at.float().sum(0), at.shape[0]

    none = (-torch.ones(3, 6),)
    check_sizes(f, [*rows(5, 2, 33, 100), none], fullgraph=True)


@pytest.mark.usefixtures("data_dependent")
def test_masked_select() -> None:
    def f(x: torch.Tensor) -> Any:
        chosen = torch.masked_select(x, x > 0)
        return chosen.exp() + 1, torch.cat([chosen, x.view(-1)]) * 2, chosen.sum()

    check_sizes(f, [*rows(5, 2, 33, 100), (-torch.ones(3, 6),), (torch.ones(3, 6),)], fullgraph=True)


@pytest.mark.usefixtures("data_dependent")
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_item_is_a_number_in_the_graph(dtype: torch.dtype) -> None:
    def f(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x * (n.sum() + 1).item() + 1

    check_sizes(
        f,
        [(x, torch.tensor([k, 2]).to(dtype)) for (x,), k in zip(rows(5, 2, 33), (3, 0, -7), strict=True)],
        fullgraph=True,
    )


@pytest.mark.usefixtures("data_dependent")
def test_item_as_a_size() -> None:
    def f(n: torch.Tensor) -> Any:
        k = (n.sum() + 0).item()
        torch._check(k >= 0)
        return torch.arange(k) * 2, torch.ones(k, 3) / 2

    check_sizes(f, [(torch.tensor([k, 1]),) for k in (3, 0, 17, 100)], fullgraph=True)


@pytest.mark.usefixtures("data_dependent")
def test_what_the_program_asserts_of_data_is_checked() -> None:
    def f(n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        k = (n.sum() + 0).item()
        torch._check(k >= 4)
        return torch.ones(k) + x.sum(0)

    g = torch.compile(f, backend="hotloop", fullgraph=True, dynamic=True)
    for n in (3, 5):
        assert g(torch.tensor([n, 2]), torch.ones(n)).tolist() == [n + 1.0] * (n + 2)
    with pytest.raises(RuntimeError):
        g(torch.tensor([2, 1]), torch.ones(2))


# --- the running program ------------------------------------------------------------------------------------


def test_threads_may_call_with_different_sizes() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.gelu(x @ w) @ w.t()).softmax(-1)  # two products: intermediates lie in the arena

    w = torch.randn(6, 30)
    torch._dynamo.mark_static(w)
    with counted() as found:
        g = torch.compile(f, backend="hotloop", dynamic=True)
        g(torch.randn(5, 6), w)
        wrong: list[int] = []

        def call(n: int) -> None:
            for k in range(20):
                x = torch.randn(n + k % 3, 6)
                if not torch.allclose(g(x, w), f(x, w), atol=1e-5):
                    wrong.append(n)

        workers = [threading.Thread(target=call, args=(n,)) for n in (3, 50, 200, 8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not wrong and found.symbolic == 1


def test_results_are_not_written_by_later_calls() -> None:
    g = torch.compile(lambda x: x * 2, backend="hotloop", dynamic=True)
    given = [torch.randn(n, 600) for n in (700, 900, 700, 900)]
    results = [g(x) for x in given]
    for x, y in zip(given, results, strict=True):
        torch.testing.assert_close(y, x * 2)


def test_random_numbers_are_those_of_a_fixed_size() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + torch.rand_like(x)

    dynamic = torch.compile(f, backend="hotloop", dynamic=True)
    dynamic(torch.ones(3, 5))
    for shape in ((4, 7), (33, 17)):
        x = torch.ones(shape)
        torch.manual_seed(3)
        ours = dynamic(x)
        torch._dynamo.reset()
        torch.manual_seed(3)
        torch.testing.assert_close(ours, torch.compile(f, backend="hotloop", dynamic=False)(x))
        torch._dynamo.reset()
        dynamic = torch.compile(f, backend="hotloop", dynamic=True)
        dynamic(torch.ones(3, 5))


def test_an_index_out_of_range_raises() -> None:
    f = torch.compile(lambda x, i: x[i] * 2, backend="hotloop", dynamic=True)
    for n in (5, 9):
        f(torch.randn(n, 3), torch.tensor([0, n - 1, -n]))
        with pytest.raises(IndexError):
            f(torch.randn(n, 3), torch.tensor([0, n, 1]))


def number(ids: torch.Tensor, k: int) -> int:
    """What Dynamo sees as a number that data tell."""
    return int(ids[k].item())


SLICES: dict[str, Any] = {
    "stop": lambda x, i: x[: number(i, 0)] * 2,
    "start": lambda x, i: x[number(i, 0) :] * 2,
    "from the end": lambda x, i: x[-number(i, 0) :] * 2,
    "both": lambda x, i: (x[number(i, 0) : number(i, 1)] * 2, x[number(i, 0) : number(i, 1)].sum(0)),
    "steps": lambda x, i: x[:, number(i, 0) : number(i, 1) : 2] * 2,
    "of what was computed": lambda x, i: (
        (x * 2).exp()[: number(i, 0)] + 1, (x @ x.T)[: number(i, 0), number(i, 1) :]
    ),
    "returned as they are": lambda x, i: (x[: number(i, 0)], x[number(i, 0) :]),
    "put together": lambda x, i: torch.cat([x[: number(i, 0)], x[number(i, 0) :]]) * 2,
    "pieces": lambda x, i: [t * 2 for t in torch.tensor_split(x, [number(i, 0)])],
    "written": lambda x, i: (x[number(i, 0) :].mul_(2), x + 1)[1],
    "sums": lambda x, i: x[: number(i, 0)].sum() + x[: number(i, 1)].sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", SLICES)
def test_slices_whose_bounds_data_tell(name: str, data_dependent: None) -> None:
    torch._dynamo.reset()
    fn = SLICES[name]
    g = torch.compile(fn, backend="hotloop")
    for ids in ([2, 6], [6, 2], [0, 8], [3, 5]):
        x, i = torch.randn(8, 5), torch.tensor(ids)
        mine, eagers = x.clone(), x.clone()
        torch.testing.assert_close(g(mine, i), fn(eagers, i))
        torch.testing.assert_close(mine, eagers)


def test_the_derivative_of_a_slice_whose_bounds_data_tell(data_dependent: None) -> None:
    torch._dynamo.reset()

    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x[: number(i, 0)].exp().sum() + x[number(i, 1) :].sin().sum()

    g = torch.compile(fn, backend="hotloop")
    for ids in ([2, 6], [6, 2], [0, 8]):
        x, i = torch.randn(8, 5, requires_grad=True), torch.tensor(ids)
        (got,), (want,) = torch.autograd.grad(g(x, i), x), torch.autograd.grad(fn(x, i), x)
        torch.testing.assert_close(got, want)


def test_what_a_call_tells_is_known_before_it_is_used(data_dependent: None) -> None:
    torch._dynamo.reset()

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = (x.sum(1) > 0).nonzero().squeeze(1)
        picked = x[rows].softmax(-1)
        return x.index_copy(0, rows, picked), picked.mean(0)

    g = torch.compile(fn, backend="hotloop")
    for n in (4, 6, 3):
        x = torch.randn(n, 5)
        torch.testing.assert_close(g(x), fn(x), equal_nan=True)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.nn.functional.max_pool1d(x.relu(), 3, 2, 1),
        lambda x: x[..., 1::2] * 3 + x[..., ::2][..., : x.shape[-1] // 2],
        lambda x: x.flip(-1) - x,
        lambda x: x.repeat_interleave(2, -1).relu(),
        lambda x: x[..., ::3].add_(1).sum(-1) + x.sum(-1),
    ],
    ids=["pool", "strides", "flip", "repeat", "written"],
)
def test_the_last_vector_of_a_row_of_any_length(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Where it cannot be partly filled it overlaps the one before, unless the loop reads what it writes."""
    torch.compiler.reset()
    f = torch.compile(fn, backend="hotloop", dynamic=True)
    for n in (*range(2, 40), 63, 64, 65, 66, 127, 129):
        x = torch.randn(3, n)
        ours, eager = x.clone(), x.clone()
        torch.testing.assert_close(f(ours), fn(eager))
        assert torch.equal(ours, eager)
