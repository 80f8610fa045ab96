"""Where searches keep their state: any Optuna storage. It can be thrown away; the records are what lasts."""

from __future__ import annotations

from typing import Any

import optuna
import sqlalchemy

from codegen.spec import SpecError

optuna.logging.set_verbosity(optuna.logging.WARNING)


def open_storage(storage: str | optuna.storages.BaseStorage | None) -> optuna.storages.BaseStorage:
    """The storage of a SQLAlchemy URL (SQLite, PostgreSQL, ...); None is memory; SpecError, in one line, when it cannot be used."""
    if not isinstance(storage, str):
        return optuna.storages.InMemoryStorage() if storage is None else storage
    try:
        opened = optuna.storages.RDBStorage(storage)
        if opened.engine.dialect.name == "sqlite":
            # Optuna commits once per parameter. Not waiting for the disk each time loses nothing when a process dies, only
            # when the machine does.
            sqlalchemy.event.listen(opened.engine, "connect", _hurry)
            opened.engine.dispose()
        return optuna.storages.get_storage(opened)
    except Exception as error:  # a storage fails in the ways of its database; the user needs the one line
        raise unusable(storage, error) from error


def unusable(storage: Any, error: BaseException) -> SpecError:
    """The error of a storage in one line."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return SpecError(f"storage {storage} cannot be used: {line}")


def _hurry(connection: Any, record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=OFF")
    cursor.close()
