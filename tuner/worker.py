"""A killable worker process: work that may fault, hang or take its process down costs one call.

The child is a fresh interpreter in its own session (no fork: the parent's threads and locks stay behind, and the parent needs no
CUDA context). Requests and responses are pickled over a socket pair. The parent kills the child's whole process group
when a call outlives its limit; the child kills its group when the parent dies (its standard input reaches end of file) and, should a
call hang while it holds the interpreter's lock, by an alarm the kernel delivers without it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 180.0
_KILL_SECONDS = 30.0
_GRACE_SECONDS = 5
_OUTPUT_BYTES = 4096


def changed_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with variables added or, where None, removed."""
    return {name: value for name, value in {**os.environ, **changes}.items() if value is not None}


def kill_group(leader: int) -> None:
    """Ends a process of a session of its own, and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


class WorkerError(RuntimeError):
    """A call that brought no response. `output` is the end of what the child printed during it."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output

    @property
    def cause(self) -> str:
        """One line for a record: the message, and the last line the child printed."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return f"{self}: {lines[-1]}" if lines else str(self)


class WorkerTimeout(WorkerError):
    """The call outlived its limit; the child was killed."""


class WorkerCrashed(WorkerError):
    """The child ended during the call; `returncode` is negative for a signal, as in subprocess."""

    def __init__(self, returncode: int, output: str) -> None:
        if returncode < 0:
            with contextlib.suppress(ValueError):
                name = signal.Signals(-returncode).name
                super().__init__(f"worker killed by {name}", output)
                self.returncode = returncode
                return
        super().__init__(f"worker exited with code {returncode}", output)
        self.returncode = returncode


class HandlerError(WorkerError):
    """The handler raised: `kind` is the exception's class name. The child lives on."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}", trace)
        self.kind = kind

    @property
    def cause(self) -> str:
        return " ".join(str(self).split())


class Worker:
    """One child process that answers requests, started by the first call and again after a kill.

    handler: "module:factory"; the child calls factory(*setup) once, then the result with each request.
    env: variables to add to or, where None, remove from the child's environment, e.g. the GPU it may see.
    A worker serves one call at a time.
    """

    def __init__(
        self,
        handler: str,
        *setup: Any,
        env: Mapping[str, str | None] | None = None,
        start_timeout: float = START_SECONDS,
    ) -> None:
        self._handler, self._setup, self._start_timeout = handler, setup, start_timeout
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._output: IO[bytes] | None = None
        self._mark = 0
        self.starts = 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the child, if it does not run, and waits until its handler is ready. Raises as `call` does."""
        if self.running:
            return
        self.kill()
        ours, theirs = socket.socketpair()
        output = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the child)
        boot = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tuner.worker import serve; serve({theirs.fileno()})"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", boot],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=changed_environment(self._env),
            )
        except BaseException:
            ours.close()
            output.close()
            raise
        finally:
            theirs.close()
        self._output, self._mark = output, 0
        self._connection = Connection(ours.detach())
        self.starts += 1
        self._exchange((list(sys.path), self._handler, self._setup, self._start_timeout), self._start_timeout)

    def call(self, request: Any, timeout: float) -> Any:
        """The handler's response to `request`, within `timeout` seconds (a start of the child is not counted).

        Raises WorkerTimeout, WorkerCrashed or HandlerError. After the first two the child is gone and the next call starts
        another; any other exception on the way (Ctrl-C) ends the child too, since its response would be out of step.
        """
        self.start()
        assert self._output is not None
        self._mark = os.fstat(self._output.fileno()).st_size
        return self._exchange((request, timeout), timeout)

    def kill(self) -> None:
        """Ends the child and everything it started; returns when it is gone."""
        process, self._process = self._process, None
        if process is not None:
            kill_group(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_SECONDS)
            if process.stdin is not None:
                process.stdin.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._output is not None:
            self._output.close()
            self._output = None

    close = kill

    def interrupt(self) -> None:
        """Kills the child from another thread than the one that waits in `call`, which then raises WorkerCrashed."""
        process = self._process
        if process is not None and process.poll() is None:
            kill_group(process.pid)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _exchange(self, message: Any, timeout: float) -> Any:
        assert self._connection is not None and self._process is not None
        try:
            self._connection.send(message)
            if not self._connection.poll(timeout):
                raise WorkerTimeout(f"no answer within {timeout:g} s", self._tail())
            kind, *payload = self._connection.recv()
        except (EOFError, ConnectionError):
            returncode = self._wait()
            output = self._tail()
            self.kill()
            raise WorkerCrashed(returncode, output) from None
        except BaseException:
            self.kill()
            raise
        if kind == "unready":
            self.kill()
        if kind != "ok":
            raise HandlerError(*payload)
        return payload[0]

    def _wait(self) -> int:
        """The child's return code: its connection is closed, so it is ending."""
        assert self._process is not None
        try:
            return self._process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    def _tail(self) -> str:
        """The end of what the child printed since the call began."""
        if self._output is None:
            return ""
        descriptor = self._output.fileno()
        size = os.fstat(descriptor).st_size
        start = max(self._mark, size - _OUTPUT_BYTES)
        return os.pread(descriptor, size - start, start).decode(errors="replace")


def serve(descriptor: int) -> None:
    """The child's main loop, on the socket `descriptor`: (request, timeout) -> ("ok", response) or ("error", kind, message, trace)."""
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):
        path, name, setup, timeout = connection.recv()
        sys.path[:] = path
        _arm(timeout)
        try:
            module, factory = name.split(":")
            handler = getattr(importlib.import_module(module), factory)(*setup)
        except Exception as error:
            connection.send(("unready", *_describe(error)))
            return
        connection.send(("ok", None))
        while True:
            signal.alarm(0)
            request, timeout = connection.recv()
            _arm(timeout)
            try:
                connection.send(("ok", handler(request)))
            except Exception as error:  # the handler's, or a response that cannot be pickled: then nothing was sent
                connection.send(("error", *_describe(error)))


def _describe(error: Exception) -> tuple[str, str, str]:
    return type(error).__name__, str(error), "".join(traceback.format_exception(error))


def _arm(timeout: float) -> None:
    """SIGALRM's default action ends the process without the interpreter's help, some time after the parent should have."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(timeout) + _GRACE_SECONDS)


def _die_with_parent() -> None:
    while os.read(0, 1024):  # the parent writes nothing: this returns when it is gone
        time.sleep(0.01)
    os.killpg(0, signal.SIGKILL)
