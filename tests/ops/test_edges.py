"""Memory as users hand it over, and writes to it: strides, overlaps, offsets, views, shared results.

What comes in: tensors in every layout, functions that read, write and return them. What holds: see
against_eager.py. The next file is test_ops.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hotloop
from against_eager import Function, check

F = torch.nn.functional


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


LAYOUTS: dict[str, Function] = {
    "transposed": lambda: torch.randn(5, 6, 4).permute(2, 1, 0),
    "expanded": lambda: torch.randn(4, 1, 5).expand(4, 6, 5),
    "one element": lambda: torch.randn(1).expand(4, 6, 5),
    "sliced": lambda: torch.randn(10, 14, 12)[1:9:2, 2:14:2, 3:8],
    "overlapping": lambda: torch.randn(100).as_strided((4, 6, 5), (3, 2, 1), 3),
}


def readers(x: Tensor) -> list[Tensor]:
    return [
        x + 1, x.sum(1), x.softmax(1), x.transpose(0, 2) * 2, x.reshape(-1) * 2, torch.cat([x, x * 2], 1),
        x[1:, ::2].relu(), x.argmax(1), x.clone(), x.contiguous() * 3, x[0] - 1, x.roll(2, 1),
        x[:, torch.tensor([0, -1, 2])], torch.zeros_like(x) + x.mean(0), torch.bmm(x, x.transpose(1, 2)),
        x.unfold(1, 3, 2) * 2, x.diagonal(0, 0, 1) + 1, x.sum(1, keepdim=True).expand(4, 6, 5),
    ]  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    check(readers, LAYOUTS[name]())


def channels(x: Tensor) -> list[Tensor]:
    return [
        x.relu(), x.sum((2, 3)), F.max_pool2d(x, 2), torch.cat([x, x], 1), F.interpolate(x, scale_factor=2.0),
        F.group_norm(x, 4), F.pad(x, (1, 2, 0, 1)), x.permute(0, 2, 3, 1).reshape(-1, 8) * 2,
        F.conv2d(x, torch.ones(4, 8, 3, 3)) + 1, F.pixel_shuffle(x, 2), F.adaptive_avg_pool2d(x, (2, 3)),
    ]  # fmt: skip


def test_channels_last() -> None:
    check(channels, torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last))


def assign(x: Tensor, y: Tensor) -> Tensor:
    x[1:3] = y
    return x + 1


def views_of_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.t()
    y.add_(1)
    z = x[0]
    z.zero_()
    return y, z


def swap(x: Tensor, y: Tensor) -> None:
    t = x.clone()
    x.copy_(y)
    y.copy_(t)


def masked(x: Tensor) -> Tensor:
    x[x > 0] = 0
    return x


MEMORY = torch.randn(20)
WRITES: dict[str, tuple[Function, list[Tensor]]] = {
    "slice": (lambda x: x[1:3].mul_(2), [torch.randn(5)]),
    "step": (lambda x: (x.view(-1)[::2].add_(1), x.sum()), [torch.randn(4, 6)]),
    "assign": (assign, [torch.randn(4, 6), torch.randn(6)]),
    "assign bfloat16": (assign, [torch.randn(4, 6).bfloat16(), torch.randn(6)]),
    "views of a view": (views_of_a_view, [torch.randn(12, 12)[::2, 1:9:2]]),
    "inputs that overlap": (lambda x, y: (x.add_(1), y * 2), [MEMORY[:10], MEMORY[5:15]]),
    "one input twice": (lambda x, y: x.add_(y), [MEMORY, MEMORY]),
    "swap": (swap, [torch.randn(5), torch.randn(5)]),
    "shift": (lambda x: x[1:].copy_(x[:-1].clone()), [torch.randn(9)]),
    "mask": (masked, [torch.randn(4, 6)]),
    "transposed mask": (lambda x: x.masked_fill_(x > 0, 1), [torch.randn(5, 4).t()]),
    "out": (lambda x, o: torch.add(x, 1, out=o), [torch.randn(5), torch.randn(5)]),
    "in place transpose": (lambda x: x.t_(), [torch.randn(3, 4)]),
    "diagonal": (lambda x: x.fill_diagonal_(1.0), [torch.randn(5, 5)]),
    "scatter": (
        lambda x: x.scatter_add_(1, torch.tensor([[0, 0], [2, 2]]), x[:2, :2] * 2), [torch.randn(5, 4)]
    ),
    "accumulate": (
        lambda x: x.index_put_((torch.tensor([1, 1]),), torch.ones(2, 4), accumulate=True),
        [torch.randn(5, 4)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_writes_to_inputs(name: str) -> None:
    fn, inputs = WRITES[name]
    check(fn, *inputs)


RESULTS: dict[str, Function] = {
    "the input": lambda x: (x, x, x[1:], x.view(1, -1)),
    "views of a result": lambda x: (lambda y: (y, y[1:], y.t(), y))(x + 1),
    "pieces": lambda x: (x + 1).chunk(2),
    "pieces of the input": lambda x: x.split(2),
    "equal results": lambda x: (x * 1, x * 1, x.clone(), x.clone(), torch.ones(3), torch.ones(3)),
    "no-ops": lambda x: (x + 0, x / 1, x.to(torch.float32), x.contiguous(), x.detach()),
    "not tensors": lambda x: (None, 3, x * 1, "a"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_shared_results(name: str) -> None:
    check(RESULTS[name], torch.randn(6, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int64], ids=str)
def test_sizes_around_vectors(dtype: torch.dtype) -> None:
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        return [
            x * y + 1, x.sum(-1), x.sum(0), x.argmax(-1), x.t() + y.t(), x.flip(1), torch.cat([x, y], 1),
            x.amax(0), x.bool().any(1), x[:, ::2] * 2, x > y,
        ]  # fmt: skip

    for n in (1, 7, 8, 9, 15, 17, 31, 33, 63, 65):
        torch._dynamo.reset()
        check(fn, (torch.randn(5, n) * 9).to(dtype), (torch.randn(5, n) * 9).to(dtype))


def unwritten(x: Tensor) -> list[Tensor]:
    dtypes = (
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.uint16,
    )
    made = [torch.empty(3, 5, dtype=dtype) for dtype in dtypes]
    strided = torch.empty_strided((3, 4), (1, 3)), torch.empty_strided((3, 4), (9, 2))
    like = torch.empty_like(x), x.new_empty(7), x.new_empty_strided((2, 2), (1, 2))
    return [*made, *strided, *like, torch.empty(4) + x[0]]


def test_memory_that_nobody_wrote_is_filled_where_the_user_asks_for_that() -> None:
    x = torch.randn(3, 4).t().contiguous().t()
    before = torch.are_deterministic_algorithms_enabled()

    def compiled() -> list[Tensor]:
        torch._dynamo.reset()
        with hotloop.config.patch(check=False):  # so that graphs are kept
            made: list[Tensor] = torch.compile(unwritten, backend="hotloop")(x)
        return made

    try:
        for fills in (False, True, False, True):
            torch.use_deterministic_algorithms(fills)
            got, want = compiled(), unwritten(x)
            assert [(g.dtype, g.shape, g.stride()) for g in got] == [
                (w.dtype, w.shape, w.stride()) for w in want
            ]
            if fills:
                for g, w in zip(got, want, strict=True):
                    torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)
    finally:
        torch.use_deterministic_algorithms(before)


_NUMBERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", [torch.bool, *_NUMBERS, torch.bfloat16, torch.float64], ids=str)
def test_one_element_beside_many_where_guarded(dtype: torch.dtype) -> None:
    def fn(one: Tensor, x: Tensor) -> list[Tensor]:
        truth, more = one > x, [] if dtype is torch.bool else [one * x, one - x]
        made = [truth, one == x, torch.maximum(one, x), torch.where(truth, one, x), one < one * one, *more]
        return [torch.cat([a.expand(x.shape), a.expand(x.shape)]) for a in made]

    check(fn, torch.full((1, 1), 3).to(dtype), (torch.randn(20, 5) * 9).abs().to(dtype))
