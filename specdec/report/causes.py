"""How much each cause takes: its time in a step, and the speedup that the full model gives without it.

All numbers are the measured costs of Phase 3 and the measured alphas of Phase 1 put into ``theory.full_speedup``; a
cause is taken away by changing one of those costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from scipy.optimize import brentq

from specdec import theory
from specdec.evidence import Evidence
from specdec.results import CAUSES
from specdec.theory import StepCosts

WRONG_GUESSES, SLOW_DRAFT = "wrong guesses", "draft slower than its weights"
WIDER_FORWARD, SYNC, CATCH_UP, HOST = "wider target forward", "sync", "catch-up", "host work"
LARGEST_COST_RATIO = 100.0  # up to which a break-even is looked for


def causes(facts: Evidence, costs: Mapping[tuple[str, int], StepCosts]) -> pd.DataFrame:
    """Return the rows of ``causes.csv``: engine, gamma, cause, ms, share, speedup, speedup_without.

    ms and share: time in a step that proposes gamma tokens. speedup: the full model's decode speedup, mean over the
    prompts; speedup_without: the same had this one cause taken no time, or for wrong guesses had all been right.
    """
    rows = []
    for (engine, gamma), cost in costs.items():
        step_ms = cost.step_time(gamma) + cost.sync
        speedup = mean_speedup(facts, gamma, cost)
        for cause, (ms, without) in _parts(facts, gamma, cost).items():
            row = {"engine": engine, "gamma": gamma, "cause": cause, "ms": ms, "share": ms / step_ms}
            rows.append(row | {"speedup": speedup, "speedup_without": without})
    return pd.DataFrame(rows, columns=list(CAUSES.columns))


def _parts(facts: Evidence, gamma: int, cost: StepCosts) -> dict[str, tuple[float, float]]:
    """Return {cause: (its ms in a step, the speedup without it)}."""
    by_weights = cost.t_target / bytes_ratio(facts)
    faster_draft = replace(cost, t_draft=min(cost.t_draft, by_weights))
    rate = float(np.mean([theory.acceptance_rate_from_alpha(alpha, gamma) for alpha in facts.alphas]))
    perfect = theory.full_speedup(1.0, gamma, facts.new_tokens, cost)

    def without(**changed: object) -> float:
        return mean_speedup(facts, gamma, replace(cost, **changed))

    return {
        WRONG_GUESSES: (gamma * (1 - rate) * cost.t_draft, perfect),
        SLOW_DRAFT: (gamma * (cost.t_draft - faster_draft.t_draft), mean_speedup(facts, gamma, faster_draft)),
        WIDER_FORWARD: (cost.target_time(gamma + 1) - cost.t_target, without(verify_ratio=None)),
        SYNC: (cost.sync, without(sync=0.0)),
        CATCH_UP: (cost.catch_up * _catch_up_share(facts, gamma), without(catch_up=0.0)),
        HOST: (cost.host, without(host=0.0)),
    }


def _catch_up_share(facts: Evidence, gamma: int) -> float:
    """Return the share of steps that have a token to catch up on, mean over the prompts."""
    counts = [theory.expected_counts(alpha, gamma, facts.new_tokens) for alpha in facts.alphas]
    return float(np.mean([count.catch_up_steps / count.steps for count in counts]))


def mean_speedup(facts: Evidence, gamma: int, cost: StepCosts) -> float:
    """Return the full model's decode speedup at ``cost``, mean over the prompts' alphas."""
    return float(np.mean([theory.full_speedup(alpha, gamma, facts.new_tokens, cost) for alpha in facts.alphas]))


def bytes_ratio(facts: Evidence) -> float:
    """Return the cost ratio that reading the weights alone would give."""
    weights = facts.models.drop_duplicates("role").set_index("role").weight_bytes
    return float(weights["target"] / weights["draft"])


def layers_ratio(facts: Evidence) -> float:
    """Return the target's layers over the draft's."""
    layers = facts.models.drop_duplicates("role").set_index("role").layers
    return float(layers["target"] / layers["draft"])


def break_even_with_overhead(facts: Evidence, gamma: int, cost: StepCosts) -> float | None:
    """Return the smallest cost ratio at which the full model's mean speedup is 1, all other costs as measured.

    None where it would take more than LARGEST_COST_RATIO.
    """

    def excess(ratio: float) -> float:
        return mean_speedup(facts, gamma, replace(cost, t_draft=cost.t_target / ratio)) - 1

    lowest = 1 / LARGEST_COST_RATIO
    if excess(LARGEST_COST_RATIO) <= 0:
        return None
    return float(brentq(excess, lowest, LARGEST_COST_RATIO, rtol=1e-6))
