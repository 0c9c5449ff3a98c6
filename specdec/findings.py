"""What the tables say, as numbers: helpful configurations, quality of predictions, alpha by gamma."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd


@dataclass(frozen=True)
class Helpful:
    """How many configurations a run sped up. ``surely`` counts those whose slowest repeat did too."""

    helpful: int
    surely: int | None  # None with one repeat
    total: int
    best: float
    best_prompt: str
    best_gamma: int
    mean: float


def count_helpful(summary: pd.DataFrame) -> Helpful | None:
    """Return the count over one engine's summary rows; None where no speedup was measured."""
    measured = summary.dropna(subset="speedup")
    if measured.empty:
        return None
    best = measured.loc[measured.speedup.idxmax()]
    low = measured.speedup_low.dropna()
    return Helpful(
        helpful=int((measured.speedup > 1).sum()),
        surely=int((low > 1).sum()) if len(low) else None,
        total=len(measured),
        best=float(best.speedup),
        best_prompt=str(best["prompt"]),
        best_gamma=int(best.gamma),
        mean=float(measured.speedup.mean()),
    )


@dataclass(frozen=True)
class PredictionQuality:
    """A prediction against the measured decode speedup. ``correlation`` is None where either does not vary."""

    rows: int
    correlation: float | None
    mean_absolute_error: float
    verdicts_agree: int  # rows where both or neither exceed 1


def prediction_quality(
    rows: pd.DataFrame, predicted: str, measured: str = "decode_speedup"
) -> PredictionQuality | None:
    """Compare the columns ``predicted`` and ``measured``; None where no row has both."""
    rows = rows.dropna(subset=[predicted, measured])
    if rows.empty:
        return None
    correlation = rows[predicted].corr(rows[measured]) if len(rows) > 1 else math.nan
    return PredictionQuality(
        rows=len(rows),
        correlation=None if math.isnan(correlation) else float(correlation),
        mean_absolute_error=float((rows[predicted] - rows[measured]).abs().mean()),
        verdicts_agree=int(((rows[predicted] > 1) == (rows[measured] > 1)).sum()),
    )


def alpha_by_gamma(runs: pd.DataFrame) -> pd.DataFrame:
    """Return acceptance_rate, alpha and its standard error per gamma, pooled over prompts.

    Repeats of a greedy run repeat its tokens, so only the first of each configuration counts.
    """
    first = runs[runs.proposed > 0].drop_duplicates(["prompt", "gamma"])
    sums = first.groupby("gamma")[["proposed", "accepted", "rejections"]].sum().astype(float)
    tried = sums.accepted + sums.rejections
    alpha = sums.accepted / tried
    return pd.DataFrame(
        {
            "acceptance_rate": sums.accepted / sums.proposed,
            "alpha": alpha,
            "standard_error": (alpha * (1 - alpha) / tried) ** 0.5,
        }
    )
