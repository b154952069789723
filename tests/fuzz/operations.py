"""Catalogue of what random programs are made of: Python expressions over tensors, with what they ask of operands.

In an expression ``{a}``, ``{b}`` and ``{c}`` are tensors of the program, ``{i}`` is a tensor of indices, ``{m}`` a
mask, ``{n}`` a small integer, ``{f}`` a number, ``{d}`` a dimension of ``{a}``.
"""

from __future__ import annotations

import dataclasses

import torch

from lightning_ort.runtime.providers.cpu import chooses_slowly, chosen_by_bits

__all__ = ["BLOCKS", "DIFFERENT", "INPLACE", "OPERATIONS", "Operation"]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One expression.

    Attributes:
        text: the expression, with placeholders.
        ndim: smallest and largest number of dimensions of ``{a}``.
        last: size that the last dimension of ``{a}`` must have, or 0.
        same: ``{b}`` and ``{c}`` have the shape of ``{a}``; otherwise they broadcast with it.
        weight: how often it is drawn.
    """

    text: str
    ndim: tuple[int, int] = (0, 4)
    last: int = 0
    same: bool = False
    weight: float = 1.0


def _all(texts: str, **asked: object) -> list[Operation]:
    return [Operation(line.strip(), **asked) for line in texts.strip().splitlines()]  # type: ignore[arg-type]


OPERATIONS = [
    # elementwise, defined everywhere; not hardsigmoid and hardswish, whose kernels take 1/6 in float32 for float64 too
    *_all("""
        torch.relu({a})
        torch.tanh({a})
        torch.sigmoid({a})
        torch.sin({a})
        torch.cos({a})
        torch.exp({a}.clamp(max=3.0))
        torch.expm1({a}.clamp(max=2.0))
        torch.log1p({a}.abs())
        torch.sqrt({a}.abs() + 0.1)
        torch.rsqrt({a}.square() + 0.5)
        torch.log({a}.abs() + 0.3)
        torch.reciprocal({a}.abs() + 0.5)
        torch.erf({a})
        torch.atan({a})
        torch.asinh({a})
        torch.abs({a})
        torch.neg({a})
        torch.sign({a})
        torch.square({a})
        torch.floor({a})
        torch.round({a})
        torch.trunc({a})
        torch.frac({a})
        torch.nan_to_num({a}, 0.0, 5.0, -5.0)
        torch.logit({a}.sigmoid() * 0.9 + 0.05)
        torch.clamp({a}, -0.5, {f})
        torch.clamp({a}, min={f})
        F.gelu({a})
        F.gelu({a}, approximate="tanh")
        F.silu({a})
        F.mish({a})
        F.elu({a})
        F.selu({a})
        F.celu({a})
        F.softplus({a})
        F.softsign({a})
        F.softshrink({a})
        F.hardshrink({a})
        F.tanhshrink({a})
        F.hardtanh({a})
        F.leaky_relu({a}, 0.1)
        F.relu6({a})
        F.logsigmoid({a})
        F.threshold({a}, 0.1, {f})
        {a} * {f} + 1.0
        {a} - {f}
        1.5 / ({a}.square() + 1.0)
        {a} ** 2
        ({a}.abs() + 0.2) ** {f}
        {a}.pow(3) * 0.1
        {a}.detach() * 0.5
        {a}.detach()
        {a}.detach()[:1]
        {a}[-1:]
        {a}.clone()
        {a} * k
        {a} + step * 0.01
        {a}.double().sin().to({a}.dtype)
        {a}.long().to({a}.dtype)
        ({a} > 0).to({a}.dtype) * {f}
        F.dropout({a}, 0.3, training=True)
        torch.rand_like({a}) * {a}
        torch.zeros_like({a}) + {f}
        torch.full_like({a}, {f})
        torch.where({a} > 0, {a}, {a} * 0.1)
        torch.where({a}.isnan(), torch.zeros_like({a}), {a})
        {a}.masked_fill({a} < 0, {f})
        torch.heaviside({a}.detach(), torch.ones((), dtype={a}.dtype))
    """),
    # two or three operands
    *_all(
        """
        {a} + {b}
        {a} - {b}
        {a} * {b}
        {a} / ({b}.square() + 0.5)
        torch.maximum({a}, {b})
        torch.minimum({a}, {b})
        torch.fmax({a}, {b})
        torch.where({a} > {b}, {a}, {b} * 0.5)
        torch.lerp({a}, {b} + {a} * 0, 0.3)
        torch.atan2({a}, {b}.abs() + 0.5)
        torch.addcmul({a}, {b}, {b}, value=0.3)
        torch.remainder({a}, {b}.abs() + 0.7)
        torch.fmod({a}, {b}.abs() + 0.7)
        torch.hypot({a}, {b}.abs() + 0.1)
        torch.logaddexp({a}, {b})
        torch.copysign({a}, {b}.nan_to_num())
        torch.xlogy({a}, {b}.abs() + 0.2)
        torch.div({a}, {b}.abs() + 0.5, rounding_mode="floor")
        ({a} >= {b}).to({a}.dtype) * {a}
        ({a} == {b}).to({a}.dtype)
        """,
        weight=1.2,
    ),
    *_all(
        """
        F.mse_loss({a}, {b})
        F.l1_loss({a}, {b}, reduction="sum")
        F.smooth_l1_loss({a}, {b}, reduction="none")
        F.huber_loss({a}, {b}, delta=0.7)
        F.binary_cross_entropy_with_logits({a}, {b}.sigmoid().detach())
        F.soft_margin_loss({a}, {b}.sign().detach())
        F.poisson_nll_loss({a}.clamp(max=3.0), {b}.abs())
        F.cosine_similarity({a}, {b}, dim=-1)
        torch.stack([{a}, {b}], dim=0).sum(0)
        torch.stack([{a}, {b}], dim=-1).amax(-1)
        torch.cat([{a}, {b}], dim=-1).mean(-1)
        torch.dist({a}, {b} + 1.0)
        """,
        same=True,
        ndim=(1, 3),
    ),
    # shapes
    *_all(
        """
        {a}.transpose(0, -1)
        {a}.flatten()[: 12]
        {a}.reshape(-1)
        {a}.unsqueeze(0)
        {a}.unsqueeze(-1)
        {a}.flip({d})
        {a}.roll(1, {d})
        {a}.narrow(-1, 0, 2)
        {a}[..., ::2]
        {a}[..., 1:]
        {a}[..., -1]
        {a}[..., :-1]
        {a}[None]
        {a}[-1:]
        {a}.select(-1, 1)
        {a}.expand(2, *{a}.shape)
        {a}.repeat_interleave(2, dim=-1)
        torch.cat([{a}, {a} * 2], dim={d})
        torch.split({a}, 2, dim=-1)[0]
        torch.chunk({a}, 2, dim=-1)[0]
        torch.unbind({a}, dim=-1)[1]
        {a}.unfold(-1, 2, 1).sum(-1)
        F.pad({a}, (1, 2))
        F.pad({a}, (1, 0), value={f})
        F.pad({a}, (-1, 1))
        {a}.cumsum(-1)
        {a}.cumsum({d})
        torch.cumprod({a}.tanh() + 0.5, dim=-1)
        torch.logcumsumexp({a}, dim=-1)
        torch.cummax({a}, dim=-1)[0]
        torch.diff({a}, dim=-1)
        torch.sort({a}, dim=-1)[0]
        torch.sort({a}, dim=-1, descending=True)[0]
        torch.topk({a}, 2, dim=-1)[0]
        torch.topk({a}, 2, dim=-1, largest=False)[0]
        torch.kthvalue({a}, 2, dim=-1)[0]
        torch.argsort({a}, dim=-1, stable=True).to({a}.dtype)
        torch.gather({a}, -1, torch.argmin({a}, dim=-1, keepdim=True))
        torch.take_along_dim({a}, {a}.argmax(-1, keepdim=True), dim=-1)
        {a}.index_select(-1, torch.tensor([1, 0, 1]))
        {a}[..., [1, 0]]
        {a}.scatter(-1, {a}.argmax(-1, keepdim=True), 0.5)
        {a}.scatter_add(-1, {a}.detach().argmin(-1, keepdim=True), {a}.mean(-1, keepdim=True))
        {a}.movedim(0, -1)
        {a}.contiguous().view(-1).sum()
        {a}.reshape({a}.shape[0], -1)
        {a} / {a}.shape[0]
        {a} * (({a}.shape[0] + 3) % 4)
        {a}.sum() * {a}.new_ones(({a}.shape[0] + 4) % 3 + 1)
        F.dropout({a}.mean() * {a}.new_ones(({a}.shape[0] + 5) % 4 + 2), 0.3, training=True)
        F.pad({a}, (0, (7 - {a}.shape[-1]) % 4))
        {a} * torch.arange({a}.shape[-1], dtype={a}.dtype)
        {a} + torch.linspace(0, 1, {a}.shape[-1], dtype={a}.dtype)
        {a}.new_ones({a}.shape[-1]) * {a}
        F.one_hot({a}.argmax(-1), {a}.shape[-1]).to({a}.dtype) * {a}
        """,
        ndim=(1, 3),
        last=-3,
    ),
    *_all(
        """
        {a}.T
        {a}.triu()
        {a}.tril(-1)
        torch.diagonal({a}).sum()
        {a} @ {a}.t()
        torch.mm({a}, {a}.t()).softmax(-1)
        {a}[torch.arange({a}.shape[0]), {a}.argmax(1)]
        torch.einsum("ij,kj->ik", {a}, {a})
        torch.cdist({a}, {a} + 1.0)
        """,
        ndim=(2, 2),
        last=-2,
    ),
    # reductions
    *_all(
        """
        {a}.sum({d})
        {a}.sum({d}, keepdim=True) + {a}
        {a}.mean({d})
        {a}.mean(-1, keepdim=True) * {a}
        {a}.sum()
        {a}.mean()
        {a}.var({d}, unbiased=False)
        {a}.std(-1)
        {a}.amax({d})
        {a}.amin(-1, keepdim=True) + {a}
        {a}.max(-1)[0]
        {a}.min({d})[0]
        {a}.max()
        {a}.median(-1)[0]
        {a}.prod(-1)
        {a}.logsumexp({d})
        {a}.norm(dim=-1)
        {a}.norm()
        torch.linalg.vector_norm({a} + 0.1, 3, dim=-1)
        {a}.softmax({d})
        {a}.softmax(-1)
        {a}.log_softmax(-1)
        F.normalize({a}, dim=-1)
        F.layer_norm({a}, {a}.shape[-1:])
        F.softmin({a}, dim=-1)
        {a}.abs().sum(-1).sqrt()
        {a}.argmax(-1).to({a}.dtype)
        ({a} > 0).sum(-1).to({a}.dtype)
        ({a} > 0).any(-1).to({a}.dtype)
        ({a} > 0).all({d}).to({a}.dtype)
        torch.aminmax({a}, dim=-1)[1]
        torch.count_nonzero({a}, dim=-1).to({a}.dtype)
        """,
        ndim=(1, 3),
        last=-2,
    ),
    # products and layers with the parameters of the module; the last dimension is 4
    *_all(
        """
        {a} @ self.w
        F.linear({a}, self.w, self.v)
        F.linear({a}, self.w)
        {a} * self.v
        {a} + self.mean
        ({a} - self.mean.clone()) / (self.scale.clone() + 0.5)
        F.layer_norm({a}, (4,), self.v)
        F.embedding({a}.detach().argmax(-1), self.w)
        torch.einsum("...i,ij->...j", {a}, self.w)
        F.bilinear({a}, {a}, self.w.unsqueeze(0), None)
        torch.addmm(self.v, {a}.reshape(-1, 4), self.w)
        F.rms_norm({a}, (4,))
        self.linear({a})
        """,
        ndim=(1, 3),
        last=4,
        weight=1.5,
    ),
    *_all(
        """
        F.cross_entropy({a}, labels)
        F.cross_entropy({a}, labels, label_smoothing=0.1, reduction="none")
        F.nll_loss({a}.log_softmax(1), labels)
        F.multi_margin_loss({a}, labels)
        F.kl_div({a}.log_softmax(1), x.softmax(1).detach(), reduction="batchmean")
        {a}.gather(1, labels[:, None])
        {a}[torch.arange({a}.shape[0]), labels]
        {a}.index_add(0, torch.zeros_like(labels), {a} * 0.1)
        torch.zeros(4, 4, dtype={a}.dtype).index_add(0, labels, {a})
        {a} * F.one_hot(labels, 4)
        {a}.index_select(1, labels[:1])
        self.norm({a})
        """,
        ndim=(-2, 2),
        last=4,
    ),
    Operation("F.scaled_dot_product_attention({a}, {a}, {a} * 0.5)", ndim=(3, 3), last=-1),
    Operation("F.scaled_dot_product_attention({a}, {a}, {a}, is_causal=True)", ndim=(3, 3), last=-1),
    # images: the input of shape (batch, 2, 6, 6); not pixel_unshuffle, whose kernel has a quirk without any image
    *_all(
        """
        F.conv2d(image, self.kernel, padding=1)
        F.conv2d(image, self.kernel, stride=2)
        F.conv_transpose2d(image, self.kernel.transpose(0, 1))
        F.max_pool2d(image, 2)
        F.max_pool2d(image, 3, 2, padding=1)
        F.avg_pool2d(image, 2)
        F.avg_pool2d(image, 3, 2, padding=1, count_include_pad=False)
        F.adaptive_avg_pool2d(image, (2, 4))
        F.adaptive_max_pool2d(image, 2)
        F.interpolate(image, scale_factor=2)
        F.interpolate(image, size=(4, 4), mode="bilinear")
        F.instance_norm(image)
        F.group_norm(image, 2)
        F.pad(image, (1, 1, 1, 1), mode="reflect")
        F.unfold(image, 3, stride=3)
        image.flatten(1)
        image.permute(0, 2, 3, 1)
        image.mean((2, 3))
        image[:, :, 1:4, ::2]
    """,
        weight=0.5,
    ),
]
"""Statements ``name = expression``."""

_BY_POSITION = ("hardshrink", "softshrink", "hardtanh", "relu6", "elu", "celu", "selu")
"""Functions whose gradient in eager at NaN depends on the position in memory."""

DIFFERENT = {
    # products with matrices that hold zeros (sharp edges, "NaN, infinities, ties"); of zeros, the sign is another
    "F.avg_pool2d(image, 3, 2, padding=1, count_include_pad=False)": ("nan", "inf", "zeros"),
    "F.adaptive_avg_pool2d(image, (2, 4))": ("nan", "inf", "zeros"),
    'F.interpolate(image, size=(4, 4), mode="bilinear")': ("nan", "inf", "zeros"),
    # eager's vectorized kernels and what they leave to the other ones treat NaN and infinities differently
    "F.gelu(": ("inf",),
    **dict.fromkeys([f"F.{name}(" for name in _BY_POSITION], ("nan", "inf")),
    # eager's loss of no rows is memory that nobody has written
    "F.multi_margin_loss(": ("empty",),
    # products with masks, where choosing is slow and bits of floats cannot be read
    **({} if torch.float32 in chosen_by_bits() or not chooses_slowly() else {"F.threshold(": ("nan", "inf")}),
}
"""Kinds of data with which eager and ONNX Runtime differ for good, by operation: programs are run without them."""

INPLACE = [
    *_all("""
        {a}.mul_(0.9)
        {a}.add_(1.0)
        {a}.relu_()
        {a}.clamp_(-1.0, 1.0)
        {a}.tanh_()
        {a}.zero_()
        {a}.masked_fill_({a}.detach() < -0.5, {f})
    """),
    *_all("{a}.add_({b})\n{a}.mul_({b})\n{a}.copy_({b})\n{a}.sub_({b}, alpha=0.5)"),
    *_all(
        """
        {a}[..., 0] = 0.5
        {a}[..., 1:] *= 0.5
        {a}[..., 0].add_(1.0)
        {a}[0] = {f}
        {a}[..., :2] = {a}[..., 1:3].clone()
        {a}.select(-1, 0).mul_(2.0)
        {a}[{a}.detach() > 0.5] = 0.1
        {a}.fill_diagonal_(0.2) if {a}.dim() == 2 else None
        {a}.T.mul_(1.1) if {a}.dim() == 2 else None
        {a}.view(-1)[:2].add_(0.5) if {a}.is_contiguous() else None
        """,
        ndim=(1, 3),
        last=-3,
    ),
]
"""Statements that write into ``{a}``, which autograd must allow."""

BLOCKS = [
    "with torch.no_grad():\n    self.count.add_(1)",
    "with torch.no_grad():\n    self.scale.mul_(0.9).add_({b4}.detach().reshape(-1, 4)[:1].sum(0), alpha=0.01)",
    "with torch.no_grad():\n    self.mean.copy_({b4}.detach().reshape(-1, 4).mean(0).nan_to_num(0.0))",
    "self.mean = self.mean * 0.5 + {b4}.detach().reshape(-1, 4).sum(0) * 0.01",
    "self.queue[:, 1:] = self.queue[:, :-1].clone()\nself.queue[:, 0] = {b4}.detach().reshape(-1, 4)[:1].sum(0)",
    "self.w.data.clamp_(-0.4, 0.4)",
    "self.v.data = self.v.data * 0.9",
    "with torch.no_grad():\n    torch._foreach_mul_([self.w, self.v], 0.95)",
    "{new} = {a4} @ self.queue.clone().detach()",
    "{new} = {a4} * (self.count * 0.1 + 1.0)",
    "{new} = {a} * (self.scale.sum() + 1.0).exp().clamp(max=5.0)",
    "torch._dynamo.graph_break()",
    "if {a}.detach().sum().item() > 1e9:\n    return {a}.sum(), {a}",
    "with torch.no_grad():\n    {new} = {a}.tanh() * 2.0",
    "{new} = {a}[{a}.detach() > 0.1].sum()",
    "{new} = {a}\nfor j in range(2):\n    {new} = {new} * 0.5 + j",
    "if step % 2 == 0:\n    {new} = {a} * 2.0\nelse:\n    {new} = {a}.sin()",
    "{new} = torch.utils.checkpoint.checkpoint(lambda t: torch.sin(t) * 0.5, {a}, use_reentrant=False)",
    # views and switches of gradients, alone or across a graph break
    "with torch.no_grad():\n    {new} = {a}.transpose(0, -1)",
    "with torch.no_grad():\n    {new} = {a}[..., 0]\ntorch._dynamo.graph_break()",
    "torch._dynamo.graph_break()\n{new} = {a}[..., :2]\ntorch._dynamo.graph_break()",
    "torch.set_grad_enabled(False)\n{new} = {a}.sin()\ntorch.set_grad_enabled(True)",
    "torch.set_grad_enabled(False)\n{new} = {a} * 0.5\ntorch._dynamo.graph_break()\ntorch.set_grad_enabled(True)",
    # transforms of functions
    "{new} = torch.func.grad(lambda t: (t.sin() * t).sum())({a})",
    "{new} = torch.func.vmap(lambda t: t.tanh() + t.sum())({a})",
    "{new} = torch.func.jvp(lambda t: t.exp().clamp(max=9.0), ({a},), ({a}.detach(),))[1]",
    "{new} = torch.autograd.grad({a}.square().sum(), {a}, create_graph=True)[0]",
    # functions with gradients of their own
    "{new} = Cubed.apply({a}.tanh())",
    "{new} = Reversed.apply({a})",
    "torch._dynamo.graph_break()\n{new} = Reversed.apply({a})\ntorch._dynamo.graph_break()",
    "with torch.no_grad():\n    {new} = Reversed.apply({a})",
    "{new} = torch.autograd.grad(Cubed.apply({a}.tanh()).sum(), {a}, create_graph=True)[0]",
]
"""Statements over several lines: buffers that change, blocks without gradients, graph breaks, Python, transforms."""
