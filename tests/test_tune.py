"""The main job on fake backends: default first, finals, noise, failures, interrupts, resuming, and what is written."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from codegen.config import Config
from codegen.families import FAMILIES
from codegen.library import LibraryConfig
from codegen.module import read_module
from codegen.spec import BlockSpec, SpecError
from codegen.target import target
from fake_backend import HERE, SPEC, FakeBackend, InstantCompilers, cost, options, run
from tuner.deliver import deliver, records_file
from tuner.finals import choose_measured, combinations, prefer_predicted
from tuner.predicted_backend import PredictedBackend, emulated
from tuner.progress import Lines, OneLine, Silent, causes
from tuner.records import Machine, Records
from tuner.report import closing
from tuner.space import preferred, space, spaces
from tuner.trial import Candidate, Outcome, Timing
from tuner.tune import TuneResult, tune


def test_a_run_searches_both_axes_and_delivers_the_module_as_measured(tmp_path: Path) -> None:
    backend = FakeBackend(salt=1)
    result, _ = run(tmp_path, backend)
    assert result.exit_code == 0 and result.choice is not None and result.delivery is not None
    by_axis = {axis: [c for c in backend.asked if tuple(c.configs) == (axis,)] for axis in ("row", "col")}
    assert {axis: len(asked) for axis, asked in by_axis.items()} == {"row": 8, "col": 8}
    for axis, asked in by_axis.items():
        assert asked[0].configs[axis] == space(SPEC.problem(axis), target("sm_90")).start
        assert asked[0].spec.axes == (axis,)
    pairs = [c for c in backend.asked if len(c.configs) == 2]
    assert pairs[0].configs == {axis: asked[0].configs[axis] for axis, asked in by_axis.items()}, "the default pair is a finalist"
    assert len(pairs) == len({tuple(c.configs.values()) for c in pairs})
    module = read_module(result.delivery.path)
    assert result.delivery.path.name == "axial_d32_h2_16x32_b2_fp32_sm90.py"
    assert dict(module.configs) == dict(result.choice.winner.candidate.configs)
    assert module.provenance.measured and not module.provenance.partial
    assert module.provenance.device_us == 18.0 and module.provenance.wall_us == 30.0, "figures are those of the module as deployed"
    assert (module.provenance.pytorch_form, module.provenance.pytorch_us) == ("torch.compile", 72.0)
    records = Records(records_file(options(tmp_path), predicted=False)).read()
    tried = [r for r in records if not any(isinstance(c, LibraryConfig) for c in r.outcome.candidate.configs.values())]
    assert len(tried) == len(backend.asked) == result.trials
    assert (tmp_path / "index.json").is_file()


@pytest.mark.parametrize("built_at", [0, 8, 9, 16, 17, 1000])
def test_the_search_goes_on_while_pytorch_compiles(built_at: int, tmp_path: Path) -> None:
    """Its forms are measured behind an axis if they are built by then, else behind the pairs: neither loses time to waiting for them."""
    backend = FakeBackend(salt=1, built_at=built_at)
    result, _ = run(tmp_path, backend)
    pairs = sum(len(candidate.configs) == 2 for candidate in backend.asked)
    assert pairs > 2 and backend.compared_at == next((n for n in (8, 16) if built_at <= n), 16 + pairs)
    assert result.pytorch["torch.compile"].device == 72.0
    assert result.delivery is not None and read_module(result.delivery.path).provenance.pytorch_us == 72.0


def test_forms_of_which_none_compiles_are_built_once(tmp_path: Path) -> None:
    backend = FakeBackend(salt=1, compiles=False)
    result, _ = run(tmp_path, backend)
    assert backend.compared_at == 8 and not result.pytorch and result.exit_code == 0


def test_an_interrupted_search_has_the_forms_that_are_built(tmp_path: Path) -> None:
    backend = FakeBackend(salt=1, built_at=9, interrupt_at=(12,))
    result, _ = run(tmp_path, backend)
    assert result.interrupted and result.delivery is not None and result.pytorch["torch.compile"].device == 72.0


def test_dependent_launch_is_tried_among_the_pairs_only(tmp_path: Path) -> None:
    backend = FakeBackend(times=lambda config: 5.0 if config.dependent_launch else 4.0)
    result, _ = run(tmp_path, backend)
    assert all(config.dependent_launch for config in backend.configs)
    assert result.choice is not None and not any(c.dependent_launch for c in result.choice.winner.candidate.configs.values())


def test_one_axis_alone(tmp_path: Path) -> None:
    result, _ = run(tmp_path, FakeBackend(salt=2), spec=BlockSpec(dim=32, heads=2, axes=("col",)))
    assert result.exit_code == 0 and result.delivery is not None and "_col_" in result.delivery.path.name


def test_the_default_wins_when_the_gain_is_within_the_spread(tmp_path: Path) -> None:
    start = space(SPEC.problem("row"), target("sm_90")).start
    slow_default = lambda config: 5.05 if config.warps == start.warps else 5.0  # noqa: E731
    noisy, _ = run(tmp_path / "a", FakeBackend(times=slow_default, spread=0.2))
    clear, _ = run(tmp_path / "b", FakeBackend(times=slow_default, spread=0.001))
    default = {axis: space(SPEC.problem(axis), target("sm_90")).start for axis in SPEC.axes}
    assert noisy.choice is not None and noisy.choice.winner.candidate.configs == default
    assert clear.choice is not None and clear.choice.winner.candidate.configs != default


def test_when_everything_fails_the_exit_code_is_3_and_the_cause_is_counted(tmp_path: Path) -> None:
    result, _ = run(tmp_path, FakeBackend(fails=lambda config: ("wrong", "output bias missing")))
    assert result.exit_code == 3 and result.choice is None and result.delivery is None
    assert result.failed == {("wrong", "output bias missing"): 16}
    assert not list(tmp_path.glob("*.py"))
    text = io.StringIO()
    closing(Console(file=text, width=120), options(tmp_path), result, measured=True)
    assert "No candidate could be verified" in text.getvalue()
    assert "16 x disagreed with the float64 reference: output bias missing" in text.getvalue()


@pytest.mark.parametrize("at", [2, 6, 12, 19])
def test_an_interrupt_writes_the_best_so_far_marked_partial(tmp_path: Path, at: int) -> None:
    backend = FakeBackend(salt=3, interrupt_at=(at,))
    result, reporter = run(tmp_path, backend)
    assert result.exit_code == 130 and result.delivery is not None and result.choice is not None
    module = read_module(result.delivery.path)
    assert module.provenance.partial
    assert len(Records(records_file(options(tmp_path), predicted=False)).read()) >= at - 1
    if at == 6:  # the row's best is known, the column has only its default
        pairs = [c for c in backend.asked if len(c.configs) == 2]
        best = min((c for c in backend.configs[:5]), key=lambda config: backend._timing(Candidate(SPEC, {"row": config})).device)
        assert pairs[0].configs["row"] == best


def test_an_interrupted_run_leaves_the_module_of_a_whole_one_alone(tmp_path: Path) -> None:
    whole, _ = run(tmp_path, FakeBackend(salt=3))
    assert whole.delivery is not None
    before = whole.delivery.path.read_text()
    for _ in range(2):
        result, _ = run(tmp_path, FakeBackend(salt=3, interrupt_at=(4,)), resume=False)
        assert result.exit_code == 130 and result.delivery is not None
        assert result.delivery.path.name == f"{whole.delivery.path.stem}_partial.py"
    assert whole.delivery.path.read_text() == before and len(list(tmp_path.glob("*.py"))) == 2


def test_an_interrupt_while_the_module_is_built_writes_it_as_partial(tmp_path: Path) -> None:
    class Interrupted(FakeBackend):
        def module(self, path, spec):
            raise KeyboardInterrupt

    result, _ = run(tmp_path, Interrupted())
    assert result.exit_code == 130 and result.delivery is not None
    assert read_module(result.delivery.path).provenance.partial


def test_two_interrupts_write_nothing_and_still_exit_130(tmp_path: Path) -> None:
    result, _ = run(tmp_path, FakeBackend(interrupt_at=(3, 4)))
    assert result.exit_code == 130 and result.delivery is None and not list(tmp_path.glob("*.py"))


def test_an_interrupted_run_resumes(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 's.db'}"
    run(tmp_path, FakeBackend(interrupt_at=(12,), digests=True), storage=storage)
    backend = FakeBackend(digests=True)
    result, reporter = run(tmp_path, backend, storage=storage)
    assert result.exit_code == 0
    assert len(backend.configs) == 5, "8 rows and 3 columns were known"
    assert any("taken over" in note for note in reporter.notes)


def test_records_alone_resume_a_run_on_the_same_machine_only(tmp_path: Path) -> None:
    run(tmp_path, FakeBackend(digests=True))
    again = FakeBackend(digests=True)
    run(tmp_path, again)
    assert again.configs == []
    elsewhere = FakeBackend(digests=True, machine=Machine("sm_90", "Replayed H200", "999.9", HERE.versions))
    _, reporter = run(tmp_path, elsewhere)
    assert len(elsewhere.configs) == 16
    assert any("not reused as measured here" in note and "580.1" in note for note in reporter.notes)
    afresh = FakeBackend(digests=True)
    run(tmp_path, afresh, resume=False)
    assert len(afresh.configs) == 16


def test_a_module_that_is_wrong_as_built_is_not_put_in_place(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="as built is not delivered: planted"):
        run(tmp_path, FakeBackend(deployed="wrong"))
    assert not list(tmp_path.glob("*.py"))


def test_a_module_that_cannot_be_built_here_says_so(tmp_path: Path) -> None:
    result, _ = run(tmp_path, FakeBackend(deployed="compile_error"))
    assert result.delivery is not None
    assert "not measured: planted" in read_module(result.delivery.path).provenance.note


def test_the_budget_ends_the_search_but_not_the_run(tmp_path: Path) -> None:
    backend = FakeBackend()
    result, reporter = run(tmp_path, backend, budget=1e-9)
    assert len(backend.configs) == 2, "the default of each axis is always tried"
    assert result.exit_code == 0 and result.delivery is not None
    assert any("--budget" in note for note in reporter.notes)


# Choosing


def _outcome(configs: dict[str, Config], us: float, spread: float = 0.1) -> Outcome:
    return Outcome(Candidate(SPEC, configs), "ok", timing=Timing(us, spread))


def test_a_winner_must_beat_the_default_by_more_than_the_larger_spread() -> None:
    row = space(SPEC.problem("row"), target("sm_90"))
    default, other = Candidate(SPEC, {"row": row.start}), {"row": row.neighbours(row.start)[0]}
    outcomes = [_outcome(dict(default.configs), 10.0), _outcome(other, 9.0)]
    assert choose_measured(outcomes, [Timing(10.0, 0.1), Timing(9.85, 0.1)], default).winner.candidate.configs == other
    assert choose_measured(outcomes, [Timing(10.0, 0.2), Timing(9.85, 0.1)], default).winner.candidate.configs == default.configs
    assert choose_measured(outcomes, [Timing(10.0, 0.1), Timing(9.85, 0.16)], default).winner.candidate.configs == default.configs
    assert choose_measured(outcomes[1:], [Timing(9.0, 0.1)], default).winner.candidate.configs == other


def test_combinations_begin_with_the_default_and_repeat_nothing() -> None:
    spaces = {axis: space(SPEC.problem(axis), target("sm_90")) for axis in SPEC.axes}
    ranked = {axis: [s.start, *s.neighbours(s.start)[:5]] for axis, s in spaces.items()}
    default = {axis: s.start for axis, s in spaces.items()}
    found = combinations(SPEC, ranked, default, target("sm_90"))
    assert found[0].configs == default and len(found) == 10
    assert len({tuple(c.configs.items()) for c in found}) == len(found)
    assert not any(set(c.configs) != {"row", "col"} for c in found)
    assert all(c.configs["row"].dependent_launch for c in combinations(SPEC, ranked, default, target("sm_90"), toggles=False))


def test_a_prediction_must_beat_the_default_clearly() -> None:
    row = space(SPEC.problem("row"), target("sm_90"))
    near = [row.start, *row.neighbours(row.start)[:3]]
    outcomes = [Outcome(Candidate(SPEC, {"row": c}), "ok", predicted_us=us) for c, us in zip(near, (10.0, 9.8, 9.0, 12.0), strict=True)]
    order = [o.predicted_us for o in prefer_predicted(outcomes, outcomes[0].candidate)]
    assert order == [9.0, 10.0, 9.8, 12.0]


# Without a GPU


def predicted(tmp_path: Path, confirm, compilers: InstantCompilers | None = None) -> tuple[TuneResult, Silent, InstantCompilers]:
    used = compilers or InstantCompilers()
    backend = PredictedBackend(target("sm_90"), confirm=confirm, compilers=used)
    reporter = Silent()
    made = options(tmp_path)
    return tune(made, backend, reporter, deliver), reporter, used


def test_without_a_gpu_the_module_is_marked_predicted_and_confirmed(tmp_path: Path) -> None:
    seen = []
    result, _, compilers = predicted(tmp_path, lambda source, spec: (seen.append(spec) or True, 2e-6, ""))
    assert result.exit_code == 0 and result.delivery is not None
    assert result.delivery.path.name == "axial_d32_h2_16x32_b2_fp32_sm90_predicted.py"
    module = read_module(result.delivery.path)
    assert not module.provenance.measured and module.provenance.device_us is None and module.provenance.error == 2e-6
    assert module.provenance.predicted_us and "measure" in module.provenance.note
    assert len(seen) == 1, "only the finalist runs on the emulator"
    assert len(compilers.compiled) == len(set(compilers.compiled)), "nothing is compiled twice"


def test_what_the_emulator_rejects_is_not_delivered(tmp_path: Path) -> None:
    verdicts = iter([(False, None, "race"), (True, 1e-6, "")])
    result, reporter, _ = predicted(tmp_path, lambda source, spec: next(verdicts))
    assert result.exit_code == 0 and ("wrong", "race") in result.failed
    assert any("rejected on the emulator: race" in note for note in reporter.notes)
    nothing, _, _ = predicted(tmp_path / "b", lambda source, spec: (False, None, "race"))
    assert nothing.exit_code == 3 and not list((tmp_path / "b").glob("*.py"))


def test_sources_that_do_not_compile_are_failed_trials(tmp_path: Path) -> None:
    result, _, _ = predicted(tmp_path, lambda source, spec: (True, 0.0, ""), InstantCompilers(refuse=lambda source: True))
    assert result.exit_code == 3 and result.failed == {("compile_error", "line 1: planted"): 16}


# What is shown


def test_progress_lines_state_the_counts_and_the_comparisons() -> None:
    text = io.StringIO()
    lines = Lines(Console(file=text, width=200), every=0.0)
    config = space(SPEC.problem("row"), target("sm_90")).start
    lines.stage("rows", 3)
    lines.outcome(_outcome({"row": config}, 10.0))
    lines.outcome(Outcome(Candidate(SPEC, {"row": config}), "wrong", "zeros"))
    lines.outcome(_outcome({"row": config}, 8.0))
    lines.baseline(20.0, {"eager": 90.0, "compile": 72.0})
    lines.close()
    last = text.getvalue().strip().splitlines()[-1]
    assert last == (
        "rows: 3/3 done, 2 feasible, 1 wrong; best 8.00 us (default 10.00 us, 1.25x); whole block: default 20.0 us, PyTorch compile 72.0 us"
    )


def test_a_terminal_gets_one_live_line() -> None:
    text = io.StringIO()
    live = OneLine(Console(file=text, width=120, force_terminal=True))
    live.stage("rows", 2)
    live.outcome(_outcome({"row": space(SPEC.problem("row"), target("sm_90")).start}, 10.0))
    live.note("[not markup]")
    live.close()
    assert "[not markup]" in text.getvalue() and "1/2 done" in text.getvalue()


def test_causes_are_ordered_by_count() -> None:
    lines = causes({("wrong", "a"): 1, ("fault", ""): 3})
    assert lines == ["3 x illegal access or another device fault", "1 x disagreed with the float64 reference: a"]


def test_what_the_emulator_runs_for_a_block() -> None:
    """The block itself where it is small, each axis at its full length where it is not, nothing where that would take hours."""
    small = BlockSpec(64, 4, 32, 32, batch=4)
    assert emulated(small) == (BlockSpec(64, 4, 32, 32, batch=1),)
    large = BlockSpec(256, 8, 128, 256, batch=2)
    assert emulated(large) == (BlockSpec(256, 8, 2, 256, batch=1, axes=("row",)), BlockSpec(256, 8, 128, 2, batch=1, axes=("col",)))
    assert emulated(BlockSpec(1024, 8, 8192, 8192)) == ()


def test_a_block_too_large_for_the_emulator_says_that_it_was_not_run() -> None:
    target_ = target("sm_90")
    spec = BlockSpec(1024, 8, 8192, 8192, batch=1)
    configs = {axis: here.start for axis, here in preferred(spaces(spec, target_)).items()}
    outcome = PredictedBackend(target_, compilers=InstantCompilers()).confirm(Candidate(spec, configs))  # type: ignore[arg-type]
    assert outcome.ok and outcome.error is None


def test_columns_begin_with_what_is_best_for_rows(tmp_path: Path) -> None:
    backend = FakeBackend(salt=1)
    run(tmp_path, backend, spec=BlockSpec(dim=32, heads=2, height=32, width=32, batch=2))
    rows, columns = ([c.configs[axis] for c in backend.asked if tuple(c.configs) == (axis,)] for axis in ("row", "col"))
    best = min(rows, key=lambda config: cost(config, salt=1))
    assert best != rows[0] and columns[1] == best  # after the default


def test_nothing_is_measured_twice_without_storage_or_records(tmp_path: Path) -> None:
    backend = FakeBackend()
    run(tmp_path, backend, spec=BlockSpec(dim=32, heads=2, height=32, width=32, batch=2), fixed={}, records=None, resume=False, trials=6)
    asked = [tuple(candidate.configs.items()) for candidate in backend.asked if len(candidate.configs) == 1]
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_is_the_first_trial_of_each_axis(tmp_path: Path, family: str) -> None:
    backend = FakeBackend()
    run(tmp_path, backend, fixed={"family": family}, trials=6)
    for axis in ("row", "col"):
        first = next(c.configs[axis] for c in backend.asked if tuple(c.configs) == (axis,))
        assert first == spaces(SPEC, target("sm_90"))[axis][family].start
