"""A run on disk: its lock, its manifest, rows written whole, and what a resumed run may keep."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import platform
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specdec.errors import InputError
from specdec.results import PHASE1, PHASE2, PHASE3, format_cell, write_whole

try:
    import fcntl
except ImportError:  # Windows: runs work, but nothing keeps two of them apart
    fcntl = None

LOCK_NAME = ".lock"
PREVIOUS = "previous"  # where a new run moves the files of the run before it
PACKAGES = ("torch", "transformers", "accelerate", "numpy", "pandas", "scipy", "matplotlib")
SCRIPTS = {"phase1": PHASE1, "phase2": PHASE2, "phase3": PHASE3}
KEPT_ON_RESUME = ("run_id", "started", "fast_kernels")
FORMAT = 1  # of manifests and tables; raised when a later version writes what this one would misread
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the results folder for this process; the system lets go when it ends, however it ends.

    Raises InputError where another run holds it or the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK_NAME, "a", encoding="utf-8")  # noqa: SIM115 - held open for as long as the lock
    except OSError as error:
        raise InputError(f"results folder {folder} can't be written: {error.strerror}") from error
    with file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InputError(f"another run is writing to {folder}; wait for it or use --results-dir") from error
        yield


def check_free(folder: Path) -> None:
    """Raise InputError at once if another run holds ``folder``, without making anything."""
    if (folder / LOCK_NAME).exists():
        with lock(folder):
            pass


def check_writable(**folders: str) -> None:
    """Raise InputError if nothing could be written to one of ``folders`` (flag -> path), without making any of them."""
    for flag, folder in folders.items():
        path = Path(folder).absolute()
        there = next(place for place in (path, *path.parents) if os.path.lexists(place))
        try:
            tempfile.TemporaryFile(dir=there).close()
        except OSError as error:
            flag = "--" + flag.replace("_", "-")
            raise InputError(f"{folder} can't be written: {error.strerror}; choose a folder with {flag}") from error


def append_line(path: Path, line: str) -> None:
    """Append one line or several, each ended, in a single write that has reached the disk on return.

    Where that fails or is interrupted, what was written of it is cut off again.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        before, data = os.fstat(descriptor).st_size, line.encode()
        try:
            if os.write(descriptor, data) != len(data):
                raise OSError(errno.ENOSPC, "the disk may be full")
            os.fsync(descriptor)
        except BaseException as error:
            os.ftruncate(descriptor, before)
            if not before:
                path.unlink()
            if isinstance(error, OSError):
                raise OSError(f"{path.name}: a row could not be written whole: {error.strerror}") from error
            raise
    finally:
        os.close(descriptor)


def append_rows(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Append ``rows`` to a CSV file at once, with the header if the file is new."""
    columns = list(columns)
    lines = [",".join(format_cell(row[column]) for column in columns) for row in rows]
    if not path.exists():
        lines.insert(0, ",".join(columns))
    append_line(path, "".join(line + "\n" for line in lines))


def drop_torn_line(path: Path) -> None:
    """Cut off a last line that was not ended, a killed run's unfinished write; a file without a whole line goes."""
    if path.exists():
        whole = path.read_bytes().rfind(b"\n") + 1
        os.truncate(path, whole)
        if not whole:
            path.unlink()


def move_to_previous(folder: Path, names: Sequence[str]) -> int:
    """Move the files of an earlier run out of the way of a new one, the first of ``names`` first; returns how many.

    Where that one is there, what ``previous`` holds of the run before goes, so that no two runs lie mixed; after a cut
    move it is not, and the rest joins what was moved.
    """
    present = [folder / name for name in names if (folder / name).exists()]
    if not present:
        return 0
    previous = folder / PREVIOUS
    previous.mkdir(exist_ok=True)
    if (folder / names[0]).exists():
        for name in names:
            (previous / name).unlink(missing_ok=True)
    for path in present:
        os.replace(path, previous / path.name)
    return len(present)


class Manifest:
    """``manifest_<phase>.json``: what a run was. Written first as partial, completed last."""

    def __init__(self, folder: Path, phase: str, entries: Mapping[str, Any], resumed: bool = False) -> None:
        self.resumed = resumed
        self.path = folder / f"manifest_{phase}.json"
        self.entries = {"phase": phase, "format": FORMAT, "status": "partial", **entries}

    def write(self, **entries: Any) -> None:
        """Add ``entries`` and write the file."""
        self.entries |= entries
        write_whole(self.path, json.dumps(self.entries, indent=2, default=str) + "\n")

    def complete(self, **entries: Any) -> None:
        """Mark the run complete."""
        self.write(status="complete", finished=_now(), **entries)


def read_manifest(folder: Path, phase: str) -> dict | None:
    """Return the manifest of ``phase``, or None if there is none; InputError if it can't be read."""
    path = folder / f"manifest_{phase}.json"
    if not path.exists():
        return None
    remedy = f"move it away and run {SCRIPTS.get(phase, phase)} again"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} can't be read: {error}; {remedy}") from error
    parts = ("pair", "constants", "versions", "device", "ceilings", "fast_kernels")
    if not isinstance(entries, dict) or not all(isinstance(entries.get(part) or {}, dict) for part in parts):
        raise InputError(f"{path} is not a manifest; {remedy}")
    written = entries.get("format", FORMAT)
    if not isinstance(written, int) or written > FORMAT:
        raise InputError(
            f"{path} was written by a newer version of this suite (format {written}, known: {FORMAT}); update the "
            "suite, or choose another folder with --results-dir"
        )
    return entries


