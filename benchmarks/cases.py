"""What is compared: the shapes people run, in each element type, with the device time each should reach on an H200."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from codegen.spec import BlockSpec, SpecError

SHORT = {"float32": "fp32", "bfloat16": "bf16"}
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Shape:
    """A block of both axes over a (batch, height, width, dim) grid. targets: microseconds of device time on an H200, by element type."""

    name: str
    batch: int
    height: int
    width: int
    dim: int
    heads: int
    targets: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Case:
    """A shape in an element type (a key of SHORT)."""

    shape: Shape
    dtype: str

    @property
    def name(self) -> str:
        """E.g. seed_b1 fp32."""
        return f"{self.shape.name} {SHORT[self.dtype]}"

    @property
    def target_us(self) -> float | None:
        return dict(self.shape.targets).get(self.dtype)

    def spec(self) -> BlockSpec:
        """The block; SpecError when this version has no code for its element type."""
        s = self.shape
        return BlockSpec(s.dim, s.heads, s.height, s.width, s.batch, self.dtype)


def _shape(name: str, batch: int, height: int, width: int, dim: int, heads: int, fp32: float, bf16: float) -> Shape:
    return Shape(name, batch, height, width, dim, heads, (("float32", fp32), ("bfloat16", bf16)))


SHAPES = (
    _shape("seed", 4, 32, 32, 64, 4, 8, 7),
    _shape("seed_b1", 1, 32, 32, 64, 4, 7, 6),
    _shape("seed_b64", 64, 32, 32, 64, 4, 75, 26),
    _shape("deeplab", 2, 65, 65, 128, 8, 50, 25),
    _shape("msa", 1, 128, 256, 256, 8, 650, 105),
    _shape("grid128", 4, 128, 128, 256, 8, 1150, 185),
    _shape("wide512", 1, 128, 128, 512, 8, 950, 145),
    _shape("long", 1, 512, 512, 64, 4, 1700, 430),
)
CASES = tuple(Case(shape, dtype) for shape in SHAPES for dtype in SHORT)


def select(shapes: Iterable[str] = (), dtypes: Iterable[str] = ()) -> tuple[Case, ...]:
    """The cases of some shapes and element types (fp32 or float32, bf16 or bfloat16); of all where none is named.

    SpecError for an unknown name.
    """
    known = {shape.name for shape in SHAPES}
    long = {**{short: name for name, short in SHORT.items()}, **{name: name for name in SHORT}}
    shapes, dtypes = tuple(shapes), tuple(dtypes)
    if unknown := [name for name in shapes if name not in known]:
        raise SpecError(f"case {unknown[0]!r} is not known: choose among {', '.join(shape.name for shape in SHAPES)}")
    if unknown := [name for name in dtypes if name not in long]:
        raise SpecError(f"dtype {unknown[0]!r} is not compared: choose among {', '.join(SHORT.values())}")
    wanted = {long[name] for name in dtypes} or set(SHORT)
    return tuple(case for case in CASES if case.shape.name in (shapes or known) and case.dtype in wanted)
