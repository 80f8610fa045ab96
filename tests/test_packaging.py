"""What users install: the wheel's content, honest pins, and the environment that `make` creates, keeps and repairs."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

_spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
assert _spec is not None and _spec.loader is not None
installer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(installer)


def shipped() -> set[str]:
    """What a user needs at run time: every file of the packages, whatever its kind, and the command."""
    files = [path for name in ("codegen", "tuner", "templates") for path in (ROOT / name).rglob("*") if path.is_file()]
    found = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts and not path.name.startswith(".")}
    return found | {"cli.py"}


def declared() -> list[Requirement]:
    return [Requirement(text) for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]]


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {_normal(requirement.name): requirement for requirement in requirements}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure() -> set[str]:
    """Every distribution that the declared ones need here, themselves included."""
    todo, seen = [requirement.name for requirement in declared()], set()
    while todo:
        name = _normal(todo.pop())
        if name not in seen:
            seen.add(name)
            needs = [Requirement(text) for text in metadata.requires(name) or ()]
            todo += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return seen


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that pip builds from a clean copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree with spaces"
    for name in shipped() | {"pyproject.toml", "README.md"}:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, tree]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_all_sources_and_templates_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert files == shipped()
    assert any(name.endswith(".j2") for name in files) and any(name.endswith(".cuh") for name in files)


def test_wheel_works_away_from_the_sources(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.path = [p for p in sys.path if p != sys.argv[2]]\n"
        "import codegen.render, cli\n"
        "assert codegen.render.__file__.startswith(sys.argv[1]) and cli.__file__.startswith(sys.argv[1])\n"
        "print(sorted(codegen.render.environment().list_templates()))"
    )
    command = [sys.executable, "-I", "-c", code, str(tmp_path / "site"), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sequence.cu.j2" in done.stdout


def test_console_command_is_the_cli(wheel: zipfile.ZipFile) -> None:
    (entries,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "axialtune = cli:main" in wheel.read(entries).decode()


def test_metadata_states_the_name_and_the_oldest_python(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    text = wheel.read(name).decode()
    assert re.search(r"^Name: axialtune$", text, re.M) and re.search(r"^Requires-Python: >=3\.11$", text, re.M)


def test_every_dependency_is_pinned_within_its_bounds() -> None:
    for requirement in declared():
        pin = pins()[_normal(requirement.name)]
        for specifier in pin.specifier:
            if specifier.operator == "==":
                assert requirement.specifier.contains(specifier.version), f"{pin} is outside {requirement}"


def test_pins_are_exact_but_for_nvrtc() -> None:
    loose = {name for name, pin in pins().items() if [s.operator for s in pin.specifier] != ["=="]}
    assert loose == {"nvidia-cuda-nvrtc"}


def test_torch_is_pinned_to_the_tested_release() -> None:
    assert str(pins()["torch"]) == "torch==2.13.0"


@pytest.mark.skipif(not os.environ.get("CI"), reason="only the environment that CI makes is bound to the pins")
def test_all_that_is_installed_here_is_pinned() -> None:
    missing = closure() - set(pins())
    assert not missing, f"not in constraints.txt: {sorted(missing)}"
    for name in closure():
        assert pins()[name].specifier.contains(metadata.version(name)), f"{name} {metadata.version(name)} is not {pins()[name]}"


def imported() -> set[str]:
    """Top-level names that the shipped sources import."""
    names: set[str] = set()
    for name in shipped():
        if name.endswith(".py"):
            for node in ast.walk(ast.parse((ROOT / name).read_text())):
                if isinstance(node, ast.Import):
                    names |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names.add(node.module.split(".")[0])
    return names


def test_what_the_sources_import_is_declared() -> None:
    providers = metadata.packages_distributions()
    own = {"codegen", "tuner", "templates", "cli", "__future__"} | set(sys.stdlib_module_names)
    needed = {_normal(name) for module in imported() - own for name in providers.get(module, [module])}
    assert needed <= {_normal(Requirement(text).name) for text in PROJECT["dependencies"]} | {"cuda-pathfinder"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's files, and a pip that writes its arguments to pip.log instead of installing."""
    root = tmp_path / "a project"
    root.mkdir()
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)

    def create(venv: Path) -> None:
        shutil.rmtree(venv, ignore_errors=True)
        (venv / "bin").mkdir(parents=True)
        fake = venv / "bin" / "python"
        fake.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\n[ -e "{root}/fail" ] && exit 1\necho "$@" >> "{root}/pip.log"\n')
        fake.chmod(0o755)

    monkeypatch.setattr(installer, "create", create)
    return root


