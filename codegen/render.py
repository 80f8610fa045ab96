"""Rendering: from a block's configurations to one CUDA translation unit, strictly and deterministically."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import jinja2

from codegen.config import Config
from codegen.sequence import SequenceConfig, SequencePlan
from codegen.spec import BlockSpec, SpecError

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"


@dataclass(frozen=True)
class Kernel:
    """How one kernel of a source is launched: grid.x = ceil(sequences / sequences_per_block), `threads` threads and
    `shared_bytes` of dynamic shared memory.

    Every kernel has the signature (const float* x, float* y, const float* norm_weight, const float* norm_bias,
    const float* qkv_weight, const float* out_weight, const float* out_bias, int sequences), where sequences is
    batch * lines. It reads x and writes y, both (batch, height, width, dim) and contiguous; x may be y.
    dependent_launch: it may be launched with programmatic stream serialization behind the block's previous kernel.
    """

    name: str
    axis: str
    threads: int
    shared_bytes: int
    sequences_per_block: int
    dependent_launch: bool


@dataclass(frozen=True)
class Source:
    """A CUDA translation unit (device code alone) and its kernels in the order of launching: the first reads the
    block's input, each writes the block's output, and each further one works on the output in place."""

    spec: BlockSpec
    text: str
    kernels: tuple[Kernel, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """The one Jinja environment: an undefined name is an error, output is plain text with Unix line ends."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals["verbatim"] = verbatim
    return made


def verbatim(name: str) -> str:
    """The text of templates/`name`, which is plain CUDA: not a template, so that it can be linted and compiled alone."""
    return (TEMPLATES / name).read_text().rstrip("\n")


def render(spec: BlockSpec, configs: Mapping[str, Config]) -> Source:
    """The CUDA source of `spec` with one configuration for each of its axes.

    Raises SpecError when an axis has no configuration or one of no known family. Whether a configuration is legal for a
    target is SequencePlan.reasons' business; rendering needs no target.
    """
    if set(configs) != set(spec.axes):
        raise SpecError(f"configurations for {sorted(configs)} given, but the block has the axes {list(spec.axes)}")
    plans: dict[str, SequencePlan] = {}
    for axis in spec.axes:
        config = configs[axis]
        if not isinstance(config, SequenceConfig):
            raise SpecError(f"family {config.family!r} cannot be rendered")
        plans[axis] = SequencePlan(spec.problem(axis), config)
    maths = sorted({plan.config.math for plan in plans.values()})
    text = environment().get_template("sequence.cu.j2").render(spec=spec, plans=plans, maths=maths)
    kernels = tuple(
        Kernel(
            name=f"axial_{axis}",
            axis=axis,
            threads=plan.threads,
            shared_bytes=plan.shared_bytes,
            sequences_per_block=plan.config.sequences,
            dependent_launch=plan.config.dependent_launch and index > 0,
        )
        for index, (axis, plan) in enumerate(plans.items())
    )
    return Source(spec, text, kernels)
