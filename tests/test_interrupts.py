"""Runs that are cut at any moment: finished rows stay whole, and --resume ends where an uninterrupted run ends."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import made_up_measuring as made_up
import pandas as pd
import pytest

import phase3_profiling
import speculative_decoding
from specdec import results, run

TESTS = Path(__file__).parent
KILLS = 25
LONGEST_WAIT_S = 0.004  # after the message at which a run is to be cut: about what storing a row takes


@pytest.fixture(scope="module")
def fork_server():
    """A clean process that has imported the phases once and forks a child for every run."""
    context = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))
        context.set_forkserver_preload(["made_up_measuring"])
        yield context


class Child:
    """One run of a phase in a process of its own."""

    def __init__(self, context, phase: str, folder: Path, *more: str) -> None:
        self.told, pipe = context.Pipe(duplex=False)
        self.process = context.Process(target=made_up.run_in_child, args=(phase, folder, pipe, *more))
        self.process.start()
        pipe.close()
        self.messages: list[str] = []

    def listen(self, count: int | None = None) -> list[str]:
        """Return all messages so far, once there are ``count`` or the child has ended."""
        try:
            while count is None or len(self.messages) < count:
                self.messages.append(self.told.recv())
        except EOFError:
            pass
        return self.messages

    def kill(self, number: int) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        os.kill(self.process.pid, number)
        self.listen()
        return self.end()

    def end(self) -> int:
        self.listen()
        self.process.join(60)
        return self.process.exitcode


@pytest.fixture(scope="module")
def uninterrupted(fork_server, tmp_path_factory) -> dict[str, tuple[Path, int]]:
    """The folder of a whole run of each phase, and how many messages it sends."""
    finished = {}
    for phase in made_up.SCRIPTS:
        folder = tmp_path_factory.mktemp(phase)
        child = Child(fork_server, phase, folder)
        assert child.end() == 0
        finished[phase] = folder, len(child.messages)
    return finished


def files_of(phase: str) -> list[str]:
    return list(made_up.PHASE1_FILES) if phase == "phase1" else [table.file for table in made_up.PHASE3_TABLES]


def assert_equal_files(phase: str, folder: Path, expected: Path) -> None:
    for name in files_of(phase):
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name
    assert run.read_manifest(folder, phase)["status"] == "complete"
    assert not list(folder.glob("*.part"))


def assert_whole_rows(folder: Path) -> None:
    for path in [*folder.glob("*.csv"), *folder.glob("*.jsonl")]:
        text = path.read_text(encoding="utf-8")
        if not text:
            continue  # killed between making the file and writing to it
        assert text.endswith("\n")
        lines = text.splitlines()
        if path.suffix == ".csv":
            assert {line.count(",") for line in lines} == {lines[0].count(",")}, path.name
        else:
            assert all(len(json.loads(line)["tokens"]) == made_up.NEW_TOKENS for line in lines)


def cut_and_resume(context, phase: str, folder: Path, finished: tuple[Path, int], seed: int) -> None:
    expected, messages = finished
    rng = random.Random(seed)
    number = signal.SIGKILL if seed % 2 else signal.SIGTERM
    child = Child(context, phase, folder)
    child.listen(rng.randint(1, messages))
    time.sleep(rng.uniform(0, LONGEST_WAIT_S))
    code = child.kill(number)
    done = (run.read_manifest(folder, phase) or {}).get("status") == "complete"
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 130) or (done and code in (0, -signal.SIGTERM))
    assert_whole_rows(folder)
    stored = child.messages.count("stored")
    if stored:
        rows = results.read_table(folder, results.RUNS)
        assert len(rows) >= stored, "a row that was stored is lost"
        assert len(rows) <= stored + 1
    assert Child(context, phase, folder, "--resume").end() == 0
    assert_equal_files(phase, folder, expected)


@pytest.mark.parametrize("seed", range(KILLS))
def test_phase_one_killed_at_a_random_moment_loses_no_row_and_resumes_to_the_same_files(
    fork_server, uninterrupted, tmp_path, seed
):
    cut_and_resume(fork_server, "phase1", tmp_path, uninterrupted["phase1"], seed)


@pytest.mark.parametrize("seed", range(8))
def test_phase_three_killed_at_a_random_moment_resumes_to_the_same_files(fork_server, uninterrupted, tmp_path, seed):
    cut_and_resume(fork_server, "phase3", tmp_path, uninterrupted["phase3"], 100 + seed)


# --- An ending at each kind of point, in one process -----------------------------------------------------------------


def nothing(message: str) -> None:
    pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Path]:
    """The folder of an uninterrupted run of each phase."""
    folders = {phase: tmp_path_factory.mktemp(phase) for phase in made_up.SCRIPTS}
    assert [made_up.run(phase, folder, nothing) for phase, folder in folders.items()] == [0, 0]
    return folders


def only_line(capsys) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture(autouse=True)
def ctrl_c_is_heard():
    """Undo what a shell does to a command in the background: it lets the command ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def raising(error: BaseException):
    def ending() -> None:
        raise error

    return ending


