"""Every plot of the suite, in one style: each function makes one figure whose title states what its data show.

Figures are made for PNG files and never shown, so no display is needed. Colours are Okabe and Ito's, which stay apart
under the common forms of colour blindness; lines differ in marker or dash as well. Type is large enough to be read at
half size.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from specdec import theory
from specdec.errors import InputError

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)  # in the order that lines take them
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#6E6E6E"  # notes and reference lines
DIVERGING = LinearSegmentedColormap.from_list("slower to faster", [VERMILION, "#FBE3D0", "#FFFFFF", "#CFE3F1", BLUE])
STYLE = {
    "font.size": 15,
    "axes.titlesize": 15,
    "axes.labelsize": 15,
    "legend.fontsize": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "lines.linewidth": 2.5,
    "lines.markersize": 8,
    "figure.dpi": 100,
}
WIDE = (11, 7.2)  # inches, at 100 dots each
WITH_LEGEND = (13, 7.2)  # a legend of seven entries stands beside the axes
TITLE_POINTS, SOURCE_POINTS = 17, 12.5
CHARACTERS_PER_INCH = 6.7  # of a title, where it is wrapped
SOURCE_LINE_INCHES = 0.215  # height of a line at the foot
NAME_DISTANCE = 0.13  # least distance of two scenarios' names, in log c
ALPHA_AXIS = np.linspace(0, 1, 201)


def save(figure: Figure, folder: Path, name: str) -> Path:
    """Write ``figure`` as ``name``.png in ``folder``, which is made if need be; InputError if it can't be written."""
    path = folder / f"{name}.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with rc_context(STYLE):
            figure.savefig(path)
    except OSError as error:
        raise InputError(f"plots folder {folder} can't be written: {error.strerror}") from error
    return path


def new_figure(
    title: str, source: str, panels: int = 1, size: tuple[float, float] = WIDE, share_y: bool = True
) -> tuple[Figure, list[Axes]]:
    """Return a figure with its finding on top, its source at the foot, and ``panels`` axes side by side."""
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    source = wrapped(source, size[0], SOURCE_POINTS)
    foot = (source.count("\n") + 2) * SOURCE_LINE_INCHES / size[1]
    figure.get_layout_engine().set(rect=(0.01, foot, 0.98, 0.98 - foot))
    axes = figure.subplots(1, panels, squeeze=False, sharey=share_y)[0]
    title = wrapped(title, size[0], TITLE_POINTS)
    figure.suptitle(title, fontsize=TITLE_POINTS, fontweight="bold", x=0.02, ha="left")
    figure.text(0.02, 0.015, source, fontsize=SOURCE_POINTS, color=GREY, ha="left", va="bottom")
    return figure, list(axes)


