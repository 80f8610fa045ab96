"""Makes the virtual environment that `make` works in, once, and repairs one that was left half-made.

Standard library only: it runs before anything is installed. A second run with nothing to do takes milliseconds. What
was installed is written to a stamp in the environment, keyed by pyproject.toml, constraints.txt and the interpreter.
While pip runs, a marker stands there; finding it means that an earlier run was killed, and pip could take packages it
only half unpacked for installed ones, so such an environment is made anew. One without either was made by hand and is kept.
"""

import argparse
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
STAMP = ".axialtune-installed"
MARKER = ".axialtune-incomplete"


def digest(root: Path) -> str:
    """What an installation depends on: the declared dependencies, the pins, and this interpreter's version."""
    parts = [(root / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\0".join([*parts, str(root).encode(), sys.version.encode()])).hexdigest()


def stamped(venv: Path) -> dict[str, Any]:
    """What the stamp says: {"digest": text, "extras": [names]}; empty when there is none or it cannot be read."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
        return stamp if isinstance(stamp, dict) else {}
    except (OSError, ValueError):
        return {}


def healthy(venv: Path) -> bool:
    """Whether the environment's interpreter starts and has pip."""
    try:
        return subprocess.run([venv / "bin" / "python", "-c", "import pip"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def create(venv: Path) -> None:
    """Makes the environment anew; SystemExit with what to install where Python came without venv."""
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True)
    if made.returncode:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        print(made.stdout + made.stderr, file=sys.stderr)
        raise SystemExit(f"cannot create {venv}: on Debian and Ubuntu, apt-get install python{version}-venv; elsewhere, see above")


def install(root: Path, venv: Path, extras: set[str]) -> bool:
    """Brings `venv` to the project at `root` with `extras`, with the pins of constraints.txt. False if it was so already.

    Holds a lock on the folder around the environment, which ends with the process: two of these never work at once.
    Raises SystemExit when the environment cannot be made or pip fails.
    """
    venv.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(venv.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        marker, stamp, wanted = venv / MARKER, stamped(venv), digest(root)
        done = set(stamp.get("extras", [])) if stamp.get("digest") == wanted else None
        if done is not None and extras <= done and not marker.exists() and (venv / "bin" / "python").exists():
            return False
        if marker.exists() or not healthy(venv):
            print(f"making {venv}", flush=True)
            create(venv)
        extras = extras | set(stamp.get("extras", []))
        marker.touch()
        (venv / STAMP).unlink(missing_ok=True)
        target = f"{root}[{','.join(sorted(extras))}]" if extras else str(root)
        # PyTorch first: alone and pinned it is found as the build the machine's pip prefers, before anything asks for a range.
        for arguments in (["torch"], ["-e", target]):
            print(f"installing {' '.join(arguments)}", flush=True)
            command = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", "-c", str(root / "constraints.txt"), *arguments]
            if subprocess.run(command).returncode:
                raise SystemExit("installation failed: pip says why above; run make again once that is mended")
        (venv / STAMP).write_text(json.dumps({"digest": wanted, "extras": sorted(extras)}))
        marker.unlink()
        return True
    finally:
        os.close(folder)


def main() -> None:
    if sys.version_info < OLDEST:
        raise SystemExit(f"Python {OLDEST[0]}.{OLDEST[1]} or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.12 ...")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment (default: .venv)")
    parser.add_argument("--extra", action="append", default=[], help="an optional dependency group of pyproject.toml")
    options = parser.parse_args()
    install(ROOT, options.venv.absolute(), set(options.extra))


if __name__ == "__main__":
    main()
