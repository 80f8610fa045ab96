"""What each command of the command line does, without the terminal: from a user's words to calls, results and exit codes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from codegen.config import Config
from codegen.families import FAMILIES, having, plan_of
from codegen.library import KERNELS
from codegen.module import Emitted
from codegen.render import Source, render
from codegen.sequence import SequenceConfig
from codegen.spec import BlockSpec, SpecError, valid_name
from codegen.target import Target, target
from tuner.gpu import Gpu, obstacle, visible_gpu
from tuner.records import Records
from tuner.space import FP32_TOLERANCE, parse_fixed, space, spaces
from tuner.storage import open_storage
from tuner.trial import Timing

DEFAULT_ARCH = "sm_90"


@dataclass(frozen=True)
class Request:
    """The options of `tune` as given; see the command's help."""

    spec: BlockSpec
    out: Path
    trials: int = 60
    budget: float = 90.0
    seed: int = 0
    gpu: int | None = None
    arch: str | None = None
    storage: str | None = None
    study: str | None = None
    tolerance: float = FP32_TOLERANCE
    fix: tuple[str, ...] = ()
    fresh: bool = False
    command: str = ""


def usable_gpu(index: int | None, arch: str | None) -> tuple[Gpu | None, str]:
    """The GPU to measure on, or None and why not (empty when there simply is none).

    An `arch` other than the GPU's asks for a prediction. SpecError when a GPU was asked for by index and cannot be used.
    """
    gpu = visible_gpu(index)
    if gpu is None:
        return None, ""
    reason = obstacle(gpu)
    if reason is None and arch is not None and target(arch) != gpu.target:
        if index is not None:
            there, asked = gpu.target.arch, target(arch).arch
            raise SpecError(f"GPU {index} is a {there}, not {asked}: leave out --gpu to predict, or --arch to measure")
        return None, f"the {gpu.name} is a {gpu.target.arch}: the choice for {target(arch).arch} is predicted"
    if reason is not None:
        if index is not None:
            raise SpecError(reason)
        return None, reason
    return gpu, ""


def run(request: Request, console: Console) -> int:
    """`tune`: returns the exit code."""
    from tuner.deliver import deliver, records_file
    from tuner.predicted_backend import PredictedBackend
    from tuner.progress import reporter
    from tuner.report import closing
    from tuner.tune import TuneOptions, tune

    fixed = parse_fixed(request.fix)
    _check_tolerance(request.spec, request.tolerance)
    gpu, why = usable_gpu(request.gpu, request.arch)
    to = gpu.target if gpu is not None else target(request.arch or DEFAULT_ARCH)
    spaces(request.spec, to, fixed=fixed, tolerance=request.tolerance)  # refuses at once what cannot be
    _writable(request.out)
    options = TuneOptions(
        request.spec,
        to,
        request.out,
        request.trials,
        request.budget,
        request.seed,
        request.tolerance,
        fixed,
        _study(request),
        open_storage(storage_of(request)),
        not request.fresh,
        command=request.command,
    )
    options = replace(options, records=Records(records_file(options, predicted=gpu is None)))
    if gpu is not None:
        from tuner.gpu_backend import GpuBackend

        backend: Any = GpuBackend(gpu, seed=request.seed, tolerance=request.tolerance)
    else:
        backend = PredictedBackend(to, seed=request.seed, tolerance=request.tolerance)
    progress = reporter(console)
    try:
        progress.note(f"Block {request.spec.name} for {to.arch} ({gpu.name if gpu else 'predicted, not measured'}).")
        if why:
            progress.note(why)
        result = tune(options, backend, progress, deliver)
    finally:
        progress.close()
        backend.close()
    closing(console, options, result, measured=gpu is not None)
    return result.exit_code


def _check_tolerance(spec: BlockSpec, tolerance: float) -> None:
    if spec.itemsize < 4 and tolerance != FP32_TOLERANCE:
        raise SpecError(f"--tolerance is for float32: {spec.dtype} is held to twice the error of PyTorch's own form; leave it out")


