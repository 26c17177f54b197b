"""PyTorch's own samples of every operator, compiled and compared with eager.

What comes in: a dtype, names of operators of `torch.testing`'s operator database (all of them if none is
named), and ways to run them: `forward`, `backward`, `dynamic` (forward with symbolic sizes). What goes out:
one `Outcome` for each sample and way, and from them docs/operators.md. What holds: a sample runs AOTAutograd
and hotloop as a user's function does, but not Dynamo; samples run in another process, so that a crash ends
one operator and not the sweep.

    python tests/ops/sweep.py float32                        every operator, then a summary
    python tests/ops/sweep.py int64 floor_divide             one operator, in this process
    python tests/ops/sweep.py all --results r.jsonl          every dtype and way; goes on where it was stopped
    python tests/ops/sweep.py --table docs/operators.md --results r.jsonl

Next: expected.py, what is expected to fail; table.py, which writes the table; test_ops.py, which runs a part.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.testing._internal import common_methods_invocations
from torch.utils._pytree import tree_flatten, tree_unflatten

sys.path.insert(0, str(Path(__file__).parent.parent))

import hotloop
from expected import DTYPES, is_arbitrary, reason, unjudged, without_strides
from hotloop import backend
from hotloop.backend import compile_graph
from hotloop.config import resolve
from hotloop.graph.decompositions import decompositions
from hotloop.ir.loops import Extern
from judge import assert_as_accurate, float64_reference, reference_of, to_float64
from table import Outcome, write_table

# The database wraps random operators in a function that sets a seed. A compiled function would have it set
# once, while it is traced.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

__all__ = ["MODES", "Outcome", "names", "sweep", "sweep_here"]

MODES = ("forward", "backward", "dynamic")
SAMPLES = 4
GENERATED = 48  # samples looked at for an operator: generating all takes minutes for some
SECONDS = 60.0  # of processor time for one operator and way, before its process is ended

_PACKAGE = str(Path(hotloop.__file__).parent)
# Dynamo would not have put these operators into a graph: sizes, or what follows, depend on values, or PyTorch
# cannot say what they give.
_GRAPH_BREAKS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def names(dtype: torch.dtype) -> list[str]:
    """The operators that take this dtype on the CPU."""
    return sorted(_database(dtype))


def _name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def _database(dtype: torch.dtype) -> dict[str, Any]:
    return {_name(op): op for op in common_methods_invocations.op_db if dtype in op.supported_dtypes("cpu")}


def _samples(op: Any, dtype: torch.dtype, count: int, grad: bool) -> list[tuple[int, Any]]:
    """Samples from all over the operator's list, the first ones being the plainest; all for a count of 0."""
    given = op.sample_inputs("cpu", dtype, requires_grad=grad)
    found = list(itertools.islice(given, GENERATED) if count else given)
    if count == 0 or len(found) <= count:
        return list(enumerate(found))
    chosen = sorted({round(i * (len(found) - 1) / (count - 1)) for i in range(count)}) if count > 1 else [0]
    return [(i, found[i]) for i in chosen]


