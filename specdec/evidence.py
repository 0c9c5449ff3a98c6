"""What the analysis works on: one pair's facts, times, alphas and traces, from a run's files or from the study's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specdec import predictions, published, results, run
from specdec.errors import InputError

STUDY_PROMPTS = "mean_of_8_prompts"  # the study gives speedups per gamma only
STUDY_ENGINE = "published"
ROLES = ("draft", "target")
COUNTED = ("prompt", "engine", "gamma", "repeat", "new_tokens", "proposed", "accepted", "rejections")  # never blank


@dataclass(frozen=True)
class Evidence:
    """One pair on one machine.

    label: names the pair and the machine. source: which run it is. notes: what the reader must know about the input.
    models: per engine and role (``draft``, ``target``): name, layers, weight_bytes, weights_ms (reading them at this
        machine's bandwidth; NaN if that was not measured) and measured_ms per token (NaN if nothing was decoded).
    cost_ratios: engine -> c, absent if not measured.
    alphas: prompt -> alpha, only prompts where it could be measured; ``alpha_kind`` says which of the two rates.
    traces: prompt -> agreement of draft and target at each new token, (tokens,) of bool.
    summary: one row per prompt, engine and gamma; None for the study.
    """

    label: str
    models: pd.DataFrame
    cost_ratios: Mapping[str, float]
    alphas: pd.Series
    alpha_kind: str
    gammas: tuple[int, ...]
    new_tokens: int
    predictions: pd.DataFrame
    traces: Mapping[str, np.ndarray] = field(default_factory=dict)
    summary: pd.DataFrame | None = None
    notes: tuple[str, ...] = ()
    source: str = "published figures"

    @property
    def cost_ratio(self) -> float | None:
        """The first engine's c, None if no engine has one."""
        return next(iter(self.cost_ratios.values()), None)

    @property
    def alpha(self) -> float | None:
        """The mean of the prompts' alphas, None if none has one."""
        return None if self.alphas.empty else float(self.alphas.mean())


def read_run(folder: Path, allow_mixed: bool = False) -> Evidence:
    """Return the evidence of the Phase 1 run in ``folder``.

    Raises InputError, naming file and remedy, if a file is missing or damaged, and where the files hold different
    configurations, unless ``allow_mixed``.
    """
    manifest = run.read_manifest(folder, "phase1")
    if manifest is None:
        raise InputError(f"{folder / 'manifest_phase1.json'} is missing; run {results.PHASE1} to make it")
    partial = manifest.get("status") != "complete"
    notes = [f"The run in {folder} was not finished: what follows rests on the part that is there."] if partial else []
    runs = _read_rows(folder, results.RUNS)
    summary = _read_summaries(folder, runs)
    notes += _mixed(folder, runs, summary, manifest, allow_mixed)
    traces = _read_traces(folder, partial)
    notes += _gaps(summary)
    if traces:
        left_out = [name for name in summary["prompt"].unique() if name not in traces]
        notes += [f"{name}: its agreement trace has gaps or is missing, so it is not replayed." for name in left_out]
    models = _understood(folder, lambda: _models(folder, manifest, runs))
    cost_ratios = summary[summary.cost_ratio > 0].groupby("engine", sort=False).cost_ratio.median()
    return Evidence(
        label=label(folder, manifest),
        source=f"Phase 1's run {manifest.get('run_id', 'unnamed')}, begun {manifest.get('started', 'unknown')}",
        models=models,
        cost_ratios={engine: float(ratio) for engine, ratio in cost_ratios.items()},
        alphas=predictions.pooled_acceptance(runs).alpha,
        alpha_kind="alpha",
        gammas=tuple(sorted(int(gamma) for gamma in summary.gamma.unique() if gamma > 0)),
        new_tokens=int(summary.new_tokens.max()),
        predictions=predictions.predict(summary, traces),
        traces=traces,
        summary=summary,
        notes=tuple(notes),
    )


def study_evidence(study: published.Study) -> Evidence:
    """Return the study's figures in the same form; its alphas are acceptance rates, and it kept no trace."""
    bandwidth = study.hardware_value("memory_bandwidth") * 1e9
    models = [
        {
            "engine": STUDY_ENGINE,
            "role": role,
            "name": name,
            "layers": int(study.model(role).layers),
            "weight_bytes": float(study.model(role).weight_bytes),
            "weights_ms": study.model(role).weight_bytes / bandwidth * 1e3,
            "measured_ms": float(study.model(role).ms_per_token),
        }
        for role, name in zip(ROLES, ("Qwen2-0.5B", "Qwen2-1.5B"), strict=True)
    ]
    by_gamma = published.predictions_by_gamma(study)
    rows = by_gamma.rename(columns={"leviathan": "leviathan_rate"}).assign(prompt=STUDY_PROMPTS, engine=STUDY_ENGINE)
    return Evidence(
        label="the study's pair: draft Qwen2-0.5B, target Qwen2-1.5B, float16, on its RTX 2070",
        models=pd.DataFrame(models),
        cost_ratios={STUDY_ENGINE: study.cost_ratio},
        alphas=study.rates.set_index("prompt").acceptance_rate,
        alpha_kind="acceptance_rate",
        gammas=study.gammas,
        new_tokens=int(study.summary_value("new_tokens")),
        predictions=rows.reindex(columns=list(results.PREDICTIONS.columns)),
    )


def _read_summaries(folder: Path, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the summary rows of every engine that has runs, the engine that ran first above."""
    tables = [results.SUMMARIES[engine] for engine in runs.engine.unique() if engine in results.SUMMARIES]
    if not tables:
        raise InputError(f"{folder / results.RUNS.file} names no known engine; run {results.PHASE1} to make it")
    return pd.concat([_read_rows(folder, table) for table in tables], ignore_index=True)


def _read_rows(folder: Path, table: results.Table) -> pd.DataFrame:
    """Return a table that has at least one row, and in every row what names and counts it."""
    rows = results.read_table(folder, table)
    if rows.empty:
        raise InputError(f"{folder / table.file} has no rows; run {results.PHASE1} to make it")
    for column in COUNTED:
        if column in rows and rows[column].isna().any():
            raise InputError(f"{folder / table.file} has a row without {column}; run {results.PHASE1} to make it")
    return rows


def _mixed(folder: Path, runs: pd.DataFrame, summary: pd.DataFrame, manifest: Mapping, allowed: bool) -> list[str]:
    """Return a banner if the files hold configurations of different runs; InputError unless ``allowed``."""
    key = ["prompt", "engine", "gamma"]
    in_runs, in_summary = (set(frame[key].itertuples(index=False, name=None)) for frame in (runs, summary))
    problems = []
    if stray := in_summary - in_runs:
        problems.append(f"{_named(min(stray))} is in the summary but not in {results.RUNS.file}")
    elif manifest.get("status") == "complete" and (stray := in_runs - in_summary):
        problems.append(f"{_named(min(stray))} is in {results.RUNS.file} but not in the summary")
    constants = manifest.get("constants") or {}
    for name, column in (("gammas", "gamma"), ("engines", "engine"), ("max_new_tokens", "new_tokens")):
        known = constants.get(name)
        known = known if isinstance(known, list) else [known]
        if name in constants and (stray := [value for value in summary[column].unique() if value not in known]):
            problems.append(f"{column} {stray[0]} is in the summary, the manifest's run had {known}")
    if problems and not allowed:
        raise InputError(
            f"the files in {folder} are of different runs: {'; '.join(problems)}; run {results.PHASE1} again, "
            "or go on with --allow-mixed"
        )
    return [f"MIXED INPUT: {problem}" for problem in problems]


def _named(key: tuple[str, str, int]) -> str:
    prompt, engine, gamma = key
    return f"{prompt}, engine {engine}, gamma {gamma}"


def _read_traces(folder: Path, partial: bool) -> dict[str, np.ndarray]:
    """Return the agreement traces; a run that was not finished may have none yet."""
    if partial and not (folder / results.TRACE.file).exists():
        return {}
    trace = results.read_table(folder, results.TRACE).dropna(subset=["position", "agrees"])
    groups = trace.sort_values("position", kind="stable").groupby("prompt", sort=False)
    return {
        str(prompt): rows.agrees.to_numpy(dtype=bool)
        for prompt, rows in groups
        if list(rows.position) == list(range(len(rows)))
    }


def _gaps(summary: pd.DataFrame) -> list[str]:
    """Say which configurations have no speedup and which prompts no alpha."""
    notes = []
    if blank := int(summary.speedup.isna().sum()):
        notes.append(f"{blank} of {len(summary)} configurations have no speedup and are left out of the means.")
    proposing = summary[summary.gamma > 0].groupby("prompt", sort=False)
    for prompt, alphas in proposing.alpha:
        if alphas.isna().all():
            notes.append(
                f"{prompt}: no proposed token was tried, so it has no alpha and is left out of the simulation."
            )
        elif alphas.max() == 0:
            notes.append(f"{prompt}: no proposed token was accepted (alpha 0): no cost ratio can make it pay.")
    return notes


def label(folder: Path, manifest: Mapping) -> str:
    """Return the pair and the device of a run in words; InputError if the manifest does not describe them."""
    return _understood(folder, lambda: _label(folder, manifest))


def _label(folder: Path, manifest: Mapping) -> str:
    draft, target = (_model_entry(folder, manifest, role) for role in ROLES)
    device = (manifest.get("device") or {}).get("name", target.get("device", "an unknown device"))
    name = manifest["pair"].get("name", "unnamed")
    name += " (embedded and small, not a run of the study)" if name == "tiny" else ""
    return f"pair {name}: draft {draft['name']}, target {target['name']}, {target.get('dtype', '')}, on {device}"


def _understood(folder: Path, describe: Callable[[], Any]) -> Any:
    """Return what ``describe`` makes of a manifest; InputError where it is of another shape than Phase 1 writes."""
    try:
        return describe()
    except (AttributeError, KeyError, TypeError, OverflowError, ValueError) as error:
        path = folder / "manifest_phase1.json"
        raise InputError(f"{path} does not describe the run ({error}); run {results.PHASE1} to make it") from error


def _model_entry(folder: Path, manifest: Mapping, role: str) -> Mapping:
    try:
        entry = manifest["pair"][role]
        entry["name"], entry["layers"], entry["bytes_per_token"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the {role}: no {error}") from None
    return entry


def _models(folder: Path, manifest: Mapping, runs: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for engine, of_engine in runs.groupby("engine", sort=False):
        for role, who in zip(ROLES, ("draft", "baseline"), strict=True):
            entry = _model_entry(folder, manifest, role)
            ceiling = (manifest.get("ceilings") or {}).get(role, {}).get("ceiling_ms", math.nan)
            rows.append(
                {
                    "engine": engine,
                    "role": role,
                    "name": entry["name"],
                    "layers": int(entry["layers"]),
                    "weight_bytes": float(entry["bytes_per_token"]),
                    "weights_ms": float(ceiling),
                    "measured_ms": _decode_ms(of_engine, who),
                }
            )
    return pd.DataFrame(rows)


def _decode_ms(runs: pd.DataFrame, who: str) -> float:
    """Return the median time per token of decoding alone, without the prefill and the token it gives."""
    alone = runs[runs.new_tokens > 1].drop_duplicates(["prompt", "repeat"])
    per_token = (alone[f"{who}_time_s"] - alone[f"{who}_prefill_s"]) / (alone.new_tokens - 1).astype(float)
    return float(per_token.median() * 1e3) if per_token.notna().any() else math.nan