def open_run(folder: Path, phase: str, files: Iterable[str], entries: Mapping[str, Any], resume: bool) -> Manifest:
    """Begin a run, moving an earlier one's ``files`` away, or with ``resume`` take up the one in ``folder``.

    Returns its manifest, written as partial. Raises InputError where the run to resume had another pair, constants or
    versions, or another machine.
    """
    name = f"manifest_{phase}.json"
    earlier = read_manifest(folder, phase) if resume else None
    if earlier is None:
        if resume:
            print(f"nothing to go on with in {folder}: a new run begins")
        if moved := move_to_previous(folder, [name, *files]):
            print(f"{moved} files of the earlier run are now in {folder / PREVIOUS}")
    else:
        changed = differences(earlier, {"pair": entries["pair"]})
        if earlier.get("device") and entries.get("device"):
            changed += differences(machine(earlier), machine(entries))
            changed += differences(earlier["device"], {"threads": entries["device"].get("threads")})
        for part in ("constants", "versions"):
            changed += differences(earlier.get(part) or {}, entries[part])
        if changed:
            raise InputError(
                f"--resume goes on with the same run only, but {'; '.join(changed)}; without --resume a new run begins "
                f"and the files of this one move to {PREVIOUS}/"
            )
        entries = {**entries, **{name: earlier[name] for name in KEPT_ON_RESUME if name in earlier}}
    manifest = Manifest(folder, phase, entries, resumed=earlier is not None)
    manifest.write()
    return manifest


def run_entries(argv: list[str] | None, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return what every manifest says of a run: id, time, command, constants, versions and commit."""
    arguments = sys.argv[1:] if argv is None else argv
    return {
        "run_id": secrets.token_hex(6),
        "started": _now(),
        "command": [Path(sys.argv[0]).name, *map(without_folder, map(readable, arguments))],
        "constants": {name: without_folder(value) for name, value in constants.items()},
        "versions": {"python": platform.python_version(), **_package_versions()},
        "commit": _commit(),
    }


def machine(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a manifest says of the machine: name and variant of the device."""
    device = entries.get("device") or {}
    return {"device": device.get("name"), "variant of the device": device.get("variant")}


def whose(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two phases must have in common: the pair with its devices and dtype, and the machine."""
    return {"pair": entries.get("pair"), **machine(entries)}


def decided_kernels(entries: Mapping[str, Any], phase1: Mapping[str, Any] | None = None) -> dict[str, dict] | None:
    """Return what a run, before it was cut, or else the folder's Phase 1 decided on kernels; None: decide by timing."""
    for earlier in (entries, phase1 or {}):
        kernels = earlier.get("fast_kernels") or {}
        reusable = kernels and all(isinstance(of_model, dict) for of_model in kernels.values())  # once they were text
        if reusable and not differences(_decides_kernels(earlier), _decides_kernels(entries)):
            return kernels
    return None


def _decides_kernels(entries: Mapping[str, Any]) -> dict[str, Any]:
    threads = (entries.get("device") or {}).get("threads")
    return {**whose(entries), "threads": threads, "torch": (entries.get("versions") or {}).get("torch")}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return one phrase per constant that differs between two runs, values as JSON has them."""
    old, new = (json.loads(json.dumps(entries, default=str)) for entries in (old, new))
    return [f"{name}: {old.get(name)} then, {new.get(name)} now" for name in new if old.get(name) != new.get(name)]


def without_folder(value: Any) -> Any:
    """Return a path's last part and anything else unchanged, so that no folder of this machine is stored."""
    if isinstance(value, str) and os.sep in value and (os.path.exists(value) or not HUB_ID.fullmatch(value)):
        return readable(Path(value).name)
    return value


def readable(name: str) -> str:
    """Return a file's name as text that can be shown and stored, also where this locale could not decode it."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _package_versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _commit() -> str | None:
    """Return the commit of this checkout, marked if files differ from it; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
