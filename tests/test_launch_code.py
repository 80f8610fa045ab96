"""The code that launches a module's kernels, compiled with stand-ins of PyTorch's and CUDA's headers and run: what each kernel is given."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path

import pytest

from codegen.config import Config
from codegen.families import FAMILIES
from codegen.module import load_module, write_module
from codegen.reference import parameter_shapes
from codegen.render import Source, render
from codegen.spec import BlockSpec
from codegen.target import target
from codegen.terms import term_shapes
from emitted import PREDICTED

STAND_IN = Path(__file__).resolve().parent / "stand_in"
H200 = target("sm_90")
TYPES = {"float32": "Float", "bfloat16": "BFloat16", "float16": "Half"}


def run(
    source: Source,
    configs: dict[str, Config],
    folder: Path,
    batch: int,
    *words: str,
    changes: dict[str, str] | None = None,
    cuda: int = 13000,
) -> tuple[list[dict], dict[str, int]]:
    """What the launching code prints for a batch, and where its inputs are; words: of tests/stand_in/main.cpp; changes: an input -> how it
    is made instead; cuda: the runtime's version."""
    spec = source.spec
    shapes = {"x": (batch, spec.height, spec.width, spec.dim), **parameter_shapes(spec), **term_shapes(spec, batch)}
    places = {name: 0x1000 * (index + 1) for index, name in enumerate(shapes)}

    def made(name: str, shape: tuple[int, ...]) -> str:
        kind = "Bool" if name == "key_mask" else TYPES[spec.dtype]
        usual = f"tensor({{{', '.join(map(str, shape))}}}, torch::headeronly::ScalarType::{kind}, {places[name]})"
        return (changes or {}).get(name, usual).replace("USUAL", usual[:-1])

    tensors = ",\n    ".join(made(name, shape) for name, shape in shapes.items())
    launch = load_module(write_module(folder, source, configs, PREDICTED, H200)).LAUNCH_SOURCE
    (folder / "launch.inc").write_text(launch)
    (folder / "inputs.inc").write_text(tensors)
    (folder / "pointers.inc").write_text(", ".join(str(len(kernel.arguments)) for kernel in source.kernels))
    flags = ["-std=c++20", "-Wall", "-Werror", "-fsanitize=address,undefined", "-I", str(STAND_IN), "-I", "."]
    command = ["g++", *flags, "-DAXIALTUNE_NAMESPACE=here", f"-DCUDART_VERSION={cuda}", str(STAND_IN / "main.cpp"), "-o", "main"]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    done = subprocess.run([folder / "main", *words], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], places


def configs_of(spec: BlockSpec, *families: str) -> dict[str, Config]:
    made: dict[str, Config] = {}
    for axis, family in zip(spec.axes, families, strict=True):
        config = FAMILIES[family].default(spec.problem(axis), H200, FAMILIES[family].maths[spec.dtype][0])
        assert config is not None
        made[axis] = config
    return made


