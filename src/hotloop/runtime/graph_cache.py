"""Whole compiled graphs on disk: a graph seen before needs no lowering, no scheduling and no printing.

What comes in: the graph as AOTAutograd made it, and everything else that the generated text depends on. What
goes out: a key, and under it the host program and the functions as JSON. What holds in between: the key
covers each node with its operator, arguments, and the dtype, shape, strides and memory sharing of its result,
the values of one-element constants (they may be folded into the code), the options that change code, the
versions of hotloop and torch, and hotloop's own source. What has no text that says everything (a higher-order
operator and its subgraphs, say) is not cached. The next file is ``override.py``.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hotloop import __version__, compat
from hotloop.errors import source_line
from hotloop.runtime.cache import Cache, digest

__all__ = ["CompiledText", "graph_digest", "load", "save"]

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


#: The part of a key that says which operators a graph has, with their arguments.
_GRAPH = "graph"


@dataclass(frozen=True)
class CompiledText:
    """A compiled graph as text: the host program, each function as (symbol, text, needs), and where in the
    graph module each constant of the host program comes from."""

    host: str
    functions: tuple[tuple[str, str, tuple[str, ...]], ...]
    constants: Mapping[str, str]


@cache
def _own_source() -> str:
    """A digest of hotloop's source: a change of the compiler is a change of everything it compiled."""
    found = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.h")]):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def graph_digest(
    gm: torch.fx.GraphModule, kind: str, settings: Mapping[str, str]
) -> tuple[str, dict[str, str]] | None:
    """The key of a graph and what it is made of, or ``None`` where the graph has something without a text.

    ``settings``: options, SIMD level, number of threads: what else the generated text depends on.
    """
    storages: dict[int, int] = {}
    lines: list[str] = []
    layouts: list[str] = []
    places: list[str] = []
    for node in gm.graph.nodes:
        arguments, target = _text((node.args, node.kwargs)), _target(node)
        if arguments is None or target is None:
            return None
        lines.append(f"{node.op} {node.name} {target} {arguments}")
        layouts.append(_value(node.meta.get("val"), storages))
        places.append(node.meta.get("stack_trace") or "")  # generated comments and messages quote the line
        if node.op == "get_attr":
            constant = _attribute(gm, str(node.target))
            if not isinstance(constant, torch.Tensor):
                return None
            lines.append(
                _value(constant, storages) + (repr(constant.tolist()) if constant.numel() <= 1 else "")
            )
    parts = {
        **settings,
        _GRAPH: _digest_of(lines),
        "dtypes and layouts": _digest_of(layouts),
        "source lines": _digest_of(places),
        "kind": kind,
        "hotloop": f"{__version__} {_own_source()}",
        "torch": compat.torch_version(),
    }
    return digest(parts), parts


def _digest_of(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _target(node: torch.fx.Node) -> str | None:
    """What a node calls or names, or ``None`` where its name may mean something else in another process."""
    if node.op != "call_function":
        return str(node.target)
    if not isinstance(node.target, compat.OpOverload):
        named: Any = node.target
        known = getattr(named, "__module__", None) == operator.getitem.__module__
        return f"operator.{named.__name__}" if known else None
    if node.target.namespace in ("aten", "prims"):
        return str(node.target)
    return f"{node.target} {compat.operator_arguments(node.target)}"


def _text(value: Any) -> str | None:
    """An argument as text, or ``None`` where it has none that says everything."""
    if isinstance(value, torch.fx.Node):
        return value.name
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (tuple, list)):
        parts = [_text(v) for v in value]
        return (
            None
            if None in parts
            else f"{type(value).__name__}({','.join(p for p in parts if p is not None)})"
        )
    if isinstance(value, dict):
        return _text([(k, v) for k, v in value.items()])
    if isinstance(value, slice):
        return _text((value.start, value.stop, value.step))
    return None


def _value(value: Any, storages: dict[int, int]) -> str:
    if isinstance(value, torch.Tensor):
        shared = storages.setdefault(compat.storage_key(value), len(storages))
        strided = value.layout is torch.strided
        memory = f"{value.stride()}{value.storage_offset()}" if strided else f"{value.layout}"
        layout = f"{tuple(value.shape)}{memory}"
        lazy = f"{'conj' * value.is_conj()}{'neg' * value.is_neg()}"
        return f"{value.dtype}{layout}{lazy}{value.device}{type(value).__name__}@{shared}"
    if isinstance(value, (tuple, list)):
        return ";".join(_value(v, storages) for v in value)
    return repr(value)


def _attribute(gm: torch.fx.GraphModule, path: str) -> Any:
    value: Any = gm
    for part in path.split("."):
        value = getattr(value, part)
    return value


def save(
    cache: Cache, key: str, parts: Mapping[str, str], gm: torch.fx.GraphModule, host: str,
    functions: Sequence[tuple[str, str, Sequence[str]]], constants: Mapping[str, torch.Tensor],
) -> None:  # fmt: skip
    """Keep a compiled graph. Nothing is kept where a constant is not one of the module's own attributes."""
    paths: dict[str, str] = {}
    attributes = [str(n.target) for n in gm.graph.nodes if n.op == "get_attr"]
    for name, tensor in constants.items():
        path = next((a for a in attributes if _attribute(gm, a) is tensor), None)
        if path is None:
            return
        paths[name] = path
    value = {"host": host, "functions": [[s, t, list(n)] for s, t, n in functions], "constants": paths}
    cache.put(key, ".json", json.dumps(value).encode(), _name(gm, parts), parts, of=_identity(parts))


def load(
    cache: Cache, key: str, parts: Mapping[str, str], gm: torch.fx.GraphModule
) -> tuple[CompiledText, dict[str, torch.Tensor]] | None:
    """What was kept under the key, with the module's constants; any fault is a miss."""
    data = cache.get(key, ".json", _name(gm, parts), parts, of=_identity(parts))
    if data is None:
        return None
    try:
        value = json.loads(data)
        functions = tuple((str(s), str(t), tuple(map(str, n))) for s, t, n in value["functions"])
        found = CompiledText(str(value["host"]), functions, dict(value["constants"]))
        return found, {name: _attribute(gm, path) for name, path in found.constants.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _identity(parts: Mapping[str, str]) -> str:
    """What makes it the same graph, compiled with something else changed: its operators and arguments."""
    return f"{parts['kind']} {parts[_GRAPH]}"


def _name(gm: torch.fx.GraphModule, parts: Mapping[str, str]) -> str:
    """What a person knows a graph by: the line that its first operator came from."""
    operators = [n for n in gm.graph.nodes if n.op == "call_function"]
    line = next(filter(None, map(source_line, operators)), None)
    many = f"{len(operators)} operator{'s' * (len(operators) != 1)}"
    return f"{parts['kind']} graph, {many}" + (f" from {line}" if line else "")
