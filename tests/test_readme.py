"""The README's figures are those of the committed results."""

import re
from pathlib import Path

import pandas as pd
import pytest

from specdec import published, results
from specdec.report import comparison, outlook
from specdec.report.collection import Collection

ROOT = Path(__file__).parents[1]
COLUMNS = {"study, RTX 2070": "study", "this run, as published": "published", "this run, fast": "fast"}


def committed():
    """Return the comparison table of the committed study run, or of the published figures alone."""
    folder = ROOT / "results" / "study"
    if (folder / results.COMPARISON.file).exists():
        return results.read_table(folder, results.COMPARISON)
    nothing = Collection("", None, pd.DataFrame(columns=list(results.RUNS.columns)), {}, {}, (), ())
    return comparison.compare_with_study(nothing, published.read_study())


def tables(text):
    """Yield each Markdown table as (names of columns, rows of cells)."""
    for block in re.findall(r"(?:^\|.*\|$\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        yield rows[0], rows[2:]


@pytest.mark.parametrize("document", ["README.md", "DESIGN.md"])
def test_tables_of_figures_are_those_of_the_committed_results(document):
    expected = committed().set_index("quantity")
    checked = 0
    for names, rows in tables((ROOT / document).read_text(encoding="utf-8")):
        if names[0] != "quantity":
            continue
        for quantity, *cells in rows:
            for name, cell in zip(names[1:], cells, strict=True):
                value = outlook.quantity_cell(quantity, expected.loc[quantity, COLUMNS[name]])
                assert cell == value, (document, quantity, name)
                checked += 1
    assert checked or document == "DESIGN.md"


def test_the_readme_names_every_table_and_runs_the_scripts_in_order():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tables_written = [value for value in vars(results).values() if isinstance(value, results.Table)]
    for file in [table.file for table in (*tables_written, *results.SUMMARIES.values())]:
        assert file in text, file
    scripts = (results.PHASE1, results.PHASE2, results.PHASE3, results.REPORT)
    assert " && ".join(f"python {script}" for script in scripts) in text
