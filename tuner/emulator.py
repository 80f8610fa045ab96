"""Running a rendered source without a GPU, with every access to memory checked.

The CUDA text is compiled as it is by g++, against tuner/emulator/cuda_host.h; the threads of a block run as fibers, blocks
one after another, in a process of their own. Found are accesses that are out of bounds, misaligned or read what nothing
wrote; barriers and warp collectives that not all threads reach; data races within a block; words that one block
writes and another touches; kernels that never end. The first of them ends the run with an EmulationError.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import platformdirs
import torch
from torch import Tensor

from codegen.reference import parameter_shapes, torch_dtype
from codegen.render import Kernel, Source
from codegen.spec import SpecError
from codegen.terms import term_dtype, term_shapes
from tuner.emulator_build import CompileError, build, line_of, lines_of

ORDERS = ("forward", "reverse")
KINDS = {
    "compile": "the source does not compile",
    "out_of_bounds": "out-of-bounds access",
    "misaligned": "misaligned access",
    "uninitialised": "read of uninitialised memory",
    "read_only": "write to read-only memory",
    "race": "data race",
    "block_conflict": "conflict between blocks",
    "previous_kernel": "race with the previous kernel",
    "protocol": "misuse of an asynchronous unit",
    "divergence": "divergent barrier or warp collective",
    "deadlock": "deadlock",
    "overflow": "integer overflow",
    "timeout": "timeout",
    "stack": "too much local memory",
    "trap": "trap",
    "crash": "crash",
}
MAX_SHARED_BYTES, MAX_THREADS = 256 * 1024, 1024

# A buffer in shared memory, for messages: (name, offset in words, rows, words from row to row).
SharedBuffer = tuple[str, int, int, int]


@dataclass(frozen=True)
class Report:
    """The first fault of a run.

    kind: a key of KINDS; message: one line with all of it. kernel, block, thread: who did it; None where nobody did.
    line: number of the line in the source's text, None when unknown. buffer: the parameter's or shared buffer's name.
    """

    kind: str
    message: str
    kernel: str | None = None
    block: int | None = None
    thread: int | None = None
    line: int | None = None
    buffer: str | None = None


class EmulationError(RuntimeError):
    """The emulated source does what it must not do; `report` says what, who and where."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.message)
        self.report = report


@dataclass(frozen=True)
class SharedTraffic:
    """What the accesses to shared memory from one place of the source took in one kernel: wavefronts, and those of them that bank conflicts
    added; splits: what asynchronous copies of 16 bytes add where a line of global memory comes to lie in several lines of shared
    memory, which `conflicts` does not contain. lines: of the access, and of the calls around it up to the kernel's."""

    kernel: str
    lines: tuple[int, ...]
    wavefronts: int
    conflicts: int
    splits: int


@dataclass(frozen=True)
class _Region:
    name: str
    shape: tuple[int, ...]
    writable: bool
    itemsize: int

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()