def calls(root: Path) -> list[str]:
    log = root / "pip.log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


def test_installs_torch_pinned_first_then_the_project(project: Path) -> None:
    assert installer.install(project, project / ".venv", {"test"})
    first, second = calls(project)
    assert first.endswith(f"-c {project}/constraints.txt torch")
    assert second.endswith(f"-c {project}/constraints.txt -e {project}[test]")


def test_a_second_run_does_nothing(project: Path) -> None:
    installer.install(project, project / ".venv", set())
    calls(project)
    assert not installer.install(project, project / ".venv", set())
    assert calls(project) == []


def test_a_missing_group_is_added_and_stays(project: Path) -> None:
    venv = project / ".venv"
    installer.install(project, venv, set())
    assert installer.install(project, venv, {"test"})
    assert not installer.install(project, venv, set())
    (project / "constraints.txt").write_text("torch==2.13.0\n")
    calls(project)
    installer.install(project, venv, set())
    assert calls(project)[-1].endswith("[test]")


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed(project: Path, name: str) -> None:
    installer.install(project, project / ".venv", set())
    with (project / name).open("a") as file:
        file.write("# changed\n")
    assert installer.install(project, project / ".venv", set())


def test_an_environment_whose_installation_was_interrupted_is_made_anew(project: Path) -> None:
    venv = project / ".venv"
    (project / "fail").touch()
    with pytest.raises(SystemExit, match="installation failed"):
        installer.install(project, venv, set())
    assert not (venv / installer.STAMP).exists()
    (project / "fail").unlink()
    (venv / "half-unpacked").touch()
    assert installer.install(project, venv, set())
    assert not (venv / "half-unpacked").exists()


def test_an_environment_without_its_interpreter_is_made_anew(project: Path) -> None:
    venv = project / ".venv"
    installer.install(project, venv, set())
    (venv / "bin" / "python").unlink()
    assert installer.install(project, venv, set())
    assert (venv / "bin" / "python").exists()


def test_an_environment_made_by_hand_is_kept(project: Path) -> None:
    venv = project / ".venv"
    installer.create(venv)
    (venv / "mine").touch()
    assert installer.install(project, venv, set())
    assert (venv / "mine").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"digest": 1}'])
def test_an_unreadable_stamp_only_means_installing_again(project: Path, text: str) -> None:
    venv = project / ".venv"
    installer.install(project, venv, set())
    (venv / installer.STAMP).write_text(text)
    assert installer.install(project, venv, set())
    assert json.loads((venv / installer.STAMP).read_text())["digest"] == installer.digest(project)


def test_too_old_an_interpreter_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    with pytest.raises(SystemExit, match=r"Python 3\.11 or newer is needed"):
        installer.main()


def dry_run(*arguments: str) -> str:
    """What make would do; MAKEFLAGS of a make that runs these tests must not leak in."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "VENV", "ARGS", "PYTHON")}
    return subprocess.run(["make", "-n", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_make_tune_runs_the_main_job() -> None:
    assert "cli.py tune --dim 64 --heads 4" in dry_run("tune")
    assert "cli.py tune --dim 64 --heads 4 --budget 20" in dry_run("tune", "ARGS=--budget 20")


def test_make_test_installs_the_test_group_and_runs_pytest() -> None:
    text = dry_run("test", "VENV=/elsewhere/venv")
    assert '--venv "/elsewhere/venv" --extra test' in text and "/elsewhere/venv/bin/python -m pytest" in text


def test_readme_begins_with_the_two_commands() -> None:
    blocks = re.findall(r"```[a-z]*\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert [line.split("#")[0].strip() for line in blocks[0].strip().splitlines()] == ["make tune", "make test"]
    assert "pip install" in blocks[1]


def test_ci_runs_what_make_test_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert re.search(r'^step .* make test( ARGS="-n auto")?$', script.read_text(), re.M)
