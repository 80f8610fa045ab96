"""The library candidate: PyTorch's best form is delivered where no kernel beats it, is said to be, and computes."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rich.console import Console

import emitted
import kernelbench_rules
from codegen.kernelbench import violations
from codegen.library import FORMS, KERNELS, LibraryConfig
from codegen.module import Emitted, list_modules, load_module, module_text, read_module
from codegen.render import render
from codegen.spec import BlockSpec, SpecError
from codegen.target import target
from emitted import PREDICTED, SPEC, close, gradients, images, pair
from fake_backend import FakeBackend, options, run
from tuner.deliver import records_file
from tuner.finals import unbeaten_form
from tuner.gpu_backend import ModuleTiming
from tuner.predict import samples
from tuner.records import Records
from tuner.report import closing, modules_table
from tuner.trial import OK, Timing

LIBRARY = ModuleTiming(OK, "", 4e-7, Timing(17.0, 0.1, 24.0, 29.0))


def written(tmp_path: Path, backend: FakeBackend, **more) -> Emitted:
    result, _ = run(tmp_path, backend, **more)
    assert result.delivery is not None
    found = read_module(result.delivery.path)
    assert result.delivery.use == found.use
    return found


def test_the_faster_form_is_delivered_measured_and_named(tmp_path: Path) -> None:
    backend = FakeBackend(compiled=16.5, library=LIBRARY)
    module = written(tmp_path, backend)
    assert backend.built == [KERNELS, "torch.compile"], "both are measured as deployed"
    assert module.use == "torch.compile" and module.family == "library"
    facts = module.provenance
    assert (facts.device_us, facts.wall_us, facts.error) == (17.0, 29.0, 4e-7), "figures are those of what the module uses"
    assert (facts.pytorch_us, facts.pytorch_wall_us, facts.pytorch_form) == (16.5, 100.0, "torch.compile")
    assert (facts.kernels_us, facts.kernels_wall_us) == (18.0, 30.0)
    text = module.path.read_text()
    header = text.split('"""')[1]
    assert "No kernel that was found beats PyTorch's torch.compile form" in header
    for line in ("PyTorch (torch.compile), device time: 16.50 us", "the kernels in this file, wall time of a call: 30.00 us"):
        assert line in header
    assert not violations(text) and set(module.configs) == {"row", "col"}, "the kernels stay in the file"
    assert module.source.text == render(module.spec, module.configs).text


@pytest.mark.parametrize(
    ("compiled", "use"),
    [(20.0, KERNELS), (19.01, KERNELS), (18.9, "torch.compile"), (18.0, "torch.compile"), (17.5, "torch.compile")],
)
def test_kernels_have_to_beat_the_form_by_more_than_the_noise(tmp_path: Path, compiled: float, use: str) -> None:
    """The kernels take 18 us as deployed, spread 0.1, and the form's spread is 1."""
    assert written(tmp_path, FakeBackend(compiled=compiled, library=LIBRARY)).use == use


def test_device_time_decides_not_the_wall_time() -> None:
    forms = {"eager": Timing(9.0, 0.1, wall=900.0), "SDPA": Timing(11.0, 0.1, wall=10.0)}
    assert unbeaten_form(Timing(10.0, 0.1, wall=20.0), forms) == ("eager", forms["eager"])
    assert unbeaten_form(Timing(8.0, 0.1, wall=5000.0), forms) is None
    assert unbeaten_form(Timing(10.0, 0.1), {}) is None
    assert unbeaten_form(Timing(10.0, 0.1), {"max-autotune": Timing(1.0, 0.1)}) is None, "a module has no such form"


@pytest.mark.parametrize(
    ("library", "why"),
    [
        (ModuleTiming("wrong", "error 3e-5"), "a module of it failed: error 3e-5"),
        (ModuleTiming("timeout", "did not finish within 300 s"), "a module of it failed: did not finish"),
        (replace(LIBRARY, timing=Timing(18.5, 0.1)), "but in a module at 18.50 us"),
    ],
)
def test_a_form_that_fails_or_is_slower_in_a_module_is_not_delivered(tmp_path: Path, library: ModuleTiming, why: str) -> None:
    module = written(tmp_path, FakeBackend(compiled=16.5, library=library))
    assert module.use == KERNELS and module.provenance.device_us == 18.0
    assert why in module.provenance.note


