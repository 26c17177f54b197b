"""The judge passes what is as accurate as eager, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import judge
from hotloop.tools.judge import largest_errors


def _case() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    exact = torch.randn(200, generator=generator, dtype=torch.float64) * 100
    return exact, exact.to(torch.float32)


def test_equal_results_pass_without_asking_for_the_reference() -> None:
    _, eager = _case()

    def never() -> torch.Tensor:
        raise AssertionError("the reference was computed")

    judge.assert_as_accurate(eager.clone(), eager, never)


def test_further_from_eager_but_nearer_to_the_truth_passes() -> None:
    exact, good = _case()
    eager = good * 1.0001
    with pytest.raises(AssertionError, match="less accurate"):
        judge.assert_as_accurate(good, eager)
    judge.assert_as_accurate(good, eager, exact)
    judge.assert_as_accurate(good, eager, exact, per_element=True)


def test_three_times_eagers_error_fails() -> None:
    exact, good = _case()
    with pytest.raises(AssertionError, match="less accurate"):
        judge.assert_as_accurate(good * 1.0003, good * 1.0001, exact)


def test_several_runs_of_eager_say_what_rounding_explains() -> None:
    exact = torch.tensor(2.0, dtype=torch.float64)
    lucky = torch.tensor(2.0, dtype=torch.bfloat16)
    asked: list[bool] = []

    def runs() -> list[torch.Tensor]:
        asked.append(True)
        return [torch.tensor(value, dtype=torch.bfloat16) for value in (2.0, 2.09375, math.inf, 1.9375)]

    def check(value: float) -> None:
        got = torch.tensor(value, dtype=torch.bfloat16)
        judge.assert_as_accurate(
            [got, got], [lucky, lucky], [exact, exact], runs=lambda: [[r, r] for r in runs()]
        )

    check(2.015625)
    assert not asked  # within a unit of the truth
    for value in (2.09375, 1.90625):
        check(value)
    assert len(asked) == 2  # once for all results
    with pytest.raises(AssertionError, match=r"eager's 9.375e-02, bound 1.094e-01"):
        check(2.125)
    with pytest.raises(AssertionError, match="less accurate"):
        check(math.nan)


def test_one_wrong_element_fails_and_is_named() -> None:
    exact, eager = _case()
    wrong = eager.clone()
    wrong[17] += 0.1
    with pytest.raises(AssertionError, match=r"1 of 200 .*\(17,\)"):
        judge.assert_as_accurate(wrong, eager, exact)


def test_small_elements_are_held_to_their_own_size_on_request() -> None:
    exact = torch.tensor([1e6, 1.0], dtype=torch.float64)
    eager = exact.float()
    got = torch.tensor([1e6, 1.001])
    judge.assert_as_accurate(got, eager, exact)
    with pytest.raises(AssertionError, match="less accurate"):
        judge.assert_as_accurate(got, eager, exact, per_element=True)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
def test_special_values_must_match(special: float) -> None:
    exact, eager = _case()
    exact[3], eager[3] = special, special
    judge.assert_as_accurate(eager.clone(), eager, exact)
    wrong = eager.clone()
    wrong[3] = 0.0
    with pytest.raises(AssertionError, match="less accurate"):
        judge.assert_as_accurate(wrong, eager, exact)
    wrong = eager.clone()
    wrong[4] = special
    with pytest.raises(AssertionError, match="less accurate"):
        judge.assert_as_accurate(wrong, eager, exact)


def test_overflow_that_the_truth_does_not_have_may_be_avoided() -> None:
    exact = torch.tensor([6e4, 1.0], dtype=torch.float64)
    eager = torch.tensor([float("inf"), 1.0], dtype=torch.float16)
    judge.assert_as_accurate(exact.half(), eager, exact)


def test_shape_dtype_stride_and_number_must_match() -> None:
    value = torch.zeros(2, 3)
    for other in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), [value, value], None):
        with pytest.raises(AssertionError):
            judge.assert_as_accurate(other, value)
    judge.assert_as_accurate(value.t().contiguous().t(), value)
    with pytest.raises(AssertionError, match="strides"):
        judge.assert_as_accurate(value.t().contiguous().t(), value, check_stride=True)


def test_sparse_tensors_are_compared_by_their_elements() -> None:
    at = torch.tensor([[0, 2, 2], [1, 0, 0]])
    want = torch.sparse_coo_tensor(at, torch.tensor([1.0, 2.0, 3.0]), (3, 3))
    judge.assert_as_accurate(want.coalesce(), want)
    other = torch.sparse_coo_tensor(at, torch.tensor([1.0, 2.0, 3.5]), (3, 3))
    for wrong in (other, want.to_dense()):
        with pytest.raises(AssertionError):
            judge.assert_as_accurate(wrong, want, want.to_dense().double())
    assert largest_errors([other], [want]) == (0.5, 0.1)


def test_integers_and_booleans_must_be_equal() -> None:
    judge.assert_as_accurate(torch.arange(4), torch.arange(4))
    with pytest.raises(AssertionError):
        judge.assert_as_accurate(torch.tensor([1, 2]), torch.tensor([1, 3]))
    with pytest.raises(AssertionError):
        judge.assert_as_accurate(torch.tensor(True), torch.tensor(False))


def test_reference_reaches_float64_through_casts_to_lower_dtypes() -> None:
    x = torch.tensor([1.0, 1e-9])

    def with_cast(value: torch.Tensor) -> torch.Tensor:
        return (value.float().sum() - torch.ones((), dtype=torch.float32)) * torch.tensor(1.0)

    result = judge.reference_of(with_cast, x)()
    assert result.dtype == torch.float64
    assert abs(result.item() - 1e-9) < 1e-12
    assert torch.get_default_dtype() == torch.float32


def test_reference_of_a_module_leaves_integers_alone() -> None:
    module = nn.Embedding(5, 3).double()
    result = judge.reference_of(module, torch.tensor([1, 4]))()
    assert result.dtype == torch.float64 and result.shape == (2, 3)


def test_the_largest_errors_are_found_element_by_element() -> None:
    want = [torch.tensor([1.0, 100.0, 0.0, math.nan, math.inf]), torch.tensor([3, 4]), 7, torch.empty(0)]
    assert largest_errors(want, want) == (0.0, 0.0)
    got = [torch.tensor([1.5, 101.0, 0.25, math.nan, math.inf]), torch.tensor([3, 4]), 7, torch.empty(0)]
    assert largest_errors(got, want) == (1.0, 0.01)
    assert largest_errors([torch.tensor([2e-9, 4.0])], [torch.tensor([1e-9, 4.0])])[1] < 1e-9
    assert largest_errors([torch.tensor([0.25])], [torch.tensor([0.0])]) == (0.25, 0.0)
    assert largest_errors([torch.tensor([math.nan])], [torch.tensor([1.0])]) == (math.inf, math.inf)
    assert largest_errors([torch.tensor([-math.inf])], [torch.tensor([math.inf])])[0] == math.inf
    assert largest_errors([torch.tensor([5])], [torch.tensor([4])]) == (1.0, 0.25)
    wide = torch.tensor([True]), torch.tensor([False])
    assert largest_errors([wide[0]], [wide[1]]) == (1.0, 0.0)
