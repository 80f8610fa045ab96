"""What is to be replaced: the shape and variant of one axial attention block."""

from __future__ import annotations

import re
from dataclasses import dataclass

AXES = ("row", "col")
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
DEFAULT_BATCH = 4
MAX_DIM = 4096
MAX_LENGTH = 65_536


class SpecError(ValueError):
    """A specification, configuration or target that cannot be; the message is one line that says what to change."""


@dataclass(frozen=True)
class BlockSpec:
    """One axial attention block over a (batch, height, width, dim) grid.

    dim:    channels D, a positive multiple of heads.
    heads:  attention heads; head_dim = dim / heads.
    height, width: the grid's H and W, in tokens. Row attention runs along W, column attention along H.
    batch:  the batch the kernels are tuned for; the generated code accepts any.
    dtype:  element type of input, output and weights; a key of DTYPES.
    axes:   which of "row" and "col" the block has, in the order in which they run.
    eps:    LayerNorm's epsilon.
    key_mask: whether forward takes a mask of the tokens that may be attended to, (batch, height, width).
    logit_bias: whether forward takes a bias of the logits for each axis, (heads, length, length).

    Raises SpecError with the reason when the numbers do not describe a block.
    """

    dim: int = 64
    heads: int = 4
    height: int = 32
    width: int = 32
    batch: int = DEFAULT_BATCH
    dtype: str = "float32"
    axes: tuple[str, ...] = AXES
    eps: float = 1e-5
    key_mask: bool = False
    logit_bias: bool = False

    def __post_init__(self) -> None:
        for field, upper in (("dim", MAX_DIM), ("heads", MAX_DIM), ("height", MAX_LENGTH), ("width", MAX_LENGTH), ("batch", 2**31 - 1)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= upper:
                raise SpecError(f"{field} must be a whole number from 1 to {upper}, not {value!r}")
        if self.dim % self.heads:
            raise SpecError(f"dim {self.dim} is not divisible by heads {self.heads}: choose heads among the divisors of dim")
        if self.dtype not in DTYPES:
            raise SpecError(f"dtype {self.dtype!r} is not supported: choose one of {', '.join(DTYPES)}")
        if not isinstance(self.axes, tuple) or self.axes not in (("row",), ("col",), ("row", "col")):
            raise SpecError(f"axes must be row, col or both, not {self.axes!r}")
        if not isinstance(self.eps, float) or not 0.0 < self.eps < 1.0:
            raise SpecError(f"eps must be between 0 and 1, not {self.eps!r}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def name(self) -> str:
        """The part of a file name that states the specification, e.g. d64_h4_32x32_fp32."""
        axis = "" if self.axes == AXES else f"_{self.axes[0]}"
        batch = "" if self.batch == DEFAULT_BATCH else f"_b{self.batch}"
        return f"d{self.dim}_h{self.heads}_{self.height}x{self.width}{batch}{axis}_{DTYPES[self.dtype]}"

    def problem(self, axis: str) -> AxisProblem:
        """The kernel problem of one of the block's axes."""
        if axis not in self.axes:
            raise SpecError(f"the block has no {axis} axis")
        return AxisProblem(self, axis)


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
