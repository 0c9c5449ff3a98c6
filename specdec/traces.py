"""Replay of recorded agreement traces: how far independent tokens are from what the text really did."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from specdec import simulation, theory
from specdec.evidence import Evidence

SHORTEST_TRACE = 3  # tokens: the prefill's and the last can't be proposed


@dataclass(frozen=True)
class Replayed:
    """The recorded traces, replayed without any assumption.

    by_gamma: gamma, replay_steps and iid_steps (summed over prompts), replay_over_iid, deviation (of the sum, in
        standard deviations of independent agreement; NaN where that can't vary), replay_speedup and iid_speedup (means
        over prompts at this run's cost ratio with no overhead; NaN without one).
    oracle_tokens_per_step, oracle_speedup: of a schedule that knows the trace.
    autocorrelation: prompt -> lag-1 autocorrelation of agreement, prompts where it exists.
    same_steps: configurations of the run in which the replay takes as many steps as the run did, of ``compared``.
    """

    by_gamma: pd.DataFrame
    oracle_tokens_per_step: float
    oracle_speedup: float
    autocorrelation: pd.Series
    same_steps: int
    compared: int


def replay_traces(facts: Evidence) -> Replayed | None:
    """Replay each prompt's trace at each gamma and compare it with independent agreement; None without traces."""
    traces = [trace[: facts.new_tokens] for trace in facts.traces.values()]
    traces = [trace for trace in traces if len(trace) >= SHORTEST_TRACE]
    if not traces or not facts.gammas:
        return None
    oracles = [simulation.OracleGamma(trace, max(facts.gammas)) for trace in traces]
    oracle = [_replayed_counts(trace, schedule) for trace, schedule in zip(traces, oracles, strict=True)]
    lag1 = {name: simulation.lag1_autocorrelation(trace) for name, trace in facts.traces.items()}
    same = _same_steps(facts)
    return Replayed(
        by_gamma=pd.DataFrame([_by_gamma(traces, gamma, facts.cost_ratio) for gamma in facts.gammas]),
        oracle_tokens_per_step=sum(len(trace) - 1 for trace in traces) / sum(int(one.steps) for one in oracle),
        oracle_speedup=_mean_speedup(oracle, facts.cost_ratio),
        autocorrelation=pd.Series({name: value for name, value in lag1.items() if value is not None}, dtype=float),
        same_steps=sum(same),
        compared=len(same),
    )


def _replayed_counts(trace: np.ndarray, schedule) -> theory.StepCounts:
    return simulation.counts_of(simulation.replay(trace, schedule, 0, len(trace)))


def _by_gamma(traces: list[np.ndarray], gamma: int, cost_ratio: float | None) -> dict[str, float]:
    compared = [simulation.compare_with_iid(trace, gamma, len(trace)) for trace in traces]
    replay_steps, iid_steps = (sum(getattr(one, name) for one in compared) for name in ("replay_steps", "iid_steps"))
    spread = math.sqrt(sum(one.iid_steps_sd**2 for one in compared))
    independent = [
        theory.expected_counts(one.alpha, gamma, len(trace)) for one, trace in zip(compared, traces, strict=True)
    ]
    return {
        "gamma": gamma,
        "replay_steps": replay_steps,
        "iid_steps": iid_steps,
        "replay_over_iid": replay_steps / iid_steps,
        "deviation": (replay_steps - iid_steps) / spread if spread else math.nan,
        "replay_speedup": _mean_speedup([_replayed_counts(trace, gamma) for trace in traces], cost_ratio),
        "iid_speedup": _mean_speedup(independent, cost_ratio),
    }


def _mean_speedup(counts: list[theory.StepCounts], cost_ratio: float | None) -> float:
    if cost_ratio is None:
        return math.nan
    return float(np.mean([theory.decode_speedup(one, theory.StepCosts(1.0, cost_ratio)) for one in counts]))


def _same_steps(facts: Evidence) -> list[bool]:
    """Return for each configuration that has a trace whether its replay takes as many steps as the run did."""
    rows = () if facts.summary is None else facts.summary.dropna(subset="tokens_per_step").itertuples()
    same = []
    for row in rows:
        trace, tokens = facts.traces.get(row.prompt), int(row.new_tokens)
        if trace is not None and len(trace) >= tokens:
            steps = len(simulation.replay(trace, int(row.gamma), 0, tokens).proposed)
            same.append(steps == round((tokens - 1) / row.tokens_per_step))
    return same
