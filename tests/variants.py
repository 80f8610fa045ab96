"""Blocks that differ from the usual one, for the tests of every part: one of each kind, and random draws."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from codegen.spec import NORMS

EACH: dict[str, dict[str, Any]] = {  # what is unusual about a block -> its fields
    "narrow heads": {"head_dim": 7},
    "wide heads": {"head_dim": 20},
    "qkv bias": {"qkv_bias": True},
    "no output bias": {"out_bias": False},
    "no residual": {"residual": False},
    "no parameters of the norm": {"norm_affine": False},
    "RMSNorm": {"norm": "rms"},
    "RMSNorm without parameters": {"norm": "rms", "norm_affine": False},
    "no norm": {"norm": "none"},
    "post-norm": {"post_norm": True},
    "post-RMSNorm": {"post_norm": True, "norm": "rms"},
    "post-norm without residual": {"post_norm": True, "residual": False, "norm_affine": False},
    "eps": {"eps": 1e-3},
    "key mask": {"key_mask": True},
    "logit bias": {"logit_bias": True},
    "key mask and logit bias": {"key_mask": True, "logit_bias": True},
    "everything": {"head_dim": 12, "qkv_bias": True, "out_bias": False, "residual": False, "norm": "rms", "post_norm": True, "eps": 1e-4},
}


def drawn(draw: random.Random) -> dict[str, Any]:
    """The fields of a random variant, contradictions left out; about half of them as usual."""
    fields: dict[str, Any] = {name: True for name in ("qkv_bias", "post_norm", "key_mask", "logit_bias") if draw.random() < 0.4}
    fields |= {name: False for name in ("out_bias", "residual", "norm_affine") if draw.random() < 0.3}
    fields["norm"] = draw.choice(NORMS)
    if draw.random() < 0.5:
        fields["head_dim"] = draw.choice((3, 8, 10, 16, 17))
    if fields["norm"] == "none":
        fields = {name: value for name, value in fields.items() if name not in ("post_norm", "norm_affine")}
    return fields


def variants() -> st.SearchStrategy[dict[str, Any]]:
    """Hypothesis' draws of `drawn`."""
    return st.integers(0, 2**32 - 1).map(lambda seed: drawn(random.Random(seed)))
