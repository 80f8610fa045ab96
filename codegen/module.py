"""Emitted modules: one Python file with a ModelNew that replaces the block, written, read back and listed.

A module is read as text (its constants are literals), so that listing or verifying a file never executes it;
`load_module` is for callers that mean to run it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from codegen.config import Config
from codegen.families import config_from_dict
from codegen.kernelbench import violations
from codegen.layout import ceil_div
from codegen.library import FORMS, KERNELS, LibraryConfig
from codegen.provenance import Provenance
from codegen.reference import parameter_shapes
from codegen.render import TERMS, WEIGHTS, Kernel, Source, environment
from codegen.spec import BlockSpec, SpecError
from codegen.target import Target, target
from codegen.terms import split_terms, term_shapes

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "index.json"
_FP16X3 = (
    " The fp16x3 arithmetic keeps operands of products as pairs of fp16 values: one beyond 65504 becomes infinite, and what is "
    "below 1e-11 is lost."
)
_WIDTH = 120
PIECE_BYTES = 256
"""Scratch buffers start on multiples of it: sectors, lines and what copies ask for divide it."""


@dataclass(frozen=True)
class Emitted:
    """A module as read from its file. use: what ModelNew computes with on CUDA, KERNELS or one of PyTorch's FORMS."""

    path: Path
    spec: BlockSpec
    arch: str
    configs: Mapping[str, Config]
    source: Source
    provenance: Provenance
    use: str = KERNELS

    @property
    def family(self) -> str:
        """The family of what ModelNew uses: `library`, or that of the kernels; of each axis where they differ."""
        if self.use != KERNELS:
            return LibraryConfig.family
        return " + ".join(dict.fromkeys(config.family for config in self.configs.values()))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return self.source.kernels

    @property
    def target(self) -> Target:
        return target(self.arch)


def module_name(spec: BlockSpec, arch: str, predicted: bool) -> str:
    """The file name of a module: block, dtype, architecture, and whether it is only predicted."""
    return f"axial_{spec.name}_{target(arch).arch.replace('_', '')}{'_predicted' if predicted else ''}.py"


def module_text(source: Source, configs: Mapping[str, Config], provenance: Provenance, target: Target, use: str = KERNELS) -> str:
    """The module as text; it holds the kernels whatever it uses. SpecError when KernelBench's text check would reject it, or when
    it is no Python."""
    spec = source.spec
    if use not in (KERNELS, *FORMS):
        raise SpecError(f"a module cannot use {use!r}: choose one of {', '.join((KERNELS, *FORMS))}")
    provenance = provenance.acceptable()
    axes = {("row", "col"): "row attention, then column attention", ("row",): "row attention", ("col",): "column attention"}[spec.axes]
    pieces, each, fixed = _pieces(source)
    env = environment()
    launch = env.get_template("module/launch.cpp.j2").render(
        spec=spec,
        kernels=source.kernels,
        pieces=pieces,
        each=each // spec.itemsize,
        fixed=fixed // spec.itemsize,
        calls=[_call(kernel, spec) for kernel in source.kernels],
        parameters=[f"{axis}_{part}" for axis in spec.axes for part in spec.parameters],
        sizes={part: (*parameter_shapes(spec)[f"{spec.axes[0]}_{part.replace('_', '.')}"], 0)[:2] for part in spec.parameters},
        terms=term_shapes(spec, 0),
        most=max(max(kernel.count(spec, 1), kernel.blocks(spec, 1)) for kernel in source.kernels if not kernel.fixed),
    )
    for name, text in (("CUDA source", source.text), ("launch code", launch)):
        if "'''" in text or text.endswith("\\"):
            raise SpecError(f"the {name} cannot stand in a Python raw string")
    text = env.get_template("module.py.j2").render(
        spec=spec,
        title=f"Axial attention block: dim {spec.dim}, {spec.heads} heads, {spec.height}x{spec.width}, {spec.dtype}, for {target.arch}.",
        description=_wrapped(
            f"{axes.capitalize()} over (batch, height, width, dim), {_anatomy(spec)}. "
            f"Tuned for batch {spec.batch}; any batch is computed."
            + (_FP16X3 if any(configs[axis].to_dict().get("math") == "fp16x3" for axis in spec.axes) else ""),
            "",
        ),
        summary=f"{axes.capitalize()} over a {spec.height}x{spec.width} grid of {spec.dim} channels, {spec.dtype}.",
        configs={axis: _wrapped(", ".join(f"{k} {v}" for k, v in configs[axis].to_dict().items())) for axis in spec.axes},
        figures="\n".join(_wrapped(line, "") for line in provenance.lines()).replace("\\", "/").replace('"', "'"),
        spec_literal=_literal(spec.to_dict()),
        terms=list(term_shapes(spec, 0)),
        terms_literal=_literal(tuple(term_shapes(spec, 0))),
        parameters_literal=_literal(spec.parameters),
        variants={name: _literal(value) for name, value in spec.variants.items()},
        arch_literal=_literal(target.arch),
        use=use,
        forms_literal=_literal(FORMS),
        configs_literal=_literal({axis: configs[axis].to_dict() for axis in spec.axes}),
        kernels_literal=_literal([_stated(kernel) for kernel in source.kernels]),
        scratch_literal=_literal(dict(source.scratch)),
        packed_literal=_literal(dict(source.packed)) if source.packed else None,
        provenance_literal=_literal({**dataclasses.asdict(provenance), "versions": dict(provenance.versions)}),
        cuda=source.text if source.text.endswith("\n") else source.text + "\n",
        launch=launch,
        code=source.arch(target).removeprefix("sm_"),
        capability=repr(divmod(target.number, 10)),
    )
    if wrong := violations(text):
        raise SpecError(f"the module would be rejected by KernelBench: it {'; it '.join(wrong)}")
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise SpecError(f"the module's text is not Python: {error}") from None
    return text


