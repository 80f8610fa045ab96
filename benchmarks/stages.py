"""Where the time of a `sequence` or `resident` kernel goes: the clock of the multiprocessor at each stage's end.

    python -m benchmarks.stages [--dim 64 ...] [--set NAME=VALUE] [--set family=resident]

The rendered source is compiled a second time with stamps (clock64, one lane a warp): in `sequence` behind the kernel's start, on both
sides of each block-wide barrier, and before its end, in `resident` behind each stage of each head. The table has cycles, averaged over
warps and the first blocks, as many as the GPU holds at once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from codegen.families import plan_of
from codegen.render import Source, render
from codegen.resident import ResidentPlan
from codegen.sequence import SequencePlan
from codegen.spec import BlockSpec, SpecError
from codegen.target import Target
from tuner.compile import compile_source
from tuner.gpu import visible_gpu
from tuner.session import configs_of
from tuner.work import blocks_per_sm

STAMPS = {
    "shared": (
        "start", "load + LayerNorm", "barrier: tokens", "QKV product", "barrier: keys", "attention", "barrier: result", "output product",
    ),
    "registers": ("start", "load + LayerNorm", "barrier: tokens", "QKV product + attention", "barrier: result", "output product"),
}  # fmt: skip
"""Where a kernel of `sequence` is stamped, by what becomes of keys and values; of several rounds the last one's stamps remain."""
RESIDENT = (
    (r"(const int lane = threadIdx\.x % 32, tile = threadIdx\.x / 32 \* ROWS, first_tile)", r"int event = 0;\n    stamp(event++);\n    \1"),
    (r"(fence_async_proxy\(\);\n    )(__syncthreads\(\);  // operand A and[^\n]*\n)", r"\1stamp(event++);\n    \2    stamp(event++);\n"),
    (r"(if \(!C::OVERLAP \|\| head == 0\) multiply_all<Qkv>\([^;]*;)", r"\1 stamp(event++);"),
    (r"(__syncthreads\(\);  // keys and values are there for all\n)", r"stamp(event++);\n        \1        stamp(event++);\n"),
    (r"(keep_result\(softmax\[each\][^;]*;)", r"stamp(event++);\n          \1 stamp(event++);"),
    (r"(    fill\(held[^;]*;\n(?:[^\n]*\n){2})(    __syncthreads\(\);\n)", r"\1    stamp(event++);\n\2    stamp(event++);\n"),
    (r"(multiply_all<Out>\([^;]*;)(\n *finish\([^;]*;)", r"stamp(event++);\n      \1\2 stamp(event++);"),
    (r"(tiles\[row\]\.after\([^;]*;)", r"\1\n      stamp(event++);"),
)  # fmt: skip
"""(what stands once in `Resident`, the same with stamps), in the order of `resident_names`."""
MOST_BLOCKS, MOST_WARPS = 1024, 32


def resident_names(plan: ResidentPlan) -> tuple[str, ...]:
    """What ends at each stamp of a warp."""
    group = plan.config.head_group
    each = ("QKV product", "q, k and v handed on", "barrier: keys", *("attention", "its result") * group)
    tiles = ("residual and bias", "output product", "stores") * plan.out.column_tiles
    heads = each * (plan.problem.block.heads // group)
    return ("start", "load + norm", "barrier: tokens", *heads, "end of the result", "barrier: result", *tiles)


def _head(stamps: int) -> str:
    return f"""__device__ long long stamps[{MOST_BLOCKS}][{MOST_WARPS}][{stamps}];
__device__ __forceinline__ void stamp(int stage) {{
  if (threadIdx.x % 32 == 0 && blockIdx.x < {MOST_BLOCKS}) stamps[blockIdx.x][threadIdx.x / 32][stage] = clock64();
}}
"""


def stamped(source: Source, stamps: int) -> Source:
    """The source of one kernel of `sequence` with stamps at its stages' ends; SpecError when these are not as many as expected."""
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
    return replace(source, text=source.text[:start] + _head(stamps) + "\n".join(lines) + "\n")


def stamped_resident(source: Source, stamps: int) -> Source:
    """The source of a `resident` kernel with stamps; SpecError when a stage is not found."""
    start = source.text.index("// A whole axis in one kernel, by warpgroups.")
    text = source.text[start:]
    for pattern, stamped_text in RESIDENT:
        text, found = re.subn(pattern, stamped_text, text)
        if found != 1:
            raise SpecError(f"the kernel has not the stages this knows: {found} places are like {pattern}")
    return replace(source, text=source.text[:start] + _head(stamps) + text)


def cycles(source: Source, kernel: str, plan: SequencePlan | ResidentPlan, to: Target) -> list[float]:
    """Cycles since a block's first stamp at each stamp of the stamped `kernel`, averaged over the blocks that are there at once and their
    warps, in a warm launch on this process's GPU."""
    import torch
    from cuda.bindings import driver

    from codegen.reference import random_input, random_weights
    from codegen.terms import random_terms
    from tuner.launch import Loaded

    spec = source.spec
    generator = torch.Generator(device="cuda").manual_seed(0)
    x, weights = random_input(spec, generator), random_weights(spec, generator) | random_terms(spec, generator)
    compiled = compile_source(source, to)
    loaded = Loaded(source, compiled.cubin)
    forward = loaded.bind(x, weights, torch.empty_like(x))
    for _ in range(20):
        forward()
    torch.cuda.synchronize()
    status, pointer, size = driver.cuModuleGetGlobal(loaded._module, b"stamps")
    assert status == driver.CUresult.CUDA_SUCCESS, status
    host = torch.empty(size // 8, dtype=torch.int64)
    driver.cuMemcpyDtoH(host.data_ptr(), pointer, size)
    (launched,) = (each.blocks(spec, spec.batch) for each in source.kernels if each.name == kernel)
    at_once = to.sms * blocks_per_sm(plan, compiled.resources[kernel].registers, to)
    table = host.view(MOST_BLOCKS, MOST_WARPS, -1)[: min(MOST_BLOCKS, at_once, launched), : plan.warps].double()
    return (table - table[:, :, :1].amin(1, keepdim=True)).mean((0, 1)).tolist()


def summary(names: Sequence[str], values: Sequence[float]) -> list[tuple[str, int, float]]:
    """(stage, how often a warp comes by, cycles of one time on average), in the order of their first time."""
    spent: dict[str, list[float]] = {}
    for name, (before, value) in zip(names, itertools.pairwise((0.0, *values)), strict=True):
        spent.setdefault(name, []).append(value - before)
    return [(name, len(each), sum(each) / len(each)) for name, each in spent.items()]


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
        source, plan = render(spec, {axis: config}), plan_of(spec.problem(axis), config)
        if isinstance(plan, SequencePlan):
            kernel, names = f"axial_{axis}", STAMPS["shared" if plan.keys_shared else "registers"]
            source = stamped(source, len(names))
        elif isinstance(plan, ResidentPlan):
            kernel, names = f"axial_{axis}_block", resident_names(plan)
            source = stamped_resident(source, len(names))
        else:
            raise SpecError("kernels of the families sequence and resident are stamped: --set family=resident")
    except SpecError as error:
        raise SystemExit(f"error: {error}") from None
    values = cycles(source, kernel, plan, gpu.target)
    for name, times, each in summary(names, values):
        Console().print(f"{name:24} {times:4} x {each:8.0f}")
    Console().print(f"{'all':24} {values[-1]:15.0f}")


if __name__ == "__main__":
    typer.run(main)
