"""Random programs of fixed seeds, programs that once differed, and whether a difference would be found.

What comes in: seeds. What holds: each engine gives what eager gives. A longer run:
``python tests/fuzz/fuzz.py --count 10000``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fuzz import check, run, shrink
from generator import generate
from hotloop.ir import expr as ex
from hotloop.lower.lower import RULES
from long_run import Run, parser
from programs import Input, Program, Step

pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch, about what random programs do
GROUPS = range(0, 72, 12)

CASES: dict[str, Program] = {
    "an operator without points reads a constant position": Program(
        (
            Input("x1", "torch.randint(0, 5, [0, 0, 0]).to(torch.uint8)", 566, False),
            Input("x2", "torch.randn([4, 1]).to(torch.float32)", 155, False),
        ),
        (Step("v0", "x1.reshape(-1)"), Step("v9", "torch.logical_xor(x2, v0)")),
        ("v9",),
    ),
    "a result that takes the place of what a later statement reads": Program(
        (Input("x1", "torch.randn(40, 8)", 163),),
        (
            Step("v3", "x1 + x1"),
            Step("v10", "torch.exp(v3.clamp(max=3))"),
            Step("v17", "v3.gather(0, v3.argsort(0))"),
            Step("v18", "v3 + v10"),
            Step("v22", "v17 * v10"),
            Step("v25", "torch.pow(2, v22.clamp(-3, 3))"),
            Step("v19", "torch.cat([v18, v17], 0)"),
            Step("v27", "torch.addcmul(v19, v19, v19, value=0.5)"),
            Step("v24", "torch.stack([v10, v18], 0)"),
        ),
        ("v22", "v24", "v25", "v27"),
    ),
    "an index under a condition that all lanes share": Program(
        (Input("x1", "torch.randn(40, 8)", 163),),
        (
            Step("v1", "x1 != x1"),
            Step("v9", "v1 & 3"),
            Step("v17", "x1.gather(0, x1.argsort(0))"),
            Step("v19", "torch.cat([v9, x1 + 1, v17], 0)"),
            Step("v27", "torch.addcmul(v19, v19, v19, value=0.5)"),
        ),
        ("v27",),
    ),
    "a position that is computed before the conditions under which it is used": Program(
        (Input("x1", "torch.randint(0, 5, [9, 2]).to(torch.int32)", 901),),
        (Step("v0", "x1.take_along_dim(x1.argsort(1), 1)"), Step("v3", "torch.stack([v0, v0], 0)")),
        ("v3",),
    ),
    "a scatter of nothing": Program(
        (Input("x4", "torch.randint(0, 5, [1, 0]).to(torch.int32)", 0),),
        (Step("v6", "x4.unfold(1, 0, 1)"), Step(None, "v6.zero_()")),
        ("v6",),
    ),
    "a scatter of nothing of fewer dimensions": Program(
        (Input("x3", "torch.randint(0, 5, [2, 2, 32, 32])", 1),),
        (Step(None, "x3.scatter_(1, torch.zeros(0, 32, 1, dtype=torch.int64), 1)"),),
        ("x3",),
    ),
    "a row that one reader finds in scratch and another reads across": Program(
        (Input("x0", "torch.randint(0, 5, [2, 1025]).to(torch.int32)", 22),),
        (
            Step("v1", "torch.sinh(x0.clamp(-3, 3))"),
            Step("v7", "v1.view([2, 5, 41, 5]).var((0, 1, 2, 3))"),
            Step("v9", "torch.expm1(-v1.reshape([2, 5, 5, 41]).abs())"),
        ),
        ("v7", "v9"),
    ),
    "a norm over a dimension of one": Program(
        (Input("x1", "torch.randn([5, 1])", 2, True),),
        (Step("v1", "torch.linalg.vector_norm(x1, dim=-1)"),),
        ("v1",),
    ),
    "a mean of equal values over short loops": Program(
        (Input("x3", "torch.randint(0, 5, [9, 9, 1, 9]).to(torch.uint8)", 0),),
        (
            Step("v1", "F.embedding(x3.to(torch.int64).abs() % 2, torch.arange(6.0).view(2, 3))"),
            Step("v2", "F.hardsigmoid(v1)"),
            Step("v4", "F.l1_loss(v1, v2)"),
        ),
        ("v4",),
    ),
    "a result and the same detached": Program(
        (Input("x0", "torch.randn(2, 65)", 874, True),),
        (
            Step("v1", "torch.dist(x0, x0 * 2)"),
            Step("v2", "v1.reshape(-1)"),
            Step("v3", "v1.detach()"),
        ),
        ("v2", "v3"),
    ),
    "a bool that is gathered under a condition that all lanes share": Program(
        (Input("x1", "torch.randint(-9, 10, (13, 1))", 69),),
        (
            Step("v1", "torch.masked_fill(x1, x1 > 3, 0)"),
            Step("v2", "x1 == v1"),
            Step("v8", "v2.roll(3, 0)"),
            Step("v13", "torch.cat([x1, v8, x1], 1)"),
            Step("v15", "v13.to(torch.float32)"),
        ),
        ("v8", "v15"),
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("first", GROUPS)
def test_random_programs(first: int) -> None:
    outcomes = list(run([generate(seed) for seed in range(first, first + 12)]))
    assert len(outcomes) == 12
    assert not [str(failure) for _, failure, _ in outcomes if failure is not None]
    assert sum(judged for _, _, judged in outcomes) >= 6


@pytest.mark.parametrize("name", CASES)
def test_programs_that_differed(name: str) -> None:
    check(CASES[name])


def test_a_seed_is_a_program() -> None:
    assert str(generate(17)) == str(generate(17))
    assert str(generate(17)) != str(generate(18))


def test_a_wrong_rule_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    target = torch.ops.aten.sin.default
    rule = RULES[target]

    def wrong(b, node, x):  # type: ignore[no-untyped-def]
        out = rule(b, node, x)
        return b.pointwise(x.sizes, out.dtype, lambda v: ex.call("neg", out.at(v)), node.meta["val"])

    monkeypatch.setitem(RULES, target, wrong)  # type: ignore[arg-type]
    program = Program(
        (Input("x0", "torch.randn(5, 7)", 1), Input("x1", "torch.randn(7)", 2, True)),
        (
            Step("v0", "x0 + x1"),
            Step("v1", "torch.sin(v0)"),
            Step("v2", "v1.sum(0)"),
            Step("v3", "v2 * x1"),
            Step(None, "x0.mul_(2)"),
            Step("v5", "v0.t()"),
        ),
        ("v3", "v5"),
    )
    ((_, failure, judged),) = run([program], ("interpret",))
    assert judged and failure is not None and failure.engine == "interpret"
    small = shrink(failure)
    assert [s.code for s in small.program.steps] == [f"torch.sin({small.program.inputs[0].name})"]


#: Answers as a process of long_run.py does, but for the seeds 5, which differs, and 7, which ends it.
WORKER = """
import json, os, signal, sys
for line in sys.stdin:
    answers = []
    for seed in json.loads(line):
        if seed == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        answers.append({"seed": seed, "judged": seed != 3, "kinds": ["odd"] if seed % 2 else []})
        if seed == 5:
            answers.append({"failed": 5, "engine": "fused", "text": "wrong", "program": "five"})
    for a in [*answers, {"ready": True}]:
        print(json.dumps(a), flush=True)
"""


def test_a_long_run_tells_each_seed_that_differs_or_ends_a_process(tmp_path: Path) -> None:
    results = tmp_path / "found.txt"
    given = parser().parse_args(["--minutes", "0", "--processes", "2", "--results", str(results)])
    run = Run(given, [sys.executable, "-c", WORKER])
    handed = iter([[4, 5, 6, 7, 8], [0, 1, 2, 3]])
    fresh = run.seeds
    run.seeds = lambda: next(handed, None) or fresh()  # type: ignore[method-assign]
    run.wait()
    assert run.found.counts == {"judged": 7, "not judged": 1, "odd": 2}
    assert sorted(run.found.failures) == [5, 7]
    assert "SIGKILL" in run.found.failures[7]["text"]
    assert "2 seeds differ: 5 7" in results.read_text() and "five" in results.read_text()
