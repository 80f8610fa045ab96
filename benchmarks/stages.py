"""Where the time of a `sequence` kernel goes: the clock of the multiprocessor at each stage's end.

    python -m benchmarks.stages [--dim 64 ...] [--set NAME=VALUE]

The rendered source is compiled a second time with a stamp (clock64, one lane a warp) behind the kernel's start, on both sides of
each block-wide barrier, and before its end; the table has cycles since the block's first stamp, averaged over warps and blocks.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from codegen.render import Source, render
from codegen.sequence import SequenceConfig, SequencePlan
from codegen.spec import BlockSpec, SpecError
from codegen.target import Target
from tuner.compile import compile_source
from tuner.gpu import visible_gpu
from tuner.session import configs_of

STAMPS = {
    "shared": ("start", "load + LayerNorm", "barrier", "QKV product", "barrier", "attention", "barrier", "output product"),
    "registers": ("start", "load + LayerNorm", "barrier", "QKV product + attention", "barrier", "output product"),
}
"""Where a kernel is stamped, by what becomes of keys and values; of several rounds the last one's stamps remain."""
MOST_BLOCKS, MOST_WARPS, MOST_STAMPS = 4096, 32, max(map(len, STAMPS.values()))
_HEAD = f"""__device__ long long stamps[{MOST_BLOCKS}][{MOST_WARPS}][{MOST_STAMPS}];
__device__ __forceinline__ void stamp(int stage) {{
  if (threadIdx.x % 32 == 0 && blockIdx.x < {MOST_BLOCKS}) stamps[blockIdx.x][threadIdx.x / 32][stage] = clock64();
}}
"""


def stamped(source: Source, stamps: int) -> Source:
    """The source of one kernel with stamps at its stages' ends; SpecError when these are not as many as expected."""
    start = source.text.index('extern "C" __global__')
    lines, stage = [], 0
    for line in source.text[start:].splitlines():
        if line.strip() == "__syncthreads();":
            lines.append(f"  stamp({stage});")
            stage += 1
        if line == "}":
            lines.append(f"  stamp({stage});")
        lines.append(line)
        if "extern __shared__" in line or line.strip() == "__syncthreads();":
            lines.append(f"  stamp({stage});")
            stage += 1
    if stage != stamps - 1:
        raise SpecError("the kernel has not the stages this knows: only the sequence family is stamped")
    return replace(source, text=source.text[:start] + _HEAD + "\n".join(lines) + "\n")


def cycles(source: Source, warps: int, stamps: int, to: Target) -> list[float]:
    """Cycles since a block's first stamp at each stamp, averaged over blocks and warps, in a warm launch on this process's GPU."""
    import torch
    from cuda.bindings import driver

    from codegen.reference import random_input, random_weights
    from codegen.terms import random_terms
    from tuner.launch import Loaded

    spec = source.spec
    generator = torch.Generator(device="cuda").manual_seed(0)
    x, weights = random_input(spec, generator), random_weights(spec, generator) | random_terms(spec, generator)
    loaded = Loaded(source, compile_source(source, to).cubin)
    forward = loaded.bind(x, weights, torch.empty_like(x))
    for _ in range(20):
        forward()
    torch.cuda.synchronize()
    status, pointer, size = driver.cuModuleGetGlobal(loaded._module, b"stamps")
    assert status == driver.CUresult.CUDA_SUCCESS, status
    host = (ctypes.c_longlong * (size // 8))()
    driver.cuMemcpyDtoH(ctypes.addressof(host), pointer, size)
    blocks = min(MOST_BLOCKS, source.kernels[0].blocks(spec, spec.batch))
    table = torch.tensor(list(host), dtype=torch.float64).view(MOST_BLOCKS, MOST_WARPS, -1)[:blocks, :warps, :stamps]
    return (table - table[:, :, :1].amin(1, keepdim=True)).mean((0, 1)).tolist()


def main(
    dim: int = 64,
    heads: int = 4,
    height: int = 32,
    width: int = 32,
    batch: int = 4,
    dtype: str = "float32",
    axis: str = "row",
    setting: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE of a tunable; may be repeated.")] = None,
) -> None:
    """See the module's text."""
    gpu = visible_gpu()
    if gpu is None:
        raise SystemExit("a GPU is needed")
    try:
        spec = BlockSpec(dim, heads, height, width, batch, dtype, axes=(axis,))
        config = configs_of(spec, gpu.target, ["family=sequence", *(setting or ())])[axis]
        assert isinstance(config, SequenceConfig)
        plan = SequencePlan(spec.problem(axis), config)
    except SpecError as error:
        raise SystemExit(f"error: {error}") from None
    before, names = 0.0, STAMPS["shared" if plan.keys_shared else "registers"]
    source = stamped(render(spec, {axis: config}), len(names))
    for name, value in zip(names, cycles(source, plan.warps, len(names), gpu.target), strict=True):
        Console().print(f"{name:18} {value:8.0f}  +{value - before:.0f}")
        before = value


if __name__ == "__main__":
    typer.run(main)
