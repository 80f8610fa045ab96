"""`python -m benchmarks.host FILE...`: where the time of a module's call on the host goes, on an otherwise idle machine.

Microseconds a call in a loop that waits for the GPU at its end: a whole call; Python alone, as far as the op; the op alone, and the op
for a batch of nothing, which launches nothing; and a call that records gradients. Beside them the device's time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.once import prepared

COLUMNS = ("call", "Python alone", "op alone", "op, empty batch", "call, grad mode", "device")


def parts(
    module: ModuleType, model: Any, x: Any, terms: Mapping[str, Any], wall: Callable[[Callable[[], object]], float]
) -> dict[str, float]:
    """COLUMNS but the last -> microseconds, by `wall`, for a module whose model has been called with this input and these terms."""
    import torch

    launch, weights = module._launcher(), model._weights()
    arguments = [x, *weights, *terms.values()]
    empty = [x[:0], *weights, *(tensor[:0] if name == "key_mask" else tensor for name, tensor in terms.items())]
    call = functools.partial(model, x, *terms.values())
    found = {}
    with torch.no_grad():
        found["call"] = wall(call)
        found["op alone"] = wall(lambda: launch(*arguments))
        found["op, empty batch"] = wall(lambda: launch(*empty))
        y, launcher = launch(*arguments), module._launcher
        try:
            module._launcher = lambda: lambda *tensors: y  # type: ignore[attr-defined]
            found["Python alone"] = wall(call)
        finally:
            module._launcher = launcher  # type: ignore[attr-defined]
    with torch.enable_grad():
        found["call, grad mode"] = wall(call)
    return found


def main(files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Emitted modules.")]) -> None:
    """See the module's text."""
    import torch

    from tuner.measure import TRIAL, measure, wall

    table = Table("us", *COLUMNS, box=None, header_style="none")
    for file in files:
        module, model, x, terms = prepared(file)
        with torch.no_grad():
            model(x, *terms.values())
            device = measure([functools.partial(model, x, *terms.values())]).device
        found = parts(module, model, x, terms, functools.partial(wall, effort=TRIAL)) | {"device": device}
        table.add_row(file.stem, *(f"{found[name]:.1f}" for name in COLUMNS))
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
