"""Times the kernels of chosen configurations of one block, each by itself.

    python -m benchmarks.kernels --dim 256 --heads 8 --height 128 --width 256 --batch 1 --try "" --try "qkv_engine=mma out_engine=mma"

Each --try is tunables set over the default of the family, as for `render --fix`; "" is the default. A line has the microseconds of
each kernel (replays of a CUDA graph of many launches of it, so with a warm L2 where its data fits), of all in their order, and the largest
error against float64 over the output's scale.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from codegen.spec import BlockSpec, SpecError
from codegen.target import Target
from tuner.compile import CompileError, compile_source
from tuner.gpu import visible_gpu
from tuner.session import source_of

DEVICE = "cuda"


def line(spec: BlockSpec, to: Target, settings: str) -> str:
    """One configuration's line. SpecError or CompileError when there is no such kernel."""
    import torch

    from codegen.reference import random_input, random_weights, reference
    from tuner.launch import Loaded
    from tuner.measure import measure

    source = source_of(spec, to, settings.split())
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    x, weights = random_input(spec, generator), random_weights(spec, generator)
    loaded = Loaded(source, compile_source(source, to).cubin)
    y = torch.empty_like(x)
    forward = loaded.bind(x, weights, y)
    forward()
    torch.cuda.synchronize()
    expected = reference(spec, x, weights)
    error = float((y.double() - expected).abs().max() / expected.abs().max())
    del expected
    times = [(kernel.name.removeprefix("axial_"), measure([partial(forward, i)]).device) for i, kernel in enumerate(source.kernels)]
    whole = measure([forward]).device
    return f"{whole:8.1f} all  " + "  ".join(f"{name} {time:.1f}" for name, time in times) + f"  error {error:.1e}"


def main(
    dim: int = 256,
    heads: int = 8,
    height: int = 128,
    width: int = 256,
    batch: int = 1,
    dtype: str = "float32",
    axis: Annotated[str, typer.Option(help="row, col or both.")] = "both",
    tried: Annotated[list[str] | None, typer.Option("--try", help='NAME=VALUE ... of one configuration; "" is the default.')] = None,
) -> None:
    """See the module's text."""
    gpu = visible_gpu()
    if gpu is None:
        raise SystemExit("a GPU is needed")
    try:
        spec = BlockSpec(dim, heads, height, width, batch, dtype, axes=("row", "col") if axis == "both" else (axis,))
    except SpecError as error:
        raise SystemExit(f"error: {error}") from None
    for settings in tried or [""]:
        print(settings or "default")
        try:
            print(line(spec, gpu.target, settings), flush=True)
        except (SpecError, CompileError) as error:
            print(f"    {error}", flush=True)


if __name__ == "__main__":
    typer.run(main)
