"""Files of an earlier, a later or another run are never taken for this run's, and it is said which run is read."""

from __future__ import annotations

import json
from pathlib import Path

import made_up_measuring as made_up
import pytest
from synthetic import Synthetic, write_run

import analysis_deep
import phase3_profiling
from specdec import figures, results, run
from specdec.errors import InputError


def quiet(message: str) -> None:
    pass


def error_of(capsys) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


def edit_manifest(folder: Path, phase: str, **entries) -> None:
    path = folder / f"manifest_{phase}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def add_a_column(path: Path) -> None:
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([f"{header},of_tomorrow", *(f"{row},1" for row in rows)]) + "\n")


@pytest.fixture
def done(tmp_path) -> Path:
    """The folder of a whole made-up run of both phases."""
    assert [made_up.run(phase, tmp_path, quiet) for phase in made_up.SCRIPTS] == [0, 0]
    return tmp_path


@pytest.fixture(autouse=True)
def no_rendering(monkeypatch):
    monkeypatch.setattr(figures, "save", lambda figure, folder, name: folder / f"{name}.png")


def analyse(folder: Path, *flags: str) -> int:
    return analysis_deep.main(
        ["--results-dir", str(folder), "--plots-dir", str(folder / "plots"), "--trials", "20", *flags]
    )


# --- Going on with a run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", made_up.SCRIPTS)
@pytest.mark.parametrize(
    "flags, named",
    [
        (["--gammas", "1,2"], "gammas: [1, 3] then, [1, 2] now"),
        (["--max-new-tokens", "11"], "max_new_tokens: 12 then, 11 now"),
        (["--seed", "1"], "seed: 0 then, 1 now"),
        (["--threads", "1"], "threads: 0 then, 1 now"),
        (["--prompts", "code_cpp"], "prompts: "),
    ],
)
def test_resume_with_another_constant_is_refused_and_says_what_else_to_do(done, capsys, phase, flags, named):
    before = {path: path.read_bytes() for path in done.iterdir() if path.is_file()}
    capsys.readouterr()
    assert made_up.run(phase, done, quiet, "--resume", *flags) == 2
    error = error_of(capsys)
    assert named in error
    assert "without --resume a new run begins and the files of this one move to previous/" in error
    assert before == {path: path.read_bytes() for path in done.iterdir() if path.is_file()}


@pytest.mark.parametrize("phase", made_up.SCRIPTS)
def test_resume_with_other_packages_or_another_pair_is_refused(done, capsys, phase):
    versions = run.read_manifest(done, phase)["versions"]
    edit_manifest(done, phase, versions=versions | {"torch": "1.0"})
    assert made_up.run(phase, done, quiet, "--resume") == 2
    assert "torch: 1.0 then, " in error_of(capsys)
    edit_manifest(done, phase, versions=versions, pair={"name": "another"})
    assert made_up.run(phase, done, quiet, "--resume") == 2
    assert "pair: {'name': 'another'} then, " in error_of(capsys)


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"name": "another machine"}, "device: another machine then, "),
        ({"variant": "model 99"}, "variant of the device: model 99 then, "),
        ({"threads": 99}, "threads: 99 then, "),
    ],
)
@pytest.mark.parametrize("phase", made_up.SCRIPTS)
def test_resume_on_another_machine_is_refused(done, capsys, phase, changed, named):
    device = run.read_manifest(done, phase)["device"]
    edit_manifest(done, phase, device=device | changed)
    assert made_up.run(phase, done, quiet, "--resume") == 2
    assert named in error_of(capsys)


@pytest.mark.parametrize("phase", made_up.SCRIPTS)
def test_a_manifest_of_a_newer_version_is_refused_with_what_to_do(done, capsys, phase):
    edit_manifest(done, phase, format=run.FORMAT + 1)
    assert made_up.run(phase, done, quiet, "--resume") == 2
    assert f"written by a newer version of this suite (format {run.FORMAT + 1}, known: {run.FORMAT})" in error_of(
        capsys
    )
    assert analyse(done) == (2 if phase == "phase1" else 0)


@pytest.mark.parametrize("table", [results.RUNS, results.STEPS])
def test_columns_of_a_newer_version_do_not_stay_beside_rows_without_them(done, table):
    add_a_column(done / table.file)
    path = done / results.RUNS.file
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    assert made_up.run("phase1", done, quiet, "--resume") == 0
    lines = (done / table.file).read_text().splitlines()
    assert lines[0] == ",".join(table.columns)
    assert {line.count(",") for line in lines} == {len(table.columns) - 1}


@pytest.mark.parametrize("phase, table", [("phase1", results.RUNS), ("phase3", results.BREAKDOWN)])
def test_a_table_without_a_column_of_today_is_refused_not_mixed(done, capsys, phase, table):
    path = done / table.file
    path.write_text(path.read_text().replace("gamma", "gamma_of_old", 1))
    before = path.read_bytes()
    assert made_up.run(phase, done, quiet, "--resume") == 2
    assert f"{table.file} lacks the column gamma; run {table.made_by} to make it" in error_of(capsys)
    assert path.read_bytes() == before


