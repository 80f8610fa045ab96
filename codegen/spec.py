"""What is to be replaced: the shape and variant of one axial attention block."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AXES = ("row", "col")
NORMS = ("layer", "rms", "none")
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
DEFAULT_BATCH = 4
MAX_DIM = 4096
DEFAULT_EPS = 1e-5
MAX_LENGTH = 65_536
VARIANTS: dict[str, tuple[str, str]] = {
    "head_dim": ("hd{}", "--head-dim {}"),
    "qkv_bias": ("qkvbias", "--qkv-bias"),
    "out_bias": ("nooutbias", "--no-out-bias"),
    "norm": ("{}", "--norm {}"),
    "norm_affine": ("noaffine", "--no-norm-affine"),
    "post_norm": ("postnorm", "--post-norm"),
    "residual": ("noresidual", "--no-residual"),
    "eps": ("eps{}", "--eps {}"),
    "key_mask": ("keymask", "--key-mask"),
    "logit_bias": ("logitbias", "--logit-bias"),
}
"""Field of BlockSpec in which a block may differ from the usual one -> how a file's name and a command line state it."""


class SpecError(ValueError):
    """A specification, configuration or target that cannot be; the message is one line that says what to change."""


class _Derived(int):
    """A head_dim that follows from dim and heads, and does so again in dataclasses.replace."""


