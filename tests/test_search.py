"""Searches on a fake measuring backend: what is asked, when it stops, what is taken over."""

from __future__ import annotations

import random
import sqlite3
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import optuna
import pytest

from codegen.config import Config
from codegen.spec import BlockSpec, SpecError
from codegen.target import target
from fake_backend import FakeBackend, cost
from tuner.search import Known, Search, SearchOptions
from tuner.session import Request, storage_of
from tuner.space import Space, space

TWELVE = dict(
    math="tf32x3", sequences=1, qkv_rows=2, out_rows=2, out_columns=1, key_tile=32, fragment=4, weights="hold", residual="reload",
    norm_lanes=16, padding=True, min_blocks=1, prefetch="qkv",
)  # fmt: skip


def row_space(**fixed) -> Space:
    return space(BlockSpec().problem("row"), target("sm_90"), fixed=fixed)


def options(trials: int = 30, **more) -> SearchOptions:
    return SearchOptions(**{"study": "test", "context": "here", "trials": trials, **more})


def test_the_default_is_first_and_nothing_is_measured_twice() -> None:
    here, backend = row_space(), FakeBackend(ahead=4)
    result = Search(here, options(60)).run(backend.evaluate)
    assert backend.configs[0] == here.start
    assert len(backend.configs) == len(set(backend.configs)) == 60
    assert all(here.legal(config) for config in backend.configs)
    assert result.stop == "trials" and len(result.ranked) == 60
    assert [score for _, score in result.ranked] == sorted(score for _, score in result.ranked)


def test_the_search_beats_random_search_at_equal_budget() -> None:
    here = row_space()
    found, by_chance = [], []
    for salt in range(8):
        draw = random.Random(1000 + salt)
        reference = min(cost(here.random(draw), salt) for _ in range(800))
        result = Search(here, options(40, seed=salt)).run(FakeBackend(salt).evaluate)
        found.append(result.ranked[0][1] / reference)
        draw = random.Random(salt)
        by_chance.append(min(cost(here.random(draw), salt) for _ in range(40)) / reference)
    assert statistics.mean(found) < statistics.mean(by_chance) - 0.1
    assert statistics.mean(found) < 1.15


def test_the_same_seed_asks_the_same_questions() -> None:
    asked = []
    for seed in (3, 3, 4):
        backend = FakeBackend()
        Search(row_space(), options(20, seed=seed)).run(backend.evaluate)
        asked.append(backend.configs)
    assert asked[0] == asked[1] != asked[2]


def test_a_small_space_is_walked_through_once_and_then_the_search_stops() -> None:
    here = row_space(**TWELVE)
    size = here.count(1000)
    assert 5 < size < 50, "the restriction must leave a small space for this test"
    backend = FakeBackend()
    result = Search(here, options(50)).run(backend.evaluate)
    assert result.stop == "exhausted"
    assert set(backend.configs) == set(here.enumerate()) and len(backend.configs) == size
    assert backend.configs[0] == here.start


def test_a_space_of_exactly_as_many_points_as_trials_is_exhausted_too() -> None:
    here = row_space(**TWELVE)
    result = Search(here, options(here.count(1000))).run(FakeBackend().evaluate)
    assert result.stop == "exhausted"


def test_failures_are_counted_and_do_not_end_the_search() -> None:
    backend = FakeBackend(fails=lambda config: ("fault", "illegal access") if config.math == "ffma" else None)
    result = Search(row_space(), options(40)).run(backend.evaluate)
    assert len(backend.configs) == 40
    assert result.failed["fault"] + len(result.ranked) == 40 and result.failed["fault"] > 0
    assert all(config.math != "ffma" for config, _ in result.ranked)


def test_a_deadline_stops_proposals() -> None:
    result = Search(row_space(), options(40, deadline=time.monotonic() - 1.0)).run(FakeBackend().evaluate)
    assert result.stop == "budget"
    assert [o.candidate.configs["row"] for o in result.outcomes] == [row_space().start], "the default is tried in any case"


def test_an_interrupt_keeps_what_is_finished_and_a_rerun_finishes_the_rest(tmp_path) -> None:
    storage = f"sqlite:///{tmp_path / 'studies.db'}"
    first = FakeBackend(interrupt_at=(9,), ahead=3)
    result = Search(row_space(), options(20, storage=storage)).run(first.evaluate)
    assert result.stop == "interrupted" and len(result.ranked) == 8
    second = FakeBackend(ahead=3)
    search = Search(row_space(), options(20, storage=storage, seed=1))
    assert search.resumed == 8
    result = search.run(second.evaluate)
    assert len(second.configs) == 12 and not set(second.configs) & set(first.configs[:8])
    assert len(result.ranked) == 20 and result.stop == "trials"
    assert Search(row_space(), options(20, storage=storage)).run(FakeBackend().evaluate).outcomes == ()


