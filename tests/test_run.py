"""Runs on disk: one at a time, rows whole or absent, earlier files out of the way."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal

import pytest

from specdec import run
from specdec.errors import InputError


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_ends(tmp_path):
    with run.lock(tmp_path):
        with pytest.raises(InputError, match="another run is writing to"):
            run.lock(tmp_path).__enter__()
        with pytest.raises(InputError, match="another run is writing to"):
            run.check_free(tmp_path)
    with run.lock(tmp_path):
        pass
    run.check_free(tmp_path)


def hold_lock(folder, ready) -> None:
    with run.lock(folder):
        ready.set()
        signal.pause()


def test_a_killed_run_leaves_no_lock_behind(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=hold_lock, args=(tmp_path, ready))
    holder.start()
    assert ready.wait(60)
    with pytest.raises(InputError):
        run.check_free(tmp_path)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    run.check_free(tmp_path)


def test_looking_whether_a_folder_is_free_makes_nothing(tmp_path):
    run.check_free(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="can't be written"), run.lock(tmp_path / "file" / "folder"):
        pass


def test_rows_are_appended_whole_with_one_header(tmp_path):
    path = tmp_path / "rows.csv"
    run.append_rows(path, ["a", "b"], [{"a": 1, "b": "x,y", "more": 0}])
    run.append_rows(path, ["a", "b"], [{"a": 2.5, "b": None}, {"a": True, "b": 'say "no"'}])
    assert path.read_text() == 'a,b\n1,"x,y"\n2.5,\nTrue,"say ""no"""\n'


def test_a_torn_last_line_is_dropped_and_whole_ones_stay(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n3,")
    run.drop_torn_line(path)
    assert path.read_text() == "a,b\n1,2\n"
    run.drop_torn_line(path)
    assert path.read_text() == "a,b\n1,2\n"
    run.drop_torn_line(tmp_path / "absent.csv")
    assert not (tmp_path / "absent.csv").exists()


def test_a_disk_that_takes_half_a_row_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", lambda descriptor, data: len(data) // 2)
    with pytest.raises(OSError, match=r"rows.csv: a row could not be written whole"):
        run.append_rows(tmp_path / "rows.csv", ["a"], [{"a": 1}])


def test_a_new_run_moves_the_earlier_files_of_its_phase_and_no_others(tmp_path):
    for name in ("mine.csv", "theirs.csv"):
        (tmp_path / name).write_text("old")
    run.move_to_previous(tmp_path, ["mine.csv", "absent.csv"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["previous", "theirs.csv"]
    assert (tmp_path / "previous" / "mine.csv").read_text() == "old"


def test_a_manifest_is_partial_until_completed(tmp_path):
    manifest = run.Manifest(tmp_path, "phase1", run.run_entries(["--quick"], {"gammas": (1, 2)}))
    manifest.write()
    entries = run.read_manifest(tmp_path, "phase1")
    assert entries["status"] == "partial"
    assert entries["constants"] == {"gammas": [1, 2]}
    assert entries["versions"]["torch"]
    manifest.complete(device={"name": "cpu"})
    entries = run.read_manifest(tmp_path, "phase1")
    assert (entries["status"], entries["device"]["name"]) == ("complete", "cpu")
    assert run.read_manifest(tmp_path, "phase3") is None


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_a_damaged_manifest_is_named(tmp_path, text):
    (tmp_path / "manifest_phase1.json").write_text(text)
    with pytest.raises(InputError, match=r"manifest_phase1.json"):
        run.read_manifest(tmp_path, "phase1")


def test_differences_name_what_changed_and_both_values():
    old = json.loads(json.dumps({"gammas": (1, 2), "repeats": 3}))
    assert run.differences(old, {"gammas": (1, 2), "repeats": 3}) == []
    assert run.differences(old, {"gammas": (1, 4), "repeats": 3}) == ["gammas: [1, 2] then, [1, 4] now"]


def test_no_folder_of_this_machine_is_stored(tmp_path):
    (tmp_path / "model.gguf").write_text("")
    assert run.without_folder(str(tmp_path / "model.gguf")) == "model.gguf"
    assert run.without_folder("Qwen/Qwen2-0.5B") == "Qwen/Qwen2-0.5B"
    assert run.without_folder(3) == 3


def test_a_relative_path_that_looks_like_a_hub_id_is_shortened_if_it_exists(tmp_path, monkeypatch):
    (tmp_path / "models" / "draft").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert run.without_folder("models/draft") == "draft"


def test_kernels_are_decided_once_a_folder_unless_something_that_decides_them_changed():
    def entries(threads=2, torch="2.13", **more):
        return {"pair": "p", "device": {"name": "d", "threads": threads}, "versions": {"torch": torch}, **more}

    phase1 = entries(fast_kernels={"draft": {"compiled": True}})
    own = entries(fast_kernels={"draft": {"compiled": False}})
    assert run.decided_kernels(entries(), phase1) == phase1["fast_kernels"]
    assert run.decided_kernels(own, phase1) == own["fast_kernels"]
    assert run.decided_kernels(entries(threads=1), phase1) is None
    assert run.decided_kernels(entries(torch="2.12"), phase1) is None
    assert run.decided_kernels(entries(), entries(fast_kernels={"draft": "all packed"})) is None
    assert run.decided_kernels(entries()) is None
