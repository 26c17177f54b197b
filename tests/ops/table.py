"""The table of operators and dtypes, from the outcomes of a sweep.

What comes in: outcomes. What goes out: the text of docs/operators.md. Next: test_ops.py.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from expected import DTYPES

__all__ = ["Outcome", "write_table"]


@dataclass(frozen=True)
class Outcome:
    """What became of one sample.

    `kind` is ok, wrong, error (compiling or calling raised), crash, timeout, expected (wrong or raised, for a
    reason that is known), break (not for a compiler: Dynamo leaves it to PyTorch), or skip (no sample that
    eager itself runs). `calls` names the operators in it that were called through PyTorch.
    """

    operator: str
    dtype: str
    mode: str = "forward"
    sample: int = -1
    kind: str = ""
    text: str = ""
    calls: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether the whole graph was compiled, without a call through PyTorch."""
        return self.kind == "ok" and not self.calls

    @staticmethod
    def from_json(line: str) -> Outcome:
        value: dict[str, Any] = json.loads(line)
        return Outcome(**{**value, "calls": tuple(value["calls"])})


_HEAD = """\
# Operators

Every operator of PyTorch's operator database (`torch.testing`), in each dtype that has a column, with samples
of the database: compiled, and compared with eager in results, strides, dtypes and what inputs hold. Made by

    python tests/ops/sweep.py all --modes forward,backward,dynamic --samples 1 --results sweep.jsonl
    python tests/ops/sweep.py --table docs/operators.md --results sweep.jsonl

which goes on where it was stopped. A dtype that has no column was not run. The samples of an operator are
few, chosen from all over its list: up to four in float32 forward, else one, and one of the form that works in
place. Their number in each column is said below. Random operators are compared with eager under
`fallback_random`, and then looked at once more without it, as users run them.

- `C`: compiled; the whole graph runs in kernels.
- `P`: right, with at least one operator called through PyTorch (what a library does best, such as a matrix
  product, or what has no rule yet).
- `3/4`: of 4 samples, 3 are compiled whole and 1 calls PyTorch.
- `G`: its size or what follows depends on data, so that capture leaves it to PyTorch.
- a number in brackets: a failure that is expected, with the reason below.
- `!`: a fault. There should be none.
- blank: PyTorch has no such operator of this dtype, or no sample that it runs itself.

"bwd" is forward and backward together, "dyn" forward with symbolic sizes.
"""
_SHORT = {
    "float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "uint16": "u16",
    "uint32": "u32", "uint64": "u64", "bool": "bool", "complex64": "c64", "complex128": "c128",
}  # fmt: skip
_SUFFIX = {"forward": "", "backward": " bwd", "dynamic": " dyn"}
_COLUMNS = [(dtype, mode) for dtype in DTYPES for mode in _SUFFIX]


def write_table(outcomes: Sequence[Outcome]) -> str:
    """The text of the table."""
    cells: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for o in outcomes:
        cells[o.operator, o.dtype, o.mode].append(o)
    reasons: dict[str, int] = {}
    names = sorted({o.operator for o in outcomes})
    columns = [c for c in _COLUMNS if any(key[1:] == c for key in cells)]
    heads = [f"{_SHORT[d]}{_SUFFIX[m]}" for d, m in columns]
    rows = ["| operator | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in names:
        texts = [_cell(cells.get((name, *c), []), reasons) for c in columns]
        if any(texts):
            rows.append(f"| {name} | " + " | ".join(texts) + " |")
    notes = [f"{n}. {text}" for text, n in reasons.items()]
    parts = [_HEAD, _summary(outcomes), *(["## Expected failures\n", "\n".join(notes), ""] if notes else [])]
    return "\n".join([*parts, "## The table\n", *rows, ""])


def _cell(outcomes: Sequence[Outcome], reasons: dict[str, int]) -> str:
    kinds = Counter(o.kind for o in outcomes)
    if kinds["wrong"] + kinds["error"] + kinds["crash"] + kinds["timeout"]:
        return "!"
    expected = next((o.text for o in outcomes if o.kind == "expected"), None)
    if expected is not None:
        return f"[{reasons.setdefault(expected, len(reasons) + 1)}]"
    if not kinds["ok"]:
        return "G" if kinds["break"] else ""
    whole = sum(o.whole for o in outcomes)
    return "C" if whole == kinds["ok"] else "P" if not whole else f"{whole}/{kinds['ok']}"


def _summary(outcomes: Sequence[Outcome]) -> str:
    """How many samples of each column ran, and how."""
    rows = [
        "## Samples\n", f"torch {torch.__version__}.\n",
        "| dtype | operators | samples | compiled whole | with a call through PyTorch | left by capture "
        "| expected failures | faults |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for dtype, mode in _COLUMNS:
        own = [o for o in outcomes if (o.dtype, o.mode) == (dtype, mode)]
        if not own:
            continue
        kinds = Counter(o.kind for o in own)
        whole = sum(o.whole for o in own)
        ran = kinds["ok"]
        share = f" ({whole / ran:.1%})" if ran else ""
        faults = kinds["wrong"] + kinds["error"] + kinds["crash"] + kinds["timeout"]
        operators = len({o.operator for o in own if o.kind != "skip"})
        samples = sum(kinds.values()) - kinds["skip"]
        counts = (
            operators,
            samples,
            f"{whole}{share}",
            ran - whole,
            kinds["break"],
            kinds["expected"],
            faults,
        )
        rows.append(f"| {dtype}{_SUFFIX[mode]} | {' | '.join(map(str, counts))} |")
    return "\n".join([*rows, ""])