def test_an_interrupted_run_is_no_slower_than_pytorch_either(tmp_path: Path) -> None:
    result, _ = run(tmp_path, FakeBackend(compiled=1.0, interrupt_at=(19,)))
    assert result.exit_code == 130 and result.delivery is not None
    module = read_module(result.delivery.path)
    assert module.use == "torch.compile" and module.provenance.partial and module.provenance.device_us == 1.0


def test_without_a_right_kernel_there_is_no_module(tmp_path: Path) -> None:
    result, _ = run(tmp_path, FakeBackend(compiled=1.0, fails=lambda config: ("wrong", "planted")))
    assert result.exit_code == 3 and result.delivery is None and result.pytorch


def test_records_index_list_and_the_closing_lines_show_it(tmp_path: Path) -> None:
    backend = FakeBackend(compiled=16.5, library=LIBRARY)
    result, _ = run(tmp_path, backend)
    made = options(tmp_path)
    records = [r for r in Records(records_file(made, predicted=False)).read() if r.outcome.timing]
    forms = {c.form: r.outcome.timing.device for r in records for c in r.outcome.candidate.configs.values() if isinstance(c, LibraryConfig)}
    assert forms == {"eager": 90.0, "torch.compile": 16.5}
    assert not samples([r for r in records if any(c.family == "library" for c in r.outcome.candidate.configs.values())])
    (entry,) = json.loads((tmp_path / "index.json").read_text())
    assert (entry["family"], entry["use"]) == ("library", "torch.compile")
    text = io.StringIO()
    console = Console(file=text, width=200)
    console.print(modules_table(list_modules(tmp_path)))
    assert "library (torch.compile)" in text.getvalue()
    closing(console, made, result, measured=True)
    assert "No kernel beats PyTorch's torch.compile form by more than the noise" in text.getvalue()
    again = FakeBackend(compiled=16.5, library=LIBRARY)
    assert run(tmp_path, again)[0].exit_code == 0, "records of forms do not disturb a later run"


def test_a_module_that_beats_pytorch_says_nothing_of_it(tmp_path: Path) -> None:
    module = written(tmp_path, FakeBackend())
    assert module.family == "sequence" and "No kernel" not in module.path.read_text()
    assert json.loads((tmp_path / "index.json").read_text())[0]["use"] == KERNELS


def test_only_known_forms_can_be_used(tmp_path: Path) -> None:
    source, configs = emitted.rendered(SPEC, target("sm_90"))
    with pytest.raises(SpecError, match="cannot use 'cudnn': choose one of kernels, eager"):
        module_text(source, configs, PREDICTED, target("sm_90"), "cudnn")
    path = emitted.write(tmp_path)
    path.write_text(path.read_text().replace('USE = "kernels"', 'USE = "cudnn"'))
    with pytest.raises(SpecError, match="USE is 'cudnn'"):
        read_module(path)
    with pytest.raises(SpecError, match="'library' cannot be rendered"):
        render(SPEC, dict.fromkeys(SPEC.axes, LibraryConfig()))


# What such a module computes. Its CUDA path is taken for CPU tensors.