def write_module(
    directory: Path | str,
    source: Source,
    configs: Mapping[str, Config],
    provenance: Provenance,
    target: Target,
    use: str = KERNELS,
) -> Path:
    """Writes the module of `source` into `directory` (made if missing), at once and whole, and returns its path.

    use: what ModelNew computes with on CUDA, KERNELS or one of PyTorch's FORMS; the kernels are in the file either way.
    A predicted module has a name of its own and so never replaces a measured one, and one of an interrupted search takes another
    name beside one of a whole search. SpecError when the folder cannot be
    written or the text would be no acceptable module; nothing is left behind then.
    """
    text = module_text(source, configs, provenance, target, use)
    path = Path(directory) / module_name(source.spec, target.arch, not provenance.measured)
    if provenance.partial and _is_whole(path):
        path = path.with_stem(f"{path.stem}_partial")
    replace_file(path, text)
    return path


def _is_whole(path: Path) -> bool:
    """Whether a module of a whole search stands at `path`."""
    try:
        return not read_module(path).provenance.partial
    except SpecError:
        return False


def read_module(path: Path | str) -> Emitted:
    """What the module at `path` states about itself, without executing it; SpecError when it is not one of ours."""
    path = Path(path)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror or error}") from None
    except (SyntaxError, ValueError) as error:
        raise SpecError(f"{path} is not an emitted module: {str(error).splitlines()[0]}") from None
    wanted = {"SPEC", "ARCH", "CONFIGS", "KERNELS", "SCRATCH", "PROVENANCE", "CUDA_SOURCE", "USE"}
    found: dict[str, Any] = {}
    try:
        for node in tree.body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                if (name := node.targets[0].id) in wanted | {"PACKED"}:
                    found[name] = ast.literal_eval(node.value)
        if missing := sorted(wanted - set(found)):
            raise SpecError(f"it has no {', '.join(missing)}")
        spec = BlockSpec.from_dict(found["SPEC"])
        configs = {axis: config_from_dict(found["CONFIGS"][axis]) for axis in spec.axes}
        kernels = tuple(_kernel(kernel) for kernel in found["KERNELS"])
        scratch, packed = (tuple((name, int(elements)) for name, elements in found.get(key, {}).items()) for key in ("SCRATCH", "PACKED"))
        if tuple(dict.fromkeys(kernel.axis for kernel in kernels if kernel.axis)) != spec.axes:
            raise SpecError(f"its kernels are not those of the axes {list(spec.axes)}")
        for kernel in kernels:
            own = ("x", "y", *WEIGHTS, *TERMS) if kernel.axis else (f"{axis}_{name}" for axis in spec.axes for name in WEIGHTS)
            if unknown := set(kernel.arguments) - {*own, *dict(scratch), *dict(packed)}:
                raise SpecError(f"kernel {kernel.name}: {unknown.pop()!r} is no argument")
        if not isinstance(found["CUDA_SOURCE"], str):
            raise SpecError("its CUDA_SOURCE is no text")
        if found["USE"] not in (KERNELS, *FORMS):
            raise SpecError(f"its USE is {found['USE']!r}")
        source = Source(spec, found["CUDA_SOURCE"].removeprefix("\n"), kernels, scratch, packed)
        return Emitted(path, spec, target(found["ARCH"]).arch, configs, source, Provenance(**found["PROVENANCE"]), found["USE"])
    except (AttributeError, KeyError, TypeError, ValueError, MemoryError, RecursionError) as error:
        raise SpecError(f"{path} is not an emitted module: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from None


def load_module(path: Path | str) -> ModuleType:
    """Executes the module at `path` and returns it; it is registered in sys.modules, so that its objects can be pickled."""
    path = Path(path).resolve()
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:12]
    name = f"axialtune_module_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SpecError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with contextlib.ExitStack() as stack:
        stack.callback(sys.modules.pop, name, None)
        spec.loader.exec_module(module)
        stack.pop_all()
    return module