BLOCKS = {
    "sequence": (BlockSpec(64, 4, 32, 32, 4), ("sequence", "sequence")),
    "resident": (BlockSpec(64, 4, 33, 48, 2, "bfloat16"), ("resident", "resident")),
    "staged, then resident": (BlockSpec(64, 4, 64, 64, 2, "float16"), ("staged", "resident")),
    "variants": (BlockSpec(32, 4, 9, 20, 2, axes=("col",), head_dim=16, qkv_bias=True, norm="rms", post_norm=True), ("staged",)),
    "terms": (BlockSpec(32, 4, 9, 20, 2, key_mask=True, logit_bias=True, out_bias=False), ("sequence", "staged")),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("block", BLOCKS)
def test_each_kernel_gets_what_its_source_states(block: str, batch: int, tmp_path: Path) -> None:
    """The same as the tuner launches (tuner/launch.py): pointers in order, items, blocks, threads, shared memory, early or not."""
    spec, families = BLOCKS[block]
    configs = configs_of(spec, *families)
    source = render(spec, configs)
    said, places = run(source, configs, tmp_path, batch)
    launches, last = [line for line in said if "kernel" in line], said[-1]
    assert last["sizes"] == [batch, spec.height, spec.width, spec.dim]
    assert [line["kernel"] for line in launches] == list(range(len(source.kernels)))
    buffers: dict[str, int] = {"y": last["y"]}
    for line, kernel in zip(launches, source.kernels, strict=True):
        names = [kernel.tensor(spec, argument) for argument in kernel.arguments]
        for name, place in zip(names, line["pointers"], strict=True):
            assert place == (places[name] if name in places else buffers.setdefault(name, place)), (kernel.name, name)
        found = [line[key] for key in ("blocks", "threads", "shared", "items", "stream")]
        assert found == [[kernel.blocks(spec, batch), 1, 1], [kernel.threads, 1, 1], kernel.shared_bytes, kernel.count(spec, batch), 0x73]
        assert line["early"] == kernel.dependent_launch and line["by"] == "driver"
    assert set(buffers) == {"y", *source.buffers(batch)} and len(set(buffers.values())) == len(buffers)
    allocated = [(line["at"], line["made"] * spec.itemsize) for line in said if "made" in line]
    assert [at for at, _ in allocated] == [last["y"], *([min(set(buffers.values()) - {last["y"]})] if source.buffers(batch) else [])]
    if source.buffers(batch):  # of one piece, in which none overlaps another
        (start, size), sizes = allocated[1], {name: elements * spec.itemsize for name, elements in source.buffers(batch).items()}
        pieces = sorted((buffers[name], buffers[name] + size) for name, size in sizes.items())
        assert all(end <= after for (_, end), (after, _) in itertools.pairwise(pieces)) and pieces[-1][1] <= start + size
        assert all((at - start) % 256 == 0 for at, _ in pieces)
    large = [index for index, kernel in enumerate(source.kernels) if kernel.shared_bytes > 48 * 1024]
    assert [(line["allows"], line["bytes"]) for line in said if "allows" in line] == [(i, source.kernels[i].shared_bytes) for i in large]


@pytest.mark.parametrize(
    ("words", "device", "cuda"), [([], 3, 12060), (["driver unknown"], 3, 13000), (["driver refuses"], 3, 13000), ([], 64, 13000)]
)
def test_a_kernel_is_launched_by_the_driver_else_by_the_runtime(words: list[str], device: int, cuda: int, tmp_path: Path) -> None:
    """By a handle that is asked for once, and let have its shared memory then; the same launches either way."""
    spec, families = BLOCKS["resident"]
    configs = configs_of(spec, *families)
    source = render(spec, configs)
    there = {name: f"USUAL, true, {device})" for name in ("x", *parameter_shapes(spec))}
    said, _ = run(source, configs, tmp_path, 2, "twice", *words, changes=there, cuda=cuda)
    usual, _ = run(source, configs, tmp_path, 2, changes=there)
    by_driver, kept, count = not words and device < 64, device < 64, len(source.kernels)
    launches = [line for line in said if "kernel" in line]
    assert [line.pop("by") for line in launches] == ["driver" if by_driver else "runtime"] * 2 * count
    assert [line["kernel"] for line in launches] == [*range(count)] * 2
    assert launches[:count] == [{key: line[key] for key in line if key != "by"} for line in usual if "kernel" in line]
    large = [index for index, kernel in enumerate(source.kernels) if kernel.shared_bytes > 48 * 1024]
    assert large and [line["allows"] for line in said if "allows" in line] == large * (1 if kept else 2)
    assert [line["handle of"] for line in said if "handle of" in line] == [*range(count)] * kept
    assert [line["asked for"] for line in said if "asked for" in line] == ["cuLaunchKernelEx"]


def test_what_cannot_be_had_is_named(tmp_path: Path) -> None:
    spec, families = BLOCKS["sequence"]
    configs = configs_of(spec, *families)
    source = render(spec, configs)
    said, _ = run(source, configs, tmp_path, 2, "no memory")
    launched, _ = run(source, configs, tmp_path, 2, "driver refuses", "runtime refuses")
    assert said == [{"refused": "PyTorch could not allocate 131072 elements of float32 on cuda:3"}]
    assert launched[-1] == {"refused": f"{source.kernels[0].name} could not be launched: stood in for"}


def test_inputs_are_copied_or_refused(tmp_path: Path) -> None:
    spec, families = BLOCKS["sequence"]
    configs = configs_of(spec, *families)
    source = render(spec, configs)

    def said(**changes: str) -> list[dict]:
        return run(source, configs, tmp_path, 2, changes={name.replace("__", "."): text for name, text in changes.items()})[0]

    def pointer(lines: list[dict], name: str) -> int:
        (kernel,) = (k for k in source.kernels if name in [k.tensor(spec, a) for a in k.arguments] and k.axis == "row")
        (line,) = (line for line in lines if line.get("kernel") == source.kernels.index(kernel))
        return line["pointers"][[kernel.tensor(spec, a) for a in kernel.arguments].index(name)]

    assert pointer(said(row_qkv__weight="USUAL, false)"), "row_qkv.weight") > 0x900000, "a strided weight is copied"
    misaligned = "tensor({2, 32, 32, 64}, torch::headeronly::ScalarType::Float, 0x1004)"
    assert pointer(said(x=misaligned), "x") > 0x900000, "and so is what does not start on 16 bytes"
    for changes, reason in (
        ({"x": "USUAL, true, -1)"}, "the input must be on a CUDA device"),
        ({"x": "tensor({2, 32, 64}, torch::headeronly::ScalarType::Float, 0x1000)"}, "(batch, 32, 32, 64)"),
        ({"x": "tensor({2, 32, 32, 64}, torch::headeronly::ScalarType::Half, 0x1000)"}, "must be float32"),
        ({"col_out__bias": "USUAL, true, 1)"}, "col_out_bias must be on the input's device, cuda:3"),
        ({"row_out__weight": "tensor({64, 32}, torch::headeronly::ScalarType::Float, 0x5000)"}, "row_out_weight has the wrong shape"),
        ({"x": f"tensor({{{2**31}LL, 32, 32, 64}}, torch::headeronly::ScalarType::Float, 0x1000)"}, "is too large: split the input"),
    ):
        *before, line = said(**changes)
        assert reason in line["refused"] and not any("kernel" in each for each in before), line
    made, line = said(x="tensor({0, 32, 32, 64}, torch::headeronly::ScalarType::Float, 0x1000)")
    assert made["made"] == 0 and line["sizes"] == [0, 32, 32, 64], "a batch of nothing launches nothing"
