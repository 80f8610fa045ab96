"""The command line by its exit codes and messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cli
import emitted
import tuner.predicted_backend
from codegen.module import read_module
from codegen.spec import BlockSpec
from fake_backend import InstantCompilers

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--dim", "16", "--heads", "2", "--height", "5", "--width", "16", "--batch", "2")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Runs the program in this process, in an empty folder: (exit code, what it printed)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["cli.py", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        code = stopped.value.code
        return (code if isinstance(code, int) else 0), captured.out + captured.err

    return run


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch):
    """No compiler, no emulator, no GPU: only the flow."""
    monkeypatch.setattr("tuner.session.visible_gpu", lambda index: None)
    monkeypatch.setattr(tuner.predicted_backend, "Compilers", lambda target, timeout: InstantCompilers())
    monkeypatch.setattr(tuner.predicted_backend._Emulated, "__call__", lambda self, source, spec: (True, 1e-6, ""))
    return monkeypatch


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("tune", "--dim", "65", "--heads", "4"), "dim 65 is not divisible by heads 4"),
        (("tune", "--heads", "0"), "heads must be"),
        (("tune", "--dim", "-64"), "dim must be"),
        (("tune", "--dim", "many"), "dim"),
        (("tune", "--height", "0"), "height must be"),
        (("tune", "--dtype", "float8"), "dtype 'float8' is not supported"),
        (("tune", "--dtype", "bf16", "--tolerance", "1e-3"), "--tolerance is for float32"),
        (("tune", "--dtype", "fp16", "--fix", "math=tf32x3"), "math tf32x3 is not for float16: choose fp16"),
        (("tune", "--arch", "sm_70"), "arch 'sm_70' is not supported"),
        (("tune", "--axis", "diagonal"), "axis must be row, col or both"),
        (("tune", "--fix", "warps=9"), "warps must be one of"),
        (("tune", "--fix", "warp=8"), "not NAME=VALUE"),
        (("tune", "--fix", "math=tf32"), "--tolerance"),
        (("tune", "--fix", "sequences=1", "--fix", "qkv_rows=4"), "qkv_rows 4 does not divide"),
        (("tune", "--trials", "0"), "--trials"),
        (("tune", "--budget", "0"), "--budget"),
        (("tune", "--gpu", "99"), "gpu 99 does not exist"),
        (("tune", "--study", "../x"), "not a plain name"),
        (("tune", "--dim", "4096", "--heads", "1", "--height", "600", "--width", "700"), "bytes of shared memory exceed"),
        (("tune", "--out", "/proc/nowhere"), "cannot be written"),
        (("render", "--set", "out_rows=4"), "out_rows 4 does not divide"),
        (("verify", "missing.py"), "cannot be read"),
        (("verify", str(ROOT / "cli.py")), "is not an emitted module"),
        (("verify", "--on", "tpu", "x.py"), "--on must be cpu or gpu"),
        (("render", "--set", "family=sequence", "--set", "attn_warps=4"), "family sequence has not all of attn_warps"),
        (("bench", "missing.py"), "cannot be read"),
        (("list", "nowhere"), "is not a folder"),
        (("calibrate", "nowhere.jsonl"), "is not a file of records"),
        (("frobnicate",), "frobnicate"),
    ],
)
def test_what_a_user_can_get_wrong_ends_in_a_clear_line_and_exit_code_2(call, arguments: tuple[str, ...], message: str) -> None:
    code, text = call(*arguments)
    assert code == 2
    assert message in " ".join(text.split())
    assert "Traceback" not in text


def test_an_unusable_storage_is_exit_code_2(call, instant) -> None:
    code, text = call("tune", *SMALL, "--storage", "sqlite:////nonexistent/x.db")
    assert code == 2 and "storage" in text and "Traceback" not in text


def test_help_names_the_commands() -> None:
    text = CliRunner().invoke(cli.app, ["--help"]).output
    assert all(name in text for name in ("tune", "render", "verify", "bench", "list", "doctor"))
    text = CliRunner().invoke(cli.app, ["tune", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).output
    wanted = "dim heads height width batch dtype axis trials budget seed gpu arch out storage study fix tolerance"
    assert all(f"--{name}" in text for name in wanted.split())


def test_render_prints_the_source_and_nothing_else(call) -> None:
    code, text = call("render", *SMALL, "--axis", "row", "--set", "math=ffma", "--set", "weights=stream", "--set", "fragment=2")
    assert code == 0
    assert text.count("__global__") == 1 and "axial_row" in text and "Ffma" in text
    assert call("render", *SMALL, "--axis", "row", "--set", "math=ffma", "--set", "weights=stream", "--set", "fragment=2")[1] == text


def test_tune_without_a_gpu_writes_a_predicted_module_and_list_shows_it(call, instant, tmp_path: Path) -> None:
    code, text = call("tune", *SMALL, "--trials", "3", "--arch", "sm_80", "--fix", "warps=4")
    assert code == 0, text
    path = tmp_path / "generated" / "axial_d16_h2_5x16_b2_fp32_sm80_predicted.py"
    assert str(path.relative_to(tmp_path)) in text and "predicted, not measured" in text
    assert "default configuration" in text and "winner" in text
    module = read_module(path)
    assert module.arch == "sm_80" and all(config.warps == 4 for config in module.configs.values())
    assert "tune --dim 16" in module.provenance.command
    code, text = call("list")
    assert code == 0 and path.name in text and "predicted" in text
    code, text = call("tune", *SMALL, "--trials", "3", "--arch", "sm_80", "--fix", "warps=4")
    assert code == 0 and "rows: 3 results of earlier runs taken over" in text


def test_tune_exits_with_3_when_nothing_can_be_verified(call, instant) -> None:
    instant.setattr(tuner.predicted_backend._Emulated, "__call__", lambda self, source, spec: (False, None, "race on shared memory"))
    code, text = call("tune", *SMALL, "--trials", "2", "--fresh")
    assert code == 3 and "No candidate could be verified" in text and "race on shared memory" in text


def test_tune_exits_with_130_after_an_interrupt_and_keeps_the_best(call, instant, tmp_path: Path) -> None:
    compilers = InstantCompilers()
    plain, calls = compilers.submit, []

    def submit(source):
        calls.append(source)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return plain(source)

    compilers.submit = submit  # type: ignore[method-assign]
    instant.setattr(tuner.predicted_backend, "Compilers", lambda target, timeout: compilers)
    code, text = call("tune", *SMALL, "--trials", "9", "--fresh")
    assert code == 130 and "partial" in text
    assert read_module(tmp_path / "generated" / "axial_d16_h2_5x16_b2_fp32_sm90_predicted.py").provenance.partial


def test_an_empty_folder_lists_nothing(call, tmp_path: Path) -> None:
    assert call("list", str(tmp_path)) == (0, f"no modules in {tmp_path}\n")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module from the real pipeline: NVRTC, model, emulator."""
    folder = tmp_path_factory.mktemp("tuned")
    command = [sys.executable, str(ROOT / "cli.py"), "tune", *SMALL, "--trials", "3", "--arch", "sm_90", "--out", str(folder), "--fresh"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return folder / "axial_d16_h2_5x16_b2_fp32_sm90_predicted.py"


def test_verify_accepts_the_tuned_module(call, tuned: Path) -> None:
    code, text = call("verify", str(tuned))
    assert code == 0 and "agrees with the float64 reference" in text


def test_verify_takes_a_large_module_in_parts(call, tmp_path: Path, monkeypatch) -> None:
    path = emitted.write(tmp_path, BlockSpec(16, 2, 16, 12, batch=3))

    def verify(limit: int) -> tuple[int, str]:
        monkeypatch.setattr(tuner.predicted_backend, "EMULATED_MULTIPLICATIONS", limit)
        return call("verify", str(path))

    code, text = verify(200_000)
    assert code == 0 and "each axis alone on a few sequences" in text, text
    code, text = verify(10)
    assert code == 2 and "too large for the emulator: verify it with --on gpu" in text
    source = read_module(path).source.text
    path.write_text(path.read_text().replace(source, source.replace("// The block", "// This block")))
    code, text = verify(200_000)
    assert code == 2 and "of another version" in text


def test_verify_names_the_stage_of_a_planted_fault(call, tuned: Path, tmp_path: Path) -> None:
    text = tuned.read_text()
    before = "load_pair(biases[j], bias + column, column);"
    assert text.count(before) == 1, "the template changed: plant the missing bias elsewhere"
    broken = tmp_path / "broken.py"
    broken.write_text(text.replace(before, "biases[j][0] = biases[j][1] = 0.0f;"))
    code, said = call("verify", str(broken))
    assert code == 1 and "output bias" in said, said


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_reaches_the_whole_process_group_and_still_leaves_a_module(tmp_path: Path) -> None:
    endless = ("--trials", "500", "--budget", "500", "--fresh")
    command = [sys.executable, "-u", str(ROOT / "cli.py"), "tune", *SMALL, "--arch", "sm_90", "--out", str(tmp_path), *endless]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs, and their children, ignore it
    )
    records = tmp_path / "records" / "axial_d16_h2_5x16_b2_fp32_sm90_predicted.jsonl"
    limit = time.monotonic() + 60
    while time.monotonic() < limit and process.poll() is None and not (records.is_file() and records.read_text().count("\n") >= 2):
        time.sleep(0.1)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    text = process.communicate(timeout=120)[0]
    assert process.returncode == 130, text
    assert "Traceback" not in text and "partial" in text
    assert read_module(tmp_path / "axial_d16_h2_5x16_b2_fp32_sm90_predicted.py").provenance.partial
