"""The statements that random programs are made of, as templates.

What comes in: nothing. What goes out: tables of text. `{x}` and `{y}` stand for variables, `{d}` for
dimensions of x, `{s}` for slices of it, `{n}` for its size along d, `{k}` for a row of positions along d,
`{i}` for positions along d, one for each element of y. What holds: PyTorch may refuse any of them; the
generator tries.

Next: generator.py, which fills them in.
"""

from __future__ import annotations

__all__ = [
    "BINARY", "CASTS", "IN_PLACE", "REDUCTIONS", "SCATTERS", "SCATTERS_IN_PLACE", "SIZED", "UNARY",
    "WHOLE_REDUCTIONS",
]  # fmt: skip


def _statements(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(";") if part.strip())


UNARY = _statements(
    """
    torch.sin({x}); torch.cos({x}); torch.tanh({x}); torch.sigmoid({x}); torch.exp(-{x}.abs());
    torch.erf({x}); torch.exp({x}.clamp(max=3)); F.relu({x}); F.gelu({x}); F.gelu({x}, approximate='tanh');
    F.silu({x}); {x}.abs(); -{x}; {x}.abs().sqrt(); torch.rsqrt({x}.abs() + 0.5); torch.log1p({x}.abs());
    torch.expm1(-{x}.abs()); torch.log({x}.abs() + 0.25); {x}.floor(); {x}.round(); {x}.ceil(); {x}.trunc();
    {x}.sign(); torch.square({x}); torch.reciprocal({x}.abs() + 0.5); torch.atan({x}); F.softplus({x});
    F.leaky_relu({x}, 0.1); F.hardswish({x}); F.elu({x}); F.hardtanh({x}); F.softshrink({x});
    torch.logical_not({x}); ~{x}; {x}.isnan(); torch.asinh({x}); torch.sinh({x}.clamp(-3, 3));
    torch.frac({x}); F.mish({x}); F.hardsigmoid({x}); torch.nan_to_num({x}); {x} + 1; {x} * 0.5; 3 - {x};
    {x} / 2; {x} % 3; {x} // 2; {x} ** 2; {x} ** 3; {x} * -2; {x} + True; {x} > 0; {x} <= 1; {x} == 0;
    {x}.clamp(-1, 1); {x}.clamp(min=0); {x} & 3; {x} | 8; {x} ^ 5; {x} << 1; {x} >> 1; {x}.clone();
    torch.zeros_like({x}); torch.full_like({x}, 2); {x}.contiguous(); {x}.detach(); {x} * 1; {x}.fmod(2);
    torch.pow(2, {x}.clamp(-3, 3)); torch.where({x} > 0, {x}, -1); torch.masked_fill({x}, {x} < 0, 2);
    torch.lgamma({x}.abs() + 1); torch.xlogy({x}, {x}.abs() + 1); {x}.logit(0.1); torch.deg2rad({x});
    """
)

CASTS = _statements(
    "; ".join(
        f"{{x}}.to(torch.{d})"
        for d in (
            "float32",
            "float64",
            "bfloat16",
            "float16",
            "int64",
            "int32",
            "int16",
            "int8",
            "uint8",
            "bool",
        )
    )
)

BINARY = _statements(
    """
    {x} + {y}; {x} - {y}; {x} * {y}; {x} + {y}; {x} * {y}; torch.maximum({x}, {y}); torch.minimum({x}, {y});
    {x} / ({y}.abs() + 1); torch.atan2({x}, {y}.abs() + 1); {x} > {y}; {x} <= {y}; {x} == {y}; {x} != {y};
    torch.logical_and({x}, {y}); torch.logical_or({x}, {y}); torch.logical_xor({x}, {y}); {x} & {y};
    {x} | {y}; {x} ^ {y}; torch.where({y} > 0, {x}, {y}); torch.where({x} < {y}, {x}, 0.5);
    torch.masked_fill({x}, {y} > 0, 0.5); torch.add({x}, {y}, alpha=2); torch.sub({x}, {y}, alpha=3);
    torch.lerp({x}, {y}, 0.3); torch.fmax({x}, {y}); torch.copysign({x}, {y}); torch.hypot({x}, {y} + 1);
    torch.addcmul({x}, {y}, {y}, value=0.5); torch.rsub({x}, {y}); torch.floor_divide({x}, {y}.abs() + 1);
    torch.remainder({x}, {y}.abs() + 1); torch.logaddexp({x}, {y}); torch.clamp({x}, max={y});
    torch.clamp({x}, min={y}); torch.dist({x}, {y}); F.mse_loss({x}, {y}); F.smooth_l1_loss({x}, {y});
    F.l1_loss({x}, {y});
    """
)

