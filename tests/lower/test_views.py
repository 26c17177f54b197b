"""Views through lowering against eager: each operator, and random chains of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from check import check, lowered
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from hotloop.ir.loops import Pointwise

Function = Callable[..., Any]
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)


def counted(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Elements that tell where they came from."""
    x = torch.arange(math.prod(shape)).reshape(shape)
    return x % 3 == 1 if dtype is torch.bool else x.to(dtype)


VIEWS: dict[str, Function] = {
    "expand": lambda x: x[:, :1].expand(2, -1, 5, 4),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, -1),
    "t": lambda x: x[0].t(),
    "view": lambda x: x.reshape(6, -1),
    "reshape_across": lambda x: x.transpose(0, 1).reshape(4, 2, 3),
    "slice": lambda x: x[:, 1:3:2, -3:],
    "slice_clamped": lambda x: x[5:, -100:100],
    "select": lambda x: x[1, :, -2],
    "split": lambda x: torch.split(x, 2, 1),
    "split_sizes": lambda x: torch.split(x, [1, 0, 2], 1),
    "chunk": lambda x: x.chunk(3, -1),
    "unbind": lambda x: x.unbind(1),
    "squeeze": lambda x: x[:1].squeeze(),
    "squeeze_dim": lambda x: x[:1, :, :1].squeeze(-1).squeeze(1),
    "squeeze_dims": lambda x: x[:1, :, :1].squeeze((0, 1, 2)),
    "unsqueeze": lambda x: x.unsqueeze(1).unsqueeze(-1),
    "unfold": lambda x: x.unfold(1, 2, 1).unfold(2, 3, 1),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "diagonal_above": lambda x: x.diagonal(1, -1, 0),
    "diagonal_below": lambda x: x.diagonal(-2, 0, 2),
    "as_strided": lambda x: x.as_strided((3, 4), (2, 3), 1),
    "detach": lambda x: x.detach(),
    "view_copy": lambda x: torch.ops.aten.view_copy(x, [24]),
    "split_copy": lambda x: torch.ops.aten.split_copy(x, 2, 1),
    "movedim": lambda x: x.movedim(0, -1),
    "narrow": lambda x: x.narrow(2, 1, 2),
}
MOVES: dict[str, Function] = {
    "flip": lambda x: x.flip(0, -1),
    "roll": lambda x: x.roll((1, -5), (0, 2)),
    "roll_flat": lambda x: x.roll(7),
    "roll_twice": lambda x: x.roll((1, 1), (2, 2)),
    "repeat": lambda x: x.repeat(2, 1, 3, 2),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 1),
    "repeat_interleave_flat": lambda x: x.repeat_interleave(2),
    "rot90": lambda x: (x.rot90(1), x.rot90(2, (0, 2)), x.rot90(-1, (1, 2)), x.rot90(4)),
    "tril": lambda x: (x.tril(), x.tril(-1), x.triu(1), x.triu(-2)),
    "cat": lambda x: torch.cat([x, x[:, :1], x[:, 1:]], 1),
    "cat_last": lambda x: torch.cat([x, x.flip(0)], -1),
    "stack": lambda x: (torch.stack([x, x.roll(1)]), torch.stack([x, x], -1)),
    "pad": lambda x: functional.pad(x, (1, 2, 0, 3)),
    "pad_negative": lambda x: functional.pad(x, (-1, 2, 3, -1, -1, 0)),
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:, :2] * 0, 1, 0, 3, 2),
    "slice_scatter_end": lambda x: torch.slice_scatter(x, x[:, :, :2], 2, -2),
    "select_scatter": lambda x: torch.select_scatter(x, x[:, 0], 1, -1),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(x, x[:, :, 0], 0, 1, 2),
    "diagonal_scatter_off": lambda x: torch.diagonal_scatter(x, x[:, :1, 0], -2, 1, 2),
    "diagonal_scatter_above": lambda x: torch.diagonal_scatter(x, x[:, :, 0], 1, 1, 2),
}
SOURCES: dict[str, Function] = {
    "contiguous": lambda dtype: counted(2, 3, 4, dtype=dtype),
    "transposed": lambda dtype: counted(4, 3, 2, dtype=dtype).transpose(0, 2),
    "strided": lambda dtype: counted(4, 3, 9, dtype=dtype)[1::2, :, ::2][:, :, :4],
    "expanded": lambda dtype: counted(2, 1, 4, dtype=dtype).expand(2, 3, 4),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", sorted(SOURCES))
@pytest.mark.parametrize("name", sorted(VIEWS))
def test_views(name: str, source: str, dtype: torch.dtype) -> None:
    x = SOURCES[source](dtype)
    if name == "as_strided" and source != "contiguous":
        x = x.contiguous()
    # Where in its storage an input begins is known at the call only: as_strided from there is PyTorch's.
    views = name != "as_strided"
    check(VIEWS[name], x, own=views, strides=views, exact=True)
    if dtype is torch.float32:  # once more on a value computed in the program, and read by another operation
        check(lambda x: _also_computed(VIEWS[name], x), x, exact=True)


def _also_computed(f: Function, x: torch.Tensor) -> Any:
    out = f(torch.logical_not(x) if x.dtype is torch.bool else x + 1)
    return [torch.eq(o, 5) for o in (out if isinstance(out, (tuple, list)) else [out])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", sorted(SOURCES))
@pytest.mark.parametrize("name", sorted(MOVES))
def test_moves(name: str, source: str, dtype: torch.dtype) -> None:
    if dtype is torch.bool and name == "slice_scatter":
        pytest.skip("eager has no bool * 0 of bool")
    # Scatters into what is not dense have eager's gaps between the elements: PyTorch makes them.
    own = not ("scatter" in name and source in ("strided", "expanded"))
    check(MOVES[name], SOURCES[source](dtype), own=own, exact=True)


@pytest.mark.parametrize("name", ["view", "permute", "slice", "split", "unsqueeze", "unfold"])
def test_a_view_of_an_input_is_no_operation(name: str) -> None:
    assert not lowered(VIEWS[name], counted(2, 3, 4)).ops


def test_views_of_scalars_and_of_nothing() -> None:
    check(
        lambda x: (x.reshape(1, 1), x.expand(2, 3), x.squeeze(), x.unsqueeze(0), x.unfold(0, 1, 1)),
        torch.tensor(3.0),
    )
    check(lambda x: (x.flip(()), x.repeat(2), x.roll(1), x.t(), x.permute(())), torch.tensor(3.0))
    check(
        lambda x: (x.reshape(0, 5), x.transpose(0, 1), x[:, 1:], x.repeat(2, 2), x.roll(1, 0), x.roll(2)),
        torch.ones(3, 0),
    )
    check(
        lambda x: (x.reshape(4, 0, 2), x.expand(2, 0, 3), x.flip(1), x[:0], x.unfold(1, 2, 1)),
        torch.ones(0, 3),
    )
    check(
        lambda x: (functional.pad(x, (1, 2)), torch.cat([x, x], 1), x.as_strided((0, 2), (1, 1))),
        torch.ones(3, 0),
    )


def test_cat_promotes_and_drops_legacy_empties() -> None:
    a, i, b = torch.randn(2, 3), torch.arange(6).reshape(2, 3), torch.tensor([[True, False, True]] * 2)
    check(lambda *t: torch.cat(t), a, i, b, exact=True)
    check(lambda *t: torch.cat(t, 1), a.bfloat16(), b, i, exact=True)
    check(lambda e, a: torch.cat([e, a, e], 1), torch.empty(0), a, exact=True)
    check(lambda e: torch.cat([e, e], 0), torch.empty(0), exact=True)
    check(lambda a, z: torch.cat([a, z, a], 1), a, torch.empty(2, 0), exact=True)
    check(lambda a: torch.cat([a] * 12), a, own=False, exact=True)
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    check(lambda x: torch.cat([x, x + 1], 1), last, exact=True)


def test_cat_of_joined_pieces_needs_no_masks_where_sliced_apart() -> None:
    """Reading one part of a cat decides its masks by ranges, once the reader substitutes its index."""
    (op,) = (o for o in lowered(lambda a, b: torch.cat([a, b]), torch.ones(3), torch.ones(4)).ops)
    assert isinstance(op, Pointwise)
    (v,) = op.vars
    assert op.body.op == "masked"
    assert op.body.substitute({v: type(v).__radd__(v, 0) % 3}).op == "load"


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("shape, pad", [
    ((2, 3, 5), (2, 4)), ((3, 7), (6, 0)), ((2, 3, 4, 5), (1, 2, 3, 0)), ((3, 4, 5), (0, 2, 1, 1)),
    ((1, 2, 3, 4, 5), (1, 2, 0, 3, 2, 1)), ((2, 3, 5), (-1, 2)), ((2, 3, 1), (0, 0)),
])  # fmt: skip
def test_edge_pads(mode: str, shape: tuple[int, ...], pad: tuple[int, ...]) -> None:
    check(lambda x: functional.pad(x, pad, mode=mode), counted(*shape), exact=True)


def test_padding_with_infinity() -> None:
    check(lambda x: functional.pad(x, (1, 1), value=-math.inf), torch.randn(3).bfloat16(), exact=True)
    check(lambda x: functional.pad(x, (1, 1, 2, 0), value=7), counted(2, 2, dtype=torch.int64), exact=True)
    check(lambda x: functional.pad(x, (0, 3), value=True), counted(5, dtype=torch.bool), exact=True)


def test_dtype_views() -> None:
    check(lambda x: x.view(torch.int32), torch.randn(3, 4), exact=True)
    check(lambda x: x.t().view(torch.float32), counted(3, 4, dtype=torch.int32), exact=True)
    check(lambda x: (x + 1).view(torch.int16) + 1, torch.randn(3, 4).bfloat16(), exact=True)
    check(lambda x: (x + 1).view(torch.int16), torch.randn(3, 4), own=False, exact=True)
    check(lambda x: (x + 1).view(torch.int64), torch.randn(3, 4), own=False, exact=True)


def test_as_strided_of_other_layouts() -> None:
    check(lambda x: (x + 1).as_strided((2, 3), (1, 2)), counted(2, 3), exact=True)
    check(lambda x: (x + 1).as_strided((2, 2, 2), (1, 0, 3), 2), counted(3, 4).t(), exact=True)
    check(lambda x: x[2:5].as_strided((3, 2), (1, 1), 2), counted(7, 1), own=False, strides=False, exact=True)
    check(lambda x: x.as_strided((3,), (1,), 7), counted(20)[5:], own=False, exact=True)
    check(lambda x: x.as_strided((2, 3), (5, 1)), counted(4, 5)[:, :3], own=False, strides=False, exact=True)
    last = counted(2, 3, 4, 5).to(memory_format=torch.channels_last)
    check(lambda x: (x * 2).as_strided((7, 3), (5, 2), 4), last, exact=True)


def test_pixel_shuffles() -> None:
    x = counted(2, 12, 4, 6)
    check(
        lambda x: (
            functional.pixel_shuffle(x, 2),
            functional.pixel_unshuffle(x, 2),
            functional.channel_shuffle(x, 3),
        ),
        x,
        exact=True,
    )
    check(lambda x: functional.pixel_shuffle(x, 2), x.to(memory_format=torch.channels_last), exact=True)


# --- chains -------------------------------------------------------------------------------------------------


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def step(draw: st.DrawFn, x: torch.Tensor) -> Function:
    """One operation that suits a tensor of this shape. Its arguments are drawn now, so that it can run
    again."""
    kinds = ["unsqueeze", "reshape", "repeat", "double", "expand"]
    if x.dim():
        kinds += [
            "permute",
            "slice",
            "select",
            "flip",
            "roll",
            "unfold",
            "squeeze",
            "pad",
            "cat",
            "interleave",
        ]
    if x.dim() > 1:
        kinds += ["diagonal", "flatten", "transpose"]
    kind = draw(st.sampled_from(kinds))
    d = draw(st.integers(0, max(x.dim() - 1, 0)))
    n = x.shape[d] if x.dim() else 1
    if kind == "double":
        return lambda x: x * 2
    if kind == "unsqueeze":
        return lambda x: x.unsqueeze(d)
    if kind == "reshape":
        first = draw(st.sampled_from(divisors(x.numel()) or [1]))
        rest = x.numel() // first
        second = draw(st.sampled_from(divisors(rest) or [1]))
        return lambda x: x.reshape(first, second, rest // second)
    if kind == "repeat":
        reps = draw(st.lists(st.integers(1, 2), min_size=x.dim(), max_size=x.dim() + 1))
        return lambda x: x.repeat(*reps) if reps else x
    if kind == "expand":
        lead = draw(st.integers(1, 2))
        return lambda x: x.expand(lead, *x.shape)
    if kind == "permute":
        order = draw(st.permutations(range(x.dim())))
        return lambda x: x.permute(*order)
    if kind == "transpose":
        return lambda x: x.transpose(0, d)
    if kind == "slice":
        start, stop, by = (
            draw(st.integers(0, max(n - 1, 0))),
            draw(st.integers(1, n + 2)),
            draw(st.integers(1, 3)),
        )
        return lambda x: x[(slice(None),) * d + (slice(start, max(stop, start + 1), by),)]
    if kind == "select":
        at = draw(st.integers(-n, n - 1))
        return lambda x: x.select(d, at)
    if kind == "flip":
        return lambda x: x.flip(d)
    if kind == "roll":
        by = draw(st.integers(-5, 5))
        return lambda x: x.roll(by, d)
    if kind == "unfold":
        size = draw(st.integers(1, n))
        by = draw(st.integers(1, 2))
        return lambda x: x.unfold(d, size, by)
    if kind == "squeeze":
        return lambda x: x.squeeze(d)
    if kind == "pad":
        a, z = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        return lambda x: functional.pad(x, (a, z))
    if kind == "cat":
        return lambda x: torch.cat([x, x[..., :1]], -1)
    if kind == "interleave":
        return lambda x: x.repeat_interleave(2, d)
    if kind == "diagonal":
        return lambda x: x.diagonal(0, 0, max(d, 1))
    return lambda x: x.flatten(0, max(d, 1))


@st.composite
def chains(draw: st.DrawFn) -> tuple[torch.Tensor, Function]:
    shape = draw(st.lists(st.sampled_from((1, 2, 3, 4, 6, 7)), min_size=1, max_size=3))
    x = counted(*shape)
    source = x
    if draw(st.booleans()):
        source = x.permute(*draw(st.permutations(range(x.dim()))))
    steps: list[Function] = []
    at = source
    for _ in range(draw(st.integers(1, 6))):
        if at.numel() > 600 or at.numel() == 0:
            break
        steps.append(step(draw, at))
        at = steps[-1](at)

    def run(x: torch.Tensor) -> torch.Tensor:
        for s in steps:
            x = s(x)
        return x

    return source, run


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(chains())
def test_chains_of_views(chain: tuple[torch.Tensor, Function]) -> None:
    x, f = chain
    check(f, x, exact=True)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(chains())
def test_chains_of_views_of_a_computed_value(chain: tuple[torch.Tensor, Function]) -> None:
    x, f = chain
    check(lambda x: f(x + 1).sum(-1) if f(x).dim() else f(x + 1) * 3, x, exact=True)


def test_as_strided_scatter() -> None:
    scatter = torch.ops.aten.as_strided_scatter
    check(lambda x, y: scatter(x, y, (3, 4), (4, 1)), counted(3, 4), counted(4, 3).t(), exact=True)
    check(lambda x, y: scatter(x, y, (2, 3), (4, 2), 1), counted(3, 4), counted(2, 3), own=False, exact=True)


def test_a_view_of_one_element_is_no_copy() -> None:
    for f in (lambda x: x.unsqueeze(0), lambda x: x[None, :, None], lambda x: x.view(1, 1, 1)):
        for dtype in (torch.float32, torch.complex64):
            assert not lowered(f, torch.ones(1, dtype=dtype)).ops