@dataclass(frozen=True)
class BlockSpec:
    """One axial attention block over a (batch, height, width, dim) grid.

    dim:    channels D; a multiple of heads unless head_dim is given.
    heads:  attention heads.
    height, width: the grid's H and W, in tokens. Row attention runs along W, column attention along H.
    batch:  the batch the kernels are tuned for; the generated code accepts any.
    dtype:  element type of input, output and weights; a key of DTYPES.
    axes:   which of "row" and "col" the block has, in the order in which they run.
    eps:    the normalisation's epsilon.
    head_dim: channels of a head of q, k and v; dim / heads where None is given. `inner` is that of all heads together.
    norm:   "layer" (nn.LayerNorm), "rms" (nn.RMSNorm) or "none"; norm_affine: whether it has parameters.
    post_norm: x is normalised after the residual was added, not before the QKV product.
    qkv_bias, out_bias: whether the products have biases. residual: whether x is added to the branch.
    key_mask, logit_bias: whether forward takes a mask of the tokens that may be attended to, and a bias of the logits for each axis
        (see codegen/terms.py).

    Raises SpecError with the reason when the numbers do not describe a block.
    """

    dim: int = 64
    heads: int = 4
    height: int = 32
    width: int = 32
    batch: int = DEFAULT_BATCH
    dtype: str = "float32"
    axes: tuple[str, ...] = AXES
    eps: float = DEFAULT_EPS
    head_dim: int = None  # type: ignore[assignment]  # as given; an int afterwards
    norm: str = "layer"
    norm_affine: bool = True
    post_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = True
    residual: bool = True
    key_mask: bool = False
    logit_bias: bool = False

    def __post_init__(self) -> None:
        for field, upper in (("dim", MAX_DIM), ("heads", MAX_DIM), ("height", MAX_LENGTH), ("width", MAX_LENGTH), ("batch", 2**31 - 1)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= upper:
                raise SpecError(f"{field} must be a whole number from 1 to {upper}, not {value!r}")
        if self.head_dim is None or isinstance(self.head_dim, _Derived):
            if self.dim % self.heads:
                raise SpecError(
                    f"dim {self.dim} is not divisible by heads {self.heads}: choose heads among the divisors of dim, or a head_dim"
                )
            object.__setattr__(self, "head_dim", _Derived(self.dim // self.heads))
        elif not isinstance(self.head_dim, int) or isinstance(self.head_dim, bool) or not 1 <= self.head_dim <= 4 * MAX_DIM // self.heads:
            raise SpecError(f"head_dim must be a whole number from 1 to {4 * MAX_DIM // self.heads}, not {self.head_dim!r}")
        if self.dtype not in DTYPES:
            raise SpecError(f"dtype {self.dtype!r} is not supported: choose one of {', '.join(DTYPES)}")
        if not isinstance(self.axes, tuple) or self.axes not in (("row",), ("col",), ("row", "col")):
            raise SpecError(f"axes must be row, col or both, not {self.axes!r}")
        if not isinstance(self.eps, float) or not 0.0 < self.eps < 1.0:
            raise SpecError(f"eps must be between 0 and 1, not {self.eps!r}")
        if self.norm not in NORMS:
            raise SpecError(f"norm must be {', '.join(NORMS[:-1])} or {NORMS[-1]}, not {self.norm!r}")
        for field in ("norm_affine", "post_norm", "qkv_bias", "out_bias", "residual", "key_mask", "logit_bias"):
            if not isinstance(getattr(self, field), bool):
                raise SpecError(f"{field} must be true or false, not {getattr(self, field)!r}")
        if self.norm == "none":
            for field in ("norm_affine", "post_norm", "eps"):
                if field in self.variants:
                    raise SpecError(f"norm none leaves nothing for {VARIANTS[field][1].split()[0]} to say: leave one of them out")

    @property
    def inner(self) -> int:
        """Channels of q, of k and of v, all heads together: dim, unless head_dim says otherwise."""
        return self.heads * self.head_dim

    @property
    def variants(self) -> dict[str, Any]:
        """In what the block differs from the usual one: of VARIANTS' fields those with another value."""
        usual = {**_USUAL, "head_dim": self.dim // self.heads if self.dim % self.heads == 0 else None}
        return {field: value for field in VARIANTS if (value := getattr(self, field)) != usual[field]}

    @property
    def options(self) -> list[str]:
        """The command line's options for `variants`."""
        return [VARIANTS[field][1].format(value) for field, value in self.variants.items()]

    @property
    def pre_norm(self) -> str:
        """What normalises the tokens before the QKV product: one of NORMS."""
        return "none" if self.post_norm else self.norm

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters of an axis in the order of the state_dict, as kernels name them: `qkv_weight` is its qkv.weight."""
        there = {
            "norm_weight": self.norm != "none" and self.norm_affine,
            "norm_bias": self.norm == "layer" and self.norm_affine,
            "qkv_weight": True,
            "qkv_bias": self.qkv_bias,
            "out_weight": True,
            "out_bias": self.out_bias,
        }
        return tuple(name for name, is_there in there.items() if is_there)

    def parameters_of(self, part: str) -> tuple[str, ...]:
        """Those of `parameters` that belong to "norm", "qkv" or "out"."""
        return tuple(name for name in self.parameters if name.startswith(part))

    @property
    def pre_norm_parameters(self) -> tuple[str, ...]:
        """The parameters of `pre_norm`."""
        return () if self.post_norm else self.parameters_of("norm")

    @property
    def terms(self) -> tuple[str, ...]:
        """What changes the logits beside queries and keys, as kernels name it: `logit_bias` of a row kernel is the input row_bias."""
        return tuple(term for term in ("key_mask", "logit_bias") if getattr(self, term))

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values; of the variants only those that are not as usual, so that old files and new ones agree."""
        always = ("dim", "heads", "height", "width", "batch", "dtype", "axes", "eps")
        return {name: getattr(self, name) for name in always} | self.variants

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BlockSpec:
        """The block that `to_dict` or JSON states; KeyError, TypeError or SpecError when there is none such."""
        return cls(**{**data, "axes": tuple(data["axes"])})

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def name(self) -> str:
        """The part of a file name that states the specification, e.g. d64_h4_32x32_fp32."""
        axis = "" if self.axes == AXES else f"_{self.axes[0]}"
        batch = "" if self.batch == DEFAULT_BATCH else f"_b{self.batch}"
        parts = {field: VARIANTS[field][0].format(_word(value)) for field, value in self.variants.items()}
        head_dim = f"_{parts.pop('head_dim')}" if "head_dim" in parts else ""
        variants = "".join(f"_{part}" for part in parts.values())
        return f"d{self.dim}_h{self.heads}{head_dim}_{self.height}x{self.width}{batch}{axis}{variants}_{DTYPES[self.dtype]}"

    def problem(self, axis: str) -> AxisProblem:
        """The kernel problem of one of the block's axes."""
        if axis not in self.axes:
            raise SpecError(f"the block has no {axis} axis")
        return AxisProblem(self, axis)


_USUAL: dict[str, Any] = {field: BlockSpec.__dataclass_fields__[field].default for field in VARIANTS}


def _word(value: Any) -> str:
    """A value in a name that Python can import: no dot, no minus."""
    return "nonorm" if value == "none" else str(value).replace("-", "m").replace(".", "p")


@dataclass(frozen=True)
class AxisProblem:
    """What one kernel solves: attention of `block` along one axis.

    A sequence is one line of the grid along the axis: `length` tokens, `token_stride` elements apart.
    """

    block: BlockSpec
    axis: str

    @property
    def length(self) -> int:
        """Tokens in a sequence: W for rows, H for columns."""
        return self.block.width if self.axis == "row" else self.block.height

    @property
    def lines(self) -> int:
        """Sequences in one image of the batch: H for rows, W for columns."""
        return self.block.height if self.axis == "row" else self.block.width

    @property
    def sequences(self) -> int:
        """Sequences in the whole batch."""
        return self.block.batch * self.lines

    @property
    def token_stride(self) -> int:
        """Elements between neighbouring tokens of a sequence."""
        return self.block.dim if self.axis == "row" else self.block.dim * self.block.width


def parse_axes(text: str) -> tuple[str, ...]:
    """The axes that `row`, `col` or `both` names on a command line; SpecError for anything else."""
    axes = {"row": ("row",), "col": ("col",), "both": AXES}.get(text)
    if axes is None:
        raise SpecError(f"axis must be row, col or both, not {text!r}")
    return axes


def parse_dtype(text: str) -> str:
    """The element type that `text` names, in full or in short (bf16); SpecError for anything else."""
    for name, short in DTYPES.items():
        if text in (name, short):
            return name
    raise SpecError(f"dtype {text!r} is not supported: choose one of {', '.join(DTYPES)}")


def valid_name(text: str) -> bool:
    """Whether `text` is safe as a study name or file stem: letters, digits, dot, dash and underscore."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", text) is not None
