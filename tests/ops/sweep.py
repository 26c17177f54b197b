"""PyTorch's own samples of every operator, compiled and compared with eager.

What comes in: a dtype and names of operators of `torch.testing`'s operator database; all of them if none is
named. What goes out: one `Outcome` for each sample. What holds: a sample runs AOTAutograd and hotloop as a
user's function does, but not Dynamo; samples run in another process, so that a crash ends one operator and
not the sweep.

    python tests/ops/sweep.py float32                 every operator, then a summary
    python tests/ops/sweep.py int64 floor_divide      one operator, in this process

Next: test_ops.py, which runs a part of it.
"""

from __future__ import annotations

import argparse
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from functorch.compile import aot_function
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.testing._internal import common_methods_invocations
from torch.utils._pytree import tree_flatten, tree_unflatten

sys.path.insert(0, str(Path(__file__).parent.parent))

import hotloop
from hotloop.backend import compile_graph
from hotloop.config import resolve
from hotloop.graph.decompositions import decompositions
from judge import assert_as_accurate, reference_of

# The database wraps random operators in a function that sets a seed. A compiled function would have it set
# once, while it is traced.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

__all__ = ["Outcome", "names", "sweep", "sweep_here"]

SAMPLES = 4
GENERATED = 48  # samples looked at for an operator: generating all takes minutes for some
SECONDS = 60.0  # for one operator, before its process is ended

_PACKAGE = str(Path(hotloop.__file__).parent)
# Their values are not determined by the arguments.
_ARBITRARY = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
# Results that float64 cannot judge: bases are determined only up to signs and rotations, and neighbours are
# those of the dtype. They are compared with eager alone.
_NO_REFERENCE = (
    "linalg.eig",
    "linalg.svd",
    "svd",
    "pca_lowrank",
    "geqrf",
    "linalg.qr",
    "qr",
    "frexp",
    "nextafter",
)
# Operators whose strides PyTorch announces (to whoever compiles) otherwise than its CPU kernel makes them.
_OTHER_VALUES = {  # the same of values: it rounds halves to even where its kernel for images rounds them up
    torch.uint8: ("nn.functional.interpolate.bilinear", "nn.functional.interpolate.bicubic",
                  "nn.functional.upsample_bilinear"),
}  # fmt: skip
_OTHER_STRIDES = ("nn.functional.max_unpool",)


# Dynamo would not have put these operators into a graph: sizes, or what follows, depend on values.
_GRAPH_BREAKS = (DataDependentOutputException, DynamicOutputShapeException)


@dataclass(frozen=True)
class Outcome:
    """What became of one sample.

    `kind` is ok, wrong, error (compiling or calling raised), crash, timeout, or skip (not for a compiler).
    """

    operator: str
    dtype: str
    sample: int
    kind: str
    text: str = ""
    seconds: float = 0.0


def names(dtype: torch.dtype) -> list[str]:
    """The operators that take this dtype on the CPU."""
    found = [_name(op) for op in common_methods_invocations.op_db if dtype in op.supported_dtypes("cpu")]
    return sorted(set(found))


def _name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def _database(dtype: torch.dtype) -> dict[str, Any]:
    return {_name(op): op for op in common_methods_invocations.op_db if dtype in op.supported_dtypes("cpu")}


def _samples(op: Any, dtype: torch.dtype, count: int) -> list[tuple[int, Any]]:
    """Samples from all over the operator's list, the first ones being the plainest."""
    found = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), GENERATED))
    if len(found) <= count:
        return list(enumerate(found))
    chosen = sorted({round(i * (len(found) - 1) / (count - 1)) for i in range(count)})
    return [(i, found[i]) for i in chosen]


def compiled(fn: Callable[..., Any], options: dict[str, Any] | None = None) -> Callable[..., Any]:
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
        decompositions=decompositions(),
    )