REDUCTIONS = _statements(
    """
    {x}.sum({d}); {x}.sum({d}, keepdim=True); {x}.mean({d}); {x}.mean({d}, keepdim=True); {x}.amax({d});
    {x}.amin({d}, keepdim=True); {x}.prod({d}); {x}.argmax({d}); {x}.argmin({d}, keepdim=True);
    {x}.any({d}); {x}.all({d}, keepdim=True); {x}.var({d}); {x}.std({d}, keepdim=True);
    torch.logsumexp({x}, {d}); torch.softmax({x}, {d}); torch.log_softmax({x}, {d});
    torch.linalg.vector_norm({x}, dim={d}); {x}.max({d}).values; {x}.min({d}).indices; {x}.cumsum({d});
    {x} - {x}.mean({d}, keepdim=True); {x} / ({x}.abs().sum({d}, keepdim=True) + 1); {x}.count_nonzero({d});
    F.normalize({x}, dim={d}); torch.var_mean({x}, dim={d})[1]; {x}.nansum({d}); {x}.cumprod({d});
    {x}.sort({d}).values; {x}.cummax({d}).values; {x}.cummin({d}).indices; torch.logcumsumexp({x}, {d});
    {x}.cumsum({d}, dtype=torch.float32); {x}.sum({d}, dtype=torch.float64); {x}.std({d}, correction=0);
    torch.aminmax({x}, dim={d})[0]; {x}.cumsum({d}); {x}.flip({d}).cumsum({d}).flip({d});
    {x}.cummax({d})[1]; ({x} * {x}).sum({d}); {x}.mean({d}); {x}.sum({d}); {x}.cumprod({d});
    {x}.contiguous().median({d}).values;
    """
)

WHOLE_REDUCTIONS = _statements(
    """
    {x}.sum(); {x}.mean(); {x}.amax(); {x}.any(); {x}.argmax(); {x}.std(); torch.softmax({x}, -1);
    {x}.max(); {x}.norm(); F.layer_norm({x}, {x}.shape[-1:]); F.rms_norm({x}, {x}.shape[-1:]);
    {x}.sum(dtype=torch.float64); {x}.all();
    """
)

IN_PLACE = _statements(
    """
    {x}.add_({y}); {x}.mul_({y}); {x}.sub_({y}); {x}.copy_({y}); {x}.fill_(2); {x}.zero_();
    {x}.clamp_(-1, 1); {x}.add_(1); {x}.mul_(0.5); {x}.neg_(); {x}.abs_(); {x}.tanh_();
    {x}.masked_fill_({x} > 0, 1); {x}.relu_(); {x}.logical_not_(); {x}.div_({y}.abs() + 1); {x}.sigmoid_();
    {x}[{s}] = {y}; {x}[{s}] = 1; {x}[{s}] += 1; {x}[{s}].mul_(2); {x}.t_(); {x}.unsqueeze_(0);
    {x}.floor_(); {x}.masked_fill_({y} > 0, 1); {x}.maximum({y}).add_(1); {x}[{x} > 1] = 0;
    torch.add({y}, 1, out={x}); {x}.diagonal().mul_(2); {x}.mT.mul_({y}); {x}.view(-1)[{s}] = 1;
    {x}.flatten()[{s}].add_(1); {x}[{s}].copy_({y}); {x}[{s}].fill_(3); {x}.unsqueeze(0).add_({y});
    {x}[..., -1].add_(1); {x}[..., 1:].mul_({x}[..., :-1]); {x}[{s}] -= {y}; {x}[{s}].zero_();
    {x}.cumsum_(-1); {x}.cumprod_(0); torch.sum({y}, 0, out={x}); {x}[..., ::2].relu_();
    """
)


SCATTERS = _statements(
    """
    {x}.scatter({d}, {i}, {y}); {x}.scatter({d}, {i}, 2); {x}.scatter_add({d}, {i}, {y});
    {x}.scatter_reduce({d}, {i}, {y}, 'amax'); {x}.scatter_reduce({d}, {i}, {y}, 'sum', include_self=False);
    {x}.scatter_reduce({d}, {i}, {y}, 'prod');
    {x}.scatter_reduce({d}, {i}, {y}, 'amin', include_self=False);
    {x}.scatter_reduce({d}, {i}, {y}, 'mean'); {x}.index_add({d}, {k}, {y}); {x}.index_copy({d}, {k}, {y});
    {x}.index_add({d}, {k}, {y}, alpha=2); {x}.index_fill({d}, {k}, 3); {x}.index_put(({k},), {y});
    {x}.index_put(({k},), {y}, accumulate=True); {x}.index_put((({k} % 2) > 0,), {y}); {x}[{k}];
    {x}[..., {k}]; {x}[:, {k}]; {x}.gather({d}, {i}); {x}.index_select({d}, {k}); {x}.take({i});
    {x}.masked_scatter({x} > 0, {y}); {x}.slice_scatter({y}, {d}, 1);
    {x}.slice_scatter({y}, {d}, 0, {n}, 2); {x}.select_scatter({y}, {d}, 0); {x}.diagonal_scatter({y});
    torch.bucketize({x}, torch.tensor([-1.0, 0.0, 0.5])); {x}[{k}, {k}];
    {x}.scatter_add({d}, {i}, {y}).cumsum({d}); {x}[{k}].sum({d});
    torch.where({x} > 0, {x}.gather({d}, {i}), 0); F.embedding({i}, {x}); F.one_hot({i}, 7);
    {x}[{k}[:, None], {k}];
    """
)

