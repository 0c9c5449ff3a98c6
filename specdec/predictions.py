"""What each model predicts for each configuration that was run, beside what was measured.

One function, :func:`predict`, makes every row of ``predictions.csv``. Phase 2 calls it with what Phase 1 measured;
Phase 3 calls it again with the costs of each engine's steps and so fills the columns that need them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from specdec import theory
from specdec.results import PREDICTIONS
from specdec.simulation import counts_of, replay

NEEDS = {
    "leviathan_rate": "acceptance_rate and the cost ratio, of a run that proposed something",
    "leviathan_alpha": "alpha and the cost ratio, of a run that proposed something",
    "corrected": "T_draft, T_target and sync time, which phase3_profiling.py measures",
    "full": "v(k), sync or catch-up and host time, which phase3_profiling.py measures",
    "replay": "what full needs, which phase3_profiling.py measures, beside agreement_trace.csv",
    "replay_free": "agreement_trace.csv and the cost ratio",
}


def predict(
    summary: pd.DataFrame,
    traces: Mapping[str, np.ndarray],
    costs: Mapping[str, theory.StepCosts] | None = None,
) -> pd.DataFrame:
    """Return the rows of ``predictions.csv``: one per prompt, engine and gamma; what can't be computed is NaN.

    summary: rows of one or both summary files, one below the other.
    traces: prompt -> agreement at each new token, (tokens,) of bool.
    costs: engine -> what the parts of its step cost; without an engine's, its corrected, full and replay are NaN.

    measured is ``decode_speedup``. leviathan_rate and leviathan_alpha take the row's own cost ratio; corrected, full
    and replay take ``costs``, the latter on the prompt's recorded agreement; replay_free is replay with a step that
    costs gamma draft forwards and one target forward, as Leviathan assumes, so that its distance from leviathan_alpha
    is that of the assumption of independent tokens and endless output.
    Raises ValueError for costs whose verify_ratio is too short for a row's gamma.
    """
    rows = [_predicted_row(row, traces.get(row.prompt), (costs or {}).get(row.engine)) for row in summary.itertuples()]
    return pd.DataFrame(rows, columns=list(PREDICTIONS.columns))


def predict_from_profile(
    summary: pd.DataFrame,
    runs: pd.DataFrame,
    traces: Mapping[str, np.ndarray],
    costs: Mapping[tuple[str, int], theory.StepCosts],
) -> pd.DataFrame:
    """Return the rows of ``predictions.csv`` with nothing in them that was measured in the row they predict.

    summary, traces: as in :func:`predict`; runs: rows of ``speculative_runs.csv``. costs: (engine, gamma) -> what the
    parts of a step cost, from Phase 3. Acceptance is one number per prompt, pooled over its gammas; the cost ratio is
    that of ``costs``. Configurations without costs are left out.
    """
    pooled = pooled_acceptance(runs)
    parts = []
    for (engine, gamma), step in costs.items():
        rows = summary[(summary.engine == engine) & (summary.gamma == gamma)].copy()
        rows["cost_ratio"] = step.t_target / step.t_draft
        rows["alpha"] = rows["prompt"].map(pooled.alpha).astype(float)
        rate = rows["prompt"].map(pooled.acceptance_rate).astype(float)
        for column, acceptance in (("predicted_speedup", rate), ("predicted_speedup_alpha", rows.alpha)):
            known = acceptance.notna()
            rows.loc[known, column] = theory.leviathan_speedup(acceptance[known], gamma, step.t_target / step.t_draft)
        parts.append(predict(rows, traces, {engine: step}))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(PREDICTIONS.columns))


def pooled_acceptance(runs: pd.DataFrame) -> pd.DataFrame:
    """Return each prompt's alpha and acceptance_rate, pooled over gammas; without prompts where nothing was tried.

    Repeats and engines repeat a greedy run's tokens, so only the first of each configuration counts.
    """
    first = runs.drop_duplicates(["prompt", "gamma"])
    sums = first.groupby("prompt", sort=False)[["proposed", "accepted", "rejections"]].sum().astype(float)
    tried = sums.accepted + sums.rejections
    table = pd.DataFrame({"alpha": sums.accepted / tried, "acceptance_rate": sums.accepted / sums.proposed})
    return table[tried > 0]


def _predicted_row(row, trace: np.ndarray | None, costs: theory.StepCosts | None) -> dict:
    predicted = {
        "prompt": row.prompt,
        "engine": row.engine,
        "gamma": row.gamma,
        "measured": row.decode_speedup,
        "leviathan_rate": row.predicted_speedup,
        "leviathan_alpha": row.predicted_speedup_alpha,
    }
    gamma, tokens = int(row.gamma), int(row.new_tokens)
    if row.cost_ratio > 0:
        predicted["replay_free"] = _replayed(trace, gamma, tokens, theory.StepCosts(1.0, float(row.cost_ratio)))
    if costs is not None:
        predicted["replay"] = _replayed(trace, gamma, tokens, costs)
    if costs is not None and not math.isnan(row.alpha):
        predicted["corrected"] = float(
            theory.corrected_speedup(row.alpha, gamma, costs.t_draft, costs.t_target, costs.sync)
        )
        predicted["full"] = theory.full_speedup(row.alpha, gamma, tokens, costs) if tokens > 1 else math.nan
    return predicted


def _replayed(trace: np.ndarray | None, gamma: int, tokens: int, costs: theory.StepCosts) -> float:
    if trace is None or not 1 < tokens <= len(trace):
        return math.nan
    return float(theory.decode_speedup(counts_of(replay(trace, gamma, 0, tokens)), costs))


def missing(predictions: pd.DataFrame) -> dict[str, str]:
    """Return {column: what it needs} for the predictions that no row has."""
    return {column: need for column, need in NEEDS.items() if predictions[column].isna().all()}


def overhead_factors(predictions: pd.DataFrame) -> pd.DataFrame:
    """Return measured / predicted by engine, gamma and prediction: below 1, the model leaves a cost out.

    Columns engine, gamma, prediction, prompts, measured and predicted (means over prompts that have both), factor
    (their ratio), low and high (over single prompts; NaN with fewer than two).
    """
    rows = []
    for (engine, gamma), group in predictions.groupby(["engine", "gamma"], sort=False):
        for column in NEEDS:
            both = group.dropna(subset=["measured", column])
            if both.empty:
                continue
            factors = both.measured / both[column]
            measured, predicted = both.measured.mean(), both[column].mean()
            rows.append(
                {
                    "engine": engine,
                    "gamma": int(gamma),
                    "prediction": column,
                    "prompts": len(both),
                    "measured": measured,
                    "predicted": predicted,
                    "factor": measured / predicted,
                    "low": factors.min() if len(both) > 1 else math.nan,
                    "high": factors.max() if len(both) > 1 else math.nan,
                }
            )
    columns = ["engine", "gamma", "prediction", "prompts", "measured", "predicted", "factor", "low", "high"]
    return pd.DataFrame(rows, columns=columns)