def test_a_gained_value_opens_a_new_study_with_the_legal_old_trials(tmp_path) -> None:
    storage = f"sqlite:///{tmp_path / 'studies.db'}"
    old = row_space()
    narrow = replace(old, values={**old.values, "key_tile": (16,)}, start=replace(old.start, key_tile=16))
    before = FakeBackend()
    Search(narrow, options(10, storage=storage)).run(before.evaluate)
    search = Search(old, options(15, storage=storage))
    assert search.resumed == 10
    after = FakeBackend()
    result = search.run(after.evaluate)
    assert len(after.configs) == 5 and after.configs[0] == old.start and not set(after.configs) & set(before.configs)
    assert len(result.ranked) == 15
    assert len(optuna.get_all_study_names(storage)) == 2


def test_old_trials_that_are_no_longer_legal_are_left_behind(tmp_path) -> None:
    storage = f"sqlite:///{tmp_path / 'studies.db'}"
    before = FakeBackend()
    Search(row_space(), options(20, storage=storage)).run(before.evaluate)
    narrow = row_space(math="tf32x3")
    search = Search(narrow, options(30, storage=storage))
    assert search.resumed == sum(narrow.legal(config) for config in before.configs)
    assert 0 < search.resumed < 20


def test_results_of_another_context_are_not_reused(tmp_path) -> None:
    storage = f"sqlite:///{tmp_path / 'studies.db'}"
    Search(row_space(), options(6, storage=storage, context="A100, driver 1")).run(FakeBackend().evaluate)
    search = Search(row_space(), options(6, storage=storage, context="A100, driver 2"))
    assert search.resumed == 0 and search.foreign == 6


def test_results_of_another_source_are_tried_again(tmp_path) -> None:
    storage = f"sqlite:///{tmp_path / 'studies.db'}"

    class Digests(FakeBackend):
        def _outcome(self, candidate):
            return replace(super()._outcome(candidate), source_digest="old")

    Search(row_space(), options(6, storage=storage)).run(Digests().evaluate)
    assert Search(row_space(), options(6, storage=storage, digest_of=lambda config: "old")).resumed == 6
    search = Search(row_space(), options(6, storage=storage, digest_of=lambda config: "new"))
    assert search.resumed == 0
    assert len(search.run(FakeBackend().evaluate).outcomes) == 6


def test_a_tampered_storage_never_reaches_the_templates(tmp_path) -> None:
    storage = f"sqlite:///{tmp_path / 'studies.db'}"
    here = row_space()
    name = Search(here, options(3, storage=storage))._study.study_name
    study = optuna.load_study(study_name=name, storage=storage)
    start = here.start.to_dict()
    for config in ({**start, "warps": "8; asm"}, {**start, "warps": 64}, {"family": "sequence"}, "text", None, 7):
        study.add_trial(optuna.trial.create_trial(value=0.1, user_attrs={"config": config, "status": "ok"}))
    rendered: list[Config] = []
    search = Search(here, options(3, storage=storage, digest_of=lambda config: rendered.append(config) or ""))
    assert search.resumed == 0 and not rendered
    backend = FakeBackend()
    result = search.run(backend.evaluate)
    assert len(backend.configs) == 3 and result.ranked[0][1] > 1.0


def test_records_count_as_known() -> None:
    here = row_space()
    draw = random.Random(5)
    known = tuple(Known(here.random(draw), 5.0 + i) for i in range(4))
    known += (Known(here.random(draw), None, "wrong"), Known(replace(here.start, dependent_launch=False), 1.0))
    backend = FakeBackend()
    search = Search(here, options(10, known=known))
    assert search.resumed == 5, "the one with a value outside the space is left out"
    result = search.run(backend.evaluate)
    assert len(backend.configs) == 5 and result.failed == {"wrong": 1}
    assert not {k.config for k in known} & set(backend.configs)


@pytest.mark.parametrize("storage", ["sqlite:////nonexistent/folder/x.db", "nonsense://x"])
def test_an_unusable_storage_is_one_clear_error(storage: str) -> None:
    with pytest.raises(SpecError, match="storage"):
        Search(row_space(), options(3, storage=storage))


def test_a_storage_that_is_no_database_is_one_clear_error(tmp_path) -> None:
    (tmp_path / "x.db").write_text("not a database, " * 100)
    with pytest.raises(SpecError, match="storage"):
        Search(row_space(), options(3, storage=f"sqlite:///{tmp_path / 'x.db'}"))


def test_choosing_the_storage_keeps_the_locks_that_this_process_holds_on_it(tmp_path, monkeypatch) -> None:
    """POSIX drops all locks of a process on a file when it closes any descriptor of it; two tunes at once then write over each other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    request = Request(BlockSpec(), tmp_path)
    first = storage_of(request)
    assert first is not None
    file = first.removeprefix("sqlite:///")
    holder = sqlite3.connect(file, isolation_level=None)
    holder.execute("create table t (x)")
    holder.execute("begin exclusive")
    assert storage_of(request) == first
    write = f"import sqlite3; sqlite3.connect({file!r}, timeout=0).execute('insert into t values (1)')"
    other = subprocess.run([sys.executable, "-c", write], capture_output=True, text=True)
    assert "database is locked" in other.stderr
    holder.close()


def test_a_study_name_is_plain() -> None:
    with pytest.raises(SpecError, match="study"):
        Search(row_space(), options(3, study="a/../b"))
