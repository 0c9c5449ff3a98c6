"""The study's published figures, read from results/published_rtx2070, and what follows from them.

Nothing here is fitted: every number is arithmetic on the published ones, or one of ``theory``'s formulas applied to
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from specdec import theory
from specdec.results import Table, read_table

PUBLISHED_DIR = Path(__file__).parents[1] / "results" / "published_rtx2070"
PROFILED_STEPS = 20  # steps behind each figure by gamma, as the study's design document says of its step profile
LARGEST_SAMPLE = 1000  # proposals up to which a sample size is looked for


def _table(name: str, texts: str, integers: str, numbers: str) -> Table:
    kinds = {"text": texts, "integer": integers, "number": numbers}
    columns = {column: kind for kind, names in kinds.items() for column in names.split()}
    return Table(f"{name}.csv", columns, "git checkout results/published_rtx2070")


TABLES = {
    "rates": _table("alpha_by_prompt", "prompt", "", "acceptance_rate"),
    "rates_by_gamma": _table("alpha_by_gamma", "", "gamma", "acceptance_rate"),
    "temperatures": _table("alpha_vs_temperature", "", "", "temperature acceptance_rate relative_to_greedy"),
    "hardware": _table("hardware", "quantity unit", "", "value"),
    "sync": _table("kv_sync", "", "gamma", "sync_ms share_of_step"),
    "break_even": _table("min_cost_ratio", "", "gamma", "alpha min_cost_ratio"),
    "speedups": _table("predicted_vs_measured", "", "gamma", "predicted_speedup measured_speedup"),
    "scenarios": _table("scenarios", "scenario", "", "cost_ratio helpful_pct mean_speedup"),
    "summary": _table("summary", "quantity", "", "value"),
    "timing": _table("timing", "model", "layers", "parameters_million weight_bytes ms_per_token"),
}


@dataclass(frozen=True)
class Study:
    """The published tables as read; ``rates`` and the like are what the study calls alpha."""

    rates: pd.DataFrame
    rates_by_gamma: pd.DataFrame
    temperatures: pd.DataFrame
    hardware: pd.DataFrame
    sync: pd.DataFrame
    break_even: pd.DataFrame
    speedups: pd.DataFrame
    scenarios: pd.DataFrame
    summary: pd.DataFrame
    timing: pd.DataFrame

    def hardware_value(self, quantity: str) -> float:
        """Return one figure of the hardware table."""
        return float(self.hardware.set_index("quantity").value[quantity])

    def summary_value(self, quantity: str) -> float:
        """Return one figure of the summary table."""
        return float(self.summary.set_index("quantity").value[quantity])

    def model(self, role: str) -> pd.Series:
        """Return the timing row of the ``draft`` or the ``target``."""
        return self.timing.set_index("model").loc[role]

    @property
    def cost_ratio(self) -> float:
        """The measured c, the draft's and target's isolated times (N = 50)."""
        return self.hardware_value("measured_cost_ratio")

    @property
    def gammas(self) -> tuple[int, ...]:
        return tuple(int(gamma) for gamma in self.speedups.gamma)


def read_study(folder: Path = PUBLISHED_DIR) -> Study:
    """Return the study's figures; InputError, naming the file, if one can't be read."""
    return Study(**{name: read_table(folder, table) for name, table in TABLES.items()})


def predictions_by_gamma(study: Study) -> pd.DataFrame:
    """Return per gamma Leviathan's and the corrected speedup, each the mean over the prompts' published rates.

    Columns gamma, measured, leviathan, corrected; the latter takes the published sync time of that gamma.
    """
    rates = study.rates.acceptance_rate.to_numpy()
    draft_ms, target_ms = study.model("draft").ms_per_token, study.model("target").ms_per_token
    sync_ms = study.sync.set_index("gamma").sync_ms
    rows = [
        {
            "gamma": gamma,
            "measured": measured,
            "leviathan": theory.leviathan_speedup(rates, gamma, study.cost_ratio).mean(),
            "corrected": theory.corrected_speedup(rates, gamma, draft_ms, target_ms, sync_ms[gamma]).mean(),
        }
        for gamma, measured in zip(study.gammas, study.speedups.measured_speedup, strict=True)
    ]
    return pd.DataFrame(rows)


def implied_by_time(study: Study) -> pd.DataFrame:
    """Return what the study's own times say of acceptance, per gamma.

    A step takes sync_ms / share_of_step; at the measured speedup it must have committed speedup x step / T_target
    tokens. Columns gamma, measured, step_ms, parts_ms (drafts + target + sync, from the isolated times),
    tokens_per_step, acceptance_rate, alpha, leviathan (with that alpha), without_sync (the measured speedup had sync
    taken no time).
    """
    draft_ms, target_ms = study.model("draft").ms_per_token, study.model("target").ms_per_token
    rows = []
    for row in study.speedups.merge(study.sync, on="gamma").itertuples():
        gamma, step_ms = int(row.gamma), row.sync_ms / row.share_of_step
        tokens = row.measured_speedup * step_ms / target_ms
        alpha = theory.alpha_from_tokens_per_step(tokens, gamma)
        rows.append(
            {
                "gamma": gamma,
                "measured": row.measured_speedup,
                "step_ms": step_ms,
                "parts_ms": gamma * draft_ms + target_ms + row.sync_ms,
                "tokens_per_step": tokens,
                "acceptance_rate": (tokens - 1) / gamma,
                "alpha": alpha,
                "leviathan": theory.leviathan_speedup(alpha, gamma, study.cost_ratio),
                "without_sync": row.measured_speedup / (1 - row.share_of_step),
            }
        )
    return pd.DataFrame(rows)


def alphas_implied_by_predictions(study: Study) -> pd.Series:
    """Return per gamma the one alpha at which Leviathan's model gives the published prediction."""
    alphas = {
        int(row.gamma): theory.alpha_from_tokens_per_step(
            row.predicted_speedup * (1 + row.gamma / study.cost_ratio), int(row.gamma)
        )
        for row in study.speedups.itertuples()
    }
    return pd.Series(alphas, name="alpha")