def module_runner(path: Path | str, device: str = "cuda") -> Callable[[Tensor, Mapping[str, Tensor]], Tensor]:
    """The module at `path` as a function of an input and weights (both anywhere), computed on `device`; the output is on the CPU.

    weights: also the mask and biases of the logits, where the block has them."""
    import torch

    from codegen.reference import torch_dtype

    emitted = read_module(path)
    spec = emitted.spec
    model = load_module(path).ModelNew(spec.dim, spec.heads, spec.height, spec.width).to(device, torch_dtype(spec)).eval()

    def run(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        parameters, terms = split_terms(spec, weights)
        model.load_state_dict(parameters, strict=True)
        with torch.no_grad():
            return model(x.to(device), *(term.to(device) for term in terms)).cpu()

    return run


def list_modules(directory: Path | str) -> list[Emitted]:
    """The modules in `directory`, by file name; a file that is named like one and is none is left out with a warning."""
    found = []
    for path in sorted(Path(directory).glob("axial_*.py")):
        try:
            found.append(read_module(path))
        except SpecError as error:
            warnings.warn(str(error), stacklevel=2)
    return found


def update_index(directory: Path | str) -> Path:
    """Derives index.json from the modules in `directory` and returns its path."""
    entries = [
        {
            "file": emitted.path.name,
            "spec": emitted.spec.to_dict(),
            "arch": emitted.arch,
            "family": emitted.family,
            "use": emitted.use,
            "gpu": emitted.provenance.gpu,
            "measured": emitted.provenance.measured,
            "partial": emitted.provenance.partial,
            "device_us": emitted.provenance.device_us,
            "pytorch_us": emitted.provenance.pytorch_us,
            "predicted_us": emitted.provenance.predicted_us,
            "error": emitted.provenance.error,
            "source": emitted.source.digest,
        }
        for emitted in list_modules(directory)
    ]
    path = Path(directory) / INDEX
    replace_file(path, json.dumps(entries, indent=2) + "\n")
    return path


def _pieces(source: Source) -> tuple[list[tuple[str, int, int]], int, int]:
    """The source's scratch buffers in one: (name, where it starts: bytes for an image of the batch, and bytes), on multiples of
    PIECE_BYTES, and the bytes of all of them, for an image and whatever the batch."""

    def whole(elements: int) -> int:
        return ceil_div(elements * source.spec.itemsize, PIECE_BYTES) * PIECE_BYTES

    pieces, each, fixed = [], 0, 0
    for name, elements in source.packed:
        pieces.append((name, 0, fixed))
        fixed += whole(elements)
    for name, elements in source.scratch:
        pieces.append((name, each, fixed))
        each += whole(elements)
    return pieces, each, fixed


def _stated(kernel: Kernel) -> dict[str, Any]:
    """A kernel's fields as a module states them: the number of its items only where that is fixed."""
    return {name: value for name, value in dataclasses.asdict(kernel).items() if name != "fixed" or value}


def _anatomy(spec: BlockSpec) -> str:
    """What stands around the attention of an axis, in words."""
    norm = {"layer": "LayerNorm", "rms": "RMSNorm", "none": "no normalisation"}[spec.norm]
    norm += "" if spec.norm_affine else " without parameters"
    if spec.post_norm:
        text = f"with {'a residual and ' if spec.residual else ''}{norm} after each axis{'' if spec.residual else ' and no residual'}"
    else:
        text = f"with {norm} before and {'a' if spec.residual else 'no'} residual after each axis"
    more = [f"heads of {spec.head_dim} channels"] if "head_dim" in spec.variants else []
    more += ["a bias in the QKV product"] if spec.qkv_bias else []
    more += [] if spec.out_bias else ["none in the output product"]
    more += ["a mask of the keys as an input"] if spec.key_mask else []
    more += ["a bias of the logits as an input for each axis"] if spec.logit_bias else []
    return "; ".join([text, ", ".join(more)] if more else [text])


def _kernel(data: Mapping[str, Any]) -> Kernel:
    kernel = Kernel(**data)
    for f in dataclasses.fields(kernel):
        value = getattr(kernel, f.name)
        fits = all(isinstance(name, str) for name in value) if f.name == "arguments" else type(value).__name__ == f.type
        if not fits:
            raise SpecError(f"kernel: {f.name} cannot be {value!r}")
    return kernel


def _call(kernel: Kernel, spec: BlockSpec) -> str:
    """The kernel's pointers in the launch code."""

    def expression(argument: str) -> str:
        tensor = kernel.tensor(spec, argument)
        if tensor in parameter_shapes(spec) or argument in TERMS:
            return f"data({tensor.replace('.', '_')})"
        return {"x": "data(x)", "y": "out"}.get(tensor, tensor)

    return ", ".join(map(expression, kernel.arguments))


def _literal(value: Any, indent: int = 0) -> str:
    """`value` as a Python literal: on one line if it fits, else its items packed onto indented lines."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        items, opening, closing = [f"{_literal(k)}: {_literal(v, indent + 4)}" for k, v in value.items()], "{", "}"
    elif isinstance(value, (list, tuple)):
        items, (opening, closing) = [_literal(v, indent + 4) for v in value], "()" if isinstance(value, tuple) else "[]"
    else:
        return repr(value)
    line = opening + ", ".join(items) + ("," if isinstance(value, tuple) and len(items) == 1 else "") + closing
    if len(line) + indent <= _WIDTH and "\n" not in line:
        return line
    lines = [""]
    for item in items:
        if lines[-1] and ("\n" in lines[-1] + item or indent + 4 + len(lines[-1]) + len(item) + 2 > _WIDTH):
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{item},"
    margin = " " * (indent + 4)
    return "\n".join([opening, *(margin + line for line in lines), " " * indent + closing])


def _wrapped(text: str, indent: str = " " * 9) -> str:
    return "\n".join(textwrap.wrap(text, _WIDTH - len(indent), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))


def replace_file(path: Path, text: str) -> None:
    """Writes `text` to `path` at once: readers see the old file or the new one, never a part."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            if temporary:
                os.unlink(temporary)
        raise SpecError(f"{path.parent} cannot be written: {error.strerror or error}: choose another folder with --out") from None