@pytest.fixture(params=FORMS)
def module(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Compiled forms are traced, but run without a code generator, which takes long."""
    compiled = torch.compile
    made = []

    def traced(function, *, dynamic):
        made.append((function.__name__, dynamic))
        return compiled(function, dynamic=dynamic, backend="eager")

    monkeypatch.setattr(torch, "compile", traced)
    module = emitted.on_cpu(emitted.write(tmp_path, use=request.param))
    module.compiled = made
    module.importlib = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: name))  # Triton counts as installed
    return module


def test_every_form_computes_without_kernels(module: ModuleType) -> None:
    expected, model = pair(module)
    for batch in (2, 5, 3, 2, 0):
        x = images(batch=batch)
        with torch.no_grad():
            if batch:
                close(model(x), expected(x))
            assert model(x).shape == x.shape
    assert not module.launched
    used = "compile" in module.USE
    assert module.compiled == ([("_tuned_batch", False), ("_other_batch", True)] if used else [])


def test_every_form_has_gradients(module: ModuleType) -> None:
    expected, model = pair(module)
    x = images()
    for got, right in zip(gradients(model, x), gradients(expected, x), strict=True):
        close(got, right, 1e-4)
    assert not module.launched


def test_every_form_uses_new_weights(module: ModuleType) -> None:
    expected, model = pair(module)
    x = images()
    before = model(x)
    for m in (expected, model):
        with torch.no_grad():
            m.row_out.weight.mul_(3.0)
    close(model(x), expected(x))
    assert float((model(x) - before).detach().abs().max()) > 1e-2


def test_every_form_can_be_compiled_by_the_caller(module: ModuleType) -> None:
    expected, model = pair(module)
    x = images()
    with torch.no_grad():
        close(torch._dynamo.optimize("eager", nopython=True)(model)(x), expected(x))


def test_eager_and_sdpa_are_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for use, calls in (("eager", 0), ("SDPA", 2)):
        module = emitted.on_cpu(emitted.write(tmp_path / use, use=use))
        seen = []
        fused = torch.nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(module.F, "scaled_dot_product_attention", lambda *a, seen=seen, fused=fused: seen.append(1) or fused(*a))
        pair(module)[1](images())
        assert len(seen) == calls
        monkeypatch.undo()


def test_use_can_be_set_back_to_the_kernels(tmp_path: Path) -> None:
    module = emitted.on_cpu(emitted.write(tmp_path, use="SDPA"))
    model = pair(module)[1]
    model(images())
    assert not module.launched
    module.USE = "kernels"
    model(images())
    assert module.launched
    module.USE = "kernel"
    with pytest.raises(ValueError, match="USE has to be kernels or one of eager"):
        model(images())


@pytest.mark.parametrize("use", FORMS)
def test_kernelbench_accepts_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    """Its harness executes the text with no file behind it, which torch.compile must bear: one whole graph."""
    graphs = []
    compiled = torch.compile
    keep = lambda graph, inputs: graphs.append(graph) or graph  # noqa: E731
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled(function, dynamic=dynamic, backend=keep))
    text = emitted.write(tmp_path, use=use).read_text()
    assert not violations(text)
    assert kernelbench_rules.largest_excess(text.replace("not on_cuda", "False"), SPEC, "cpu") <= 0.0
    assert len(graphs) == ("compile" in use)


@pytest.mark.gpu
@pytest.mark.parametrize("use", FORMS)
def test_every_form_on_a_gpu(tmp_path: Path, use: str) -> None:
    major, minor = torch.cuda.get_device_capability(0)
    module = load_module(emitted.write(tmp_path, BlockSpec(), f"sm_{major}{minor}", use=use))
    expected, model = pair(module, BlockSpec(), device="cuda")
    for batch in (4, 7):
        x = images(BlockSpec(), batch, device="cuda")
        with torch.no_grad():
            close(model(x), expected(x))
        close(model(x), expected(x))
    assert module._launch is None


@pytest.mark.parametrize("use", [form for form in FORMS if "compile" in form])
def test_without_triton_a_compiled_form_is_computed_uncompiled_with_one_warning(tmp_path: Path, use: str) -> None:
    module = emitted.on_cpu(emitted.write(tmp_path, use=use))
    module.importlib = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    expected, model = pair(module)
    with torch.no_grad(), pytest.warns(UserWarning, match="needs Triton") as caught:
        for batch in (2, 3):
            close(model(images(batch=batch)), expected(images(batch=batch)))
    assert len(caught) == 1
