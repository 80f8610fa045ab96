"""KernelBench: an emitted module is accepted unchanged, and each thing its text check rejects is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import emitted
import kernelbench_rules
from codegen.kernelbench import acceptable, strip_comments, violations
from codegen.reference import Model
from codegen.spec import BlockSpec


@pytest.mark.parametrize("axes", [("row", "col"), ("row",), ("col",)])
def test_an_emitted_module_is_accepted_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axes: tuple[str, ...]) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.9+PTX")
    spec = BlockSpec(dim=16, heads=2, height=5, width=7, batch=2, axes=axes)
    text = emitted.write(tmp_path, spec).read_text()
    assert violations(text) == []
    assert kernelbench_rules.largest_excess(text, spec, "cpu") <= 0.0
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "unset")  # so that the harness' own setting is undone
    assert kernelbench_rules.largest_excess(text, spec, "cpu", build_directory=str(tmp_path / "build")) <= 0.0
    assert not (tmp_path / "build").exists()


def test_the_harness_notices_a_wrong_module(tmp_path: Path) -> None:
    text = emitted.write(tmp_path).read_text()
    wrong = text.replace("return x + (result", "return x + 1.001 * (result")
    assert wrong != text
    assert kernelbench_rules.largest_excess(wrong, emitted.SPEC, "cpu") > 0.0


def test_parameters_are_drawn_as_the_reference_draws_them(tmp_path: Path) -> None:
    names = kernelbench_rules.execute(emitted.write(tmp_path).read_text(), emitted.SPEC)
    arguments = names["get_init_inputs"]()
    torch.manual_seed(42)
    expected = Model(*arguments).to("cpu", torch.float32).state_dict()
    torch.manual_seed(42)
    got = names["ModelNew"](*arguments).to("cpu", torch.float32).state_dict()
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert [tuple(x.shape) for x in names["get_inputs"]()] == [(2, 5, 7, 16)]


@pytest.mark.parametrize(
    "planted",
    [
        "    pass", "# fine\nx = 1; pass", '"""A two-pass softmax."""', "try:\n  f()\nfinally:\n  g()", "/* try : */", "except:",
        "'every row except the last'", "import threading", "from threading import Thread", "import multiprocessing",
        "multiprocessing.Pool(2)", "concurrent.futures", "ThreadPoolExecutor", "ProcessPoolExecutor", "x = T._make_subclass(T, y)",
        "class Lazy(torch.Tensor):", "class Lazy(Tensor):", "template <class T> void f(Tensor) {}", "torch.Tensor.__new__(T)",
        "torch.cuda.Event.record = f", "torch.cuda.Event.elapsed_time = f", "torch.cuda.synchronize = f", "torch.cuda.Event = f",
        "time.perf_counter = f", "time.time = f", "s = torch.cuda.Stream()", "with torch.cuda.stream(s):", "s.wait_stream(t)",
        "x.record_stream(s)", "x.half()", "x.to(torch.float16)", "x.to(dtype=torch.half)", "from __future__ import annotations",
    ],
)  # fmt: skip
def test_each_planted_violation_is_found(tmp_path: Path, planted: str) -> None:
    text = emitted.write(tmp_path).read_text()
    assert violations(text + "\n" + planted + "\n")


@pytest.mark.parametrize(
    "planted", ["# pass", "// try:", "bypass, passed, passes", "retry: x", "exception", "excepted", "template <typename T> void f(Tensor);"]
)
def test_harmless_text_is_not_rejected(tmp_path: Path, planted: str) -> None:
    assert violations(emitted.write(tmp_path).read_text() + "\n" + planted + "\n") == []


@pytest.mark.parametrize("needed", ["__global__", "cpp_extension"])
def test_what_must_be_there_is_missed(tmp_path: Path, needed: str) -> None:
    text = emitted.write(tmp_path).read_text()
    assert violations(text.replace(needed, "").replace("load_inline", ""))


def test_lines_are_cut_at_the_first_comment_sign() -> None:
    assert strip_comments("a # b // c\nd // e # f\ng") == "a \nd \ng"


def test_free_text_is_made_acceptable() -> None:
    for text in ("pass", "try: it", "no tiles except one", "line\nend", "import threading"):
        assert not any(found.startswith("contains") for found in violations(acceptable(text)))
    assert acceptable("python cli.py tune --dim 64") == "python cli.py tune --dim 64"


def test_only_torch_and_the_standard_library_are_imported(tmp_path: Path) -> None:
    import ast
    import sys

    for node in ast.walk(ast.parse(emitted.write(tmp_path).read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for name in names:
                assert name.split(".")[0] in {"torch", *sys.stdlib_module_names}