def test_only_a_table_that_grows_is_said_to_be_mended_by_resume(tmp_path):
    for table, mended in ((results.RUNS, True), (results.BREAKDOWN, False)):
        (tmp_path / table.file).write_text("torn")
        with pytest.raises(InputError) as caught:
            results.read_table(tmp_path, table)
        assert ("--resume" in str(caught.value)) == mended


def test_a_new_run_takes_the_earlier_plots_away_and_a_resumed_one_keeps_them(tmp_path):
    (tmp_path / "plots").mkdir()
    for name in phase3_profiling.PLOTS:
        (tmp_path / "plots" / f"{name}.png").write_text("old")
    assert made_up.run("phase3", tmp_path, quiet) == 0
    assert sorted(path.stem for path in (tmp_path / "plots" / "previous").iterdir()) == sorted(phase3_profiling.PLOTS)
    (tmp_path / "plots" / "time_breakdown.png").write_text("new")
    assert made_up.run("phase3", tmp_path, quiet, "--resume") == 0
    assert (tmp_path / "plots" / "time_breakdown.png").exists()


def test_previous_holds_one_run_only(done):
    assert made_up.run("phase1", done, quiet, "--engines", "published") == 0
    assert (done / "previous" / "speculative_results_fast.csv").exists()
    assert made_up.run("phase1", done, quiet, "--engines", "published") == 0
    assert (done / "previous" / "speculative_results.csv").exists()
    assert not (done / "previous" / "speculative_results_fast.csv").exists(), "of the run before the previous one"
    assert not (done / "previous" / "time_breakdown.csv").exists(), "of the other phase, which did not run again"


# --- Reading a run ---------------------------------------------------------------------------------------------------


def test_the_analysis_says_which_run_it_read(tmp_path, capsys):
    write_run(tmp_path)
    edit_manifest(tmp_path, "phase1", started="2026-01-02T03:04:05+00:00")
    assert analyse(tmp_path) == 0
    assert "Phase 1's run made-up, begun 2026-01-02T03:04:05+00:00" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "constant, value, named",
    [
        ("gammas", [1, 2], "gamma 4 is in the summary, the manifest's run had [1, 2]"),
        ("engines", ["fast"], "engine published is in the summary, the manifest's run had ['fast']"),
        ("max_new_tokens", 32, "new_tokens 64 is in the summary, the manifest's run had [32]"),
    ],
)
def test_tables_of_another_run_than_the_manifests_are_refused_unless_allowed(tmp_path, capsys, constant, value, named):
    write_run(tmp_path)
    manifest = run.read_manifest(tmp_path, "phase1")
    edit_manifest(tmp_path, "phase1", constants=manifest["constants"] | {constant: value})
    assert analyse(tmp_path) == 2
    error = error_of(capsys)
    assert named in error
    assert "or go on with --allow-mixed" in error
    assert analyse(tmp_path, "--allow-mixed") == 0
    assert "MIXED INPUT" in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"pair": {"name": "another"}}, {"device": {"name": "another machine"}}])
def test_phase_three_refuses_a_folder_with_another_pairs_or_machines_run(done, capsys, change):
    edit_manifest(done, "phase1", **change)
    before = {path: path.read_bytes() for path in done.iterdir() if path.is_file()}
    assert made_up.run("phase3", done, quiet) == 2
    error = error_of(capsys)
    assert "another" in error
    assert "give this phase the same flags, or choose another --results-dir" in error
    assert before == {path: path.read_bytes() for path in done.iterdir() if path.is_file()}


def test_phase_three_lists_other_constants_that_differ(done, capsys):
    constants = run.read_manifest(done, "phase1")["constants"]
    edit_manifest(done, "phase1", constants=constants | {"max_new_tokens": 64, "gammas": [1, 2]})
    assert made_up.run("phase3", done, quiet) == 0
    shown = capsys.readouterr().out
    assert "Constants that differ from those of Phase 1: " in shown
    assert "gammas: [1, 2] then, [1, 3] now" in shown
    assert "max_new_tokens: 64 then, 12 now" in shown
    assert "repeats" not in shown


def test_phase_three_keeps_its_own_results_where_phase_ones_are_damaged(done, capsys):
    (done / "manifest_phase1.json").write_text("{")
    assert made_up.run("phase3", done, quiet) == 0
    assert "No predictions: " in capsys.readouterr().out
    assert run.read_manifest(done, "phase3")["status"] == "complete"


def test_an_unfinished_run_is_read_as_one(tmp_path, capsys):
    write_run(tmp_path, Synthetic(status="partial"))
    assert analyse(tmp_path) == 0
    assert "was not finished" in capsys.readouterr().out