def send(number: int):
    def ending() -> None:
        os.kill(os.getpid(), number)
        signal.pause()

    return ending


NO_MEMORY = RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: 9 bytes")
ENDINGS = {
    "SIGINT": (send(signal.SIGINT), 130, "interrupted; what is finished is kept"),
    "SIGTERM": (send(signal.SIGTERM), 130, "interrupted; what is finished is kept"),
    "no memory": (raising(MemoryError()), 1, "out of memory: no more is free; what is finished is kept"),
    "no memory in torch": (raising(NO_MEMORY), 1, "DefaultCPUAllocator: can't allocate memory: 9 bytes; what is"),
    "device lost": (raising(OSError(errno.EIO, "Input/output error")), 1, "Input/output error; what is finished"),
}


@pytest.mark.parametrize("phase, calls", [("phase1", 1), ("phase1", 30), ("phase3", 1), ("phase3", 8)])
@pytest.mark.parametrize("name", ENDINGS)
def test_every_ending_while_measuring_keeps_what_is_finished_and_says_how_to_go_on(
    whole, tmp_path, capsys, name, phase, calls
):
    ending, code, message = ENDINGS[name]
    count = itertools.count(1)

    def tell(what: str) -> None:
        if what == "measuring" and next(count) == calls:
            ending()

    assert made_up.run(phase, tmp_path, tell) == code
    line = only_line(capsys)
    assert line.startswith("error: ")
    assert message in line
    assert "--resume" in line
    assert run.read_manifest(tmp_path, phase)["status"] == "partial"
    assert_whole_rows(tmp_path)
    assert made_up.run(phase, tmp_path, nothing, "--resume") == 0
    assert_equal_files(phase, tmp_path, whole[phase])


def test_a_fault_of_the_program_keeps_what_is_finished_too(whole, tmp_path):
    count = itertools.count(1)

    def tell(what: str) -> None:
        if next(count) == 25:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        made_up.run("phase1", tmp_path, tell)
    assert run.read_manifest(tmp_path, "phase1")["status"] == "partial"
    assert_whole_rows(tmp_path)
    assert made_up.run("phase1", tmp_path, nothing, "--resume") == 0
    assert_equal_files("phase1", tmp_path, whole["phase1"])


