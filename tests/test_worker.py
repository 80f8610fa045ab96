"""The killable worker: every way in which a call can go wrong costs that call alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from processes import alive, gone
from tuner.worker import ROOT, HandlerError, Worker, WorkerCrashed, WorkerTimeout

ECHO = "fake_workers:echo"


@pytest.fixture
def worker():
    with Worker(ECHO, "a", 2) as one:
        yield one


def test_answers_from_another_process_and_keeps_state(worker):
    setup, pid, request = worker.call({"x": 1}, 30)
    assert (setup, request) == (("a", 2), {"x": 1})
    assert pid == worker.pid != os.getpid()
    assert worker.call("calls", 30) == 2
    assert worker.starts == 1


def test_timeout_kills_and_next_call_works(worker):
    pid = worker.call("hello", 30)[1]
    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match="no answer within 0.3 s"):
        worker.call("sleep", 0.3)
    assert time.monotonic() - start < 5
    assert gone(pid) and not worker.running
    assert worker.call("calls", 30) == 1
    assert worker.starts == 2


def test_interpreter_lock_held_forever_is_killed(worker):
    worker.start()
    with pytest.raises(WorkerTimeout):
        worker.call("spin", 0.3)
    assert worker.call("calls", 30) == 1


def test_crash_names_the_signal_and_the_last_words(worker):
    with pytest.raises(WorkerCrashed) as caught:
        worker.call("abort", 30)
    assert caught.value.returncode == -6
    assert "SIGABRT" in caught.value.cause and "about to abort" in caught.value.output
    assert worker.call("calls", 30) == 1


def test_exit_code_is_reported(worker):
    with pytest.raises(WorkerCrashed, match="exited with code 7"):
        worker.call("exit", 30)


def test_exception_is_an_error_but_not_the_end(worker):
    pid = worker.call("hello", 30)[1]
    with pytest.raises(HandlerError) as caught:
        worker.call("raise", 30)
    assert caught.value.kind == "ValueError" and caught.value.cause == "ValueError: no such thing"
    assert "fake_workers.py" in caught.value.output
    assert worker.call("hello", 30)[1] == pid


def test_response_that_cannot_be_pickled_is_an_error(worker):
    with pytest.raises(HandlerError, match="cannot pickle"):
        worker.call("lock", 30)
    assert worker.call("calls", 30) == 2


def test_much_output_does_not_block(worker):
    assert worker.call("print", 30)[2] == "print"


def test_factory_that_fails_is_an_error_each_time():
    with Worker("fake_workers:broken") as broken:
        for starts in (1, 2):
            with pytest.raises(HandlerError, match="RuntimeError: no device"):
                broken.call("x", 30)
            assert broken.starts == starts and not broken.running


def test_environment_is_added_and_removed(monkeypatch):
    monkeypatch.setenv("AXIALTUNE_TEST_GONE", "1")
    with Worker(ECHO, env={"AXIALTUNE_TEST_NEW": "here", "AXIALTUNE_TEST_GONE": None}) as worker:
        assert worker.call(("environment", "AXIALTUNE_TEST_NEW"), 30) == "here"
        assert worker.call(("environment", "AXIALTUNE_TEST_GONE"), 30) is None


def test_what_the_worker_started_dies_with_it(worker, tmp_path):
    with pytest.raises(WorkerTimeout):
        worker.call(("grandchild", str(tmp_path / "pid")), 2)
    assert gone(int((tmp_path / "pid").read_text()))


def test_interrupt_from_another_thread(worker):
    worker.start()
    threading.Timer(0.3, worker.interrupt).start()
    with pytest.raises(WorkerCrashed, match="SIGKILL"):
        worker.call("sleep", 60)


def test_ctrl_c_during_a_call_ends_the_worker(worker, monkeypatch):
    pid = worker.call("hello", 30)[1]
    connection = worker._connection
    monkeypatch.setattr(type(connection), "poll", lambda self, timeout: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        worker.call("hello", 30)
    monkeypatch.undo()
    assert gone(pid)
    assert worker.call("calls", 30) == 1


@pytest.mark.parametrize("request_text", ["hello", "sleep", "spin"])
def test_worker_dies_with_a_killed_parent(request_text, tmp_path):
    """Idle or busy, and even when it cannot run Python code: then the kernel's alarm ends it."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "from tuner.worker import Worker\n"
        "w = Worker('fake_workers:echo'); w.start(); print(w.pid, flush=True)\n"
        f"w.call({request_text!r}, 1 if {request_text!r} == 'spin' else 600); print('done', flush=True); import time; time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(ROOT), str(ROOT / "tests")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    if request_text == "hello":
        assert parent.stdout.readline() == "done\n"
    else:
        time.sleep(0.5)
    assert alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pid, 20.0)
