"""Deciding whether a compiled result is as good as eager's.

What comes in: the compiled result, eager's result, and (lazily) the same computation in float64.
What goes out: nothing, or an ``AssertionError`` that shows the worst element.

What holds: shapes and dtypes always equal eager's. Integers and booleans are equal. Floating-point
elements pass if they are close to eager's under ``torch.testing``'s own tolerances for the dtype. Those
that are not are judged by float64: a compiled element may be wrong by twice eager's worst error and a few
units in the last place, never more. So no tolerance is ever widened for the sake of a test: a compiler
that is merely *different* from eager passes only where it is as near to the truth as eager is.

One number has one error, and eager's may be small by luck. Where several runs of eager are given, each
rounded otherwise, their worst error and one unit are what an element may be wrong by, and nothing is doubled.

Next: ``replay.py``, which runs the dumps; the tests use it too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from hotloop.compat import DispatchMode, tree_map

__all__ = [
    "TOLERANCES",
    "assert_as_accurate",
    "float64_reference",
    "largest_errors",
    "reference_of",
    "to_float64",
]

# torch.testing.assert_close's defaults: (relative, absolute) for each dtype.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}
_LOW_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ALLOWED_ULPS = 4.0
_ALLOWED_ERROR_RATIO = 2.0

#: Several runs of eager.
Runs = Callable[[], Sequence[Sequence[Any]]]
Reference = Sequence[torch.Tensor] | torch.Tensor | Callable[[], Sequence[torch.Tensor] | torch.Tensor] | None


class _Float64Everywhere(DispatchMode):  # type: ignore[no-untyped-call]
    """Turns every request for a lower floating dtype into one for float64.

    Models cast to float32 inside (norms, rotary embeddings, attention masks), which would leave a
    "float64" reference with float32's errors.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(_raise_dtype, (args, kwargs or {}))
        if func is torch.ops.aten._grouped_mm.default:
            return _grouped_matmul(*args, **kwargs)
        return func(*args, **kwargs)


def _grouped_matmul(
    rows: torch.Tensor, matrices: torch.Tensor, offsets: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """``aten._grouped_mm``, which has no float64, (rows, k) by (groups, k, n), from the groups' row ends."""
    assert rows.dim() == 2 and matrices.dim() == 3 and offsets is not None, "only rows grouped by their ends"
    result = rows.new_zeros(rows.shape[0], matrices.shape[2])
    begin = 0
    for matrix, end in zip(matrices, offsets.tolist(), strict=True):
        result[begin:end] = rows[begin:end] @ matrix
        begin = end
    return result


def _raise_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOW_DTYPES else value


@contextlib.contextmanager
def float64_reference() -> Iterator[None]:
    """Inside, casts to and tensors created in a lower floating dtype are float64, the default dtype too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64Everywhere():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


def to_float64(value: Any) -> Any:
    """Copies a tree of arguments with its floating-point tensors (not integers, not booleans) in float64."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in _LOW_DTYPES:
            return leaf.detach().to(torch.float64)
        return leaf

    return tree_map(convert, value)


def reference_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """A lazy float64 run of ``function``, to be passed to :func:`assert_as_accurate`."""

    def run() -> Any:
        with torch.no_grad(), float64_reference():
            return function(*to_float64(args), **to_float64(kwargs))

    return run


def assert_as_accurate(
    actual: Any,
    eager: Any,
    reference64: Reference = None,
    *,
    runs: Runs | None = None,
    per_element: bool = False,
    check_stride: bool = False,
    what: str = "result",
) -> None:
    """Asserts that ``actual`` is as accurate as ``eager``.

    ``actual`` and ``eager`` are tensors or sequences of tensors; ``reference64`` is the same in float64, or
    a function that computes it, called only where elements differ from eager's by more than
    ``torch.testing``'s tolerances. With ``per_element`` each element is held to its own magnitude; without,
    to the largest of its tensor, which suits sums of products, where an element near zero is the
    cancellation of large terms. ``runs`` gives the results of other runs of eager, none of
    them nearer to the truth than rounding explains; it is called only where elements are less accurate than
    ``eager``. Without a reference, closeness to eager alone decides.
    """
    actuals, eagers = _as_list(actual), _as_list(eager)
    assert len(actuals) == len(eagers), f"{what}: {len(actuals)} tensors where eager has {len(eagers)}"
    references: list[Any] | None = None
    known: list[list[Any]] = []
    for position, (got, want) in enumerate(zip(actuals, eagers, strict=True)):
        label = what if len(eagers) == 1 else f"{what}[{position}]"
        if not isinstance(want, torch.Tensor):
            assert type(got) is type(want) and got == want, f"{label}: {got!r} where eager has {want!r}"
            continue
        _check_form(got, want, check_stride, label)
        got, want = _dense(got), _dense(want)
        far = _far_from_eager(got, want)
        if not bool(far.any()):
            continue
        if references is None and reference64 is not None:
            references = _as_list(reference64() if callable(reference64) else reference64)
        truth = None if references is None else _dense(references[position])
        others = None if runs is None else partial(_others, runs, known, position)
        _judge(got, want, truth, far, per_element, label, others)


def largest_errors(actual: Sequence[Any], expected: Sequence[Any]) -> tuple[float, float]:
    """The largest absolute and the largest relative difference of two lists of results.

    A difference is relative to the largest element that was expected in its tensor: next to nothing may be
    twice as much. Where both are NaN, or the same infinity, it is 0; where one is, it is infinite.
    """
    absolute = relative = 0.0
    for got, want in zip(actual, expected, strict=True):
        if not isinstance(want, torch.Tensor) or want.numel() == 0:
            continue
        a, e = _wide(_dense(got)), _wide(_dense(want))
        same = a.eq(e) | (a.isnan() & e.isnan())
        error = (a - e).abs().masked_fill(same, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))
        worst, size = float(error.amax()), float(torch.where(e.isfinite(), e.abs(), 0.0).amax())
        absolute, relative = max(absolute, worst), max(relative, worst / size if size else 0.0)
    return absolute, relative


