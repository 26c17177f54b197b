"""The rules that keep the compiler one-way, read from the source with ast.

    errors, config, compat, dumps < ir < graph, lower < schedule < codegen < runtime < backend < tools

Each module imports only from its left, and graph, lower, schedule and codegen share nothing with each other
but the IR. The last tests show that each rule catches what it is there for.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "hotloop"

BASE = ("errors", "config", "compat", "dumps")
STAGES = ("graph", "lower", "schedule", "codegen")
# What each part may import beside itself.
ALLOWED: dict[str, tuple[str, ...]] = {
    "": ("errors", "config"),  # hotloop/__init__.py: importing hotloop stays light
    "errors": (),
    "config": ("errors",),
    "compat": ("errors", "config"),
    "dumps": ("errors", "config", "compat"),
    "ir": BASE,
    **dict.fromkeys(STAGES, (*BASE, "ir")),
    "runtime": (*BASE, "ir", *STAGES),
    "backend": (*BASE, "ir", *STAGES, "runtime"),
    "tools": (*BASE, "ir", *STAGES, "runtime", "backend"),
}
# sympy comes with torch and is met where a SymInt enters or a guard leaves.
# functorch.compile, a part of torch, is the documented home of the min-cut partitioner.
PACKAGES = {"torch", "functorch", "sympy", "hotloop"} | set(sys.stdlib_module_names)
OPTIONAL = {"triton"}

MAX_FILE = 900
MAX_FUNCTION = 80


@dataclass(frozen=True)
class Import:
    module: str  # absolute dotted name; `from a import b` gives "a.b"
    line: int
    inside_function: bool


def resolve_from(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The absolute name of what `from ... import` imports from, relative imports included."""
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*parts, node.module] if node.module else parts)


def imports_of(
    tree: ast.AST, module: str, is_package: bool = False, inside: bool = False
) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, inside)
        elif isinstance(node, ast.ImportFrom):
            source = resolve_from(node, module, is_package)
            for alias in node.names:
                yield Import(f"{source}.{alias.name}", node.lineno, inside)
        else:
            function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports_of(node, module, is_package, inside or function)


def part_of(module: str) -> str:
    """ "hotloop.ir.expr.Load" belongs to "ir", "hotloop.__version__" to the package itself."""
    name = module.split(".")[1] if "." in module else ""
    return name if name in ALLOWED else ""


def faults_of_imports(tree: ast.AST, module: str, is_package: bool = False) -> list[str]:
    part = part_of(module)
    faults = []
    for found in imports_of(tree, module, is_package):
        where = f"{module}:{found.line}"
        top = found.module.split(".")[0]
        if top == "hotloop":
            other = part_of(found.module)
            if other not in ("", part) and other not in ALLOWED[part]:
                faults.append(f"{where} imports {found.module}, which is not on its left")
        elif top not in PACKAGES | OPTIONAL:
            faults.append(f"{where} imports {top}, which hotloop does not depend on")
        if found.inside_function and top not in OPTIONAL:
            faults.append(f"{where} imports {found.module} inside a function")
        internal = any(piece.startswith("_") for piece in found.module.split("."))
        if top == "torch" and internal and module != "hotloop.compat":
            faults.append(f"{where} imports {found.module}: internals of torch belong in compat.py")
    return faults


def dotted(node: ast.expr) -> str:
    """`torch.fx.Node` of an attribute chain on a name; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def faults_of_internals(tree: ast.AST, module: str) -> list[str]:
    """Uses of torch's internals by attribute: `torch._C`. Operators may begin with an underscore."""
    faults = []
    for node in ast.walk(tree):
        name = dotted(node) if isinstance(node, ast.Attribute) else ""
        if name.startswith("torch._inductor"):
            faults.append(f"{module}:{node.lineno} uses {name}")
        if not name.startswith("torch.") or name.startswith("torch.ops.") or module == "hotloop.compat":
            continue
        if any(part.startswith("_") and not part.startswith("__") for part in name.split(".")):
            faults.append(f"{module}:{node.lineno} uses {name}: internals of torch belong in compat.py")
    return faults


def faults_of_size(tree: ast.Module, text: str, module: str) -> list[str]:
    faults = []
    lines = len(text.splitlines())
    if lines >= MAX_FILE:
        faults.append(f"{module} has {lines} lines: {MAX_FILE} is too many")
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length >= MAX_FUNCTION:
                faults.append(
                    f"{module}:{node.lineno} {node.name} has {length} lines: {MAX_FUNCTION} is too many"
                )
    return faults


