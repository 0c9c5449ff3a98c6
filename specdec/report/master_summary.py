"""The summary plot that stands alone: six panels, one message each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec import figures, findings, results, theory
from specdec.figures import BLACK, BLUE, GREY, STYLE, VERMILION, YELLOW
from specdec.profile_figures import ENGINE_COLOURS, PHASES
from specdec.report import causes
from specdec.report.collection import Collection
from specdec.report.model_figures import ENGINE_MARKERS, MODELS

STEP_SHIFT = 0.12  # of the engines from each other on a gamma axis
MASTER = (22, 14)  # inches: six panels, each legible at half size


@dataclass(frozen=True)
class Panel:
    """One of the six: draws its message and returns it as the panel's title; ``needs`` names what it rests on."""

    draw: Callable[[Axes, Collection], str]
    possible: Callable[[Collection], bool]
    needs: str


def plot_master_summary(collection: Collection, answer: str) -> Figure:
    """Plot the six messages of the report, one a panel; a panel without its data says what would make it."""
    panels = (
        Panel(_speedups, lambda c: bool(c.summaries), results.PHASE1),
        Panel(_cost_ratios, lambda c: bool(c.facts and c.facts.cost_ratios), results.PHASE1),
        Panel(_step_account, _steps_are_known, f"{results.PHASE3} (sections 1 and 4)"),
        Panel(_acceptance, lambda c: bool(len(c.rows(results.BY_TEMPERATURE))), f"{results.PHASE3} (section 3)"),
        Panel(_predictions, lambda c: bool(_errors(c)), f"{results.PHASE1} with a gamma above 0"),
        Panel(_what_would_pay, lambda c: bool(len(c.rows(results.SIMULATION)) and c.summaries), results.PHASE2),
    )
    with rc_context(STYLE):
        figure, axes = figures.new_grid(answer, f"{collection.label}.", rows=2, columns=3, size=MASTER)
        for number, (panel, each) in enumerate(zip(panels, axes, strict=True), 1):
            if panel.possible(collection):
                title = panel.draw(each, collection)
            else:
                title = "not measured"
                each.text(0.5, 0.5, f"needs {panel.needs}", ha="center", va="center", transform=each.transAxes)
                each.set_axis_off()
            each.set_title(figures.wrapped(f"{number}. {title}", MASTER[0] / 3.1, 16), loc="left", fontweight="bold")
    return figure


def _speedups(axes: Axes, collection: Collection) -> str:
    counts = []
    for side, (engine, rows) in enumerate(collection.summaries.items()):
        gammas = sorted(rows.gamma.unique())
        for place, gamma in enumerate(gammas):
            own = rows[rows.gamma == gamma].speedup.dropna()
            x = place + (side - 0.5 * (len(collection.summaries) - 1)) * 3 * STEP_SHIFT
            shown = {"label": f"{engine}: a dot a prompt, line: mean"} if not place else {}
            axes.plot([x] * len(own), own, ENGINE_MARKERS[engine], color=ENGINE_COLOURS[engine], alpha=0.6, **shown)
            axes.plot([x - STEP_SHIFT, x + STEP_SHIFT], [own.mean()] * 2, color=ENGINE_COLOURS[engine], linewidth=4)
        axes.set_xticks(range(len(gammas)), [str(gamma) for gamma in gammas])
        count = findings.count_helpful(rows)
        counts.append(f"{count.helpful} of {count.total} ({engine})" if count else f"none measured ({engine})")
    axes.axhline(1, color=BLACK, linewidth=1.2, linestyle="--")
    axes.set_xlabel("gamma (draft tokens per step)")
    axes.set_ylabel("speedup, what a user waits (x)")
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend
    axes.legend(frameon=False, loc="upper right")
    return "Faster than plain decoding: " + ", ".join(counts)


def _cost_ratios(axes: Axes, collection: Collection) -> str:
    facts = collection.facts
    by_bytes, by_layers = causes.bytes_ratio(facts), causes.layers_ratio(facts)
    bars = {f"measured\n{engine}": (ratio, ENGINE_COLOURS[engine]) for engine, ratio in facts.cost_ratios.items()}
    bars |= {"by bytes of\nweights": (by_bytes, GREY), "by\nlayers": (by_layers, GREY)}
    names = [f"{name}\n{height:.2f}" for name, (height, _) in bars.items()]
    axes.bar(names, [height for height, _ in bars.values()], color=[colour for _, colour in bars.values()])
    for place, engine in enumerate(facts.cost_ratios):
        rows = collection.summaries[engine].cost_ratio.dropna()
        axes.plot([place] * 2, [rows.min(), rows.max()], color=BLACK, marker="_", markersize=14)  # over the rows
    if not facts.alphas.empty:
        least = [theory.break_even_cost_ratio(facts.alpha, gamma) for gamma in facts.gammas]
        least = [ratio for ratio in least if ratio is not None]
        if least:
            axes.axhline(
                min(least), color=VERMILION, linestyle="--", label=f"needed at alpha {facts.alpha:.2f}, no overhead"
            )
            axes.legend(frameon=False, loc="upper left")
    axes.set_ylabel("cost ratio c = T_target / T_draft", labelpad=10)
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])  # room for the legend
    listed = " and ".join(f"{ratio:.2f} ({engine})" for engine, ratio in facts.cost_ratios.items())
    return f"Cost ratio c: {listed}; reading weights alone would give {by_bytes:.2f}"


def _steps_are_known(collection: Collection) -> bool:
    return bool(collection.step_costs) and bool(((collection.runs.steps > 0) & (collection.runs.gamma > 0)).any())


