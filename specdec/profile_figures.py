"""Phase 3's plots, in the style of :mod:`specdec.figures`."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec import figures, profile_findings
from specdec.figures import BLUE, GREEN, GREY, MARKERS, ORANGE, PURPLE, SERIES, SKY, STYLE, VERMILION

PHASES = {  # column -> name, colour, hatch: neighbours differ in both
    "draft_ms": ("draft", BLUE, ""),
    "catchup_ms": ("catch-up", SKY, "//"),
    "target_ms": ("target", ORANGE, ""),
    "verify_ms": ("verify", GREEN, ".."),
    "sync_ms": ("sync (draft re-forward)", VERMILION, "xx"),
    "other_ms": ("other", GREY, ""),
}
PROMPT_COLOURS, PROMPT_MARKERS = (*SERIES, GREY), (*MARKERS, "*")  # eight, one for each of the study's prompts
ENGINE_COLOURS = {"published": VERMILION, "fast": BLUE}


def _stacked(axes: Axes, medians: pd.DataFrame, columns: list[str], scale: float) -> None:
    bottom = np.zeros(len(medians))
    for column, phase in zip(columns, PHASES, strict=True):
        name, colour, hatch = PHASES[phase]
        heights = medians[column].to_numpy(dtype=float) * scale
        axes.bar(range(len(medians)), heights, bottom=bottom, color=colour, hatch=hatch, edgecolor="white", label=name)
        bottom += heights
    axes.set_xticks(range(len(medians)), [str(gamma) for gamma in medians.index])
    axes.set_xlabel("gamma (draft tokens per step)")


def plot_time_breakdown(breakdown: pd.DataFrame, label: str) -> Figure:
    """Plot the mean ms of each phase per gamma, an engine a panel; bars show the quartiles of whole steps."""
    steps = breakdown[breakdown.gamma > 0]
    engines = list(steps.engine.unique())
    title = "; ".join(_largest_phase(engine, steps[steps.engine == engine]) for engine in engines)
    source = f"{label}. Means over full steps; black bars: quartiles of the whole step."
    with rc_context(STYLE):
        figure, panels = figures.new_figure(title, source, panels=len(engines), size=figures.WITH_LEGEND)
        for axes, engine in zip(panels, engines, strict=True):
            groups = steps[steps.engine == engine].groupby("gamma")
            means = groups[list(PHASES)].mean()
            _stacked(axes, means, list(PHASES), 1.0)
            low, high = (groups.step_ms.quantile(share).to_numpy() for share in (0.25, 0.75))
            total = means.sum(axis=1).to_numpy()
            spread = np.maximum([total - low, high - total], 0)
            axes.errorbar(range(len(means)), total, yerr=spread, fmt="none", color="black", capsize=5)
            axes.set_title(f"engine {engine}")
        panels[0].set_ylabel("time per step (ms)")
        _legend_beside(figure, panels[-1])
    return figure


def plot_phase_distribution(breakdown: pd.DataFrame, label: str) -> Figure:
    """Plot each phase's share of all steps' time per gamma, an engine a panel."""
    steps = breakdown[breakdown.gamma > 0]
    engines = list(steps.engine.unique())
    medians = profile_findings.phase_medians(steps)
    shares = [name.replace("_ms", "_share") for name in PHASES]
    title = "; ".join(_target_share(engine, medians.loc[engine]) for engine in engines)
    with rc_context(STYLE):
        figure, panels = figures.new_figure(
            title, f"{label}. Shares of all full steps' time.", panels=len(engines), size=figures.WITH_LEGEND
        )
        for axes, engine in zip(panels, engines, strict=True):
            _stacked(axes, medians.loc[engine], shares, 100.0)
            axes.set_title(f"engine {engine}")
            axes.set_ylim(0, 100)
        panels[0].set_ylabel("share of step time (%)")
        _legend_beside(figure, panels[-1])
    return figure


def _legend_beside(figure: Figure, axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside right center", frameon=False)


def _largest_phase(engine: str, steps: pd.DataFrame) -> str:
    shares = steps[list(PHASES)].sum() / steps.step_ms.sum()
    name = PHASES[shares.idxmax()][0]
    return f"{engine}: the {name} takes the largest part of a step, {shares.max():.0%}"


def _target_share(engine: str, medians: pd.DataFrame) -> str:
    first, last = medians.target_share.iloc[0], medians.target_share.iloc[-1]
    sync = medians.sync_share
    text = f"{engine}: the target's share goes from {first:.0%} to {last:.0%} as gamma grows"
    return text + (f", sync's from {sync.iloc[0]:.0%} to {sync.iloc[-1]:.0%}" if sync.max() > 0.01 else ", no sync")


def plot_alpha_vs_position(steps: pd.DataFrame, label: str) -> Figure:
    """Plot acceptance along the text (one gamma) and by place in the block (the widest gamma)."""
    gamma = profile_findings.usual_gamma(steps)
    own, widest = steps[steps.gamma == gamma].dropna(subset="acceptance_rate"), int(steps.gamma.max())
    places = profile_findings.acceptance_by_place(steps[steps.gamma == widest])
    with rc_context(STYLE):
        figure, [left, right] = figures.new_figure(
            _position_title(own),
            f"{label}. Left: gamma {gamma}, one dot a step; right: gamma {widest}.",
            panels=2,
            size=figures.WITH_LEGEND,
        )
        for place, (prompt, group) in enumerate(own.groupby("prompt", sort=False)):
            colour, marker = PROMPT_COLOURS[place % len(PROMPT_COLOURS)], PROMPT_MARKERS[place % len(PROMPT_MARKERS)]
            left.plot(
                group.position, group.acceptance_rate, marker, color=colour, alpha=0.6, markersize=6, label=prompt
            )
        _binned_means(left, own)
        left.set_xlabel("position in the text (new tokens)")
        left.set_ylabel("accepted share")
        left.set_ylim(-0.05, 1.05)
        right.plot(places.place, places.accepted_share, "o-", color=VERMILION, label="accepted at all")
        error = np.sqrt(places.conditional * (1 - places.conditional) / places.tried.clip(lower=1))
        right.errorbar(
            places.place, places.conditional, yerr=error, fmt="s--", color=BLUE, capsize=4, label="given all before it"
        )
        right.set_xlabel("place in the block")
        right.legend(frameon=False, loc="lower left")
        figure.legend(*left.get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def _binned_means(axes: Axes, steps: pd.DataFrame) -> None:
    bins = pd.cut(steps.position.astype(float), 6)
    groups = steps.assign(position=steps.position.astype(float)).groupby(bins, observed=True)
    means, counts = groups[["position", "acceptance_rate"]].mean(), groups.size()
    error = groups.acceptance_rate.std() / np.sqrt(counts)
    axes.errorbar(
        means.position, means.acceptance_rate, yerr=error, fmt="k-", linewidth=3, capsize=5, label="mean, all prompts"
    )


def _position_title(steps: pd.DataFrame) -> str:
    trend = profile_findings.position_trend(steps)
    if trend is None:
        return "Acceptance does not vary, or there are too few steps to say how it moves along the text"
    change = f"{trend.slope * 10:+.3f} per 10 tokens, standard error {trend.stderr * 10:.3f}"
    if abs(trend.slope) < 2 * trend.stderr:
        return f"Acceptance shows no trend along the text beyond its error ({change})"
    return f"Acceptance {'rises' if trend.slope > 0 else 'falls'} along the text ({change})"


def plot_alpha_vs_temperature(rows: pd.DataFrame, label: str) -> Figure:
    """Plot exact match, overlap and rejection sampling against temperature, prompts as a band."""
    match, overlap, sampled = (
        rows.groupby("temperature")[name].agg(["mean", "min", "max"])
        for name in ("alpha_match", "alpha_overlap", "alpha_sampled")
    )
    span = f"From T = {match.index[0]:g} to {match.index[-1]:g}"
    title = f"{span} exact match goes {_ends(match)}, rejection sampling {_ends(sampled)}"
    source = (
        f"{label}. Lines: means of prompts; bands: lowest to highest prompt. Overlap and match along the greedy text, "
        "rejection sampling along the texts that it draws."
    )
    with rc_context(STYLE):
        figure, [axes] = figures.new_figure(title, source)
        styles = (
            (match, VERMILION, "o-", "exact match with the target's choice (the study's rule)"),
            (overlap, GREEN, "D:", "overlap of both distributions, sum of min(p, q)"),
            (sampled, BLUE, "s--", "rejection sampling, measured"),
        )
        for values, colour, style, name in styles:
            axes.fill_between(values.index, values["min"], values["max"], color=colour, alpha=0.12, linewidth=0)
            axes.plot(values.index, values["mean"], style, color=colour, label=name)
        drawn = rows.groupby("temperature").match_rate.mean()
        axes.plot(
            drawn.index,
            drawn,
            "x",
            color=PURPLE,
            markersize=11,
            label="exact match drawn, accepted / proposed at gamma 4",
        )
        axes.set_xlabel("temperature")
        axes.set_ylabel("acceptance (per tried token)")
        axes.set_ylim(0, 1.05)
        axes.legend(frameon=False, loc="best")
    return figure


def _ends(values: pd.DataFrame) -> str:
    return f"from {values['mean'].iloc[0]:.2f} to {values['mean'].iloc[-1]:.2f}"


def plot_timing_analysis(isolated: pd.DataFrame, breakdown: pd.DataFrame | None, label: str) -> Figure:
    """Plot the distribution of isolated single-token times, and the sync time per gamma beside the draft's own."""
    keys = list(isolated.groupby(["engine", "model"], sort=False).groups)
    medians = isolated.groupby(["engine", "model"], sort=False).ms.median()
    ratios = [
        f"{medians[engine, 'target'] / medians[engine, 'draft']:.2f} ({engine})" for engine in isolated.engine.unique()
    ]
    title = f"One token at a time, the target takes {' and '.join(ratios)} times as long as the draft"
    with_sync = breakdown is not None and (breakdown.sync_ms > 0.01 * breakdown.step_ms).any()
    source = f"{label}. Boxes: quartiles; whiskers: 5 to 95 %; dots beyond; {len(isolated) // len(keys)} passes each."
    with rc_context(STYLE):
        figure, panels = figures.new_figure(title, source, panels=2 if with_sync else 1, share_y=False)
        boxes = panels[0].boxplot(
            [isolated[(isolated.engine == e) & (isolated.model == m)].ms for e, m in keys],
            whis=(5, 95),
            patch_artist=True,
            medianprops={"color": "black", "linewidth": 2},
        )
        for box, (engine, _) in zip(boxes["boxes"], keys, strict=True):
            box.set_facecolor(ENGINE_COLOURS[engine])
            box.set_alpha(0.6)
        panels[0].set_xticks(range(1, len(keys) + 1), [f"{engine}\n{model}" for engine, model in keys])
        panels[0].set_ylabel("time per token (ms)")
        panels[0].set_ylim(bottom=0)
        if with_sync:
            _sync_panel(panels[1], breakdown[(breakdown.engine == "published") & (breakdown.gamma > 0)])
    return figure


