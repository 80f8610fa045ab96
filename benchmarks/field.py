"""The shapes that published models run axial attention at. Where a model leaves the grid open, a usual one stands here."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.spec import BlockSpec

ROWS, COLUMNS, BOTH = ("row",), ("col",), ("row", "col")


@dataclass(frozen=True)
class Shape:
    """A model's attention: channels, heads and (height, width); inner: columns of all heads together, dim unless it is given."""

    model: str
    dim: int
    heads: int
    grid: tuple[int, int]
    batch: int = 1
    axes: tuple[str, ...] = BOTH
    inner: int | None = None

    @property
    def name(self) -> str:
        """What identifies the shape in a table and on a command line."""
        inner = f" inner {self.inner}" if self.inner else ""
        axis = "" if self.axes == BOTH else f" {self.axes[0]}"
        return f"{self.batch},{self.grid[0]},{self.grid[1]},{self.dim}/{self.heads}{inner}{axis}"

    @property
    def head_dim(self) -> int:
        return (self.inner or self.dim) // self.heads

    def spec(self) -> BlockSpec:
        """The block, in float32."""
        return BlockSpec(self.dim, self.heads, *self.grid, self.batch, axes=self.axes, head_dim=self.head_dim)


SHAPES = (
    Shape("OpenFold MSA", 256, 8, (128, 256)),
    Shape("OpenFold MSA, large", 256, 8, (512, 384)),
    Shape("OpenFold extra MSA", 64, 8, (1024, 256)),
    Shape("OpenFold triangle", 128, 4, (256, 256)),
    Shape("OpenFold template", 64, 4, (256, 256)),
    Shape("MSA Transformer", 768, 12, (128, 256)),
    Shape("TabPFN v2", 192, 6, (1024, 24)),
    Shape("TabPFN v2.5", 192, 3, (1024, 24)),
    Shape("TimeSformer", 768, 12, (16, 196)),
    Shape("Open-Sora", 1152, 16, (16, 256)),
    Shape("AnimateDiff, 64x64", 320, 8, (16, 4096), axes=COLUMNS),
    Shape("AnimateDiff, 32x32", 640, 8, (16, 1024), axes=COLUMNS),
    Shape("AnimateDiff, 16x16", 1280, 8, (16, 256), axes=COLUMNS),
    Shape("SepFormer", 256, 8, (250, 130)),
    Shape("CSDI", 64, 8, (35, 48), batch=16),
    Shape("STAEformer", 152, 4, (12, 883), batch=4),
    Shape("axial video, time", 128, 8, (5, 65536), axes=COLUMNS),
    Shape("BS-RoFormer", 192, 8, (801, 62), inner=512),
    Shape("SAINT", 32, 8, (256, 15), inner=128),
    Shape("two tokens", 64, 4, (2, 512), batch=64, axes=COLUMNS),
    Shape("5,000 tokens", 64, 4, (8, 5000), axes=ROWS),
)