def rates_at_fixed_alpha(study: Study, alpha: float) -> pd.DataFrame:
    """Return the published acceptance rate per gamma beside the one expected at ``alpha`` and the alpha it implies."""
    rows = [
        {
            "gamma": int(row.gamma),
            "published": row.acceptance_rate,
            "expected": theory.acceptance_rate_from_alpha(alpha, int(row.gamma)),
            "implied_alpha": theory.alpha_from_acceptance_rate(row.acceptance_rate, int(row.gamma)),
        }
        for row in study.rates_by_gamma.itertuples()
    ]
    return pd.DataFrame(rows)


def smallest_sample(rates: pd.Series, decimals: int = 3) -> int | None:
    """Return the smallest number of trials of which every rate, as rounded, is a whole share; None up to 1,000."""
    tolerance = 0.5 * 10**-decimals * (1 + 1e-9)
    for trials in range(1, LARGEST_SAMPLE + 1):
        if all(abs(round(rate * trials) / trials - rate) <= tolerance for rate in rates):
            return trials
    return None


def difference_in_standard_errors(first: float, second: float, trials: int) -> float:
    """Return the difference of two shares of ``trials`` trials each, over its standard error."""
    variance = (first * (1 - first) + second * (1 - second)) / trials
    return abs(first - second) / math.sqrt(variance)


@dataclass(frozen=True)
class SamplingExample:
    """One distribution that draft and target share, and how often two rules accept the draft's sampled token."""

    probabilities: tuple[float, ...] = (0.5, 0.3, 0.2)

    @property
    def exact_match(self) -> float:
        """The target's own sampled token is the same one: sum p^2."""
        return float(np.square(self.probabilities).sum())

    @property
    def rejection_sampling(self) -> float:
        """Sum min(p, q), which is 1 where p = q."""
        return float(sum(self.probabilities))
