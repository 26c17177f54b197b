"""What users do with gradients around and inside compiled functions, compared with eager.

What comes in: small functions and modules. What goes out: nothing. What holds: values and gradients are
eager's, wherever they go: accumulated, through frozen parameters, views, hooks, checkpoints, ``torch.func``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from judge import assert_as_accurate

F64 = torch.float64
Fn = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(f: Any, **options: Any) -> Any:
    return torch.compile(f, backend="hotloop", options=options or None)


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 20), nn.GELU(), nn.LayerNorm(20), nn.Linear(20, 3))


def gradients(f: Fn, *inputs: Tensor) -> list[Tensor]:
    """The results of ``f`` and their gradients by the inputs that want some."""
    own = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    out = f(*own)
    out = out if isinstance(out, (tuple, list)) else [out]
    wanted = [o for o in out if o.requires_grad]
    weights = [torch.cos(torch.arange(o.numel()) + 0.5).view_as(o).to(o) for o in wanted]
    torch.autograd.backward(wanted, weights)
    return [*(o.detach() for o in out), *(x.grad for x in own if x.grad is not None)]


def check(f: Fn, *inputs: Tensor) -> None:
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    assert_as_accurate(gradients(compiled(f), *inputs), gradients(f, *inputs), lambda: gradients(f, *wide))


def wanting(*sizes: int) -> Tensor:
    return torch.randn(sizes, requires_grad=True)


# --- training loops ---------------------------------------------------------------------------------------


def test_gradients_accumulate() -> None:
    one, other = network(), network()
    f = compiled(one)
    for number in range(3):
        torch.manual_seed(number)
        x = torch.randn(5, 7)
        f(x).square().sum().backward()
        other(x).square().sum().backward()
    assert_as_accurate([p.grad for p in one.parameters()], [p.grad for p in other.parameters()])


def test_frozen_parameters_get_no_gradients() -> None:
    one, other = network(), network()
    for m in (one, other):
        m[0].requires_grad_(False)
    x = torch.randn(5, 7)
    compiled(one)(x).sum().backward()
    other(x).sum().backward()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == (not p.requires_grad)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)
    # And again, thawed: what was compiled for frozen parameters must not serve.
    for m, f in ((one, compiled(one)), (other, other)):
        m[0].requires_grad_(True)
        m.zero_grad()
        f(x).sum().backward()
    assert_as_accurate([p.grad for p in one.parameters()], [p.grad for p in other.parameters()])


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "enable_grad", "after training"])
def test_modes(mode: str) -> None:
    m, x = network(), torch.randn(5, 7)
    f = compiled(m)
    if mode == "after training":
        f(x).sum().backward()
        mode = "inference_mode"
    with getattr(torch, mode)():
        got, want = f(x), m(x)
    assert got.requires_grad == want.requires_grad and got.is_inference() == want.is_inference()
    torch.testing.assert_close(got, want)
    if mode == "inference_mode":  # and back: the pool must not hand an inference tensor to autograd
        f(x).sum().backward()
        assert all(p.grad is not None for p in m.parameters())


def test_results_of_inference_mode_serve_in_training() -> None:
    def f(x: Tensor) -> Tensor:
        return (x.exp() * 2).relu()

    g = compiled(f)
    big = torch.randn(1024, 1024)
    for _ in range(2):
        with torch.inference_mode():
            assert g(big).is_inference()
        y = g(big.requires_grad_())
        assert not y.is_inference()
        y.sum().backward()
        torch.testing.assert_close(big.grad, (f(big) > 0) * f(big))
        big = torch.randn(1024, 1024)


def test_the_graph_is_kept_where_asked() -> None:
    x = wanting(4, 5)
    y = compiled(lambda x: (x.sin() * x).sum(1))(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    second = torch.autograd.grad((y * 2).sum(), x)[0]
    torch.testing.assert_close(second, first * 2)
    torch.testing.assert_close(first, (x.cos() * x + x.sin()).detach())
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), x)


def test_second_derivatives_raise_pytorchs_error() -> None:
    x = wanting(4, 5)
    y = compiled(lambda x: x.sin().sum())(x)
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    torch.testing.assert_close(g.detach(), x.cos().detach())
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        g.sum().backward()


def test_hooks() -> None:
    seen: dict[str, list[Tensor]] = {"eager": [], "compiled": []}
    results = {}
    for name in seen:
        m = network()
        x = torch.linspace(-1, 1, 35).view(5, 7).requires_grad_()
        x.register_hook(lambda g, name=name: seen[name].append(g) or g * 3)
        m[0].weight.register_hook(lambda g, name=name: seen[name].append(g))
        m[3].weight.register_post_accumulate_grad_hook(lambda p, name=name: seen[name].append(p.grad.clone()))
        f = compiled(m) if name == "compiled" else m
        y = f(x)
        y.register_hook(lambda g, name=name: seen[name].append(g))
        y.sum().backward()
        results[name] = [x.grad, *(p.grad for p in m.parameters())]
    assert len(seen["compiled"]) == len(seen["eager"]) == 4
    got, want = (sorted(g, key=lambda t: (tuple(t.shape), float(t.sum()))) for g in seen.values())
    assert_as_accurate(got, want)
    assert_as_accurate(results["compiled"], results["eager"])


def test_hooks_on_modules() -> None:
    outputs: list[Tensor] = []
    m = network()
    m[1].register_forward_hook(lambda module, given, out: outputs.append(out.detach()) or out * 2)
    m[3].register_full_backward_hook(lambda module, given, out: (given[0] * 0.5,))
    x = wanting(5, 7)
    want = gradients(m, x)
    got = gradients(compiled(m), x)
    assert_as_accurate(got, want)
    torch.testing.assert_close(outputs[0], outputs[-1])


def test_whole_steps() -> None:
    def step(m: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(5, 7)
    results = []
    for f in (compiled(step), step):
        m = network()
        optimizer = torch.optim.Adam(m.parameters(), 1e-2)
        losses = [f(m, optimizer, x) for _ in range(4)]
        results.append([*losses, *(p.detach() for p in m.parameters())])
    assert_as_accurate(*results)


def test_a_saved_tensor_that_was_written_raises() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x * w.exp()).sin()

    w = wanting(8, 8)
    for g in (compiled(f), f):
        x = wanting(8, 8).clone()
        y = g(x, w)
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            y.sum().backward()


def test_hooks_on_saved_tensors() -> None:
    m, x = network(), wanting(5, 7)
    want = gradients(m, x)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
        assert_as_accurate(gradients(compiled(m), x), want)
    assert packed
    with torch.autograd.graph.save_on_cpu():
        assert_as_accurate(gradients(compiled(m), x), want)


def test_anomalies_are_found() -> None:
    f = compiled(lambda x: x.sqrt() * 0)
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="nan"):
        f(torch.zeros(3, requires_grad=True)).sum().backward()


def test_backward_passes_on_several_threads() -> None:
    m = network()
    f = compiled(m)
    x = torch.randn(5, 7)

    def slope(g: Fn) -> Tensor:
        own = x.clone().requires_grad_()
        return torch.autograd.grad(g(own).square().sum(), own)[0]

    want = slope(m)
    slope(f)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: slope(f), range(40)):
            torch.testing.assert_close(got, want)


# --- inputs and results that are views ----------------------------------------------------------------------

LEAF_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:, :1].expand(6, 8),
    "broadcast": lambda x: x[0].expand(6, 8),
    "strided": lambda x: x[::2, 1::2],
    "offset": lambda x: x[2:, 3:],
    "flipped": lambda x: x.flip(0),
    "diagonal": lambda x: x.diagonal(),
    "unfolded": lambda x: x.unfold(1, 3, 2),
    "flat": lambda x: x.reshape(-1),
    "zero-dim": lambda x: x[0, 0],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("name", LEAF_VIEWS)
def test_inputs_that_are_views(name: str) -> None:
    def f(v: Tensor, w: Tensor) -> Tensor:
        return (v * w.sum()).tanh() + v.sum()

    results = []
    for g in (compiled(f), f):
        base, w = torch.linspace(-2, 2, 48).view(6, 8).requires_grad_(), torch.ones(3, requires_grad=True)
        view = LEAF_VIEWS[name](base)
        y = g(view, w)
        y.sum().backward()
        results.append([y.detach(), base.grad, w.grad])
    assert_as_accurate(results[0], results[1])


RESULT_VIEWS: dict[str, Fn] = {
    "view of an input": lambda x: x.t(),
    "view of a result": lambda x: ((x * 2).t(), (x * 2)[1:]),
    "two views of one result": lambda x: (lambda y: (y.t(), y[0], y))(x.exp()),
    "the input and more": lambda x: (x, x + 1),
    "split": lambda x: x.sin().split(2),
    "detached": lambda x: (x.exp().detach(), x.exp()),
    "a view of a result and the result detached": lambda x: (lambda y: (y.reshape(-1), y.detach()))(
        x.exp().sum()
    ),
    "expanded": lambda x: x.sum(0).expand(5, -1),
}


@pytest.mark.parametrize("name", RESULT_VIEWS)
def test_results_that_are_views(name: str) -> None:
    check(RESULT_VIEWS[name], wanting(6, 8))


def test_gradients_that_arrive_in_other_layouts() -> None:
    f = compiled(lambda x: x.sin() * 2)
    x = wanting(6, 8)
    for g in (torch.randn(8, 6).t(), torch.randn(1, 1).expand(6, 8), torch.randn(12, 16)[::2, ::2]):
        (got,) = torch.autograd.grad(f(x), x, g)
        torch.testing.assert_close(got, (x.cos() * 2 * g).detach())


def test_inputs_written_in_place() -> None:
    def f(x: Tensor, buffer: Tensor) -> Tensor:
        buffer.mul_(0.5).add_(x.detach().mean(0))
        y = x * 2
        y.sub_(buffer)
        return y.sigmoid()

    results = []
    for g in (compiled(f), f):
        x, buffer = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_(), torch.ones(6)
        y = g(g(x, buffer), buffer)
        y.sum().backward()
        results.append([y.detach(), buffer, x.grad])
    assert_as_accurate(*results)


# --- precision and memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(inside: bool, dtype: torch.dtype) -> None:
    m = network()

    def f(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=inside):
            return m(x).float().softmax(-1)

    def run(g: Fn, dtype_of: torch.dtype) -> list[Tensor]:
        m.zero_grad()
        m.to(dtype_of)
        x = torch.linspace(-1, 1, 35).view(5, 7).to(dtype_of).requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype_of is torch.float32):
            y = g(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad.clone() for p in m.parameters())]

    eager, got = run(f, torch.float32), run(compiled(f), torch.float32)
    exact = run(lambda x: m(x).softmax(-1), F64)
    for a, b, c in zip(got, eager, exact, strict=True):
        assert a.dtype == b.dtype
        bound = 2 * float((b - c).abs().max()) + 4 * torch.finfo(dtype).eps * float(c.abs().max())
        assert float((a - c).abs().max()) <= bound


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    m = network()

    def f(x: Tensor) -> Tensor:
        return checkpoint(m, checkpoint(torch.sin, x, use_reentrant=reentrant), use_reentrant=reentrant)

    x = wanting(5, 7)
    want = gradients(f, x)
    m.zero_grad()
    got = gradients(compiled(f), x)
    assert_as_accurate(got, want)


def test_checkpoints_around_a_compiled_module() -> None:
    m = network()
    f = compiled(m)
    x = wanting(5, 7)
    want = gradients(m, x)
    assert_as_accurate(gradients(lambda x: checkpoint(f, x, use_reentrant=False), x), want)


# --- derivatives inside compiled functions ------------------------------------------------------------------

W = torch.linspace(-1, 1, 24).view(6, 4)


def loss(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).tanh().square().sum()


FUNCTIONAL: dict[str, Fn] = {
    "grad": lambda x: torch.func.grad(loss)(W, x),
    "grad_and_value": lambda x: torch.func.grad_and_value(loss)(W, x),
    "vmap": lambda x: torch.vmap(lambda r: (r * r.sum()).softmax(0))(x),
    "vmap_in_dim": lambda x: torch.vmap(lambda c: c.cumsum(0) * 2, in_dims=1, out_dims=1)(x),
    "per-sample gradients": lambda x: torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(W, x[:, None]),
    "jvp": lambda x: torch.func.jvp(lambda y: y.sin() * y, (x,), (torch.ones_like(x),)),
    "vjp": lambda x: torch.func.vjp(lambda y: (y @ W).exp(), x)[1](torch.ones(5, 4)),
    "jacrev": lambda x: torch.func.jacrev(lambda y: y.exp().sum(0))(x),
    "jacfwd": lambda x: torch.func.jacfwd(lambda y: y.sin().sum(0))(x),
    "hessian": lambda x: torch.func.hessian(lambda y: y.pow(3).sum())(x[0]),
    "second derivative": lambda x: torch.func.grad(
        lambda y: torch.func.grad(lambda z: z.sin().sum())(y).sum())(x),
    "functional_call": lambda x: torch.func.functional_call(NET, {"weight": W.t()}, x),
}  # fmt: skip
NET = nn.Linear(6, 4, bias=False)


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_derivatives(name: str) -> None:
    x = torch.randn(5, 6)
    f = FUNCTIONAL[name]
    got, want = compiled(f)(x), f(x)
    flat = [list(t) if isinstance(t, tuple) else [t] for t in (got, want)]
    assert_as_accurate(*[[t[0] if isinstance(t, tuple) else t for t in side] for side in flat])


def test_functional_derivatives_of_inputs_that_want_gradients() -> None:
    check(lambda x: torch.vmap(lambda r: r.sin().sum() * r)(x), wanting(5, 6))


def test_gradients_asked_for_inside() -> None:
    def f(x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad((x.sin() * x).sum(), x)
        return (g * x).sum()

    x = wanting(4, 5)
    (got,) = torch.autograd.grad(compiled(f)(x), x)
    (want,) = torch.autograd.grad(f(x), x)
    torch.testing.assert_close(got, want)


class Scaled(torch.autograd.Function):
    """A function with a derivative of its own, which is not the true one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """x * factor"""
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Marked, to see that it is this one."""
        (x,) = ctx.saved_tensors
        return gradients[0] * ctx.factor + x.sign(), None


def test_functions_with_a_derivative_of_their_own() -> None:
    check(lambda x: Scaled.apply(x.sin(), 3.0) * 2, wanting(4, 5))


# --- operators whose backward passes are their own graphs ---------------------------------------------------

BACKWARD: dict[str, Fn] = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x * 2, x.sin()),
    "cross entropy": lambda x: F.cross_entropy(x.flatten(0, 2), torch.arange(48) % 8),
    "embedding": lambda x: F.embedding(torch.tensor([[1, 2], [1, 0]]), x.flatten(0, 2)),
    "gather": lambda x: x.gather(-1, torch.zeros(2, 4, 6, 3, dtype=torch.int64)),
    "max": lambda x: x.max(-1).values * x.amax(1, keepdim=True).sum(),
    "pooling": lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2),
    "sort": lambda x: x.sort(-1).values * torch.arange(8),
    "cumulative": lambda x: x.cumsum(-1) + x.sigmoid().cumprod(-1),
    "norm": lambda x: x.norm(dim=-1) + x.std(-1) + x.var((0, 1)).sum(0).sum(),
    "index": lambda x: x[torch.tensor([0, 1, 1]), :, torch.tensor([2, 0, 2])],
    "index_put": lambda x: x.index_put((torch.tensor([0]),), x.sum(0, keepdim=True), accumulate=True),
    "where": lambda x: torch.where(x > 0, x.exp(), x * 3).masked_fill(x > 1, 0.5),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect"),
    "convolution": lambda x: F.conv2d(x, torch.ones(3, 4, 3, 3) / 9, padding=1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "complex": lambda x: torch.fft.rfft(x).abs(),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_operators(name: str) -> None:
    check(BACKWARD[name], wanting(2, 4, 6, 8))


def test_losses_of_several_results() -> None:
    def f(x: Tensor, y: Tensor) -> Sequence[Tensor]:
        shared = (x @ y).relu()
        return shared.sum(), shared.mean(0), x.exp(), torch.zeros(3)

    check(f, wanting(4, 5), wanting(5, 6))


# --- sparse tensors: kernels see none, but what is around them is compiled ----------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_embeddings_may_be_sparse(dynamic: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.words = nn.Embedding(20, 5, sparse=True)
            self.bags = nn.EmbeddingBag(20, 5, sparse=True, mode="mean")
            self.out = nn.Linear(5, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.words(ids).sum(1) + self.bags(ids)).relu()

    one, other = Model(), Model()
    f = torch.compile(one, backend="hotloop", dynamic=dynamic)
    for sizes in ((3, 4), (5, 4)):
        ids = torch.randint(20, sizes)
        for m in (f, other):
            m(ids).square().sum().backward()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and p.grad.layout is q.grad.layout
        torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense())


def test_sparse_tensors_inside_of_a_graph() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        s = (x * 2).relu().to_sparse()
        return torch.sparse.mm(s, w * 2).sin() + s.to_dense().sum(1, keepdim=True)

    check(f, wanting(4, 5), wanting(5, 3))
    x = torch.randn(4, 5)
    for layout in (torch.sparse_coo, torch.sparse_csr):
        got = compiled(lambda x, kind=layout: (x * 2).relu().to_sparse(layout=kind))(x)
        assert got.layout is layout
        torch.testing.assert_close(got.to_dense(), (x * 2).relu())


def _detached_views(x: torch.Tensor) -> list[torch.Tensor]:
    v = x * 2
    return [v.t().detach(), v, v[::2].detach(), v.detach(), x.exp().view(-1)]


def test_detached_views_beside_what_they_show() -> None:
    """One memory, results with and without gradients."""
    x = torch.randn(4, 4, requires_grad=True)
    got, want = torch.compile(_detached_views, backend="hotloop")(x), _detached_views(x)
    assert [t.requires_grad for t in got] == [t.requires_grad for t in want]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert got[0].data_ptr() == got[1].data_ptr()