def _step_account(axes: Axes, collection: Collection) -> str:
    """Stack what a step costs, in plain tokens, and mark how many tokens it commits."""
    engine = collection.profiled_engines[-1]
    breakdown = collection.rows(results.BREAKDOWN)
    own = breakdown[breakdown.engine == engine]
    plain = own[own.gamma == 0].step_ms.median()
    means = own[own.gamma > 0].groupby("gamma")[list(PHASES)].mean() / plain
    bottom = np.zeros(len(means))
    for phase, (name, colour, hatch) in PHASES.items():
        heights = means[phase].to_numpy(dtype=float)
        if heights.max() > 0.005:
            axes.bar(
                range(len(means)), heights, bottom=bottom, color=colour, hatch=hatch, edgecolor="white", label=name
            )
        bottom += heights
    runs = collection.runs[(collection.runs.engine == engine)].drop_duplicates(["prompt", "gamma"])
    sums = runs.groupby("gamma")[["accepted", "steps"]].sum().astype(float)
    committed = ((sums.accepted + sums.steps) / sums.steps).reindex(means.index)
    axes.plot(range(len(means)), committed, "D", color=YELLOW, markeredgecolor=BLACK, markersize=13, label="committed")
    axes.set_xticks(range(len(means)), [str(gamma) for gamma in means.index])
    axes.set_xlabel("gamma (draft tokens per step)")
    axes.set_ylabel("time of a step in plain tokens")
    axes.legend(frameon=False, loc="upper left")
    gain = committed.to_numpy() / bottom
    best = int(np.nanargmax(gain))
    return (
        f"Engine {engine}: at gamma {means.index[best]} a step costs {bottom[best]:.2f} plain tokens and commits "
        f"{committed.iloc[best]:.2f}"
    )


def _acceptance(axes: Axes, collection: Collection) -> str:
    rows = collection.rows(results.BY_TEMPERATURE)
    means = rows.groupby("temperature")[["alpha_match", "alpha_sampled"]].mean()
    for column, colour, line, name in (
        ("alpha_match", VERMILION, "o-", "exact match (the study's rule)"),
        ("alpha_sampled", BLUE, "s--", "rejection sampling"),
    ):
        groups = rows.groupby("temperature")[column]
        axes.fill_between(means.index, groups.min(), groups.max(), color=colour, alpha=0.12, linewidth=0)
        axes.plot(means.index, means[column], line, color=colour, label=f"{name}; band: prompts")
    axes.set_xlabel("temperature")
    axes.set_ylabel("acceptance per tried token")
    axes.set_ylim(0, 1.3)  # room for the legend
    axes.legend(frameon=False, loc="upper left")
    last = means.iloc[-1]
    return (
        f"At T {means.index[-1]:g} exact match accepts {last.alpha_match:.2f}, rejection sampling "
        f"{last.alpha_sampled:.2f}"
    )


def _errors(collection: Collection) -> dict[str, dict[str, float]]:
    """Return the mean absolute error of each model, model -> engine -> error, of those that predict anything."""
    errors: dict[str, dict[str, float]] = {}
    for engine, group in collection.predictions.groupby("engine", sort=False):
        for column in (*MODELS, "replay"):
            quality = findings.prediction_quality(group, column, "measured")
            if quality:
                errors.setdefault(column, {})[engine] = quality.mean_absolute_error
    return errors


def _predictions(axes: Axes, collection: Collection) -> str:
    errors = _errors(collection)
    names = {"leviathan_rate": "Leviathan,\nrate", "leviathan_alpha": "Leviathan,\nalpha"}
    for side, engine in enumerate(collection.predictions.engine.unique()):
        places = np.arange(len(errors)) + 0.4 * side
        heights = [by_engine.get(engine, np.nan) for by_engine in errors.values()]
        axes.bar(places, heights, width=0.38, color=ENGINE_COLOURS[engine], label=engine)
    axes.set_xticks(np.arange(len(errors)) + 0.2, [names.get(column, column) for column in errors])
    axes.set_ylabel("mean absolute error of speedup")
    axes.legend(frameon=False, loc="upper right")
    mean = {column: float(np.mean(list(by_engine.values()))) for column, by_engine in errors.items()}
    best = min(mean, key=mean.get)
    return f"The {names.get(best, best)} model is nearest: {mean[best]:.2f} off on average".replace("\n", " ")


def _what_would_pay(axes: Axes, collection: Collection) -> str:
    facts = collection.facts
    scenarios = collection.rows(results.SIMULATION).sort_values("cost_ratio")
    spread = np.maximum([scenarios.mean_speedup - scenarios.low, scenarios.high - scenarios.mean_speedup], 0)
    axes.errorbar(
        scenarios.cost_ratio,
        scenarios.mean_speedup,
        yerr=spread,
        fmt="o-",
        color=BLUE,
        capsize=4,
        label="best gamma of each prompt; 5 to 95 % of requests",
    )
    axes.plot(scenarios.cost_ratio, scenarios.mean_all_gammas, "s-.", color=VERMILION, label="mean over all gammas")
    axes.axhline(1, color=BLACK, linewidth=1.2, linestyle="--")
    for engine, ratio in facts.cost_ratios.items():
        axes.axvline(ratio, 0, 0.6, color=ENGINE_COLOURS[engine], linestyle=":", label=f"c here, {engine}")
    axes.set_xlabel("cost ratio c = T_target / T_draft")
    axes.set_ylabel("simulated speedup, no overhead (x)")
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])  # room for the legend
    axes.legend(frameon=False, loc="upper left")
    paying = scenarios[scenarios.mean_speedup > 1]
    if paying.empty:
        return "No simulated cost ratio pays, even without overhead"
    return f"Without overhead these texts pay from c = {paying.cost_ratio.iloc[0]:.2f} on (of those simulated)"
