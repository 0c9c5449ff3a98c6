"""What the phases left in one results folder, for the report: any part may be missing, no part is of another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from specdec import evidence, predictions, profile_findings, results, run
from specdec.errors import InputError
from specdec.evidence import Evidence
from specdec.results import Table

PHASE2_TABLES = (results.SIMULATION, results.REGIME_MAP, results.BREAK_EVEN)
SECTIONS = {  # of Phase 3, with what they make
    1: (results.BREAKDOWN,),
    2: (results.BY_POSITION,),
    3: (results.BY_TEMPERATURE,),
    4: (results.ISOLATED, results.VERIFY_COST),
    5: (results.STRATEGIES,),
    6: (results.KV_COMPRESSION,),
}
OWN_TO_A_PHASE = ("sections", "engines", "results_dir", "plots_dir", "quick", "resume")  # may differ between phases


@dataclass(frozen=True)
class Collection:
    """One pair on one machine, as far as it was measured.

    label: names pair and machine. facts, runs: Phase 1's evidence and rows of ``speculative_runs.csv``; None and no
    rows without it. manifests: phase -> manifest, and tables: file -> rows, only those that are there. notes: what the
    reader must know of them. missing: what is not there, and the command that makes it.
    """

    label: str
    facts: Evidence | None
    runs: pd.DataFrame
    manifests: Mapping[str, Mapping[str, Any]]
    tables: Mapping[str, pd.DataFrame]
    notes: tuple[str, ...]
    missing: tuple[str, ...]

    def rows(self, table: Table) -> pd.DataFrame:
        """Return a table's rows, none if it is missing."""
        return self.tables.get(table.file, pd.DataFrame(columns=list(table.columns)))

    @property
    def summaries(self) -> dict[str, pd.DataFrame]:
        """Phase 1's summary rows by engine, in the order in which the engines ran."""
        if self.facts is None:
            return {}
        return dict(tuple(self.facts.summary.groupby("engine", sort=False)))

    @cached_property
    def step_costs(self) -> dict:
        """What a step costs, (engine, gamma) -> StepCosts in ms; empty without Phase 3's sections 1 and 4."""
        return profile_findings.step_costs(self.rows(results.BREAKDOWN), self.rows(results.VERIFY_COST))

    @property
    def profiled_engines(self) -> list[str]:
        """The engines whose step costs are known."""
        return list(dict.fromkeys(engine for engine, _ in self.step_costs))

    @cached_property
    def predictions(self) -> pd.DataFrame:
        """Rows of ``predictions.csv``, from all that is there now: with Phase 3's costs if it has them."""
        if self.facts is None:
            return pd.DataFrame(columns=list(results.PREDICTIONS.columns))
        if not self.step_costs:
            return self.facts.predictions
        return predictions.predict_from_profile(self.facts.summary, self.runs, self.facts.traces, self.step_costs)


def collect(folder: Path, allow_mixed: bool = False) -> Collection:
    """Return what is in ``folder``.

    Raises InputError where there is nothing, where a file is damaged, and where the phases are of different pairs or
    devices, unless ``allow_mixed``.
    """
    found = {phase: run.read_manifest(folder, phase) for phase in run.SCRIPTS}
    manifests = {phase: manifest for phase, manifest in found.items() if manifest is not None}
    if not manifests:
        raise InputError(f"there is no run in {folder}; run python {results.PHASE1} first, or name its --results-dir")
    notes = _mixed(folder, manifests, allow_mixed) + _unfinished(manifests)
    missing = [f"{script} was not run." for phase, script in run.SCRIPTS.items() if phase not in manifests]
    facts, runs = None, pd.DataFrame(columns=list(results.RUNS.columns))
    if "phase1" in manifests and (folder / results.RUNS.file).exists():
        facts, runs = evidence.read_run(folder, allow_mixed), results.read_table(folder, results.RUNS)
        notes += [note for note in facts.notes if "was not finished" not in note]  # said above for every phase
    tables = _stored(folder, PHASE2_TABLES) if _belongs(manifests, notes) else {}
    if "phase3" in manifests:
        tables |= _stored(folder, [table for made in SECTIONS.values() for table in made] + [results.CLAIMS])
        missing += _missing_sections(tables, manifests["phase3"])
    return Collection(_label(folder, manifests), facts, runs, manifests, tables, tuple(notes), tuple(missing))


