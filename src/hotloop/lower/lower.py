"""The walk: from an FX graph of ATen operators to a loop program.

What comes in: a graph module from ``graph/``, every node with a fake tensor in ``meta["val"]``, whose sizes
are ints or SymInts. What goes out: one frozen ``LoopProgram``. What holds in between: nodes are visited once,
in order, each by the rule for its operator or, where there is none or it declines, by a call through PyTorch;
nothing is fused, and an operator that is only a view adds no operation.

The next file is ``../schedule/layout.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from hotloop.compat import OpOverload, storage_key
from hotloop.config import Config
from hotloop.dumps import Log
from hotloop.errors import CompileError, HotloopError, describe_exception
from hotloop.ir import expr as ex
from hotloop.ir import sizes as sz
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index
from hotloop.ir.loops import Extern, LoopProgram, Measure, Pointwise, ViewRef, program_symbols

from . import (
    creation,
    distances,
    extern,
    indexing,
    patches,
    pointwise,
    pooling,
    products,
    random,
    ranks,
    reductions,
    scans,
    scatter,
    views,
)
from .builder import Builder, Rule, Tensor, View, loop_vars
from .symbols import InexpressibleError, Opaque, Symbols, is_sealed, is_tensor, said

__all__ = ["RULES", "lower"]

#: Every lowering rule, by operator.
RULES: Mapping[Any, Rule] = {
    **pointwise.RULES,
    **reductions.RULES,
    **distances.RULES,
    **views.RULES,
    **indexing.RULES,
    **scans.RULES,
    **scatter.RULES,
    **pooling.RULES,
    **patches.RULES,
    **products.RULES,
    **ranks.RULES,
    **creation.RULES,
    **random.RULES,
}


def lower(
    gm: torch.fx.GraphModule, config: Config, log: Log, name: str = "graph", symbolic: bool = False
) -> LoopProgram:
    """Lower a graph. Raises ``CompileError`` with the operator and the user's line where a node cannot be
    lowered, ``InexpressibleError`` where its sizes are symbolic and cannot be said.
    """
    symbols = Symbols()
    walk = _Walk(symbols.graph(gm) if symbolic else gm, name, config, log, symbols if symbolic else None)
    for symbol, value in symbols.computed.items():
        walk.builder.symbols[symbol] = Measure(-1, "value", value=value)
    for node in walk.gm.graph.nodes:
        walk.visit(node)
    return walk.finish()


class _Walk:
    """One lowering under way: what each FX node has become."""

    def __init__(
        self, gm: torch.fx.GraphModule, name: str, config: Config, log: Log, symbols: Symbols | None
    ) -> None:
        self.gm = gm
        self.fallback_random = config.fallback_random
        self.log = log
        self.symbolic = symbols is not None
        self.symbols = symbols or Symbols()
        self.builder = Builder(name)
        self.values: dict[torch.fx.Node, Any] = {}
        self.outputs: list[Any] = []
        self.mutates = False
        #: From what an input shows to the input, where its memory holds the negative of that.
        self.negated: dict[str, View] = {}
        #: For a write to an input: what it writes, where that had to be saved from an earlier write.
        self.sources: dict[torch.fx.Node, View] = {}

    def visit(self, node: torch.fx.Node) -> None:
        """Lower one node."""
        self.builder.enter(node)
        try:
            self.values[node] = getattr(self, "_" + node.op)(node)
        except (HotloopError, InexpressibleError):
            raise
        except Exception as error:
            message = describe_exception(error)
            raise CompileError(message, stage="lower", node=node) from error

    def finish(self) -> LoopProgram:
        """The program. Each size in it has to be told by an input or a call."""
        program = self.builder.finish(self.outputs)
        if self.symbolic:
            told = {v.name for v in program.symbols}
            told |= {v.name for op in program.ops if isinstance(op, Extern) for v, _, _ in op.binds}
            unknown = sorted({v.name for v in program_symbols(program)} - told)
            if unknown:
                raise InexpressibleError(f"nothing tells the sizes {unknown}")
        return program

    # --- one method for each kind of FX node ----------------------------------------------------------------

    def _placeholder(self, node: torch.fx.Node) -> Any:
        val = node.meta.get("val")
        if not is_tensor(val):
            # A number: its position matters to the caller; its value is a symbol's, or is baked.
            self.builder.number(val if isinstance(val, Index) else None)
            return val
        view = self._tensor(val, "input", f"in{len(self.builder.inputs)}", bool(node.meta.get("lasting")))
        self.builder.inputs.append(view.buffer)
        self.builder.measure(view.buffer)
        if val.is_neg() and val.dtype in pointwise.DTYPES:  # its memory holds the negative of what it shows
            negative = RULES[torch.ops.aten.neg.default](self.builder, node, view)
            self.negated[negative.buffer] = view
            return negative
        return view

    def _get_attr(self, node: torch.fx.Node) -> Any:
        value: Any = self.gm
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            return value  # a graph module, for a higher-order operator
        view = self._tensor(value, "constant", f"const{len(self.builder.constants)}")
        self.builder.constants[view.buffer] = value
        return view

    def _tensor(self, val: Tensor, kind: str, name: str, lasting: bool = False) -> View:
        if is_sealed(val):
            return self.builder.add_sealed(val, kind, name)
        device = str(val.device)
        return self.builder.add_buffer(
            tuple(val.shape), val.dtype, tuple(val.stride()), kind, name, device=device, lasting=lasting
        )

    def _call_function(self, node: torch.fx.Node) -> Any:
        b, target = self.builder, node.target
        val = node.meta.get("val")
        if self.symbolic and isinstance(val, (Index, Expr, int, float)) and not self._tells(node):
            return val  # arithmetic on sizes
        args = tuple(self._lowered(a) for a in node.args)
        kwargs = {k: self._lowered(a) for k, a in node.kwargs.items()}
        if target is operator.getitem:
            return args[0][args[1]]
        if target is torch.ops.aten.copy_.default:
            return self._mutate(node, args[0], args[1])
        tensors = _has((args, kwargs), lambda x: isinstance(x, View)) or _has(val, is_tensor)
        if not isinstance(target, OpOverload) and not tensors and callable(target):
            return target(*args, **kwargs)  # arithmetic on sizes
        if isinstance(val, (Index, int)) and node.meta.get("told") is not None:
            own = tuple(extern.argument(b, a, f) for a, f in zip(args, node.args, strict=True))
            b.tell(
                Extern((None,), node.target, own, {}, (), b._origin),
                ((node.meta["told"], 0, None), (val, 0, None)),
            )
            return val
        if isinstance(val, Opaque):
            return self._element(node, args)
        rule = RULES.get(target)
        if target in indexing.RULES and isinstance(args[0], View) and not args[0].numel:
            rule = None  # every position is out of range there: PyTorch raises what eager raises
        if self.fallback_random and target in random.RULES:
            rule = None
        if is_sealed(val) or _has((args, kwargs), self._is_sealed):
            rule = None
        if rule is not None:
            result = self._apply(rule, node, args, kwargs)
            if result is not NotImplemented:
                return result
        return extern.call(b, node, args, kwargs)

    def _apply(self, rule: Rule, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        try:
            return rule(self.builder, node, *args, **kwargs)
        except (TypeError, InexpressibleError) as error:
            if not self.symbolic:
                raise
            # The rule wants a number where there is an expression of symbols.
            text = f"{node.target} is left to PyTorch for sizes that vary: {error}"
            self.log.artifact("perf_hints", lambda: text)
            return NotImplemented

    def _tells(self, node: torch.fx.Node) -> bool:
        """Whether the node is a call that gives a number that only the data tell: ``item``."""
        told, val = node.meta.get("told"), node.meta.get("val")
        if told is None or not isinstance(node.target, OpOverload):
            return False
        symbols = [s for s in (told, val) if isinstance(s, Index) and s.kind == "sym"]
        return not all(map(self.builder.knows, symbols))

    def _element(self, node: torch.fx.Node, args: Any) -> Any:
        """A float that is an element of a tensor: read where it is used."""
        if node.target is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], View):
            x = args[0].reshape(())
            return ex.cast(x.at(()), torch.float64)
        raise InexpressibleError(f"{node.target}: {node.meta['val'].reason}")

    def _output(self, node: torch.fx.Node) -> None:
        returned: dict[str, set[int]] = {}
        owners: dict[ViewRef, list[torch.fx.Node]] = {}  # nodes are tensors of their own, however equal
        for n, value in self.values.items():
            if n.op == "placeholder" and isinstance(value, View):
                ref = self.builder.try_strided(value)
                owners |= {} if ref is None else {ref: [n]}
        results = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
        for result in results:
            out = self._returned(result, returned)
            if isinstance(out, ViewRef) and isinstance(result, torch.fx.Node):
                nodes = owners.setdefault(out, [])
                if result not in nodes:
                    nodes.append(result)
                out = replace(out, again=nodes.index(result))
            self.outputs.append(out)

    def _is_sealed(self, x: Any) -> bool:
        return isinstance(x, View) and self.builder.buffers[x.buffer].sealed

    # --- helpers --------------------------------------------------------------------------------------------

    def _lowered(self, a: Any) -> Any:
        """An FX argument with every node replaced by what it became."""
        if isinstance(a, torch.fx.Node):
            return self.values[a]
        if isinstance(a, (tuple, list)):
            return [self._lowered(x) for x in a]
        if isinstance(a, dict):
            return {k: self._lowered(x) for k, x in a.items()}
        if isinstance(a, slice):
            return slice(self._lowered(a.start), self._lowered(a.stop), self._lowered(a.step))
        return self.symbols.value(a) if isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)) else a

    def _mutate(self, node: torch.fx.Node, target: View, source: View) -> View:
        """``target.copy_(source)`` on a graph input: the last write of its buffer, after every reader."""
        b = self.builder
        buffer = b.buffers[target.buffer]
        if not self.mutates:
            self._keep_old_values()
        self.mutates = True
        source = self.sources.get(node, source)
        memory = self.negated.get(target.buffer)
        if memory is not None and target == b.whole(target.buffer):
            v = loop_vars("i", target.sizes)
            body = ex.call("neg", ex.cast(pointwise.element(source, v), target.dtype))
            b.ops.append(Pointwise(memory.buffer, v, body, b._origin))
            return source
        if target != b.whole(target.buffer) or buffer.kind != "input":
            raise CompileError("only a whole graph input can be written in place", stage="lower", node=node)
        if source.buffer == target.buffer and source != target:
            source = b.copy(source)  # it would read what it has just overwritten
        if not {source.dtype, target.dtype} <= pointwise.DTYPES:
            tensors = (b.strided(target), b.strided(source.expand(target.sizes)))
            written = (target.buffer,)
            b.ops.append(Extern((), torch.ops.aten.copy_.default, tensors, {}, written, b._origin))
            return target
        v = loop_vars("i", target.sizes)
        body = ex.cast(pointwise.element(source, v), target.dtype)
        b.ops.append(Pointwise(target.buffer, v, body, b._origin))
        return target

    def _keep_old_values(self) -> None:
        """Before the first write to an input: what is still to be read of such inputs becomes a value of its
        own.
        """
        b = self.builder
        writes = [n for n in self.gm.graph.nodes if n.target is torch.ops.aten.copy_.default]
        targets = {self.values[w.args[0]].buffer for w in writes}
        targets |= {self.negated[t].buffer for t in targets if t in self.negated}
        for w in writes:
            source = self.values.get(w.args[1])
            if isinstance(source, View) and source.buffer in targets - {self.values[w.args[0]].buffer}:
                self.sources[w] = b.copy(source)
        for node in next(n for n in self.gm.graph.nodes if n.op == "output").all_input_nodes:
            value = self.values.get(node)
            if node.op == "placeholder" or not isinstance(value, View) or value.buffer not in targets:
                continue
            if self._foreign(value.buffer, storage_key(node.meta["val"])):
                self.values[node] = b.copy(value, b.strides_like(node.meta["val"], value.sizes))

    def _returned(self, result: Any, returned: dict[str, set[int]]) -> Any:
        """A graph output: a tensor with eager's strides that shares memory with nothing that eager's does
        not.
        """
        if not isinstance(result, torch.fx.Node):
            return result
        value = self.values[result]
        if not isinstance(value, View):
            return said(value)
        b = self.builder
        if self._is_sealed(value):
            return b.strided(value)
        val = result.meta.get("eager_val", result.meta["val"])
        key = storage_key(val)
        # A version of an input is to be the input itself: what is returned of it is a tensor of its own.
        ref = None
        if value.buffer not in b.versions:
            ref = b.try_strided(value) or self._as_eager_lies(value, val, key)
        if ref is not None and extern._same_strides(ref.sizes, ref.strides, val):
            root = b.buffers[ref.buffer].alias_of or ref.buffer
            owners = returned.setdefault(root, set())
            if (not owners and not self._foreign(root, key)) or key in owners:
                owners.add(key)
                return self._handed_out(ref, val)
        copied = b.try_strided(b.copy(value, b._dense_strides(val, value.sizes)))
        assert copied is not None
        returned[copied.buffer] = {key}
        return self._handed_out(copied, val)

    def _as_eager_lies(self, value: View, val: Any, key: int) -> ViewRef | None:
        """A view whose index is not linear, because it takes a guard to see it: with eager's strides, where
        all of its buffer lies as it does in eager's storage.
        """
        b = self.builder
        whole = b.buffers[value.buffer]
        for node, other in self.values.items():
            fake = node.meta.get("val")
            if not isinstance(other, View) or other.buffer != value.buffer or not is_tensor(fake):
                continue
            ref = b.try_strided(other) if storage_key(fake) == key else None
            if ref is None or not extern._same_strides(ref.sizes, ref.strides, fake):
                continue
            if value.dtype is whole.dtype and sz.product(ref.sizes) == sz.product(whole.sizes):
                offset = sz.total([ref.offset, val.storage_offset(), -fake.storage_offset()])
                return ViewRef(value.buffer, value.sizes, tuple(val.stride()), offset, value.dtype)
        return None

    def _foreign(self, buffer: str, key: int) -> bool:
        """Whether the buffer is an input or a constant, and the output is not a view of it in eager."""
        if self.builder.buffers[buffer].kind not in ("input", "constant"):
            return False
        owner = self._input_keys().get(buffer)
        return owner != key

    def _input_keys(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for node, value in self.values.items():
            if node.op in ("placeholder", "get_attr") and isinstance(value, View):
                val = node.meta.get("val")
                if val is None or not is_tensor(val):
                    val = self.builder.constants[value.buffer]
                found[value.buffer] = storage_key(val)
        return found

    def _handed_out(self, ref: ViewRef, val: Tensor) -> ViewRef:
        b = self.builder
        root = b.buffers[ref.buffer].alias_of or ref.buffer
        if b.buffers[root].kind == "temp":
            b.buffers[root] = replace(b.buffers[root], kind="output")
        # Dimensions of size 1 have eager's strides too. Where a copy was made of a tensor with gaps, the rest
        # differ.
        strides = tuple(
            theirs if n == 1 else ours
            for n, ours, theirs in zip(ref.sizes, ref.strides, val.stride(), strict=True)
        )
        return ref if val.numel() == 0 else replace(ref, strides=strides)


def _has(x: Any, what: Callable[[Any], bool]) -> bool:
    """Whether there is such a thing in nested containers."""
    if isinstance(x, dict):
        x = tuple(x.values())
    return any(_has(part, what) for part in x) if isinstance(x, (tuple, list)) else what(x)