def cycle_in(edges: dict[str, set[str]]) -> list[str]:
    """One import cycle, as the modules along it; empty when there is none."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(edges.get(module, ())):
            found = walk(other, [*path, module])
            if found:
                return found
        done.add(module)
        return []

    for module in sorted(edges):
        found = walk(module, [])
        if found:
            return found
    return []


@dataclass(frozen=True)
class Source:
    module: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


@cache
def sources() -> tuple[Source, ...]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found.append(Source(module, path, text, ast.parse(text, str(path))))
    return tuple(found)


def test_every_module_imports_only_from_its_left() -> None:
    assert sources()
    faults = [f for s in sources() for f in faults_of_imports(s.tree, s.module, s.is_package)]
    assert not faults, "\n".join(faults)


def test_every_module_has_a_known_place() -> None:
    names = {path.stem for path in SOURCE.iterdir() if path.is_dir() or path.suffix == ".py"}
    unknown = names - set(ALLOWED) - {"__init__", "__pycache__"}
    assert not unknown, f"no layer is known for {sorted(unknown)}: add them to ALLOWED"


def test_internals_of_torch_are_in_compat_alone() -> None:
    faults = [fault for source in sources() for fault in faults_of_internals(source.tree, source.module)]
    assert not faults, "\n".join(faults)


def test_inductor_is_never_imported() -> None:
    """Neither by the compiler nor by its tests; benchmarks name it as a back end and import nothing."""
    files = [path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    for path in files:
        for found in imports_of(ast.parse(path.read_text(encoding="utf-8")), path.stem):
            assert not found.module.startswith("torch._inductor"), f"{path}:{found.line}"


def test_imports_have_no_cycle() -> None:
    modules = {source.module for source in sources()}
    edges: dict[str, set[str]] = {module: set() for module in modules}
    for source in sources():
        for found in imports_of(source.tree, source.module, source.is_package):
            name = found.module if found.module in modules else found.module.rpartition(".")[0]
            if name in modules and name != source.module:
                edges[source.module].add(name)
    assert not cycle_in(edges), " -> ".join(cycle_in(edges))


def test_files_and_functions_stay_short() -> None:
    faults = [
        fault for source in sources() for fault in faults_of_size(source.tree, source.text, source.module)
    ]
    headers = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.h")}
    faults += [f"{path} has {lines} lines" for path, lines in headers.items() if lines >= MAX_FILE]
    assert not faults, "\n".join(faults)


def test_every_module_opens_with_a_docstring() -> None:
    missing = [
        source.module for source in sources() if source.text.strip() and not ast.get_docstring(source.tree)
    ]
    assert not missing, missing


@pytest.mark.parametrize(
    ("module", "code", "says"),
    [
        ("hotloop.ir.expr", "from hotloop.lower import lower", "not on its left"),
        ("hotloop.ir.expr", "from ..lower import lower", "not on its left"),
        ("hotloop.ir.expr", "from hotloop import backend", "not on its left"),
        ("hotloop.schedule.fuse", "import hotloop.lower.lower", "not on its left"),
        ("hotloop.codegen.cpp", "from hotloop.schedule.fuse import fuse", "not on its left"),
        ("hotloop.runtime.build", "import hotloop.tools.cli", "not on its left"),
        ("hotloop.errors", "if X:\n    from hotloop.config import Config", "not on its left"),
        ("hotloop", "from hotloop.backend import hotloop", "not on its left"),
        ("hotloop.ir.expr", "import numpy", "does not depend on"),
        ("hotloop.ir.expr", "def f():\n    import re", "inside a function"),
        (
            "hotloop.ir.expr",
            "class A:\n    def f(self):\n        from hotloop.ir import index",
            "inside a function",
        ),
        ("hotloop.ir.expr", "from torch._dynamo import utils", "compat.py"),
        ("hotloop.ir.expr", "from torch import _C", "compat.py"),
    ],
)
def test_a_wrong_import_is_found(module: str, code: str, says: str) -> None:
    faults = faults_of_imports(ast.parse(code), module)
    assert len(faults) == 1
    assert says in faults[0]


@pytest.mark.parametrize(
    ("module", "code"),
    [
        (
            "hotloop.ir.expr",
            "from hotloop.ir.index import Index\nfrom . import index\nfrom hotloop import compat",
        ),
        ("hotloop.runtime.build", "from hotloop.codegen import cpp\nimport os, torch.fx"),
        ("hotloop.codegen.triton", "def f():\n    import triton.language as tl"),
        ("hotloop.compat", "from torch._dynamo import utils"),
        ("hotloop.backend", "from hotloop.lower.lower import lower\nfrom __future__ import annotations"),
    ],
)
def test_a_right_import_is_let_through(module: str, code: str) -> None:
    assert faults_of_imports(ast.parse(code), module) == []


def test_other_faults_are_found() -> None:
    assert faults_of_internals(ast.parse("x = torch._C._get()"), "hotloop.ir.expr")
    assert faults_of_internals(ast.parse("x = torch._inductor.f"), "hotloop.compat")
    assert not faults_of_internals(
        ast.parse("torch.ops.aten._softmax.default, torch.__version__"), "hotloop.ir"
    )
    long = "def f():\n" + "    x = 1\n" * 80
    assert faults_of_size(ast.parse(long), long, "m")
    assert not faults_of_size(ast.parse(long[:500]), long[:500], "m")
    big = "x = 1\n" * 900
    assert faults_of_size(ast.parse(big), big, "m")
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
