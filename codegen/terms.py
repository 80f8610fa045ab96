"""What changes the logits beside queries and keys: the key mask and the logit bias, inputs of the blocks that have them.

key_mask: bool (batch, height, width), True where a token may be attended to, along both axes. row_bias, col_bias: of the block's element
type, (heads, L, L) by query and key, shared by all sequences of the axis. Logits are q k^T / sqrt(head_dim) + bias, and minus infinity
for keys that are masked. A query whose logits are all minus infinity attends to nothing: the sum of its values is zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from codegen.spec import BlockSpec


def term_shapes(spec: BlockSpec, batch: int) -> dict[str, tuple[int, ...]]:
    """What forward takes after x: name -> shape, in order; empty for a block without mask and bias."""
    shapes: dict[str, tuple[int, ...]] = {"key_mask": (batch, spec.height, spec.width)} if spec.key_mask else {}
    if spec.logit_bias:
        for axis in spec.axes:
            length = spec.problem(axis).length
            shapes[f"{axis}_bias"] = (spec.heads, length, length)
    return shapes


def term_dtype(spec: BlockSpec, name: str) -> torch.dtype:
    """The element type of a term: bool for the mask, the block's for a bias."""
    dtype: torch.dtype = torch.bool if name == "key_mask" else getattr(torch, spec.dtype)
    return dtype


def random_terms(spec: BlockSpec, generator: torch.Generator | None = None, batch: int | None = None) -> dict[str, Tensor]:
    """Biases of about 1, and a mask with sequences of every kind that `masked_lines` has; on the generator's device."""
    device = generator.device if generator is not None else torch.device("cpu")
    terms: dict[str, Tensor] = {}
    for name, shape in term_shapes(spec, spec.batch if batch is None else batch).items():
        if name == "key_mask":
            terms[name] = _random_mask(spec, shape, generator, device)
        else:
            terms[name] = torch.randn(shape, generator=generator, device=device).to(term_dtype(spec, name))
    return terms


def masked_lines(number: int, length: int, generator: torch.Generator | None, device: torch.device | str, first: int = 0) -> Tensor:
    """A mask for each of `number` sequences, (number, length), in turn: of a random density, all masked, of another density, a
    single key, a masked tail, a masked head. first: the kind to begin with."""
    kind = ((torch.arange(number, device=device) + first) % 6)[:, None]
    density = 0.1 + 0.8 * torch.rand(number, 1, generator=generator, device=device)
    draw = torch.rand(number, length, generator=generator, device=device)
    place = torch.randint(length, (number, 1), generator=generator, device=device)
    token = torch.arange(length, device=device)
    mask = torch.where((kind == 0) | (kind == 2), draw < density, kind > 1)
    for which, kept in ((3, token == place), (4, token <= place), (5, token >= place)):
        mask = torch.where(kind == which, kept, mask)
    return mask


def _random_mask(spec: BlockSpec, shape: tuple[int, ...], generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Lines of the first axis are masked in every way; of the second one a third, so that enough is left."""
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    for index, axis in enumerate(spec.axes):
        along = mask if axis == "row" else mask.transpose(1, 2)
        number, length = along.shape[0] * along.shape[1], along.shape[2]
        first = int(torch.randint(6, (1,), generator=generator, device=device))
        lines = masked_lines(number, length, generator, device, first)
        if index > 0:
            lines |= torch.rand(number, 1, generator=generator, device=device) < 2 / 3
        along &= lines.view(along.shape)
    return mask


def lines_of(axis: str, mask: Tensor) -> Tensor:
    """A mask (batch, height, width) as (batch * lines, L), the keys of the sequences of `axis`."""
    along = mask if axis == "row" else mask.transpose(1, 2)
    return along.reshape(-1, along.shape[2])


def mask_of(axis: str, lines: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of lines_of, for a mask of `shape`."""
    batch, height, width = shape
    return lines.reshape(shape) if axis == "row" else lines.reshape(batch, width, height).transpose(1, 2).contiguous()


def logits(scores: Tensor, allowed: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scaled scores (sequences, heads, L, L) with their bias (heads, L, L), and minus infinity where `allowed` (sequences, L) is False."""
    if bias is not None:
        scores = scores + bias
    return scores if allowed is None else scores.masked_fill(~allowed[:, None, None, :], -math.inf)


def softmax(values: Tensor) -> Tensor:
    """Softmax over the keys, with zeros and gradients of zero for queries whose logits are all minus infinity."""
    none = (values == -math.inf).all(-1, keepdim=True)
    return torch.softmax(values.masked_fill(none, 0.0), dim=-1).masked_fill(none, 0.0)


def fused_mask(allowed: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The mask for PyTorch's scaled_dot_product_attention, and which queries have no key, whose result is to be set to zero: what it
    gives for them depends on its version and backend, so the mask lets them attend to any."""
    if bias is None:
        if allowed is None:
            return None, None
        none = ~allowed.any(-1)[:, None, None, None]
        return allowed[:, None, None, :] | none, none
    mask = logits(bias[None], allowed, None)
    none = (mask == -math.inf).all(-1, keepdim=True)
    return mask.masked_fill(none, 0.0), none


def split_terms(spec: BlockSpec, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """(the parameters, the terms in forward's order) of a mapping that holds both."""
    names = term_shapes(spec, 0)
    return {name: tensor for name, tensor in weights.items() if name not in names}, [weights[name] for name in names]


def with_keys(axis: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with the mask's part of an axis, row_keys or col_keys (sequences, L), as reference.branch takes them."""
    return {**weights, f"{axis}_keys": lines_of(axis, weights["key_mask"])} if "key_mask" in weights else dict(weights)


def terms_of(axis: str, terms: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """(the keys that may be attended to (sequences, L), the bias (heads, L, L)) of an axis; None for what the block does not have."""
    mask = terms.get("key_mask")
    return None if mask is None else lines_of(axis, mask), terms.get(f"{axis}_bias")
