"""The GPU architectures code is generated for: to add one, add a row here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from codegen.spec import SpecError


@dataclass(frozen=True)
class Target:
    """The limits of one architecture (CUDA C++ Programming Guide, table of compute capabilities) and, for prediction
    without a GPU, the rates of its best-known card (vendor datasheets; leads, not measurements).

    Sizes in bytes; fp32 and tf32 dense rates in TFLOP/s, bandwidth in GB/s, clock in MHz.
    """

    arch: str
    card: str
    shared_per_block: int
    shared_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    sms: int
    fp32_tflops: float
    tf32_tflops: float
    bandwidth: float
    clock: int
    registers_per_sm: int = 65_536
    registers_per_thread: int = 255

    @property
    def number(self) -> int:
        """Compute capability as one number: 90 for sm_90."""
        return int(self.arch[3:])

    @property
    def warpgroup_products(self) -> bool:
        """wgmma (PTX ISA, target sm_90a) is of this architecture alone."""
        return self.number == 90

    @property
    def dependent_launch(self) -> bool:
        """Programmatic dependent launch (griddepcontrol, PTX ISA 7.8) exists from sm_90 on."""
        return self.number >= 90


TARGETS = {
    t.arch: t
    for t in (
        Target("sm_80", "A100", 166_912, 167_936, 2048, 32, 108, 19.5, 156.0, 1555.0, 1410),
        Target("sm_86", "RTX 3090", 101_376, 102_400, 1536, 16, 82, 35.6, 35.6, 936.0, 1695),
        Target("sm_89", "RTX 4090", 101_376, 102_400, 1536, 24, 128, 82.6, 82.6, 1008.0, 2520),
        Target("sm_90", "H200", 232_448, 233_472, 2048, 32, 132, 67.0, 494.0, 4800.0, 1980),
        Target("sm_100", "B200", 232_448, 233_472, 2048, 32, 148, 80.0, 1100.0, 8000.0, 1965),
        Target("sm_103", "B300", 232_448, 233_472, 2048, 32, 148, 80.0, 1100.0, 8000.0, 1965),
        Target("sm_120", "RTX 5090", 101_376, 102_400, 1536, 24, 170, 105.0, 105.0, 1792.0, 2407),
    )
}


def target(arch: str) -> Target:
    """The target that `arch` names: sm_90, sm90 and 9.0 are the same. SpecError for an unknown one."""
    match = re.fullmatch(r"(?:sm_?)?(\d{2,3})[a-z]?|(\d{1,2})\.(\d)", arch.strip())
    key = f"sm_{match[1] or match[2] + match[3]}" if match else arch
    if key not in TARGETS:
        raise SpecError(f"arch {arch!r} is not supported: choose one of {', '.join(TARGETS)}")
    return TARGETS[key]