def _label(folder: Path, manifests: Mapping[str, Mapping]) -> str:
    described = [manifests[phase] for phase in ("phase1", "phase3") if phase in manifests]
    return (
        evidence.label(folder, described[0]) if described else str(manifests["phase2"].get("input", "an unknown pair"))
    )


def _stored(folder: Path, tables: list[Table] | tuple[Table, ...]) -> dict[str, pd.DataFrame]:
    stored = {table.file: results.stored_rows(folder, table) for table in tables}
    return {file: rows for file, rows in stored.items() if len(rows)}


def _mixed(folder: Path, manifests: Mapping[str, Mapping], allowed: bool) -> list[str]:
    """Compare Phase 3's pair, device and constants with Phase 1's: the first two must agree, the rest is listed."""
    if not {"phase1", "phase3"} <= set(manifests):
        return []
    first, third = manifests["phase1"], manifests["phase3"]
    if run.whose(first) != run.whose(third):
        labels = [evidence.label(folder, entry) for entry in (first, third)]
        problem = f"Phase 1 in {folder} is of {labels[0]}; Phase 3 of {labels[1]}"
        if labels[0] == labels[1]:
            problem += " with other weights or on another variant of the processor"
        if not allowed:
            raise InputError(f"{problem}; run one of them again, or go on with --allow-mixed")
        return [f"MIXED INPUT: {problem}."]
    constants = [dict(entry.get("constants") or {}) for entry in (first, third)]
    shared = {name: constants[1][name] for name in constants[1] if name in constants[0] and name not in OWN_TO_A_PHASE}
    return [
        f"Phases 1 and 3 ran with different constants: {name} was {constants[0][name]} in Phase 1, {value} in Phase 3."
        for name, value in shared.items()
        if constants[0][name] != value
    ]


def _unfinished(manifests: Mapping[str, Mapping]) -> list[str]:
    return [
        f"{run.SCRIPTS[phase]} was not finished: what follows rests on the part that is there; it goes on with "
        "--resume."
        for phase, manifest in manifests.items()
        if manifest.get("status") != "complete"
    ]


def _belongs(manifests: Mapping[str, Mapping], notes: list[str]) -> bool:
    """Return whether Phase 2's tables are there and of this Phase 1 run; says so in ``notes`` if of another."""
    if "phase2" not in manifests:
        return False
    analysed = manifests["phase2"].get("phase1_run_id")
    if "phase1" in manifests and analysed != manifests["phase1"].get("run_id"):
        notes.append(f"Phase 2's tables are of an earlier run and left out; run python {results.PHASE2} again.")
        return False
    return True


def _missing_sections(tables: Mapping[str, pd.DataFrame], manifest: Mapping) -> list[str]:
    absent = [n for n, made in SECTIONS.items() if any(table.file not in tables for table in made)]
    if not absent:
        return []
    listed = ",".join(map(str, absent))
    flags = _flags_without_sections(manifest.get("command") or [])
    before = f", and the flags it had: {' '.join(flags)}" if flags else ""
    return [f"{results.PHASE3} has no section {listed}: run it with --sections {listed} --resume{before}."]


def _flags_without_sections(command: Sequence[str]) -> list[str]:
    """Return the flags of a stored command but for those that say what to run; folders stand in it by name alone."""
    flags, skip = [], False
    for part in command[1:]:
        if part not in ("--sections", "--resume") and not skip:
            flags.append(part)
        skip = part == "--sections"
    return flags