def _sync_panel(axes: Axes, steps: pd.DataFrame) -> None:
    groups = steps.groupby("gamma").sync_ms
    median, low, high = groups.median(), groups.quantile(0.25), groups.quantile(0.75)
    places = range(len(median))
    axes.bar(places, median, color=VERMILION, hatch="xx", edgecolor="white", label="sync, median and quartiles")
    axes.errorbar(places, median, yerr=[median - low, high - median], fmt="none", color="black", capsize=5)
    draft = (steps.draft_ms / steps.proposed).median()
    axes.axhline(draft, color=BLUE, linestyle="--", label="one draft pass")
    axes.set_xticks(places, [str(gamma) for gamma in median.index])
    axes.set_xlabel("gamma, engine published")
    axes.set_ylabel("sync per step (ms)")
    axes.set_ylim(0, 1.35 * max(high.max(), draft))  # room for the legend above the bars
    axes.legend(frameon=False, loc="upper left")


def plot_strategies(totals: pd.DataFrame, rows: pd.DataFrame, label: str) -> Figure:
    """Plot each single-request strategy's speedup over all prompts, with a dot for every prompt; best at the top."""
    timed = totals.dropna(subset="speedup").sort_values("speedup")
    batched = [name.startswith("batch") for name, _ in timed.index]
    batches, timed = timed[batched], timed[[not batch for batch in batched]]
    unfit = ("oracle", "short output")  # knows the text; is a workload
    usable = [temperature == 0 and not name.startswith(unfit) for name, temperature in timed.index]
    best = timed[usable].iloc[-1]
    title = f"Of the strategies that anyone can use, {best.name[0]} is fastest: {best.speedup:.2f} times plain decoding"
    source = (
        f"{label}. Bars: all prompts' time together, orange where tokens are drawn; dots: single prompts. Plain "
        "decoding of the same length and temperature, engine fast, prefill included."
    )
    if len(batches):
        source += f" Not drawn, {batches.index[-1][0]}: {batches.speedup.iloc[-1]:.2f} times one by one."
    with rc_context(STYLE):
        figure, (axes,) = figures.new_figure(title, source, panels=1, size=(11, 0.42 * len(timed) + 2.4))
        places = range(len(timed))
        colours = [BLUE if temperature == 0 else ORANGE for _, temperature in timed.index]
        axes.barh(places, timed.speedup, color=colours, alpha=0.55)
        for place, (name, temperature) in enumerate(timed.index):
            own = rows[(rows.strategy == name) & (rows.temperature == temperature)].speedup.dropna()
            axes.plot(own, [place] * len(own), "o", color="black", markersize=4, alpha=0.6)
        names = [f"{name}, T {temperature:g}" if temperature else name for name, temperature in timed.index]
        axes.set_yticks(places, names)
        axes.axvline(1, color="black", linestyle="--")
        axes.set_xlabel("speedup over plain decoding")
    return figure


