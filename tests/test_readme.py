"""The README's figures are those of the committed results, and these are whole."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

import final_report
from specdec import plots, results, run
from specdec.report import outlook

ROOT = Path(__file__).parents[1]
STUDY, STUDY_PLOTS = ROOT / "results" / "study", ROOT / "plots" / "study"
README, DESIGN = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "DESIGN.md"))
CAUSES_GAMMA = 4
CAUSES_HEADER = ["cause", "as published: share of a step", "speedup without it", "fast: share of a step", "without it"]
COLUMNS = {"study, RTX 2070": "study", "this run, as published": "published", "this run, fast": "fast"}


def tables(text):
    """Yield each Markdown table as (names of columns, rows of cells)."""
    for block in re.findall(r"(?:^\|.*\|$\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        yield rows[0], rows[2:]


@pytest.mark.parametrize("document", [README, DESIGN], ids=["README.md", "DESIGN.md"])
def test_tables_of_figures_are_those_of_the_committed_results(document):
    expected = results.read_table(STUDY, results.COMPARISON).set_index("quantity")
    checked = 0
    for names, rows in tables(document):
        if names[0] != "quantity":
            continue
        for quantity, *cells in rows:
            for name, cell in zip(names[1:], cells, strict=True):
                value = outlook.quantity_cell(quantity, expected.loc[quantity, COLUMNS[name]])
                assert cell == value, (quantity, name)
                checked += 1
    assert checked


def test_the_readme_s_causes_are_those_of_the_committed_results():
    causes = results.read_table(STUDY, results.CAUSES)
    expected = causes[causes.gamma == CAUSES_GAMMA].set_index(["engine", "cause"])
    tables_of_causes = [rows for names, rows in tables(README) if names == CAUSES_HEADER]
    assert len(tables_of_causes) == 1
    for cause, *cells in tables_of_causes[0]:
        own = [expected.loc[engine, cause] for engine in ("published", "fast")]
        assert cells == [text for row in own for text in (f"{row.share:.0%}", f"{row.speedup_without:.2f}")], cause


def test_design_s_table_of_predictions_is_the_report_s():
    shown = [line for line in DESIGN.splitlines() if re.match(r"\| (published|fast) \|", line)]
    report = (STUDY / "report.md").read_text(encoding="utf-8").splitlines()
    assert len(shown) == 2 * 5
    assert set(shown) <= set(report)


def test_the_readme_names_every_table_and_runs_the_scripts_in_order():
    tables_written = [value for value in vars(results).values() if isinstance(value, results.Table)]
    for file in [table.file for table in (*tables_written, *results.SUMMARIES.values())]:
        assert file in README, file
    scripts = (results.PHASE1, results.PHASE2, results.PHASE3, results.REPORT)
    assert " && ".join(f"python {script}" for script in scripts) in README


@pytest.mark.parametrize("engine", results.SUMMARIES)
def test_the_committed_run_has_every_configuration_with_the_target_s_own_tokens(engine):
    rows = results.read_table(STUDY, results.SUMMARIES[engine])
    assert len(rows) == 32
    assert (rows.repeats == 3).all()
    assert (rows.matches_baseline | rows.near_tie).all()
    assert rows.speedup.notna().all()


@pytest.mark.parametrize("phase", ["phase1", "phase2", "phase3"])
def test_the_committed_phases_are_complete(phase):
    assert run.read_manifest(STUDY, phase)["status"] == "complete"


def test_the_committed_report_is_what_its_files_give(tmp_path, monkeypatch):
    """Report, tables and list of plots; how each plot looks has tests of its own."""
    monkeypatch.setattr(plots, "save_all", lambda drawn, folder: [f"{name}.png" for name in drawn])
    folder = tmp_path / "results" / "study"
    shutil.copytree(STUDY, folder)
    note = run.read_manifest(STUDY, "report")["constants"]["note"]
    folders = ["--results-dir", str(folder), "--plots-dir", str(tmp_path / "plots" / "study")]
    assert final_report.main([*folders, "--note", note]) == 0
    assert (folder / "report.md").read_text(encoding="utf-8") == (STUDY / "report.md").read_text(encoding="utf-8")
    for table in (results.CAUSES, results.COMPARISON, results.PREDICTIONS):
        pd.testing.assert_frame_equal(results.read_table(folder, table), results.read_table(STUDY, table), rtol=1e-6)
    assert run.read_manifest(folder, "report")["plots"] == sorted(path.stem for path in STUDY_PLOTS.glob("*.png"))