def _study(request: Request) -> str:
    if request.study is not None and not valid_name(request.study):
        raise SpecError(f"study {request.study!r} is not a plain name: use letters, digits, dot, dash and underscore")
    return request.study or ""


def storage_of(request: Request) -> str | None:
    """The storage's URL: as given, or a SQLite file in the user's cache; None for memory."""
    import platformdirs

    if request.storage == "none" or (request.fresh and request.storage is None):
        return None
    if request.storage is not None:
        return request.storage if "://" in request.storage else f"sqlite:///{request.storage}"
    folder = platformdirs.user_cache_path("axialtune")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "studies.db"
        # A file that exists is not opened here: closing it would drop the locks that SQLite, in this very process, may hold on it.
        if not file.exists():
            file.touch()
        return f"sqlite:///{file}" if os.access(file, os.R_OK | os.W_OK) else None
    except OSError:
        return None  # a cache that cannot be written only means that nothing is resumed


def _writable(folder: Path) -> None:
    """SpecError when `folder` cannot be made or written: better now than after the search."""
    import tempfile

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise SpecError(f"{folder} cannot be written: {error.strerror or error}: choose another folder with --out") from None


def source_of(spec: BlockSpec, to: Target, settings: Iterable[str]) -> Source:
    """`render`: the source of the default configuration with some tunables set. SpecError when that is not legal."""
    return render(spec, configs_of(spec, to, settings))


def configs_of(spec: BlockSpec, to: Target, settings: Iterable[str]) -> dict[str, Config]:
    """Axis -> the default configuration with some tunables set, NAME=VALUE each. SpecError when that is not legal.

    The arithmetic, the way of q, k and v and the engines decide about most other tunables: the default is the one of those that are set."""
    fixed = parse_fixed(settings)
    leading: dict[str, Any] = {name: fixed[name] for name in ("math", "heads", "qkv_engine", "out_engine") if name in fixed}
    tunables: dict[str, Any] = {name: value for name, value in fixed.items() if name != "family"}
    tolerance = 1.0 if fixed.get("math") == "tf32" else FP32_TOLERANCE
    configs: dict[str, Config] = {}
    for axis, families in spaces(spec, to, tolerance=tolerance).items():
        problem = spec.problem(axis)
        family = _family_of(tunables, fixed.get("family"), families)
        # A family that is not among them has nothing legal: `space` says why.
        here = families.get(family)
        if here is None or leading:
            here = space(problem, to, family=family, fixed=leading, tolerance=tolerance)
        asked: Config = replace(here.start, **tunables)
        if isinstance(asked, SequenceConfig) and "prefetch" not in fixed and asked.weights == "stream":
            asked = replace(asked, prefetch="none")
        reasons = plan_of(problem, asked).reasons(to)
        if reasons:
            raise SpecError(f"{axis}: {'; '.join(reasons)}")
        configs[axis] = asked
    return configs


def _family_of(tunables: Mapping[str, Any], wanted: Any, served: Iterable[str]) -> str:
    """The wanted family, or the first that has all of the tunables: of those that serve the axis, if there is such a one. SpecError
    when none has them."""
    if wanted:
        if set(tunables) <= set(FAMILIES[wanted].config.tunables()):
            return str(wanted)
        raise SpecError(f"family {wanted} has not all of {', '.join(tunables)}")
    if not (names := having(tunables)):
        raise SpecError(f"no family has all of {', '.join(tunables)}")
    return next((name for name in served if name in names), names[0])


@dataclass(frozen=True)
class Verdict:
    """Whether a module is right, and what to print."""

    ok: bool
    text: str


