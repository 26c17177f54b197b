"""Each pass on a small graph that needs it, and on the graphs that it must leave alone."""

from __future__ import annotations

import time

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from tracing import CONFIG, check_graph, cleaned, compiled, targets, trace

from hotloop.dumps import Log
from hotloop.graph import passes

X = torch.randn(3, 4)


def test_dead_code_goes_and_random_operators_stay() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        (x * 2).exp()
        torch.rand(3)
        return x + 1

    gm = make_fx(f, tracing_mode="fake")(X)
    assert passes.drop_dead_code(gm)
    assert targets(gm) == ["rand.default", "add.Tensor"]


def test_nothing_to_do_changes_nothing() -> None:
    gm = trace(lambda x: (x * 2).exp() + x, X)
    before = list(gm.graph.nodes)
    assert passes.run(gm, CONFIG, Log(CONFIG)) is gm
    assert list(gm.graph.nodes) == before
    assert not any(step(gm) for step in passes.PASSES)


def test_views_that_change_nothing_go() -> None:
    gm = check_graph(lambda x: x.view(3, 4).expand(3, 4)[:, 0:4].reshape(3, 4).t().t() * 2, X)
    assert targets(gm)[-1] == "mul.Tensor" and "view.default" not in targets(gm)
    assert len(targets(gm)) == 3  # the two transpositions change strides, and both are there


def test_conversions_that_change_nothing_go() -> None:
    gm = check_graph(lambda x: x.to(torch.bfloat16).to(torch.float32).to(torch.bfloat16) * 2, X)
    assert targets(gm).count("_to_copy.default") == 1
    # A detour through a narrower dtype loses bits: it stays.
    gm = check_graph(lambda x: x.to(torch.bfloat16).to(torch.float32) * 2, X)
    assert targets(gm).count("_to_copy.default") == 2
    gm = check_graph(lambda x: x.to(torch.bool).to(torch.int8) * 2, X)
    assert targets(gm).count("_to_copy.default") == 2


def test_neutral_arithmetic_goes() -> None:
    gm = check_graph(lambda x: ((x * 1) / 1 - 0) ** 1 + x, X)
    assert targets(gm) == ["add.Tensor"]


def test_adding_zero_to_a_float_stays() -> None:
    negative_zero = torch.tensor([-0.0, 1.0])
    gm = check_graph(lambda x: (x + 0) * 2, negative_zero)
    assert targets(gm) == ["add.Tensor", "mul.Tensor"]
    assert not torch.signbit(compiled(lambda x: (x + 0) * 2, negative_zero)[1])[0]
    assert targets(check_graph(lambda x: (x + 0) * 2, torch.arange(3))) == ["mul.Tensor"]


def test_multiplying_an_integer_by_a_float_one_converts_it() -> None:
    gm = check_graph(lambda x: x * 1.0 + 2, torch.arange(3))
    assert targets(gm) == ["mul.Tensor", "add.Tensor"]


def test_copies_go_where_nobody_sees_them() -> None:
    gm = check_graph(lambda x: (x * 2).clone().exp(), X)
    assert "clone.default" not in targets(gm)
    # One that changes the layout stays.
    gm = check_graph(lambda x: x.t().contiguous() * 2, X)
    assert "clone.default" in targets(gm)


def test_copies_that_leave_the_graph_stay() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y, y.clone().view(-1)

    first, second = compiled(f, X)[1]
    assert first.data_ptr() != second.data_ptr()
    out = compiled(lambda x: x.clone(), X)[1]
    assert out.data_ptr() != X.data_ptr()


def test_an_input_that_is_written_is_copied_first() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        old = x.clone()
        x.copy_(x + 1)
        return old * 2

    gm = make_fx(f, tracing_mode="fake")(X)
    cleaned(gm)
    assert targets(gm)[0] == "clone.default"


def test_equal_nodes_become_one() -> None:
    gm = check_graph(lambda x: (x * 2).exp() + (x * 2).exp(), X)
    assert targets(gm) == ["mul.Tensor", "exp.default", "add.Tensor"]


def test_numbers_of_different_types_are_not_equal() -> None:
    gm = check_graph(lambda x: (x * 2, x * 2.0, x * True), torch.arange(3))
    assert targets(gm).count("mul.Tensor") == 3
    gm = check_graph(lambda x: torch.copysign(x, 0.0) + torch.copysign(x, -0.0), X)
    assert targets(gm).count("copysign.Scalar") == 2


def test_two_results_that_leave_stay_two() -> None:
    a, b = compiled(lambda x: (x + 1, x + 1), X)[1]
    assert a.data_ptr() != b.data_ptr()
    gm = check_graph(lambda x: ((x + 1).t(), (x + 1).view(-1)), X)
    assert targets(gm).count("add.Tensor") == 2


def test_random_numbers_are_not_merged() -> None:
    gm = cleaned(trace(lambda x: torch.rand(3, 4) + torch.rand(3, 4) * x, X))
    assert targets(gm).count("rand.default") == 2


def test_numbers_are_folded() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        scale = torch.full((), 4.0).sqrt() * 3
        return x * scale

    gm = check_graph(f, X)
    assert targets(gm) == ["full.default", "mul.Tensor"]
    assert next(n for n in gm.graph.nodes if n.op == "call_function").args == ([], 6.0)


def test_a_constant_of_the_user_is_folded_when_it_is_one_number() -> None:
    gm = check_graph(lambda x: x * (torch.tensor(2.0) + 1), X)
    assert "add.Tensor" not in targets(gm)


def test_a_graph_of_a_thousand_nodes_is_quick() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        for k in range(250):
            x = ((x * 1.5).view(4, 3).view(3, 4) + k).tanh()
        return x

    gm = trace(f, X)
    assert len(gm.graph.nodes) > 1000
    start = time.process_time()
    cleaned(gm)
    assert time.process_time() - start < 0.5
    assert targets(gm).count("tanh.default") == 250
