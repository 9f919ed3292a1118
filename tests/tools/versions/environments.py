"""A virtual environment for each version of torch, made once and kept."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
VERSIONS: dict[str, tuple[str, ...]] = {
    "2.11.0": ("setuptools==81.0.0",),
    "2.12.1": ("setuptools==81.0.0",),
    "2.13.0": (),
    "2.14.1": (),
    "2.15.0": (),
}
"""Versions of torch, and what each wants in another version than `constraints.txt` has."""
READY = "ready.txt"
"""A file that is written last: a folder without it was interrupted, and is made anew."""


class NotAvailable(Exception):
    """This version of torch cannot be installed here; the message is the reason in one line."""


def python_of(folder: Path, version: str) -> Path:
    """The Python of the environment for this version below `folder`; makes it where it is not whole.

    Raises NotAvailable.  What is half made is removed, on Ctrl-C, too.
    """
    place = place_of(folder, version)
    python = place / "bin" / "python"
    if (place / READY).exists():
        return python
    try:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        _run([sys.executable, "-m", "venv", str(place)])
        pins = place / "pins.txt"
        pins.write_text("\n".join(pins_of(version)) + "\n")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
        _run([*pip, "-c", str(pins), f"torch=={version}", "numpy", "setuptools"])
        (place / READY).write_text(f"torch {version}\n")
    except OSError as error:
        shutil.rmtree(place, ignore_errors=True)
        raise NotAvailable(f"{error.strerror}: {error.filename or place}") from error
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    return python


def place_of(folder: Path, version: str) -> Path:
    return folder / f"torch-{version}"


def pins_of(version: str) -> list[str]:
    """Lines of `constraints.txt` for this version of torch: exact versions only, so that each run installs the same."""
    own = VERSIONS[version]
    others = {pin.partition("==")[0] for pin in own} | {"torch"}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if line and not line.startswith("#") and line.partition("==")[0] not in others]
    return [*kept, *own]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotAvailable(_reason(done.stderr or done.stdout))


def _reason(said: str) -> str:
    """The first error of pip, else the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no reason given"]
    return re.sub(r"^ERROR: ", "", next((line for line in lines if line.startswith("ERROR: ")), lines[-1]))
