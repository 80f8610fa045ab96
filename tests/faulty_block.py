"""The block in float32 PyTorch with one planted fault, as a black box: (x, weights) -> y."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from codegen.spec import BlockSpec

Product = Callable[[Tensor, Tensor], Tensor]


def to_tf32(values: Tensor) -> Tensor:
    """cvt.rna.tf32.f32: 10 mantissa bits, to nearest, ties away from zero."""
    return ((values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def truncated(values: Tensor) -> Tensor:
    """What mma.sync does with the low mantissa bits of a tf32 operand."""
    return (values.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def fp32(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def tf32(a: Tensor, b: Tensor) -> Tensor:
    """One tensor-core product."""
    return to_tf32(a) @ to_tf32(b)


def tf32x3(a: Tensor, b: Tensor) -> Tensor:
    """Three tensor-core products of operands split into a high and a low part."""
    (ah, al), (bh, bl) = ((to_tf32(t), truncated(t - to_tf32(t))) for t in (a, b))
    return al @ bh + ah @ bl + ah @ bh


def bf16(a: Tensor, b: Tensor) -> Tensor:
    return a.bfloat16().float() @ b.bfloat16().float()


class Block:
    """One launch an axis; `fault` is planted in `axis` only."""

    def __init__(self, spec: BlockSpec, fault: str = "", axis: str = "", product: Product = fp32) -> None:
        self.spec, self.fault, self.axis, self.product = spec, fault, axis, product
        self.calls = 0

    def __call__(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        self.calls += 1
        y = torch.full_like(x, math.nan)
        source = x
        for axis in self.spec.axes:
            fault = self.fault if axis == self.axis else ""
            along_row = (axis == "row") != (fault == "other axis")
            lines = source if along_row else source.transpose(1, 2)
            result = self._line(lines.contiguous(), {k.split("_")[1]: v for k, v in weights.items() if k.startswith(axis)}, fault)
            written = y if along_row else y.transpose(1, 2)
            last = lines.shape[2] - 1 if fault == "last token unwritten" else lines.shape[2]
            written[:, :, :last] = result[:, :, :last]
            source = y
        return y

    def _norm(self, x: Tensor, gain: Tensor, beta: Tensor, fault: str) -> Tensor:
        dim, eps = x.shape[-1], {"eps 1e-6": 1e-6, "eps 1e-3": 1e-3, "eps missing": 0.0}.get(fault, self.spec.eps)
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).square().sum(-1, keepdim=True) / (dim - 1 if fault == "bessel" else dim)
        if fault == "rmsnorm":
            mean, variance = torch.zeros_like(mean), x.square().mean(-1, keepdim=True)
        if fault == "mean not subtracted":
            mean = torch.zeros_like(mean)
        n = x if fault == "no norm" else (x - mean) * torch.rsqrt(variance + eps)
        return (n if fault == "gain missing" else n * gain) + (0 if fault == "beta missing" else beta)

    def _line(self, x: Tensor, w: dict[str, Tensor], fault: str) -> Tensor:
        heads, d, dim, length = self.spec.heads, self.spec.head_dim, self.spec.dim, x.shape[2]
        n = self._norm(x, w["norm.weight"], w["norm.bias"], fault)
        weight, out = w["qkv.weight"], w["out.weight"]
        if fault == "qkv transposed":
            weight = torch.cat([part.T for part in weight.chunk(3)])
        if fault == "qkv read as (dim, 3 dim)":
            weight = weight.reshape(dim, 3 * dim).T
        if fault == "last input of the QKV product dropped":
            weight = torch.cat([weight[:, :-1], torch.zeros(3 * dim, 1)], 1)
        qkv = self.product(n, weight.T)
        if fault == "packed by head":
            q, k, v = (t.transpose(2, 3) for t in qkv.unflatten(-1, (heads, 3, d)).unbind(4))
        else:
            q, k, v = (t.unflatten(-1, (heads, d)).transpose(2, 3) for t in qkv.chunk(3, -1))
        if fault == "k and v swapped":
            k, v = v, k
        if fault == "q and v swapped":
            q, v = v, q
        if fault == "q and k swapped":
            q, k = k, q
        scale = {"no scale": 1.0, "scale of dim": dim**-0.5, "scale 1/head_dim": 1 / d, "scale 10% off": 1.1 * d**-0.5}.get(fault, d**-0.5)
        scores = self.product(q * scale, k.transpose(-1, -2))
        weighted = self._softmax(scores, v, fault)
        if fault == "heads reversed":
            weighted = weighted.flip(2)
        if fault == "last head dropped":
            weighted = torch.cat([weighted[:, :, :-1], torch.zeros_like(weighted[:, :, -1:])], 2)
        if fault == "heads and channels interleaved":
            a = weighted.permute(0, 1, 3, 4, 2).reshape(*x.shape[:2], length, dim)
        else:
            a = weighted.transpose(2, 3).reshape(*x.shape[:2], length, dim)
        if fault == "attention dead":
            a = torch.zeros_like(a)
        if fault == "last input of the output product dropped":
            out = torch.cat([out[:, :-1], torch.zeros(dim, 1)], 1)
        if fault == "last output of the output product dropped":
            out = torch.cat([out[:-1], torch.zeros(1, dim)], 0)
        added = a if fault == "output product missing" else self.product(a, out if fault == "output transposed" else out.T)
        if fault == "output product in bf16":
            added = bf16(a, out.T)
        bias = {"bias missing": 0.0, "bias twice": 2.0}.get(fault, 1.0) * w["out.bias"]
        carried = {"x missing": 0 * x, "x doubled": 2 * x, "normalised x added": n, "x subtracted": -x}.get(fault, x)
        return carried + (added + bias)

    def _softmax(self, scores: Tensor, v: Tensor, fault: str) -> Tensor:
        length = scores.shape[-1]
        if fault == "last key dropped":
            scores = torch.cat([scores[..., :-1], torch.full_like(scores[..., -1:], -math.inf)], -1)
        if fault == "causal":
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
        if fault == "padded key counted":
            scores, v = torch.nn.functional.pad(scores, (0, 1)), torch.nn.functional.pad(v, (0, 0, 0, 1))
        if fault == "base 2":
            scores = scores * math.log(2)
        if fault == "over queries":
            return self.product(torch.softmax(scores, -2), v)
        maximum = scores.amax(-1, keepdim=True)
        if fault == "maximum not subtracted":
            maximum = torch.zeros_like(maximum)
        if fault == "tiles not rescaled":
            running = torch.stack([part.amax(-1) for part in scores.split(8, -1)], -1).cummax(-1).values
            maximum = running.repeat_interleave(8, -1)[..., :length]
        powers = torch.exp(scores - maximum)
        total = {"not normalised": torch.ones(1), "divided by the number of keys": torch.tensor(float(length))}.get(
            fault, powers.sum(-1, keepdim=True)
        )
        return self.product(powers, v) / total