def new_grid(title: str, source: str, rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """Return a figure as ``new_figure`` does, with ``rows`` x ``columns`` axes that share nothing."""
    figure, [first] = new_figure(title, source, size=size)
    first.remove()
    return figure, list(figure.subplots(rows, columns).flat)


def wrapped(text: str, width_inches: float, font_size: float) -> str:
    """Return ``text`` broken into lines that fit ``width_inches`` at ``font_size`` points."""
    return textwrap.fill(text, int(width_inches * CHARACTERS_PER_INCH * TITLE_POINTS / font_size))


def cost_ratio_axis(axes: Axes, cost_ratios: np.ndarray) -> None:
    """Make x a logarithmic axis of cost ratios with plain numbers."""
    axes.set_xscale("log")
    ticks = [tick for tick in (0.5, 1, 1.5, 2, 3, 4, 6, 8, 10, 15, 20, 40) if min(cost_ratios) <= tick]
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if tick <= max(cost_ratios)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
    axes.set_xlim(min(cost_ratios), max(cost_ratios))
    axes.set_xlabel("cost ratio c = T_target / T_draft (log scale)")


def _break_even_line(axes: Axes) -> None:
    axes.axhline(1, color=BLACK, linewidth=1.2, linestyle="--", zorder=1)


def first_crossing(cost_ratios: np.ndarray, speedups: np.ndarray) -> float | None:
    """Return the cost ratio at which ``speedups`` first exceeds 1, None if it never does."""
    above = np.flatnonzero(np.asarray(speedups) > 1)
    return float(cost_ratios[above[0]]) if len(above) else None


def _pays_from(crossing: float | None, cost_ratios: np.ndarray) -> str:
    if crossing is None:
        return f"at no c up to {max(cost_ratios):.3g}"
    return f"from c = {crossing:.1f}" if crossing > min(cost_ratios) else f"at every c from {min(cost_ratios):.2g}"


def plot_speedup_vs_cost_ratio(scenarios: pd.DataFrame, curve: pd.DataFrame, label: str) -> Figure:
    """Plot simulated speedup against c: best gamma per prompt (with the spread of requests), and over all gammas.

    scenarios: rows of ``simulation_results.csv``. curve: exact means, columns cost_ratio, best, all_gammas and, over
    prompts, best_lowest and best_highest.
    """
    ratios = curve.cost_ratio.to_numpy()
    best, every = (_pays_from(first_crossing(ratios, curve[name]), ratios) for name in ("best", "all_gammas"))
    title = f"On average speculation pays {best} with each prompt's best gamma"
    title += ", nor over all gammas" if best == every and best.startswith("at no") else f", {every} over all gammas"
    source = f"{label}. Dots: Monte Carlo; bars: 5 to 95 % of single requests; band: lowest to highest prompt."
    with rc_context(STYLE):
        figure, [axes] = new_figure(title, source)
        axes.fill_between(ratios, curve.best_lowest, curve.best_highest, color=BLUE, alpha=0.15, linewidth=0)
        axes.plot(ratios, curve.best, color=BLUE, label="best gamma of each prompt, in hindsight")
        axes.plot(ratios, curve.all_gammas, color=VERMILION, linestyle="-.", label="mean over all gammas")
        _scenario_dots(axes, scenarios)
        _break_even_line(axes)
        cost_ratio_axis(axes, ratios)
        axes.set_ylabel("decode speedup (x)")
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", frameon=False)
    return figure


def _scenario_dots(axes: Axes, scenarios: pd.DataFrame) -> None:
    """Mark the scenarios on both curves, a bar where their spread is known, and name them above the axes."""
    name_from = -np.inf
    for row in scenarios.sort_values("cost_ratio").itertuples():
        if not pd.isna(row.low):
            axes.plot([row.cost_ratio] * 2, [row.low, row.high], color=BLUE, linewidth=1.8)
        axes.plot(row.cost_ratio, row.mean_speedup, "o", color=BLUE)
        axes.plot(row.cost_ratio, row.mean_all_gammas, "s", color=VERMILION)
        name_from = max(np.log(row.cost_ratio), name_from + NAME_DISTANCE)  # near scenarios: names side by side
        axes.annotate(
            row.scenario.replace("_", " "),
            xy=(row.cost_ratio, 1.0),
            xytext=(np.exp(name_from), 1.03),
            xycoords=axes.get_xaxis_transform(),
            textcoords=axes.get_xaxis_transform(),
            arrowprops={"arrowstyle": "-", "color": GREY},
            rotation=30,
            rotation_mode="anchor",
            fontsize=12,
        )


def plot_regime_heatmap(regime: pd.DataFrame, gamma: int, position: Mapping[str, float], label: str) -> Figure:
    """Plot Leviathan's speedup as a table over alpha and c at one gamma; a ring marks cells where only another pays.

    regime: rows of ``regime_map.csv``. position: this pair's alpha and c, in that order, each under its
    name, where they are known.
    """
    table = regime[regime.gamma == gamma].pivot(index="alpha", columns="cost_ratio", values="speedup")
    best = regime.groupby(["alpha", "cost_ratio"]).speedup.max().unstack()
    pays, elsewhere = table.to_numpy() > 1, (table.to_numpy() <= 1) & (best.to_numpy() > 1)
    title = (
        f"At gamma {gamma} speculation pays in {pays.sum()} of {pays.size} cells; "
        f"with another gamma in {elsewhere.sum()} more (ringed)"
    )
    source = f"{label}. Leviathan's formula, which leaves every overhead out. Bold: above 1." + _where(position)
    with rc_context(STYLE):
        figure, [axes] = new_figure(title, source)
        norm = TwoSlopeNorm(1.0, vmin=0.2, vmax=3.0)
        image = axes.imshow(table, cmap=DIVERGING, norm=norm, origin="lower", aspect="auto")
        for (row, column), speedup in np.ndenumerate(table.to_numpy()):
            _cell(axes, column, row, speedup, ringed=elsewhere[row, column])
        _mark_position(axes, table, position)
        axes.set_xticks(range(len(table.columns)), [f"{ratio:g}" for ratio in table.columns])
        axes.set_yticks(range(len(table.index)), [f"{alpha:g}" for alpha in table.index])
        axes.set_xlabel("cost ratio c = T_target / T_draft")
        axes.set_ylabel("alpha (chance that a tried token is accepted)")
        axes.grid(False)
        figure.colorbar(image, ax=axes, label="predicted speedup (x)", extend="both")
    return figure


def _cell(axes: Axes, column: int, row: int, speedup: float, ringed: bool) -> None:
    weight = "bold" if speedup > 1 else "normal"
    colour = "white" if speedup > 2.4 or speedup < 0.35 else BLACK
    axes.text(column, row, f"{speedup:.2f}", ha="center", va="center", fontweight=weight, color=colour, fontsize=14)
    if ringed:
        axes.plot(column, row, "o", markersize=36, markerfacecolor="none", markeredgecolor=BLACK, markeredgewidth=1.6)


def _mark_position(axes: Axes, table: pd.DataFrame, position: Mapping[str, float]) -> None:
    """Put a star where this pair lies between the cells' centres, if it lies within the table."""
    if len(position) < 2:
        return
    alpha, ratio = position.values()
    rows, columns = table.index.to_numpy(), table.columns.to_numpy()
    if rows[0] <= alpha <= rows[-1] and columns[0] <= ratio <= columns[-1]:
        column, row = np.interp(ratio, columns, range(len(columns))), np.interp(alpha, rows, range(len(rows)))
        axes.plot(column, row, "*", markersize=17, color=YELLOW, markeredgecolor=BLACK, markeredgewidth=1.5)


def _where(position: Mapping[str, float]) -> str:
    known = [f"{name} {value:.2f}" for name, value in position.items()]
    return f" Star: this pair, {', '.join(known)}." if known else ""


def plot_analytical_curves(
    cost_ratios: tuple[float, ...], gammas: tuple[int, ...], alphas: pd.Series, label: str
) -> Figure:
    """Plot Leviathan's speedup over alpha at three cost ratios, with the second document's formula beside it.

    alphas: the prompts' own, shown as the grey span from the lowest to the highest.
    """
    needed = [_least_alpha(ratio, gammas) for ratio in cost_ratios]
    title = "Alpha above which some gamma pays: " + ", ".join(
        f"{'none' if alpha is None else f'{alpha:.2f}'} at c = {ratio:.3g}"
        for alpha, ratio in zip(needed, cost_ratios, strict=True)
    )
    source = (
        f"{label}. Grey: its prompts' alphas. Dashed: the second document's rough (g + 1) / (1 + (1 - alpha) g), "
        "which holds no cost and so is never below 1, whatever c."
    )
    with rc_context(STYLE):
        figure, panels = new_figure(title, source, panels=len(cost_ratios), size=(13.5, 7.2))
        for axes, ratio in zip(panels, cost_ratios, strict=True):
            _analytical_panel(axes, ratio, gammas)
            if len(alphas):
                axes.axvspan(alphas.min() - 0.004, alphas.max() + 0.004, color=GREY, alpha=0.2, linewidth=0)
        panels[0].set_ylabel("predicted speedup (x)")
        panels[0].legend(loc="upper left", frameon=False)
    return figure


def _least_alpha(cost_ratio: float, gammas: tuple[int, ...]) -> float | None:
    needed = [alpha for gamma in gammas if (alpha := theory.min_alpha_needed(cost_ratio, gamma)) is not None]
    return min(needed, default=None)


def _analytical_panel(axes: Axes, cost_ratio: float, gammas: tuple[int, ...]) -> None:
    for gamma, colour, marker in zip(gammas, SERIES, MARKERS, strict=False):
        speedups = theory.leviathan_speedup(ALPHA_AXIS, gamma, cost_ratio)
        axes.plot(ALPHA_AXIS, speedups, color=colour, marker=marker, markevery=(10, 40), label=f"gamma {gamma}")
    rough = theory.rejection_rate_speedup(1 - ALPHA_AXIS, max(gammas))
    axes.plot(ALPHA_AXIS, rough, color=BLACK, linestyle=(0, (4, 3)), linewidth=1.8, label=f"rough, gamma {max(gammas)}")
    _break_even_line(axes)
    axes.set_title(f"c = {cost_ratio:.3g}")
    axes.set_xlabel("alpha")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 5)