def verify_module(file: Path, on: str, gpu: int | None, seed: int, tolerance: float = FP32_TOLERANCE) -> Verdict:
    """`verify`: the module's kernels on the emulator, or the module itself on the GPU; a disagreement is traced to its stage."""
    from codegen.module import module_runner, read_module
    from tuner.emulator import EmulationError, Emulator
    from tuner.verify import Checker, diagnose

    if on not in ("cpu", "gpu"):
        raise SpecError(f"--on must be cpu or gpu, not {on!r}")
    emitted = read_module(file)
    spec = emitted.spec
    _check_tolerance(spec, tolerance)
    if on == "cpu":
        parts: list[tuple[BlockSpec, Any]] = [(part, Emulator(source).run) for part, source in _emulated_parts(emitted)]
        where = "emulator" if len(parts) == 1 else "emulator, each axis alone on a few sequences"
    else:
        _select(_gpu_or_error(gpu))
        where = "GPU" if emitted.use == KERNELS else f"GPU, PyTorch's {emitted.use} form, which it uses"
        parts = [(spec, module_runner(file, "cuda"))]
    error = 0.0
    for spec, runner in parts:
        try:
            check = Checker(spec, seed, tolerance=tolerance)(runner)
            if not check.ok:
                found = diagnose(spec, runner, seed)
                cause = found if not found.ok else check.cause
                return Verdict(False, f"disagrees with the float64 reference: {cause} (error {check.error:.1e})")
        except EmulationError as fault:
            return Verdict(False, f"fault on the emulator: {str(fault).splitlines()[0]}")
        error = max(error, check.error)
    return Verdict(True, f"agrees with the float64 reference: error {error:.1e} of the output's scale ({where})")


def _emulated_parts(emitted: Emitted) -> list[tuple[BlockSpec, Source]]:
    """What of a module the emulator runs: its own source for one image, or for a large block each axis alone on a few sequences, as this
    version renders it, if it renders the module's source as it is. SpecError otherwise."""
    from tuner.predicted_backend import emulated

    whole = replace(emitted.spec, batch=1)  # kernels do the same for every image of a batch
    parts = emulated(emitted.spec)
    if parts == (whole,):
        return [(whole, emitted.source)]
    if not parts or render(emitted.spec, emitted.configs).text != emitted.source.text:
        of = " and of another version of axialtune" if parts else ""
        raise SpecError(f"{emitted.path} is of a block too large for the emulator{of}: verify it with --on gpu")
    return [(part, render(part, {axis: emitted.configs[axis] for axis in part.axes})) for part in parts]


def _gpu_or_error(index: int | None) -> Gpu:
    gpu = visible_gpu(index)
    if gpu is None:
        raise SpecError("this needs a GPU, and none is visible: see `axialtune doctor`")
    reason = obstacle(gpu)
    if reason is not None:
        raise SpecError(reason)
    return gpu


def _select(gpu: Gpu) -> None:
    """Makes `gpu` the one that PyTorch sees; before it first uses CUDA in this process."""
    import os

    for name, value in gpu.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def bench_module(file: Path, index: int | None) -> tuple[list[tuple[str, Timing]], list[str]]:
    """`bench`: (name, timing) of PyTorch's forms and of the module, and notes on what could not be measured."""
    from codegen.module import read_module

    emitted = read_module(file)
    gpu = _gpu_or_error(index)
    from tuner.gpu_backend import GpuBackend

    backend = GpuBackend(gpu)
    try:
        rows = list(backend.pytorch(emitted.spec).items())
        notes = [f"PyTorch {name} could not be measured: {why}" for name, why in backend.pytorch_failures.items()]
        built = backend.module(file.resolve(), emitted.spec)
        notes += built.warnings
        if built.timing is None:
            raise SpecError(f"{file} could not be measured: {built.cause}")
        return [*rows, (file.name, built.timing)], notes
    finally:
        backend.close()


def calibrate(paths: Sequence[Path], write: bool) -> str:
    """`calibrate`: fits the model and says how well the old and the new coefficients rank the records."""
    from tuner.predict import CALIBRATION, calibration, fit, origin_of, quality, samples

    found = []
    for path in paths:
        if not path.is_file():
            raise SpecError(f"{path} is not a file of records")
        found += Records(path).read()
    data = samples(found)
    fitted = fit(data, origin_of(found))
    text = f"{len(data)} measured trials; rank correlation {quality(data, calibration()):.3f} before, {quality(data, fitted):.3f} after"
    if not write:
        return text + "\nnothing written: --write replaces the calibration"
    fitted.save()
    calibration.cache_clear()
    return text + f"\nwritten: {CALIBRATION}"
