"""The report: everything that the three phases found, in twelve plots and more, and one page that answers the question.

Reads the CSV files and manifests of a results folder, whichever are there, and needs no model: writes report.md,
causes.csv and comparison.csv beside them, predictions.csv anew from all that is there, and every plot.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pandas as pd

from specdec import cli, plots, published, results, run
from specdec.plots import Plots
from specdec.report import causes, collection, comparison, document, master_summary, model_figures
from specdec.report.answer import headline
from specdec.report.collection import Collection
from specdec.report.material import Material

# --- What people change; each has a flag of the same name ------------------------------------------------------------
NOTE = ""  # a line about this run that the report shows at its top
ALLOW_MIXED = False  # refuse phases of different pairs or devices
RESULTS_DIR = "results"  # below the current folder; holds the phases' files and takes the report
PLOTS_DIR = "plots"
QUICK = {"RESULTS_DIR": "results/quick", "PLOTS_DIR": "plots/quick"}
# ---------------------------------------------------------------------------------------------------------------------

PHASE = "report"
REPORT = "report.md"
OWN_PLOTS = ("master_summary", "corrected_model", "regime_map_final")  # those of the phases are drawn again in place
FLAGS = {
    "NOTE": cli.Flag(cli.text, "a line about this run, shown at the top"),
    "ALLOW_MIXED": cli.Flag(None, "go on although the phases are of different pairs or devices"),
    **cli.FOLDER_FLAGS,
}


def main(argv: list[str] | None = None) -> int:
    """Write the report and return the exit code."""
    return cli.run(lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    args = cli.parse(argv, __doc__, FLAGS, globals(), QUICK)
    folder = Path(args.results_dir)
    run.check_free(folder)
    run.check_writable(results_dir=args.results_dir, plots_dir=args.plots_dir)
    found = collection.collect(folder, args.allow_mixed)
    with run.lock(folder):
        manifest = _open_run(args, argv)
        written = _write(found, args)
        manifest.complete(plots=sorted(written.plots), missing=list(found.missing))
    _print(written, args)
    return cli.EXIT_OK


def _open_run(args: Namespace, argv: list[str] | None) -> run.Manifest:
    """Move an earlier report away and begin the manifest."""
    folder = Path(args.results_dir)
    run.move_to_previous(folder, [f"manifest_{PHASE}.json", REPORT, results.CAUSES.file, results.COMPARISON.file])
    run.move_to_previous(Path(args.plots_dir), [f"{name}.png" for name in OWN_PLOTS])
    constants = {name.lower(): getattr(args, name.lower()) for name in FLAGS}
    manifest = run.Manifest(folder, PHASE, run.run_entries(argv, constants))
    manifest.write()
    return manifest


def _write(found: Collection, args: Namespace) -> Material:
    """Write the derived tables, every plot and the report."""
    folder, study = Path(args.results_dir), published.read_study()
    has_causes = found.facts is not None and found.step_costs and found.facts.alpha is not None
    why = (
        causes.causes(found.facts, found.step_costs)
        if has_causes
        else pd.DataFrame(columns=list(results.CAUSES.columns))
    )
    beside = comparison.compare_with_study(found, study)
    results.write_table(folder, results.CAUSES, why)
    results.write_table(folder, results.COMPARISON, beside)
    if len(found.predictions):
        results.write_table(folder, results.PREDICTIONS, found.predictions)
    made = Material(found, study, beside, why, {}, args.note)
    files = plots.save_all(_plots(found, headline(made)), Path(args.plots_dir))
    relative = Path(os.path.relpath(args.plots_dir, folder)).as_posix()
    made = replace(made, plots={Path(file).stem: f"{relative}/{file}" for file in files})
    results.write_whole(folder / REPORT, document.write(made))
    return made


def _plots(found: Collection, answer: str) -> Plots:
    """Return every plot that the folder's tables allow."""
    drawn = plots.profile_plots(found.rows, found.label)
    constants = found.manifests.get("phase2", {}).get("constants")
    if found.facts is not None and constants and len(found.rows(results.REGIME_MAP)):
        drawn |= plots.analysis_plots(
            found.facts, found.rows(results.REGIME_MAP), found.rows(results.SIMULATION), constants
        )
    if found.predictions.measured.notna().any():
        drawn["corrected_model"] = lambda: model_figures.plot_corrected_model(found.predictions, found.label)
    if found.facts is not None and found.facts.cost_ratios and not found.facts.alphas.empty:
        drawn["regime_map_final"] = lambda: model_figures.plot_regime_map_final(found)
    drawn["master_summary"] = lambda: master_summary.plot_master_summary(found, answer)
    return drawn


def _print(made: Material, args: Namespace) -> None:
    print(made.collection.label)
    for note in made.collection.notes:
        print(f"note: {note}")
    print(f"\n{headline(made)}.")
    for line in made.collection.missing:
        print(f"left out: {line}")
    print(f"\nThe report is {Path(args.results_dir) / REPORT}; {len(made.plots)} plots are in {args.plots_dir}")


if __name__ == "__main__":
    sys.exit(main())
