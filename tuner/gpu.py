"""Facts about the GPUs of this machine, read through NVML: no CUDA context is created here."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from codegen.spec import SpecError
from codegen.target import Target, target
from tuner.records import Machine

_PROBE_SECONDS = 120


@dataclass(frozen=True)
class Gpu:
    """One GPU this process may use.

    index: its place among them; uuid: as CUDA_VISIBLE_DEVICES takes it; driver: version text; capability: (major, minor); memory in bytes;
    sm_clock, memory_clock: the maxima in MHz; power_limit in watts; 0 where the driver does not tell.
    """

    index: int
    name: str
    uuid: str
    driver: str
    capability: tuple[int, int]
    memory: int = 0
    sm_clock: int = 0
    memory_clock: int = 0
    power_limit: int = 0

    @property
    def arch(self) -> str:
        """The architecture to compile for, e.g. sm_90."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def target(self) -> Target:
        """Its target; SpecError when code cannot be generated for it."""
        return target(self.arch)

    @property
    def environment(self) -> dict[str, str | None]:
        """What makes this GPU the only one, cuda:0, of a child process."""
        return {"CUDA_VISIBLE_DEVICES": self.uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    @property
    def machine(self) -> Machine:
        """What a record of a trial on it states."""
        return Machine(self.arch, self.name, self.driver, versions())


@dataclass(frozen=True)
class State:
    """What the GPU does now: clocks in MHz, power in watts, temperature in degrees Celsius; 0 where unknown."""

    sm_clock: int = 0
    memory_clock: int = 0
    power: int = 0
    temperature: int = 0


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs this process may use, in PCI order or in that of CUDA_VISIBLE_DEVICES; empty without any."""
    nvml = _nvml()
    if nvml is None:
        return _probe()
    count = _ask(nvml.nvmlDeviceGetCount, otherwise=0)
    driver = _text(_ask(nvml.nvmlSystemGetDriverVersion, otherwise=""))
    found: list[Gpu] = []
    for handle in _selected(nvml, count, os.environ.get("CUDA_VISIBLE_DEVICES")):
        major, minor = _ask(nvml.nvmlDeviceGetCudaComputeCapability, handle, otherwise=(0, 0))
        if not major:
            continue
        memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle, otherwise=None)
        found.append(
            Gpu(
                len(found),
                _text(_ask(nvml.nvmlDeviceGetName, handle, otherwise="unknown GPU")),
                _text(nvml.nvmlDeviceGetUUID(handle)),
                driver,
                (major, minor),
                int(memory.total) if memory is not None else 0,
                _ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM, otherwise=0),
                _ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM, otherwise=0),
                _ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle, otherwise=0) // 1000,
            )
        )
    return tuple(found)


def visible_gpu(index: int | None = None) -> Gpu | None:
    """The GPU to use: the first, or the one of `index` among the visible. None when there is none and none was asked for;
    SpecError when the one asked for is not there."""
    gpus = visible_gpus()
    if index is None:
        return gpus[0] if gpus else None
    if not 0 <= index < len(gpus):
        there = f"there are {len(gpus)}, counted from 0" if gpus else "no GPU is visible"
        raise SpecError(f"gpu {index} does not exist: {there}")
    return gpus[index]


def obstacle(gpu: Gpu) -> str | None:
    """Why nothing can be measured on `gpu` from this installation, in one line; None when it can."""
    import torch

    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA: install a CUDA build of it to measure on the {gpu.name}"
    try:
        gpu.target  # noqa: B018
    except SpecError as error:
        return f"{gpu.name}: {error}"
    return None


def state(uuid: str) -> State:
    """Clocks, power and temperature of the GPU now; zeros where the driver does not tell."""
    nvml = _nvml()
    if nvml is None:
        return State()
    handle = _ask(nvml.nvmlDeviceGetHandleByUUID, uuid, otherwise=None)
    if handle is None:
        return State()
    return State(
        _ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM, otherwise=0),
        _ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM, otherwise=0),
        _ask(nvml.nvmlDeviceGetPowerUsage, handle, otherwise=0) // 1000,
        _ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU, otherwise=0),
    )


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions of what a measurement depends on: python, torch, the CUDA torch was built with, nvrtc."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
        found["nvrtc"] = f"{major}.{minor}"
    except Exception:  # not installed, or its library is not found
        found["nvrtc"] = "none"
    return found


@lru_cache(maxsize=1)
def _nvml() -> Any:
    """The initialised NVML module, or None where there is no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # the package is missing, or the library, or the driver
        return None
    return pynvml


def _ask(query: Callable[..., Any], *arguments: Any, otherwise: Any) -> Any:
    """NVML's answer, or `otherwise` where this GPU or driver does not support the question."""
    try:
        return query(*arguments)
    except Exception:
        return otherwise


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _selected(nvml: Any, count: int, visible: str | None) -> list[Any]:
    """NVML handles in the order of CUDA_VISIBLE_DEVICES: numbers or (beginnings of) UUIDs, up to the first that names no device."""
    handles = (_ask(nvml.nvmlDeviceGetHandleByIndex, i, otherwise=None) for i in range(count))
    by_index = [handle for handle in handles if handle is not None]
    if visible is None:
        return by_index
    chosen: list[Any] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit() and int(entry) < len(by_index):
            chosen.append(by_index[int(entry)])
        elif entry.startswith("MIG-") and (handle := _ask(nvml.nvmlDeviceGetHandleByUUID, entry, otherwise=None)) is not None:
            chosen.append(handle)
        elif entry.startswith("GPU-") and len(same := [h for h in by_index if _text(nvml.nvmlDeviceGetUUID(h)).startswith(entry)]) == 1:
            chosen.append(same[0])
        else:
            break  # as CUDA does
    return chosen


_PROBE = """
import json, torch
found = []
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    found.append([p.name, "GPU-" + str(getattr(p, "uuid", "")), [p.major, p.minor], p.total_memory])
print(json.dumps(found))
"""


@lru_cache(maxsize=1)
def _probe() -> tuple[Gpu, ...]:
    """Without NVML, but with a device node: what torch says in a process of its own. The driver's version stays unknown."""
    if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg")):
        return ()
    try:
        answer = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, timeout=_PROBE_SECONDS, check=True, text=True)
        rows = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    found: list[Gpu] = []
    for i, (name, uuid, (major, minor), memory) in enumerate(rows):
        if uuid == "GPU-":  # an old torch does not tell: name the device as the user did
            uuid = visible[i] if i < len(visible) and visible[i] else str(i)
        found.append(Gpu(i, name, uuid, "unknown", (major, minor), memory))
    return tuple(found)