def _dense(value: Any) -> Any:
    """A sparse tensor with all its elements; anything else as it is."""
    return (
        value.to_dense() if isinstance(value, torch.Tensor) and value.layout is not torch.strided else value
    )


def _others(runs: Runs, known: list[list[Any]], position: int) -> list[Any]:
    """The results at a position in other runs of eager, which run once: ``known`` keeps them."""
    if not known:
        known.extend(_as_list(run) for run in runs())
    return [_dense(run[position]) for run in known]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_form(got: Any, want: torch.Tensor, check_stride: bool, label: str) -> None:
    assert isinstance(got, torch.Tensor), f"{label}: {type(got).__name__} where eager has a tensor"
    assert got.shape == want.shape, f"{label}: shape {tuple(got.shape)} where eager has {tuple(want.shape)}"
    assert got.layout == want.layout, f"{label}: {got.layout} where eager has {want.layout}"
    assert got.dtype == want.dtype, f"{label}: dtype {got.dtype} where eager has {want.dtype}"
    if check_stride and want.numel() > 0:
        significant = [dim for dim, size in enumerate(want.shape) if size > 1]
        got_strides = [got.stride(dim) for dim in significant]
        want_strides = [want.stride(dim) for dim in significant]
        assert got_strides == want_strides, f"{label}: strides {got_strides} where eager has {want_strides}"


def _far_from_eager(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    if want.dtype not in TOLERANCES:
        return got.ne(want)
    relative, absolute = TOLERANCES[want.dtype]
    return ~torch.isclose(got, want, rtol=relative, atol=absolute, equal_nan=True)


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex128 if value.dtype.is_complex else torch.float64)


def _judge(
    got: torch.Tensor, want: torch.Tensor, truth: Any, far: torch.Tensor, per_element: bool, label: str,
    others: Callable[[], list[Any]] | None,
) -> None:  # fmt: skip
    count = int(far.sum())
    if truth is None or want.dtype not in TOLERANCES:
        settled = torch.zeros_like(far) if truth is None else got.eq(truth.to(want.dtype))
        _fail_unless(settled | ~far, got, want, truth, label, f"{count} of {far.numel()} differ from eager")
        return
    assert truth.shape == want.shape, f"{label}: the reference has shape {tuple(truth.shape)}"
    exact = _wide(truth)
    rounded = truth.to(want.dtype)
    # Infinities and NaN are right only where the truth, rounded to the dtype, has the same.
    same_special = rounded.eq(got) | (rounded.isnan() & got.isnan())
    finite = _wide(got).isfinite() & exact.isfinite()
    magnitude = torch.where(exact.isfinite(), exact.abs(), 0.0)
    info = torch.finfo(want.dtype)
    unit = info.eps * _worst(magnitude, per_element) + info.smallest_normal
    error = (_wide(got) - exact).abs()
    eager_error = _error(want, exact, per_element)
    if others is None:
        bound = _ALLOWED_ERROR_RATIO * eager_error + _ALLOWED_ULPS * unit
    else:
        bound = eager_error + unit
        if bool((finite & far & (error > bound)).any()):
            for other in others():
                eager_error = torch.maximum(eager_error, _error(other, exact, per_element))
            bound = eager_error + unit
    settled = torch.where(finite, error <= bound, same_special)
    worst = float(torch.where(finite, error, 0.0).amax())
    note = (
        f"worst error {worst:.3e}, eager's {float(eager_error.amax()):.3e}, bound {float(bound.amax()):.3e}"
    )
    _fail_unless(settled | ~far, got, want, truth, label, note)


def _worst(value: torch.Tensor, per_element: bool) -> torch.Tensor:
    return value if per_element else value.amax()


def _error(result: torch.Tensor, exact: torch.Tensor, per_element: bool) -> torch.Tensor:
    """How far a result is from the truth, element by element or at worst; only what is finite counts."""
    wide = _wide(result)
    return _worst(torch.where(wide.isfinite() & exact.isfinite(), (wide - exact).abs(), 0.0), per_element)


def _fail_unless(
    good: torch.Tensor, got: torch.Tensor, want: torch.Tensor, truth: Any, label: str, note: str
) -> None:
    if bool(good.all()):
        return
    bad = (~good).nonzero()
    difference = (_wide(got) - _wide(want)).abs().masked_fill(good, -1.0).nan_to_num(nan=float("inf"))
    flat = int(difference.flatten().argmax()) if want.dim() else 0
    index = (
        tuple(int(part) for part in torch.unravel_index(torch.tensor(flat), want.shape)) if want.dim() else ()
    )
    exactly = "" if truth is None else f", float64 {truth[index].item()!r}"
    raise AssertionError(
        f"{label}: {len(bad)} of {want.numel()} elements are less accurate than eager's ({note}); "
        f"the worst at {index}: compiled {got[index].item()!r}, eager {want[index].item()!r}{exactly}"
    )