SCATTERS_IN_PLACE = _statements(
    """
    {x}.scatter_({d}, {i}, {y}); {x}.scatter_({d}, {i}, 1); {x}.scatter_add_({d}, {i}, {y}); {x}[{k}] = {y};
    {x}.scatter_reduce_({d}, {i}, {y}, 'amax'); {x}.index_add_({d}, {k}, {y});
    {x}.index_copy_({d}, {k}, {y}); {x}.index_fill_({d}, {k}, 3);
    {x}.index_put_(({k},), {y}, accumulate=True); {x}[{k}] += 1; {x}[..., {k}] = 2; {x}[{k}, {k}] = {y};
    {x}[{k}[:, None], {k}] *= 2; {x}.select({d}, 0).add_(1); {x}[{x} > 1] = 0; {x}[{k}].add_(1);
    {x}.transpose(0, {d}).index_add_(0, {k}, {y}.transpose(0, {d})); {x}.masked_scatter_({x} > 0, {y});
    {x}[{k}] = {x}[{k}] * 2;
    """
)

#: Statements that say sizes as expressions, so that they hold for others too.
SIZED = _statements(
    """
    {x}.reshape(-1, {x}.shape[-1]); {x}.reshape({x}.shape[0] * {x}.shape[1], *{x}.shape[2:]);
    {x}.view({x}.shape[0], -1); {x}.reshape(-1); {x}.reshape(*{x}.shape[:-1], 2, -1);
    {x}.unflatten({d}, (-1, 2)); {x}.narrow({d}, {n} // 3, {n} // 2); {x}[: {x}.shape[0] // 2];
    {x}[..., {x}.shape[-1] // 2 :]; {x}[..., :-1]; {x}[1:]; {x}[::2]; {x}[..., 1::2];
    {x}.expand(3, *{x}.shape); {x}.unsqueeze({d}).expand(-1, *{x}.shape);
    {x}.unsqueeze(0).expand({y}.shape[0], *{x}.shape); {x}.select({d}, {n} // 2); {x}.select({d}, -1);
    torch.arange({n}); torch.arange({n}) * 2 % {n}; torch.arange({n}) < {n} // 2; {x} * {n}; {x} / {n};
    {x} + {n} * 0.5; torch.zeros({n}, 3); torch.full(({n},), 2.0); torch.ones({x}.shape);
    {x}.new_zeros({n}, 2); F.pad({x}, (0, {x}.shape[-1] % 4)); F.pad({x}, (1, {x}.shape[-1]));
    {x}.roll({n} // 2, {d}); {x}.roll(1, {d}); {x}.unfold({d}, 2, 1); {x}.unfold({d}, {n} // 2, 2);
    {x}.split({n} // 2 + 1, {d})[0]; {x}.chunk(2, {d})[-1]; torch.cat([{x}, {y}], {d});
    torch.cat([{x}, {x}], {d}); torch.stack([{x}, {x} * 2], {d}); {x}.flip({d});
    {x}.repeat(2, *[1] * {x}.dim()); {x}.repeat_interleave(2, {d}); torch.tril({x}); torch.triu({x}, 1);
    {x}.transpose({d}, -1); {x}.transpose(0, {d}).reshape(-1); {x}.flatten(); {x}.mT; {x}.diagonal();
    {x}.sum({d}) / {n}; {x}.sum() / {x}.numel(); {x}.reshape({y}.shape); {x}.expand({y}.shape);
    {x}.squeeze(); {x}.permute(*range({x}.dim() - 1, -1, -1)); torch.linspace(0, 1, {n}) * 2;
    torch.eye({n}); {x}.unsqueeze({d}); {x}[:, : {x}.shape[0]]; F.interpolate({x}, scale_factor=2.0);
    F.avg_pool1d({x}, 2); torch.diff({x}, dim={d}); {x}.repeat_interleave({n}, {d});
    """
)
