"""`python -m benchmarks.once FILE`: calls a module a few times, and nothing else, for a profiler to look at."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer


def prepared(file: Path) -> tuple[ModuleType, Any, Any, dict[str, Any]]:
    """A module, its block on the present GPU with random weights, a random input, and the terms of its logits by name."""
    import torch

    from codegen.module import load_module, read_module
    from codegen.reference import random_input, random_weights
    from codegen.terms import random_terms

    spec = read_module(file).spec
    dtype = getattr(torch, spec.dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    module = load_module(file)
    model = module.ModelNew(spec.dim, spec.heads, spec.height, spec.width).to("cuda", dtype)
    model.load_state_dict(random_weights(spec, generator))
    return module, model, random_input(spec, generator).to(dtype), random_terms(spec, generator)


def main(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An emitted module.")],
    calls: Annotated[int, typer.Option(min=1, help="Forwards.")] = 5,
) -> None:
    """Call a module with random input on the present GPU."""
    import torch

    _, model, x, terms = prepared(file)
    with torch.no_grad():
        for _ in range(calls):
            model(x, *terms.values())
    torch.cuda.synchronize()


if __name__ == "__main__":
    typer.run(main)
