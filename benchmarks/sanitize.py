"""Runs a sample of kernels under NVIDIA's compute-sanitizer, which watches the real GPU's accesses.

    python -m benchmarks.sanitize [--count 20] [--seed 0] [--tool memcheck --tool racecheck --tool initcheck]

Drawn are small blocks, ragged ones among them, with random legal configurations of every family, arithmetic and element
type. They are compiled beforehand and run, once each, in a process of their own, with one allocation a tensor, so that an
access past a tensor is one past an allocation. Exit code 1 when a tool finds anything.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import typer

from codegen.render import Source, render
from codegen.spec import DTYPES, BlockSpec, SpecError
from codegen.target import Target
from tuner.compile import Compilers
from tuner.gpu import visible_gpu
from tuner.space import spaces

TOOLS = ("memcheck", "racecheck", "initcheck")
SHAPES = (
    (64, 4, 32, 32),
    (64, 4, 33, 31),
    (24, 3, 5, 63),
    (40, 5, 12, 48),
    (80, 2, 65, 3),
    (66, 2, 9, 16),
    (128, 8, 20, 65),
    (33, 3, 4, 17),
)
FOUND = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


def sample(count: int, seed: int, to: Target) -> list[Source]:
    """`count` sources: shapes, element types and families in turn, configurations drawn."""
    draw = random.Random(seed)
    sources: list[Source] = []
    for index in range(100 * count):
        dtype = list(DTYPES)[index % len(DTYPES)]
        spec = BlockSpec(*SHAPES[index % len(SHAPES)], batch=2, dtype=dtype)
        try:
            found = spaces(spec, to)
        except SpecError:
            continue
        shared = set.intersection(*(set(families) for families in found.values()))
        if shared:
            family = sorted(shared)[index // len(DTYPES) % len(shared)]
            sources.append(render(spec, {axis: families[family].random(draw) for axis, families in found.items()}))
        if len(sources) == count:
            break
    return sources


def run(path: Path) -> None:
    """The watched process: each source of the file once, on data from the CPU, so that no other kernels run."""
    import torch

    from codegen.reference import random_input, random_weights
    from codegen.terms import random_terms
    from tuner.launch import Loaded

    for source, cubin in pickle.loads(path.read_bytes()):
        generator = torch.Generator().manual_seed(0)
        weights = random_weights(source.spec, generator) | random_terms(source.spec, generator)
        weights = {name: t.cuda() for name, t in weights.items()}
        x = random_input(source.spec, generator).cuda()
        y = torch.empty_like(x)
        loaded = Loaded(source, cubin)
        loaded.bind(x, weights, y)()
        torch.cuda.synchronize()
        assert bool(torch.isfinite(y.cpu()).all()), "not finite"
        loaded.unload()


def main(count: int = 20, seed: int = 0, tool: list[str] | None = None, watched: Path | None = None) -> None:
    """See the module's text."""
    if watched is not None:
        return run(watched)
    gpu, sanitizer = visible_gpu(), shutil.which("compute-sanitizer")
    if gpu is None or sanitizer is None:
        raise SystemExit("a GPU is needed, and compute-sanitizer on the PATH (it comes with the CUDA toolkit)")
    sources = sample(count, seed, gpu.target)
    with Compilers(gpu.target) as compilers:
        compiled = [(source, job.result().cubin) for source, job in [(s, compilers.submit(s)) for s in sources]]
    print(
        f"{len(sources)} sources on {gpu.name}: "
        + ", ".join(f"{s.spec.name} {'/'.join(sorted({k.name for k in s.kernels}))}" for s in sources[:3])
        + ", ..."
    )
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sources"
        path.write_bytes(pickle.dumps(compiled))
        for name in tool or TOOLS:
            quiet = ["--report-api-errors", "no"] if name == "memcheck" else []  # PyTorch probes for calls that this driver may not have
            command = [
                sanitizer,
                "--tool",
                name,
                *quiet,
                "--print-limit",
                "5",
                sys.executable,
                "-m",
                "benchmarks.sanitize",
                "--watched",
                str(path),
            ]
            done = subprocess.run(command, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, capture_output=True, text=True)
            summary = FOUND.search(done.stdout)
            clean = done.returncode == 0 and summary is not None and not any(int(n) for n in summary.groups() if n)
            print(f"{name}: {'clean' if clean else 'NOT CLEAN'} ({summary[0] if summary else f'exit code {done.returncode}'})")
            if not clean:
                failed = True
                print("\n".join((done.stdout + done.stderr).splitlines()[-40:]))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
