"""Plots of the models, in the style of ``specdec.figures``: original against corrected, and the regime map."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specdec import figures, findings, theory
from specdec.evidence import Evidence
from specdec.figures import BLACK, DIVERGING, GREEN, GREY, ORANGE, PURPLE, SKY, STYLE
from specdec.profile_figures import ENGINE_COLOURS
from specdec.report import causes
from specdec.report.collection import Collection

MODELS = {  # column of predictions.csv -> name, colour, line
    "leviathan_rate": ("Leviathan, acceptance rate (the study's)", PURPLE, "D:"),
    "leviathan_alpha": ("Leviathan, alpha", SKY, "^--"),
    "corrected": ("corrected: with sync", ORANGE, "v-."),
    "full": ("full: all costs", GREEN, "s--"),
}
ENGINE_MARKERS = {"published": "s", "fast": "o"}
MAP_POINTS = 160  # on each axis of the continuous map


def plot_corrected_model(predictions: pd.DataFrame, label: str) -> Figure:
    """Plot measured decode speedup per gamma beside what each model predicts, an engine a panel."""
    engines = list(predictions.engine.unique())
    errors = [_errors(engine, predictions[predictions.engine == engine]) for engine in engines]
    title = (
        "Predictions are off by " + "; ".join(filter(None, errors)) if any(errors) else "Measured, nothing predicted"
    )
    source = f"{label}. Means over prompts; bars: lowest to highest prompt measured. Error: mean absolute, all rows."
    if predictions.corrected.isna().all():
        source += " Corrected and full need Phase 3's sections 1 and 4."
    with rc_context(STYLE):
        figure, panels = figures.new_figure(title, source, panels=len(engines), size=figures.WITH_LEGEND)
        for axes, engine in zip(panels, engines, strict=True):
            groups = predictions[predictions.engine == engine].groupby("gamma")
            gammas = [str(gamma) for gamma in groups.groups]
            measured = groups.measured
            spread = np.maximum([measured.mean() - measured.min(), measured.max() - measured.mean()], 0)
            axes.errorbar(gammas, measured.mean(), yerr=spread, fmt="o-", color=BLACK, capsize=5, label="measured")
            for column, (name, colour, line) in MODELS.items():
                if groups[column].mean().notna().any():
                    axes.plot(gammas, groups[column].mean(), line, color=colour, label=name)
            axes.axhline(1, color=GREY, linewidth=1.2, linestyle="--", zorder=1)
            axes.set_title(f"engine {engine}")
            axes.set_xlabel("gamma (draft tokens per step)")
        panels[0].set_ylim(bottom=0)  # shared, so once all is drawn
        panels[0].set_ylabel("decode speedup (x)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def _errors(engine: str, rows: pd.DataFrame) -> str:
    found = {column: findings.prediction_quality(rows, column, "measured") for column in MODELS}
    named = {"leviathan_alpha": "Leviathan's", "corrected": "corrected", "full": "full"}
    listed = [f"{found[column].mean_absolute_error:.2f} ({name})" for column, name in named.items() if found[column]]
    return ", ".join(listed) + f" for engine {engine}" if listed else ""


def plot_regime_map_final(collection: Collection) -> Figure:
    """Plot the best speedup of any gamma over alpha and c, where it reaches 1, and where this pair's prompts lie.

    Dashed: where it reaches 1 with the costs that Phase 3 measured, an engine a line; only the draft's time changes.
    """
    facts = collection.facts
    alphas = np.linspace(0.02, 0.98, MAP_POINTS)
    ratios = np.geomspace(0.9, max([12.0, *(1.2 * ratio for ratio in facts.cost_ratios.values())]), MAP_POINTS)
    gammas = np.array(facts.gammas)
    best = theory.leviathan_speedup(alphas[:, None, None], gammas, ratios[None, :, None]).max(axis=2)
    source = (
        f"{collection.label}. Colour: the best of gamma {', '.join(map(str, gammas))} by Leviathan's formula; solid "
        "line: it reaches 1."
    )
    if collection.step_costs:
        source += " Dashed: with this run's wider forwards, sync and host work."
    with rc_context(STYLE):
        figure, [axes] = figures.new_figure(_map_title(collection), source, size=figures.WITH_LEGEND)
        mesh = axes.pcolormesh(ratios, alphas, best, cmap=DIVERGING, norm=TwoSlopeNorm(1.0, 0.2, 3.0), rasterized=True)
        axes.contour(ratios, alphas, best, levels=[1.0], colors=BLACK, linewidths=2)
        handles = [Line2D([], [], color=BLACK, linewidth=2, label="pays by Leviathan's formula")]
        handles += [_overhead_line(axes, collection, engine) for engine in collection.profiled_engines]
        for engine, ratio in facts.cost_ratios.items():
            marker, colour = ENGINE_MARKERS[engine], ENGINE_COLOURS[engine]
            axes.plot([ratio] * len(facts.alphas), facts.alphas, marker, color=colour, markeredgecolor="white")
            handles.append(Line2D([], [], marker=marker, color=colour, linestyle="", label=f"prompts, {engine}"))
        figures.cost_ratio_axis(axes, ratios)
        axes.set_ylabel("alpha (chance that a tried token is accepted)")
        axes.set_ylim(alphas[0], alphas[-1])
        axes.grid(False)
        figure.colorbar(mesh, ax=axes, label="predicted speedup (x)", extend="max")
        figure.legend(handles=handles, loc="outside right center", frameon=False)
    return figure


def _map_title(collection: Collection) -> str:
    facts = collection.facts
    ideal = [f"{_paying_without_overhead(facts, ratio)} ({engine})" for engine, ratio in facts.cost_ratios.items()]
    title = f"Some gamma pays for {' and '.join(ideal)} of {len(facts.alphas)} prompts before overhead"
    real = [f"{_paying_with_overhead(collection, engine)} ({engine})" for engine in collection.profiled_engines]
    return title + (f", for {' and '.join(real)} with it" if real else "")


def _paying_without_overhead(facts: Evidence, cost_ratio: float) -> int:
    """Count the prompts for which some gamma pays by Leviathan's formula."""
    gammas = np.array(facts.gammas)
    return sum(theory.leviathan_speedup(alpha, gammas, cost_ratio).max() > 1 for alpha in facts.alphas)


def _paying_with_overhead(collection: Collection, engine: str) -> int:
    """Count the prompts whose place on the map, at Phase 1's c, is beyond the engine's dashed line."""
    ratio = collection.facts.cost_ratios.get(engine, np.nan)
    return sum(_least_cost_ratio(collection, engine, alpha) < ratio for alpha in collection.facts.alphas)


def _overhead_line(axes: Axes, collection: Collection, engine: str) -> Line2D:
    """Draw the least c that pays at each alpha with the engine's own costs, any gamma."""
    alphas = np.linspace(0.05, 0.98, 32)
    least = [_least_cost_ratio(collection, engine, alpha) for alpha in alphas]
    axes.plot(least, alphas, "--", color=ENGINE_COLOURS[engine], linewidth=2.5)
    return Line2D([], [], color=ENGINE_COLOURS[engine], linestyle="--", label=f"pays with costs of {engine}")


def _least_cost_ratio(collection: Collection, engine: str, alpha: float) -> float:
    one = replace(collection.facts, alphas=pd.Series([alpha]))
    found = [
        causes.break_even_with_overhead(one, gamma, cost)
        for (name, gamma), cost in collection.step_costs.items()
        if name == engine
    ]
    return min((ratio for ratio in found if ratio is not None), default=np.nan)