class FullDisk:
    """Stands in for what writes to a disk: from operation ``first`` on there is room for half a row, then for none."""

    def __init__(self, first: int) -> None:
        self.left = first
        self.real = {name: getattr(os, name) for name in ("write", "fsync", "replace")}

    def use(self, name: str, *args):
        self.left -= 1
        if self.left > 0:
            return self.real[name](*args)
        if self.left == 0 and name == "write":
            return self.real["write"](args[0], args[1][: len(args[1]) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    def __enter__(self) -> None:
        self.patch = mock.patch.multiple(
            os, **{name: lambda *args, name=name: self.use(name, *args) for name in self.real}
        )
        self.patch.__enter__()

    def __exit__(self, *exception) -> None:
        self.patch.__exit__(*exception)


@pytest.fixture(scope="module")
def file_operations(tmp_path_factory) -> dict[str, int]:
    """How many file operations a whole run of each phase takes."""
    counted = {}
    for phase in made_up.SCRIPTS:
        disk = FullDisk(first=10**9)
        with disk:
            assert made_up.run(phase, tmp_path_factory.mktemp(phase), nothing) == 0
        counted[phase] = 10**9 - disk.left
    return counted


@pytest.mark.parametrize("part", [0.0, 0.03, 0.05, 0.2, 0.41, 0.42, 0.6, 0.97, 1.0])
@pytest.mark.parametrize("phase", made_up.SCRIPTS)
def test_a_disk_that_fills_up_at_any_point_leaves_no_torn_row(whole, file_operations, tmp_path, capsys, phase, part):
    folder = tmp_path / "full"
    with FullDisk(first=1 + round(part * (file_operations[phase] - 1))):
        assert made_up.run(phase, folder, nothing) == 1
    line = only_line(capsys)
    assert "the disk may be full" in line or "No space left on device" in line
    assert "--resume" in line
    assert_whole_rows(folder)
    assert not list(folder.rglob("*.part"))
    assert (run.read_manifest(folder, phase) or {"status": "partial"})["status"] == "partial"
    assert made_up.run(phase, folder, nothing, "--resume") == 0
    assert_equal_files(phase, folder, whole[phase])


def run_with_file_limit(limit: int, *args) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    made_up.run_in_child(*args)


@pytest.mark.parametrize("limit", [2000, 2345])
def test_a_file_that_the_system_cuts_short_leaves_no_torn_row(fork_server, whole, tmp_path, limit):
    told, pipe = fork_server.Pipe(duplex=False)
    process = fork_server.Process(target=run_with_file_limit, args=(limit, "phase1", tmp_path, pipe))
    process.start()
    process.join(60)
    assert process.exitcode == 1
    assert_whole_rows(tmp_path)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.*") if path.suffix in (".csv", ".jsonl")]
    assert max(sizes) > limit / 2, "the limit was met by a file that grows"
    told.close()
    assert made_up.run("phase1", tmp_path, nothing, "--resume") == 0
    assert_equal_files("phase1", tmp_path, whole["phase1"])


# --- What a crash may leave ------------------------------------------------------------------------------------------


def empty(path: Path) -> None:
    path.write_text("")


def tear(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def tear_the_first_line(path: Path) -> None:
    os.truncate(path, 10)


def tear_within_a_character(path: Path) -> None:
    path.write_bytes(path.read_bytes() + "ü".encode()[:1])


def lose(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [empty, tear, tear_the_first_line, tear_within_a_character, lose])
@pytest.mark.parametrize("name", ["speculative_runs.csv", "speculative_steps.csv", "generations.jsonl"])
def test_resume_measures_again_what_a_crash_left_torn_empty_or_lost(whole, tmp_path, name, damage):
    shutil.copytree(whole["phase1"], tmp_path, dirs_exist_ok=True)
    damage(tmp_path / name)
    measured = []
    assert made_up.run("phase1", tmp_path, measured.append, "--resume") == 0
    for table in (results.RUNS, results.STEPS, results.TRACE, *results.SUMMARIES.values()):
        key = [name for name in ("engine", "prompt", "repeat", "gamma", "step", "position") if name in table.columns]
        mine, theirs = (
            results.read_table(folder, table).sort_values(key, ignore_index=True)
            for folder in (tmp_path, whole["phase1"])
        )
        pd.testing.assert_frame_equal(mine, theirs)
    lines = [sorted((folder / "generations.jsonl").read_text().splitlines()) for folder in (tmp_path, whole["phase1"])]
    assert lines[0] == lines[1]
    assert ("stored" in measured) == (damage is not tear_within_a_character)


def test_a_fault_before_the_cut_still_fails_the_resumed_run(whole, tmp_path, capsys):
    shutil.copytree(whole["phase1"], tmp_path, dirs_exist_ok=True)
    rows = results.read_table(tmp_path, results.RUNS)
    rows.loc[3, ["matches_baseline", "first_mismatch"]] = [False, 5]
    results.write_table(tmp_path, results.RUNS, rows)
    assert made_up.run("phase1", tmp_path, nothing, "--resume") == 1
    error = capsys.readouterr().err
    assert "1 runs did not give the target's own tokens" in error
    assert "published, code_python, gamma 1, repeat 2, from new token 5" in error


def test_a_run_whose_move_was_cut_mixes_with_no_other(whole, tmp_path):
    shutil.copytree(whole["phase1"], tmp_path, dirs_exist_ok=True)
    moves = itertools.count()

    def replace_three(source, target, real=os.replace):
        if next(moves) == 3:
            raise KeyboardInterrupt
        real(source, target)

    with mock.patch.object(os, "replace", replace_three):
        assert made_up.run("phase1", tmp_path, nothing) == 130
    assert made_up.run("phase1", tmp_path, nothing, "--resume") == 0
    assert_equal_files("phase1", tmp_path, whole["phase1"])
    for name in (*made_up.PHASE1_FILES, "manifest_phase1.json"):
        assert (tmp_path / "previous" / name).read_bytes() == (whole["phase1"] / name).read_bytes()


@pytest.mark.parametrize("phase", made_up.SCRIPTS)
def test_a_second_run_in_one_folder_is_refused_and_the_first_goes_on(fork_server, whole, tmp_path, capsys, phase):
    child = Child(fork_server, phase, tmp_path)
    child.listen(1)
    os.kill(child.process.pid, signal.SIGSTOP)
    assert made_up.run(phase, tmp_path, nothing) == 2
    assert f"another run is writing to {tmp_path}; wait for it or use --results-dir" in only_line(capsys)
    os.kill(child.process.pid, signal.SIGCONT)
    assert child.end() == 0
    assert_equal_files(phase, tmp_path, whole[phase])


# --- Whole scripts ---------------------------------------------------------------------------------------------------

ROOT = TESTS.parent
QUICK = ["--quick", "--pair", "tiny", "--device", "cpu", "--threads", "1", "--gammas", "1,3"]


def killed_script(script: str, folder: Path, flags: list[str], number: int, moment) -> int:
    """Start a script, send it a signal as ``moment(folder)`` comes true, and return its exit code."""
    command = [sys.executable, str(ROOT / script), *flags, "--results-dir", str(folder)]
    process = subprocess.Popen([*command, "--plots-dir", str(folder / "plots")], stdout=subprocess.PIPE, text=True)
    while process.poll() is None and not moment(folder):
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate()
    return process.returncode


def lines_in(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def same_but_for_times(folder: Path, expected: Path, table: results.Table) -> None:
    exact = [name for name, kind in table.columns.items() if kind != "number" and name != "noisy"]
    frames = [results.read_table(each, table)[exact] for each in (folder, expected)]
    pd.testing.assert_frame_equal(*frames)


def test_phase_one_as_a_script_killed_and_resumed_ends_as_an_uninterrupted_run(tmp_path, tiny_pair):
    flags = [*QUICK, "--engines", "published", "--max-new-tokens", "8"]
    cut, expected = tmp_path / "cut", tmp_path / "expected"
    runs = results.RUNS.file
    code = killed_script(
        "speculative_decoding.py", cut, flags, signal.SIGKILL, lambda folder: lines_in(folder / runs) > 3
    )
    assert code == -signal.SIGKILL
    assert run.read_manifest(cut, "phase1")["status"] == "partial"
    assert_rows_end(cut)
    assert speculative_decoding.main([*flags, "--results-dir", str(cut), "--resume"]) == 0
    assert speculative_decoding.main([*flags, "--results-dir", str(expected)]) == 0
    for table in (results.RUNS, results.STEPS, results.TRACE, results.SUMMARIES["published"]):
        same_but_for_times(cut, expected, table)
    assert (cut / "generations.jsonl").read_bytes() == (expected / "generations.jsonl").read_bytes()


def test_phase_three_as_a_script_terminated_and_resumed_ends_as_an_uninterrupted_run(tmp_path, tiny_pair):
    flags = [*QUICK, "--engines", "published", "--sections", "2,3", "--max-new-tokens", "8", "--temperatures", "0,1"]
    cut, expected = tmp_path / "cut", tmp_path / "expected"
    code = killed_script(
        "phase3_profiling.py",
        cut,
        flags,
        signal.SIGTERM,
        lambda folder: (folder / results.BY_TEMPERATURE.file).exists(),
    )
    assert code == 130
    assert run.read_manifest(cut, "phase3")["status"] == "partial"
    assert_rows_end(cut)
    assert phase3_profiling.main([*flags, "--results-dir", str(cut), "--plots-dir", str(cut / "p"), "--resume"]) == 0
    assert phase3_profiling.main([*flags, "--results-dir", str(expected), "--plots-dir", str(expected / "p")]) == 0
    for table in (results.BY_POSITION, results.BY_TEMPERATURE):  # neither holds a time
        assert (cut / table.file).read_bytes() == (expected / table.file).read_bytes()


def assert_rows_end(folder: Path) -> None:
    assert all(path.read_text(encoding="utf-8").endswith("\n") for path in folder.glob("*.csv"))