class Emulator:
    """A source, compiled for this machine. `run` is a runner: x and weights in, y out.

    cache_dir: where compiled programs are kept by content (the user's cache folder if None).
    buffers: kernel name -> shared buffers, so that messages name them.
    compile_limit, run_limit: seconds after which g++ and a run are stopped.

    Raises SpecError when there is no g++ or the source needs what the emulator does not have, EmulationError (kind
    "compile") when the source does not compile.
    """

    def __init__(
        self,
        source: Source,
        cache_dir: Path | None = None,
        buffers: Mapping[str, Sequence[SharedBuffer]] | None = None,
        *,
        compile_limit: int = 120,
        run_limit: int = 120,
    ) -> None:
        self.source = source
        self.buffers = dict(buffers or {})
        self.run_limit = run_limit
        _check_limits(source)
        self._folder = cache_dir or platformdirs.user_cache_path("axialtune") / "emulator"
        self._compile_limit = compile_limit
        try:
            self.program = build(source, self._folder, compile_limit)
        except CompileError as error:
            raise EmulationError(Report("compile", f"{KINDS['compile']}: {error}", line=error.line)) from None

    def run(self, x: Tensor, weights: Mapping[str, Tensor], *, order: str = "forward", check_races: bool = True) -> Tensor:
        """The block's output for x (B, H, W, D) and the weights, all of the spec's dtype on the CPU; elements never written are NaN.

        weights: also the mask and biases of the logits, where the block has them (codegen/terms.py).

        order: "forward", "reverse" or "random:SEED", in which ready threads run. B may differ from the spec's batch.
        Raises EmulationError on the first fault, SpecError for tensors that do not fit the spec.
        """
        if order not in ORDERS and not re.fullmatch(r"random:\d{1,18}", order):
            raise SpecError(f"order must be forward, reverse or random:SEED, not {order!r}")
        return self._run(x, weights, order, check_races, False)[0]

    def shared_traffic(self, x: Tensor, weights: Mapping[str, Tensor]) -> list[SharedTraffic]:
        """The bank conflicts of a run; x and weights are those of `run`. Counted are all accesses of threads, `cp.async` as one of its
        size, but neither bulk copies nor the operands of products."""
        found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for text in self._run(x, weights, "forward", False, True)[1].splitlines():
            kernel, kind, place, *counts = text.split()
            total = found.setdefault((kernel, (int(place),) if kind == "line" else lines_of(self._with_lines, int(place))), [0, 0, 0])
            for which, count in enumerate(counts):
                total[which] += int(count)
        return [SharedTraffic(kernel, lines, *total) for (kernel, lines), total in found.items()]

    def _run(self, x: Tensor, weights: Mapping[str, Tensor], order: str, check_races: bool, count: bool) -> tuple[Tensor, str]:
        """The output, and the bank conflicts as the program reports them."""
        regions, tensors = _regions(self.source, x, weights)
        if x.numel() == 0:
            return torch.empty_like(x), ""
        name, _, seed = order.partition(":")
        plan = [f"order {name} {seed or 0}", f"races {int(check_races)}", f"conflicts {int(count)}", f"limit {self.run_limit}"]
        plan += [f"region {int(region.writable)} {region.elements} {region.itemsize}" for region in regions]
        indices = {region.name: index for index, region in enumerate(regions)}
        for index, kernel in enumerate(self.source.kernels):
            spec, batch = self.source.spec, x.shape[0]
            used = (str(indices[kernel.tensor(spec, name)]) for name in kernel.arguments)
            plan.append(f"launch {index} {kernel.blocks(spec, batch)} {kernel.count(spec, batch)} {' '.join(used)}")
        with tempfile.TemporaryDirectory(prefix="axialtune-") as folder:
            paths = [os.path.join(folder, name) for name in ("plan", "input", "output", "report")]
            Path(paths[0]).write_text("\n".join(plan) + "\n")
            with open(paths[1], "wb") as file:
                for tensor in tensors:
                    file.write(_bytes(tensor))
            self._execute(paths, regions)
            with open(paths[2], "rb") as file:
                return torch.frombuffer(bytearray(file.read()), dtype=x.dtype).view(x.shape), Path(paths[3]).read_text()

    @cached_property
    def _with_lines(self) -> Path:
        """The program with what tells lines: the same code at the same addresses."""
        return build(self.source, self._folder, self._compile_limit, lines=True)

    def _execute(self, paths: list[str], regions: Sequence[_Region]) -> None:
        try:
            done = subprocess.run(
                [str(self.program), *paths], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=self.run_limit + 15
            )
        except subprocess.TimeoutExpired:
            raise EmulationError(Report("timeout", f"timeout: the emulator was stopped after {self.run_limit + 15} s")) from None
        if done.returncode == 3:
            facts = dict(line.split(" ", 1) for line in Path(paths[3]).read_text().splitlines())
            raise EmulationError(self._report(facts, regions))
        if done.returncode != 0:
            cause = done.stderr.strip() or f"exit code {done.returncode}"
            raise EmulationError(Report("crash", f"crash: the emulator's process ended early ({cause})"))

    def _report(self, facts: Mapping[str, str], regions: Sequence[_Region]) -> Report:
        number = {key: int(value) for key, value in facts.items() if re.fullmatch(r"-?\d+", value)}
        kernel = next((k for k in self.source.kernels if k.name == facts.get("kernel")), None)
        line, other_line = self._line(number, ""), self._line(number, "other_")
        thread = number.get("thread")
        text = facts["text"]
        buffer = None
        if kernel is not None and "region" in number:
            buffer, place = self._place(kernel, number["region"], number["byte"], regions)
            text = f"{facts['verb']} {number['bytes']} bytes of {place}, which {text}"
        who = ", ".join(
            part
            for part in (
                facts.get("kernel", ""),
                f"block {number['block']}" if "block" in number else "",
                f"thread {_thread(thread)}" if thread is not None else "",
            )
            if part
        )
        message = f"{KINDS[facts['kind']]}: {who} {text}".rstrip()
        if "index" in number:
            message += f" (index {number['index']})"
        if "alignment" in number:
            message += f" ({number['alignment']} bytes)"
        if line:
            message += f"; {self._quote(line)}"
        if "other_thread" in number or "other_block" in number:
            other = f"thread {_thread(number['other_thread'])}" if "other_thread" in number else f"block {number['other_block']}"
            message += f"; the other is {other}" + (f", {self._quote(other_line)}" if other_line else "")
        return Report(facts["kind"], message, facts.get("kernel"), number.get("block"), thread, line, buffer)

    def _line(self, number: Mapping[str, int], whose: str) -> int | None:
        """The line that a report names, or where its return address stands, for which alone the program with lines is built; None when
        that cannot be: it takes longer than the first."""
        if (line := number.get(f"{whose}line")) or not (pc := number.get(f"{whose}pc")):
            return line or None
        try:
            return line_of(self._with_lines, pc)
        except CompileError:
            return None

    def _quote(self, line: int) -> str:
        lines = self.source.text.splitlines()
        return f"line {line}: `{lines[line - 1].strip()}`" if line <= len(lines) else f"line {line}"

    def _place(self, kernel: Kernel, region: int, byte: int, regions: Sequence[_Region]) -> tuple[str | None, str]:
        """The name of the buffer that `byte` of a region lies in, and a description of the place."""
        if region >= 0:
            found = regions[region]
            size = found.elements * found.itemsize
            if not 0 <= byte < size:
                past = byte - size
                where = f"{past} bytes behind its end" if past >= 0 else f"{-byte} bytes before its start"
                return found.name, f"{found.name} {list(found.shape)} ({where})"
            index, rest = [], byte // found.itemsize
            for extent in reversed(found.shape):
                index.append(rest % extent)
                rest //= extent
            return found.name, f"{found.name}{list(reversed(index))}"
        if region == -1:
            if not 0 <= byte < kernel.shared_bytes:
                return "shared", f"shared memory at byte {byte} of {kernel.shared_bytes}"
            for name, offset, rows, stride in self.buffers.get(kernel.name, ()):
                if 0 <= byte // 4 - offset < rows * stride:
                    row, column = divmod(byte // 4 - offset, stride)
                    return name, f"shared {name}[{row}][{column}]"
            return "shared", f"shared memory at byte {byte}"
        return None, f"the address {byte & (2**64 - 1):#x}, near no buffer"


def _thread(thread: int) -> str:
    return f"{thread} (warp {thread // 32}, lane {thread % 32})"


def _regions(source: Source, x: Tensor, weights: Mapping[str, Tensor]) -> tuple[list[_Region], list[Tensor]]:
    """The memory of a run and the content of its read-only part, both in the order of the plan."""
    spec = source.spec
    dtype = torch_dtype(spec)
    if x.dtype != dtype or x.ndim != 4 or tuple(x.shape[1:]) != (spec.height, spec.width, spec.dim):
        raise SpecError(f"x must be {spec.dtype} (batch, {spec.height}, {spec.width}, {spec.dim}), not {x.dtype} {tuple(x.shape)}")
    regions, tensors = [_Region("x", tuple(x.shape), False, spec.itemsize)], [x]
    needed = {name: (shape, dtype) for name, shape in parameter_shapes(spec).items()}
    needed |= {name: (shape, term_dtype(spec, name)) for name, shape in term_shapes(spec, x.shape[0]).items()}
    for name, (shape, wanted) in needed.items():
        tensor = weights.get(name)
        if tensor is None:
            raise SpecError(f"weight {name} is missing")
        if tensor.dtype != wanted or tuple(tensor.shape) != shape:
            raise SpecError(f"weight {name} must be {str(wanted).removeprefix('torch.')} {shape}, not {tensor.dtype} {tuple(tensor.shape)}")
        regions.append(_Region(name, shape, False, wanted.itemsize))
        tensors.append(tensor)
    regions.append(_Region("y", tuple(x.shape), True, spec.itemsize))
    regions += (_Region(name, (x.shape[0], elements), True, spec.itemsize) for name, elements in source.scratch)
    regions += (_Region(name, (elements,), True, spec.itemsize) for name, elements in source.packed)
    return regions, tensors


def _bytes(tensor: Tensor) -> bytes:
    tensor = tensor.detach().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _check_limits(source: Source) -> None:
    if re.search(r"(?<!extern )__shared__", re.sub(r"//.*", "", source.text)):
        raise SpecError("the emulator knows dynamic shared memory only: declare `extern __shared__ ... float shared[]`")
    for kernel in source.kernels:
        if kernel.threads % 32 or not 32 <= kernel.threads <= MAX_THREADS:
            raise SpecError(f"{kernel.name}: the emulator runs whole warps, 32 to {MAX_THREADS} threads, not {kernel.threads}")
        if kernel.shared_bytes > MAX_SHARED_BYTES:
            raise SpecError(f"{kernel.name}: {kernel.shared_bytes} bytes of shared memory exceed the emulator's {MAX_SHARED_BYTES}")
