"""Shared by all tests: where caches lie, and which tests need a GPU."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from tuner.gpu import obstacle, visible_gpu


def pytest_configure(config: pytest.Config) -> None:
    """Keeps tests out of the user's cache. What they compile stays for the next run, its names being content hashes;
    studies do not, as a search would resume them."""
    if hasattr(config, "cache"):
        home = config.cache.mkdir("axialtune-home")
        os.environ["XDG_CACHE_HOME"] = str(home)
        if not hasattr(config, "workerinput"):
            (home / "axialtune" / "studies.db").unlink(missing_ok=True)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of the emulator's programs for all tests of a process, so that its runtime is built once."""
    return tmp_path_factory.mktemp("emulator")


@functools.cache
def missing_gpu() -> str:
    """Why tests marked gpu cannot run here; empty when they can. Asks the driver, so that no CUDA context is created."""
    gpu = visible_gpu()
    return "no GPU" if gpu is None else obstacle(gpu) or ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and missing_gpu():
            item.add_marker(pytest.mark.skip(reason=missing_gpu()))