def _copy(leaf: Any) -> Any:
    """A copy with the same strides, in memory of its own."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return leaf
    if leaf.is_conj() or leaf.is_neg():
        return leaf.clone()
    storage = leaf.detach().untyped_storage().clone()
    fresh = torch.empty(0, dtype=leaf.dtype)
    return fresh.set_(storage, leaf.storage_offset(), leaf.shape, leaf.stride())


def _run_sample(op: Any, dtype: torch.dtype, call: Callable[..., Any], sample: Any) -> tuple[str, str]:
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if _name(op) in _OTHER_VALUES.get(dtype, ()):
        return "skip", "PyTorch's own decomposition differs from its kernel"
    if any(leaves[i].layout != torch.strided for i in places):
        return "skip", "not a strided tensor"

    def fn(*tensors: torch.Tensor) -> list[Any]:
        own = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            own[i] = tensor
        first, rest, named = tree_unflatten(own, spec)
        return tree_flatten(call(first, *rest, **named))[0]

    def inputs() -> list[torch.Tensor]:
        return [_copy(leaves[i]) for i in places]

    eager_inputs, own_inputs = inputs(), inputs()
    with torch.no_grad():
        try:
            torch.manual_seed(0)
            eager = fn(*eager_inputs)
        except Exception as error:  # noqa: BLE001 - whatever it raises is an outcome
            return "skip", _short(error)
        if any(isinstance(t, torch.Tensor) and t.layout != torch.strided for t in eager):
            return "skip", "a result that is not strided"
        try:
            torch.manual_seed(0)
            got = compiled(fn)(*own_inputs)
        except _GRAPH_BREAKS as error:
            return ("error" if _raised_by_hotloop(error) else "skip"), "a graph break: " + _short(error)
        except Exception as error:  # noqa: BLE001 - whatever it raises is an outcome
            if "custom (non-ATen) operator" in str(error):
                return "skip", _short(error)  # AOTAutograd knows no functional form
            return "error", _short(error)
    name = _name(op)
    arbitrary = name in _ARBITRARY
    if arbitrary:
        got = [torch.zeros_like(t) if isinstance(t, torch.Tensor) else t for t in got]
        eager = [torch.zeros_like(t) if isinstance(t, torch.Tensor) else t for t in eager]

    def reference() -> Any:
        torch.manual_seed(0)
        return reference_of(fn, *inputs())()

    unjudged = any(name.startswith(prefix) for prefix in _NO_REFERENCE)
    try:
        strides = not name.startswith(_OTHER_STRIDES)
        assert_as_accurate(list(got), eager, None if unjudged else reference, check_stride=strides)
        written = [i for i, (a, b) in enumerate(zip(eager_inputs, inputs(), strict=True)) if not _same(a, b)]
        if not _same_result(eager, eager_inputs, written):
            assert_as_accurate(own_inputs, eager_inputs, None, what="input after the call")
    except AssertionError as error:
        return "wrong", _short(error)
    except Exception as error:  # noqa: BLE001 - whatever it raises is an outcome
        return "wrong", "the reference failed: " + _short(error)
    return "ok", ""


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else torch.equal(a, b)


def _same_result(results: Sequence[Any], inputs: Sequence[torch.Tensor], written: Sequence[int]) -> bool:
    """Whether all that was written to is among the results, which are judged already."""
    pointers = {t.data_ptr() for t in results if isinstance(t, torch.Tensor)}
    return all(inputs[i].data_ptr() in pointers for i in written)


def _raised_by_hotloop(error: BaseException) -> bool:
    """Whether a stage of hotloop asked for a value that a fake tensor does not have."""
    return any(f.filename.startswith(_PACKAGE) for f in traceback.extract_tb(error.__traceback__))


def _short(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(_PACKAGE)]
    where = f" [{Path(own[-1].filename).name}:{own[-1].lineno}]" if own else ""
    return f"{type(error).__name__}: {str(error)[:600]}{where}"


def sweep_here(dtype: torch.dtype, operators: Sequence[str], count: int = SAMPLES) -> Iterator[Outcome]:
    """Run operators in this process."""
    database = _database(dtype)
    label = str(dtype).removeprefix("torch.")
    for name in operators:
        op = database[name]
        try:
            torch.manual_seed(0)
            samples = _samples(op, dtype, count)
        except Exception as error:  # noqa: BLE001 - whatever it raises is an outcome
            yield Outcome(name, label, -1, "skip", "samples: " + _short(error))
            continue
        for call, suffix in ((op.op, ""), (op.inplace_variant, "_")):
            if call is None:
                continue
            for number, sample in samples[: count if not suffix else 1]:
                if suffix and sample.broadcasts_input:
                    continue
                start = time.perf_counter()
                kind, text = _run_sample(op, dtype, call, sample)
                yield Outcome(name + suffix, label, number, kind, text, round(time.perf_counter() - start, 3))


# --- in another process -----------------------------------------------------------------------------------


def sweep(dtype: torch.dtype, operators: Sequence[str], count: int = SAMPLES) -> Iterator[Outcome]:
    """Run operators in another process, one at a time: a crash is an outcome of the operator it struck."""
    label = str(dtype).removeprefix("torch.")
    left = list(operators)
    while left:
        command = [sys.executable, __file__, "--worker", "--samples", str(count), label, *left]
        current = left[0]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            errors: list[str] = []
            reader = threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True)  # noqa: B023
            reader.start()
            watch = threading.Timer(SECONDS, process.kill)
            watch.start()
            for line in process.stdout:
                if line.startswith("start "):
                    current = line.split()[1]
                    left.remove(current)
                    watch.cancel()
                    watch = threading.Timer(SECONDS, process.kill)
                    watch.start()
                elif line.startswith("{"):
                    yield Outcome(**json.loads(line))
            status = process.wait()
            watch.cancel()
            reader.join()
        if status:
            kind = "timeout" if status == -signal.SIGKILL else "crash"
            yield Outcome(current, label, -1, kind, f"status {status}: {''.join(errors)[-600:]}")
            if current in left:
                left.remove(current)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dtype")
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--all", action="store_true", help="print every outcome, not the faults alone")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    warnings.simplefilter("ignore")
    if given.worker:
        for name in given.operators:
            sys.stdout.write(f"start {name}\n")
            sys.stdout.flush()
            for outcome in sweep_here(dtype, [name], given.samples):
                sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
                sys.stdout.flush()
        return
    start = time.perf_counter()
    run = sweep_here if given.operators else sweep
    kinds: Counter[str] = Counter()
    seen = set()
    for outcome in run(dtype, given.operators or names(dtype), given.samples):
        kinds[outcome.kind] += 1
        seen.add(outcome.operator)
        if outcome.kind not in ("ok", "skip") or given.all:
            sys.stdout.write(f"{outcome}\n")
            sys.stdout.flush()
    took = time.perf_counter() - start
    sys.stdout.write(f"{given.dtype}: {len(seen)} operators, {dict(kinds)}, {took:.0f} s\n")


if __name__ == "__main__":
    os.environ.setdefault("HOTLOOP_CHECK", "1")
    main()