def compiled(
    fn: Callable[..., Any], options: dict[str, Any] | None = None, dynamic: bool = False
) -> Callable[..., Any]:
    """`fn`, a function of tensors alone, compiled by AOTAutograd and hotloop, without Dynamo."""
    config = resolve(options={"fallback_random": True, **(options or {})})  # eager's numbers, to compare with

    def compile_one(kind: str) -> Callable[..., Any]:
        def run(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            call = compile_graph(gm, inputs, kind, config)
            call._boxed_call = True  # type: ignore[attr-defined]
            return call

        return run

    return aot_function(
        fn,
        fw_compiler=compile_one("forward"),
        bw_compiler=compile_one("backward"),
        inference_compiler=compile_one("inference"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=dict(decompositions()),
        dynamic=dynamic,
    )


@contextlib.contextmanager
def _calls_through_pytorch() -> Iterator[list[str]]:
    """The operators that graphs compiled inside call through PyTorch."""
    found: list[str] = []
    schedule = backend.settle

    def watched(*args: Any, **kwargs: Any) -> Any:
        plan = schedule(*args, **kwargs)
        found.extend(_operator(s.target) for s in plan.steps if isinstance(s, Extern))
        return plan

    with mock.patch.object(backend, "settle", watched):
        yield found


def _operator(target: Any) -> str:
    drawn = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return ("random " if drawn else "") + str(target).removesuffix(".default")


# --- one sample ---------------------------------------------------------------------------------------------


def _copy(leaf: Any) -> Any:
    """A copy with the same strides, in memory of its own."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return leaf
    if leaf.is_conj() or leaf.is_neg():
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    storage = leaf.detach().untyped_storage().clone()
    fresh = torch.empty(0, dtype=leaf.dtype)
    return fresh.set_(storage, leaf.storage_offset(), leaf.shape, leaf.stride()).requires_grad_(
        leaf.requires_grad
    )


class _Sample:
    """A sample as a function of its tensors."""

    def __init__(self, op: Any, call: Callable[..., Any], sample: Any, grad: bool) -> None:
        self.name = _name(op)
        self._call, self._process = call, sample.output_process_fn_grad if grad else None
        self._leaves, self._spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        self._places = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        self.strided = all(self._leaves[i].layout == torch.strided for i in self._places)

    def inputs(self) -> list[torch.Tensor]:
        return [_copy(self._leaves[i]) for i in self._places]

    def __call__(self, *tensors: torch.Tensor) -> list[Any]:
        own = list(self._leaves)
        for i, tensor in zip(self._places, tensors, strict=True):
            own[i] = tensor
        first, rest, named = tree_unflatten(own, self._spec)
        out = self._call(first, *rest, **named)
        return tree_flatten(out if self._process is None else self._process(out))[0]

    def with_gradients(self, call: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[Any]:
        """The results, then the gradients of all inputs that want one."""
        torch.manual_seed(0)
        results = list(call(*inputs))
        roots = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        wanting = [t for t in inputs if t.requires_grad]
        heads = [_head(r) for r in roots]
        found = torch.autograd.grad(roots, wanting, heads, allow_unused=True) if roots and wanting else ()
        # Where eager has no gradient, AOTAutograd may have one of zeros.
        zeros = [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanting, strict=False)]
        return [r.detach() if isinstance(r, torch.Tensor) else r for r in results] + zeros

    def without(self, call: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[Any]:
        torch.manual_seed(0)
        with torch.no_grad():
            return list(call(*inputs))


def _head(result: torch.Tensor) -> torch.Tensor:
    """What comes into backward: the same numbers in every precision."""
    ramp = (torch.arange(result.numel(), dtype=torch.float64) * 7 % 16 - 7) / 8
    return ramp.reshape(result.shape).to(result.dtype)


def _reference(sample: _Sample, grad: bool) -> Any:
    """The sample in float64."""
    torch.manual_seed(0)
    if not grad:
        return reference_of(sample, *[t.detach() for t in sample.inputs()])()
    inputs = [
        to_float64(t).requires_grad_(True) if t.requires_grad else to_float64(t) for t in sample.inputs()
    ]
    with float64_reference():
        return sample.with_gradients(sample, inputs)


def _run_sample(sample: _Sample, dtype: torch.dtype, mode: str) -> tuple[str, str]:
    if not sample.strided:
        return "skip", "not a strided tensor"
    grad = mode == "backward"
    run = sample.with_gradients if grad else sample.without
    eager_inputs, own_inputs = sample.inputs(), sample.inputs()
    try:
        eager = run(sample, eager_inputs)
    except Exception as error:  # noqa: BLE001 - whatever it raises is an outcome
        return "skip", "eager raises: " + _short(error)
    if any(isinstance(t, torch.Tensor) and t.layout != torch.strided for t in eager):
        return "skip", "a result that is not strided"
    try:
        got = run(compiled(sample, {"check": True}, mode == "dynamic"), own_inputs)
    except _GRAPH_BREAKS as error:
        return ("error" if _raised_by_hotloop(error) else "break"), "a graph break: " + _short(error)
    except Exception as error:  # noqa: BLE001 - whatever it raises is an outcome
        if "custom (non-ATen) operator" in str(error):
            return "break", _short(error)  # AOTAutograd knows no functional form
        if mode == "dynamic" and not _raised_by_hotloop(error):
            return "break", "PyTorch does not trace it with symbolic sizes: " + _short(error)
        return "error", _short(error)
    if is_arbitrary(sample.name):
        got, eager = (
            [torch.zeros_like(t) if isinstance(t, torch.Tensor) else t for t in r] for r in (got, eager)
        )
    reference = None if unjudged(sample.name) else lambda: _reference(sample, grad)
    try:
        strides = not grad and not without_strides(sample.name)
        assert_as_accurate(list(got), eager, reference, check_stride=strides)
        written = [
            i for i, (a, b) in enumerate(zip(eager_inputs, sample.inputs(), strict=True)) if not _same(a, b)
        ]
        if not _same_result(eager, eager_inputs, written):
            assert_as_accurate(own_inputs, eager_inputs, None, what="input after the call")
    except AssertionError as error:
        return "wrong", _short(error)
    except Exception as error:  # noqa: BLE001 - whatever it raises is an outcome
        return "wrong", "the reference failed: " + _short(error)
    return "ok", ""


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.detach(), b.detach()
    return torch.equal(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else torch.equal(a, b)


def _same_result(results: Sequence[Any], inputs: Sequence[torch.Tensor], written: Sequence[int]) -> bool:
    """Whether all that was written to is among the results, which are judged already."""
    pointers = {t.data_ptr() for t in results if isinstance(t, torch.Tensor)}
    return all(inputs[i].data_ptr() in pointers for i in written)


def _raised_by_hotloop(error: BaseException) -> bool:
    """Whether a stage of hotloop, or what it generated, was running."""
    own = (_PACKAGE, "<hotloop")
    return any(f.filename.startswith(own) for f in traceback.extract_tb(error.__traceback__))


def _short(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(_PACKAGE)]
    where = f" [{Path(own[-1].filename).name}:{own[-1].lineno}]" if own else ""
    return f"{type(error).__name__}: {str(error)[:600]}{where}"


def sweep_here(
    dtype: torch.dtype, operators: Sequence[str], count: int = SAMPLES, modes: Sequence[str] = ("forward",)
) -> Iterator[Outcome]:
    """Run operators in this process."""
    database = _database(dtype)
    label = str(dtype).removeprefix("torch.")
    for name, mode in itertools.product(operators, modes):
        op = database[name]
        grad = mode == "backward"
        if grad and not (op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")):
            continue
        blank = Outcome(name, label, mode)
        try:
            torch.manual_seed(0)
            samples = _samples(op, dtype, count, grad)
        except Exception as error:  # noqa: BLE001 - whatever it raises is an outcome
            yield replace(blank, kind="skip", text="samples: " + _short(error))
            continue
        if not samples:
            yield replace(blank, kind="skip", text="no samples")
        for call, suffix in ((op.op, ""), (op.inplace_variant, "_")):
            if call is None or (suffix and grad):
                continue
            for number, sample in samples[: len(samples) if not suffix else 1]:
                if suffix and sample.broadcasts_input:
                    continue
                yield _outcome(replace(blank, operator=name + suffix, sample=number), op, call, sample, dtype)


def _outcome(blank: Outcome, op: Any, call: Any, sample: Any, dtype: torch.dtype) -> Outcome:
    start = time.perf_counter()
    own = _Sample(op, call, sample, blank.mode == "backward")
    with _calls_through_pytorch() as calls:
        kind, text = _run_sample(own, dtype, blank.mode)
    if kind == "ok" and any(c.startswith("random ") for c in calls):
        # Eager's numbers were drawn through PyTorch, to compare with: by default kernels make their own.
        calls = _calls_of_own_numbers(own, blank.mode)
    if kind in ("wrong", "error"):
        expected = reason(blank.operator, blank.dtype, blank.mode)
        if expected is not None:
            kind, text = "expected", expected
    took = round(time.perf_counter() - start, 3)
    return replace(blank, kind=kind, text=text, calls=tuple(dict.fromkeys(calls)), seconds=took)


def _calls_of_own_numbers(sample: _Sample, mode: str) -> list[str]:
    """The calls through PyTorch where kernels make their own random numbers. Drawing the graph's seed, which
    torch's generator does, is none of them."""
    run = sample.with_gradients if mode == "backward" else sample.without
    options = {"check": True, "fallback_random": False}
    with _calls_through_pytorch() as calls, contextlib.suppress(Exception):
        run(compiled(sample, options, mode == "dynamic"), sample.inputs())
    return [c for c in calls if c not in ("random aten.randint.low", "aten.unbind.int")]


# --- in another process -----------------------------------------------------------------------------------


def sweep(
    dtype: torch.dtype, operators: Sequence[str], count: int = SAMPLES, modes: Sequence[str] = ("forward",)
) -> Iterator[Outcome]:
    """Run operators in another process, one at a time: a crash is an outcome of the operator it struck."""
    label = str(dtype).removeprefix("torch.")
    left = [(name, mode) for name in operators for mode in modes]
    while left:
        words = [f"{name}:{mode}" for name, mode in left]
        command = [sys.executable, __file__, "--worker", "--samples", str(count), label, *words]
        current = left[0]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            errors: list[str] = []
            reader = threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True)  # noqa: B023
            reader.start()
            for line in process.stdout:
                if line.startswith("start "):
                    name, _, mode = line.split()[1].rpartition(":")
                    current = (name, mode)
                    left.remove(current)
                elif line.startswith("{"):
                    yield Outcome.from_json(line)
            status = process.wait()
            reader.join()
        if status:
            kind = "timeout" if status == -signal.SIGPROF else "crash"
            text = f"status {status}: {''.join(errors)[-600:]}"
            expected = reason(current[0], label, current[1])
            if expected is not None:
                kind, text = "expected", expected
            yield Outcome(current[0], label, current[1], -1, kind, text)
            if current in left:
                left.remove(current)


def _work(dtype: torch.dtype, words: Sequence[str], count: int) -> None:
    """The other process. Its clock is the processor's: one that is stopped is not late."""
    for word in words:
        name, _, mode = word.rpartition(":")
        sys.stdout.write(f"start {word}\n")
        sys.stdout.flush()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        for outcome in sweep_here(dtype, [name], count, [mode]):
            sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
            sys.stdout.flush()


def _known(path: Path | None) -> list[Outcome]:
    if path is None or not path.exists():
        return []
    return [Outcome.from_json(line) for line in path.read_text().splitlines()]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dtype", nargs="?", help="a dtype, several with commas, or all")
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each operator; 0 for all")
    parser.add_argument("--modes", default="forward", help="forward,backward,dynamic")
    parser.add_argument("--results", type=Path, help="a file that keeps outcomes, and is gone on with")
    parser.add_argument("--table", type=Path, help="write the table of what --results holds")
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--all", action="store_true", help="print every outcome, not the faults alone")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.worker:
        _work(getattr(torch, given.dtype), given.operators, given.samples)
        return
    if given.dtype is not None:
        labels = DTYPES if given.dtype == "all" else given.dtype.split(",")
        for label in labels:
            _run(getattr(torch, label), given)
    if given.table is not None:
        given.table.write_text(write_table(_known(given.results)), encoding="utf-8")


def _run(dtype: torch.dtype, given: argparse.Namespace) -> None:
    start = time.perf_counter()
    label = str(dtype).removeprefix("torch.")
    done = {(o.operator.removesuffix("_"), o.mode) for o in _known(given.results) if o.dtype == label}
    kinds: Counter[str] = Counter()
    whole = 0
    for mode in given.modes.split(","):
        wanted = [n for n in given.operators or names(dtype) if (n.removesuffix("_"), mode) not in done]
        run = sweep_here if given.operators and given.results is None else sweep
        for outcome in run(dtype, wanted, given.samples, [mode]):
            kinds[outcome.kind] += 1
            whole += outcome.whole
            if outcome.kind not in ("ok", "skip", "break", "expected") or given.all:
                sys.stdout.write(f"{outcome}\n")
                sys.stdout.flush()
            if given.results is not None:
                with given.results.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    took = time.perf_counter() - start
    share = f"{whole} of {kinds['ok']} without a call through PyTorch" if kinds["ok"] else ""
    sys.stdout.write(f"{label} {given.modes}: {dict(kinds)}, {share}, {took:.0f} s\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    main()
