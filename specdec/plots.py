"""Which plots the tables of Phases 2 and 3 allow: for their scripts, and for the report, which draws them all again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from specdec import claims, figures, profile_figures, results, theory
from specdec.evidence import Evidence

CURVE_POINTS = 60  # cost ratios at which exact means are drawn
Plots = dict[str, Callable[[], Figure]]


def analysis_plots(
    facts: Evidence, regime: pd.DataFrame, scenarios: pd.DataFrame, constants: Mapping[str, Any]
) -> Plots:
    """Return Phase 2's plots, name -> how to draw it.

    regime, scenarios: rows of ``regime_map.csv`` and ``simulation_results.csv``. constants: Phase 2's own, of which
    gammas, regime_gamma and curve_cost_ratios are drawn.
    """
    position = {facts.alpha_kind: facts.alpha, "c": facts.cost_ratio}
    position = {name: value for name, value in position.items() if value is not None}
    gammas, curve_ratios = tuple(constants["gammas"]), tuple(constants["curve_cost_ratios"])
    plots: Plots = {
        "regime_heatmap": lambda: figures.plot_regime_heatmap(regime, constants["regime_gamma"], position, facts.label),
        "analytical_curves": lambda: figures.plot_analytical_curves(curve_ratios, gammas, facts.alphas, facts.label),
        "min_alpha_needed": lambda: figures.plot_min_alpha_needed(gammas, facts.alphas, facts.cost_ratios, facts.label),
    }
    if len(scenarios):
        plots["speedup_vs_cost_ratio"] = lambda: figures.plot_speedup_vs_cost_ratio(
            scenarios, exact_curve(facts, scenarios.cost_ratio), facts.label
        )
    return plots


def exact_curve(facts: Evidence, cost_ratios: pd.Series) -> pd.DataFrame:
    """Return the exact expected speedups, without overhead, over a range that holds every one of ``cost_ratios``.

    Columns cost_ratio, best (gamma of each prompt, mean over prompts), best_lowest and best_highest (prompt), and
    all_gammas (mean over prompts and gammas).
    """
    ratios = np.geomspace(min([0.9, *cost_ratios]), max([12.0, *cost_ratios]) * 1.05, CURVE_POINTS)
    counts = [[theory.expected_counts(a, gamma, facts.new_tokens) for gamma in facts.gammas] for a in facts.alphas]
    rows = []
    for ratio in ratios:
        costs = theory.StepCosts(1.0, float(ratio))
        speedups = np.array([[theory.decode_speedup(of_gamma, costs) for of_gamma in row] for row in counts])
        best = speedups.max(axis=1)  # (prompts,)
        rows.append(
            {
                "cost_ratio": ratio,
                "best": best.mean(),
                "best_lowest": best.min(),
                "best_highest": best.max(),
                "all_gammas": speedups.mean(),
            }
        )
    return pd.DataFrame(rows)


def profile_plots(rows: Callable[[results.Table], pd.DataFrame], label: str) -> Plots:
    """Return Phase 3's plots, name -> how to draw it; ``rows`` gives a table's rows, none if it was not made."""
    breakdown, position, temperature, isolated, strategies, compressed = map(
        rows,
        (
            results.BREAKDOWN,
            results.BY_POSITION,
            results.BY_TEMPERATURE,
            results.ISOLATED,
            results.STRATEGIES,
            results.KV_COMPRESSION,
        ),
    )
    plots: Plots = {}
    if not (breakdown.gamma > 0).any():
        breakdown = breakdown.iloc[:0]  # the plots show steps that proposed something
    if len(breakdown):
        plots["time_breakdown"] = lambda: profile_figures.plot_time_breakdown(breakdown, label)
        plots["phase_distribution"] = lambda: profile_figures.plot_phase_distribution(breakdown, label)
    if (position.gamma > 0).any():
        plots["alpha_vs_position"] = lambda: profile_figures.plot_alpha_vs_position(position, label)
    if len(temperature):
        plots["alpha_vs_temperature"] = lambda: profile_figures.plot_alpha_vs_temperature(temperature, label)
    if len(strategies):
        plots["strategies"] = lambda: profile_figures.plot_strategies(claims.totals(strategies), strategies, label)
    if len(compressed):
        plots["kv_compression"] = lambda: profile_figures.plot_kv_compression(compressed, label)
    if len(isolated):
        synced = breakdown[(breakdown.engine == "published") & (breakdown.gamma > 0)]  # no other engine syncs
        of_sync = synced if len(synced) else None
        plots["timing_analysis"] = lambda: profile_figures.plot_timing_analysis(isolated, of_sync, label)
    return plots


def save_all(plots: Plots, folder: Path) -> list[str]:
    """Draw every plot into ``folder``; returns the files' names."""
    return [figures.save(plot(), folder, name).name for name, plot in plots.items()]
