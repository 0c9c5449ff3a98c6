"""What to do, from Phase 1's summary rows: speculate or not, and with which gamma."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from specdec import findings
from specdec.findings import Helpful

YES, MOSTLY, SOMETIMES, NO = "Yes", "Yes, for most texts", "Only for some texts", "No"


@dataclass(frozen=True)
class Advice:
    """What one engine's rows say.

    verdict: with one gamma for everything. gamma, mean: the one gamma with the highest mean speedup. faster: prompts
    of ``prompts`` that it speeds up. count: over all configurations. by_prompt: prompt, category, gamma, speedup,
    speedup_low, speedup_high of each prompt's best row, in hindsight.
    """

    engine: str
    verdict: str
    gamma: int
    mean: float
    faster: int
    prompts: int
    count: Helpful
    by_prompt: pd.DataFrame

    @property
    def certain(self) -> bool:
        """Whether repeats show how far the timings spread."""
        return self.count.surely is not None


def advise(engine: str, rows: pd.DataFrame) -> Advice | None:
    """Return the advice from one engine's summary rows; None where no speedup was measured."""
    count = findings.count_helpful(rows)
    if count is None:
        return None
    measured = rows.dropna(subset="speedup")
    means = measured.groupby("gamma").speedup.mean()
    gamma = int(means.idxmax())
    own = measured[measured.gamma == gamma]
    faster = int((own.speedup > 1).sum())
    best = measured.loc[measured.groupby("prompt", sort=False).speedup.idxmax()]
    return Advice(
        engine=engine,
        verdict=_verdict(float(means[gamma]), faster, len(own), count),
        gamma=gamma,
        mean=float(means[gamma]),
        faster=faster,
        prompts=len(own),
        count=count,
        by_prompt=best[["prompt", "category", "gamma", "speedup", "speedup_low", "speedup_high"]],
    )


def _verdict(mean: float, faster: int, prompts: int, count: Helpful) -> str:
    if mean > 1 and faster == prompts:
        return YES
    if mean > 1 and faster > prompts / 2:
        return MOSTLY
    return SOMETIMES if count.helpful else NO


def gamma_to_use(row: pd.Series) -> str:
    """Return what to set for one prompt: a gamma, or not to speculate; says where the repeats do not agree."""
    if row.speedup <= 1:
        return "don't"
    unsure = pd.notna(row.speedup_low) and row.speedup_low <= 1
    return f"gamma {row.gamma}" + (", if at all: not faster in every repeat" if unsure else "")