def plot_kv_compression(rows: pd.DataFrame, label: str) -> Figure:
    """Plot what each technique holds a token in the draft's and the target's cache, agreement beside the bars."""
    sides = [where for where in ("draft", "target") if (rows["where"] == where).any()]
    title = "; ".join(_smallest(where, rows[rows["where"] == where]) for where in sides)
    source = (
        f"{label}. Bytes of the entries held, per token of text. Beside each bar: alpha, and the share of new tokens "
        "that are the uncompressed target's own."
    )
    with rc_context(STYLE):
        figure, panels = figures.new_figure(title, source, panels=len(sides), share_y=False, size=(14, 6))
        for axes, where in zip(panels, sides, strict=True):
            own = rows[rows["where"] == where].iloc[::-1]
            places = range(len(own))
            axes.barh(places, own.bytes_per_token, color=BLUE if where == "draft" else ORANGE, alpha=0.7)
            for place, row in zip(places, own.itertuples(), strict=True):
                text = f" alpha {row.alpha:.2f}, {row.tokens_equal_share:.0%} own"
                axes.text(row.bytes_per_token, place, text, va="center", fontsize=11)
            axes.set_yticks(places, own.technique)
            axes.set_xlim(0, 1.7 * own.bytes_per_token.max())  # room for the words
            axes.set_xlabel("bytes per token")
            axes.set_title(f"in the {where}")
    return figure


def _smallest(where: str, rows: pd.DataFrame) -> str:
    full = rows[rows.technique == "none"]
    if full.empty:
        return f"caches of the {where}"
    smallest = rows.loc[rows.bytes_per_token.idxmin()]
    share = smallest.bytes_per_token / full.iloc[0].bytes_per_token
    alphas = f"alpha {full.iloc[0].alpha:.2f} to {smallest.alpha:.2f}"
    return f"{where}: {smallest.technique} holds {share:.0%} of the bytes, {alphas}"
