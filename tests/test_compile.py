"""Compiling with NVRTC in killable processes."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from codegen.render import TEMPLATES, Kernel, Source, render
from codegen.sequence import SequencePlan, default
from codegen.spec import DTYPES, BlockSpec
from codegen.target import target
from tuner.compile import CompileCrash, CompileError, Compilers, CompileTimeout, compile_source, first_error
from tuner.cubin import CubinError, usage

SPEC = BlockSpec(dim=16, heads=2, height=5, width=7, batch=2)
SMALL = 'extern "C" __global__ void axial_row(float* x) { x[threadIdx.x] = 2.0f * x[threadIdx.x]; }\n'


def source(text: str, name: str = "axial_row") -> Source:
    return Source(SPEC, text, (Kernel(name, "row", 32, 1024, 1, False),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_default_configuration_compiles(arch, dtype):
    goal, spec = target(arch), replace(SPEC, dtype=dtype)
    configs = {axis: default(spec.problem(axis), goal) for axis in spec.axes}
    rendered = render(spec, configs)
    compiled = compile_source(rendered, goal)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert set(compiled.resources) == {"axial_row", "axial_col"}
    for kernel in rendered.kernels:
        used = compiled.resources[kernel.name]
        assert 16 <= used.registers <= 255 and used.local_bytes == 0 and used.shared_bytes == kernel.shared_bytes
    assert compiled.seconds > 0


def test_warps_that_share_a_head_need_no_local_memory():
    """65 tokens of 128 channels in fp16x3, where one warp spills. And the plan's estimate of registers, which refuses configurations, is
    from below."""
    goal, spec = target("sm_90"), BlockSpec(dim=128, heads=8, height=65, width=65, axes=("row",))
    alone = default(spec.problem("row"), goal)
    assert alone is not None
    two = replace(alone, head_warps=2, qkv_columns=2, qkv_rows=1, out_rows=1, norm_lanes=8, prefetch="none")
    plan = SequencePlan(spec.problem("row"), two)
    assert not plan.reasons(goal)
    used = compile_source(render(spec, {"row": two}), goal).resources["axial_row"]
    assert used.local_bytes == 0 and plan.registers <= used.registers <= 128


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SMALL.replace("2.0f", "y"), 'line 1: identifier "y" is undefined'),
        ("\n#error not this one\n", "line 2: #error directive: not this one"),
        (SMALL.replace("{ x", "{ __shared__ float s[99999]; s[threadIdx.x] = 1; __syncthreads(); x[0] = s[9]; x"), "too much shared data"),
        (SMALL.replace("{ x", '{ asm("foo;"); x'), "Not a name of any known instruction: 'foo'"),
        (SMALL.replace("axial_row", "other"), "no kernel axial_row"),
    ],
)
def test_refusal_is_one_clear_line(text, message):
    with pytest.raises(CompileError) as caught:
        compile_source(source(text), target("sm_90"))
    assert message in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 200
    assert caught.value.status == "compile_error"


def test_spills_are_counted():
    """A kernel that must keep more values alive than its launch bounds leave registers for."""
    loads = "".join(f"float v{i} = x[{i} * 1024 + threadIdx.x];" for i in range(96))
    total = " + ".join(f"v{i} * v{(i * 37) % 96}" for i in range(96))
    body = f"{loads} __syncthreads(); x[threadIdx.x] = {total};"
    text = f'extern "C" __global__ void __launch_bounds__(1024, 2) axial_row(float* x) {{ {body} }}'
    used = compile_source(source(text), target("sm_90")).resources["axial_row"]
    assert used.registers <= 32 and used.local_bytes > 0


def test_compiler_that_never_returns_or_dies_costs_one_source():
    with Compilers(target("sm_90"), workers=2, timeout=20, handler="fake_workers:bad_compiler") as compilers:
        compilers.submit(source(SMALL)).result()  # imports are done
        compilers.timeout = 1.5
        hang, abort = compilers.submit(source("// HANG\n" + SMALL)), compilers.submit(source("// ABORT\n" + SMALL))
        good = [compilers.submit(source(SMALL + f"// {i}\n")) for i in range(3)]
        with pytest.raises(CompileTimeout, match="did not return within 1.5 s") as slow:
            hang.result()
        with pytest.raises(CompileCrash, match="SIGABRT") as dead:
            abort.result()
        assert (slow.value.status, dead.value.status) == ("compile_timeout", "crash")
        assert all(one.result().cubin for one in good)


def test_close_does_not_wait_for_a_hanging_compiler():
    compilers = Compilers(target("sm_90"), workers=2, timeout=600, handler="fake_workers:bad_compiler")
    futures = [compilers.submit(source(f"// HANG {i}\n" + SMALL)) for i in range(4)]
    time.sleep(0.5)
    start = time.monotonic()
    compilers.close()
    assert time.monotonic() - start < 15
    assert all(future.done() for future in futures)
    assert not any(worker.running for worker in compilers._all)


def test_usage_is_read_from_the_cubin_itself():
    """Whatever a compiler's log looks like: two kernels of one source, told apart by name."""
    text = """
    extern "C" __global__ void a(float* x) { x[threadIdx.x] = 1; }
    extern "C" __global__ void b(float* x, int n) {
      float count[64] = {};
      for (int i = 0; i < n; ++i) count[int(x[i]) & 63] += 1.0f;
      x[0] = count[n & 63];
    }"""
    used = usage(compile_source(source(text, "a"), target("sm_90")).cubin)
    assert set(used) == {"a", "b"} and used["a"].stack_bytes == 0 and used["b"].stack_bytes >= 256 and used["a"].registers >= 4


@pytest.mark.parametrize("bytes_", [b"", b"PTX", b"\x7fELF\x02" + bytes(10), b"\x7fELF\x02" + bytes(100)])
def test_what_is_no_cubin_is_said_so(bytes_):
    with pytest.raises(CubinError, match="not a cubin"):
        usage(bytes_)


def test_first_error_without_a_known_form():
    assert first_error("something   odd\nhappened") == "something odd happened"
    assert first_error("") == "the compiler failed without a message"


def test_no_generic_lambdas_in_the_templates():
    """NVRTC 13.0, the oldest supported, takes a generic lambda's operator for a host function and refuses the source."""
    for path in sorted(TEMPLATES.rglob("*.cuh")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.partition("//")[0]
            assert not re.search(r"\]\s*\([^)]*\bauto\b", code), f"{path.name}:{number}: an `auto` parameter of a lambda"