def plot_min_alpha_needed(
    gammas: tuple[int, ...], alphas: pd.Series, cost_ratios: Mapping[str, float], label: str
) -> Figure:
    """Plot the alpha above which each gamma pays against c, with this pair's alphas and measured cost ratios.

    cost_ratios: engine -> c.
    """
    ratios = np.array([0.97, 12.0, *(factor * ratio for ratio in cost_ratios.values() for factor in (0.95, 1.3))])
    source = f"{label}. Leviathan's formula, which leaves every overhead out."
    with rc_context(STYLE):
        figure, [axes] = new_figure(_needed_title(gammas, alphas, cost_ratios), source, size=WITH_LEGEND)
        for gamma, colour, marker in zip(gammas, SERIES, MARKERS, strict=False):
            least = theory.break_even_grid(ALPHA_AXIS[1:], gamma)
            axes.plot(least, ALPHA_AXIS[1:], color=colour, marker=marker, markevery=(9, 30), label=f"gamma {gamma}")
        if len(alphas):
            axes.axhspan(alphas.min() - 0.004, alphas.max() + 0.004, color=GREY, alpha=0.2, linewidth=0)
            axes.axhline(alphas.mean(), color=GREY, linewidth=1.5, label="the prompts: span, mean")
        for (engine, ratio), dash in zip(cost_ratios.items(), ("-", ":"), strict=False):
            shown = f"c = {ratio:.2f}, {engine} engine"
            axes.axvline(ratio, color=BLACK, linewidth=1.8, linestyle=dash, label=shown)
        cost_ratio_axis(axes, ratios)
        axes.set_ylabel("alpha needed for a speedup above 1")
        axes.set_ylim(0, 1.02)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


def _needed_title(gammas: tuple[int, ...], alphas: pd.Series, cost_ratios: Mapping[str, float]) -> str:
    if not cost_ratios:
        return f"The alpha that gamma {min(gammas)} needs falls as 1 / c; larger gammas need more"
    ratio = next(iter(cost_ratios.values()))
    needed = {gamma: theory.min_alpha_needed(ratio, gamma) for gamma in gammas}
    own = f"; the pair's prompts have {alphas.mean():.2f} on average" if len(alphas) else ""
    if needed[min(gammas)] is None:
        return f"At c = {ratio:.2f} not even alpha 1 is enough: the draft is no faster than the target"
    parts = [f"{needed[gamma]:.2f} at gamma {gamma}" for gamma in (min(gammas), max(gammas))]
    return f"At c = {ratio:.2f} speculation needs alpha {' and '.join(dict.fromkeys(parts))}{own}"
