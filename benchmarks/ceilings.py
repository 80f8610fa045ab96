"""Measures what the card does at best: the handler of a worker process that owns the GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.floors import Ceilings

_COPY_BYTES = 1 << 30  # far beyond L2
_SIDES = {"fp32": 4096, "tf32": 8192, "bf16": 8192}  # of square matrices: some milliseconds each


class CeilingsWorker:
    """Answers any request with the Ceilings of the GPU."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, _: object) -> Ceilings:
        import torch

        torch.manual_seed(self._seed)
        x = torch.randn(_COPY_BYTES // 4, device="cuda")
        y = torch.empty_like(x)
        copy = min(_device_us(partial(y.copy_, x)), _device_us(partial(torch.add, x, 1.0, out=y)))  # the driver's copy, and a kernel's
        del x, y
        tiny = torch.zeros(32, device="cuda")
        rates = {name: _product_tflops(name) for name in _SIDES}
        return Ceilings(2 * _COPY_BYTES / copy / 1e6, rates["fp32"], rates["tf32"], rates["bf16"], _device_us(partial(tiny.add_, 1.0)))


def _product_tflops(name: str) -> float:
    import torch

    side = _SIDES[name]
    a, b = torch.randn(2, side, side, device="cuda", dtype=torch.bfloat16 if name == "bf16" else torch.float32)
    c = torch.empty_like(a)
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        return 2 * side**3 / _device_us(partial(torch.mm, a, b, out=c)) / 1e6
    finally:
        torch.set_float32_matmul_precision("highest")


def _device_us(forward: Callable[[], object]) -> float:
    from tuner.measure import measure

    return measure([forward]).device
