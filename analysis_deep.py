"""Phase 2: why speculative decoding helps or not on this machine, and what would change it.

Reads what speculative_decoding.py wrote, or with --published the figures of the study, and needs no model: roofline,
break-even, simulation, regime map, overhead and a summary in words. --published also checks that the study's own
tables come out.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specdec import (
    cli,
    conclusions,
    evidence,
    findings,
    plots,
    predictions,
    published,
    results,
    run,
    simulation,
    theory,
    traces,
)
from specdec.evidence import Evidence

# --- What people change; each has a flag of the same name ------------------------------------------------------------
SEED = 0  # of the Monte Carlo draws
TRIALS = 10_000  # simulated requests per prompt and gamma: a mean is then good to about 0.2 %
SCENARIOS = {  # name -> cost ratio c, the study's; this run's own c is added
    "measured_rtx2070_batch1": 1.18,
    "batch8_on_target": 2.5,
    "target7b_draft0.5b": 4.0,
    "target70b_draft0.5b": 8.0,
    "cpu_draft_gpu_target": 10.0,
}
GAMMAS = (1, 2, 4, 8)  # draft tokens per step in the break-even table and the regime map, as in the study
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)  # of the break-even table, as in the study
REGIME_ALPHAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # rows of the regime map
REGIME_COST_RATIOS = (
    1.0,
    1.18,
    1.5,
    2.0,
    2.5,
    3.0,
    4.0,
    6.0,
    8.0,
    10.0,
)  # its columns: the study's scenarios, more low
REGIME_GAMMA = 4  # the gamma whose map is printed and drawn, as in the study
CURVE_COST_RATIOS = (1.18, 3.12, 8.0)  # of the analytical curves: the study's measured c, its roofline, a 70B target
PUBLISHED = False  # this machine's run rather than the study's figures
ALLOW_MIXED = False  # refuse files of different runs
RESULTS_DIR = "results"  # below the current folder; holds Phase 1's files and takes this phase's
PLOTS_DIR = "plots"
QUICK = {"TRIALS": 1_000, "RESULTS_DIR": "results/quick", "PLOTS_DIR": "plots/quick"}
# ---------------------------------------------------------------------------------------------------------------------

PHASE = "phase2"
PUBLISHED_FOLDERS = {"RESULTS_DIR": "results/published", "PLOTS_DIR": "plots/published"}  # apart from the user's run
BREAK_EVEN_TOLERANCE = 0.01  # of a published cost ratio, printed to two digits
SCENARIO_TOLERANCE = 0.02  # of a published mean speedup: two digits, and its Monte Carlo noise
PREDICTION_TOLERANCES = {1: 0.01, 2: 0.025, 4: 0.045, 8: 0.01}  # by gamma: the study's alphas there are not published
ROUNDING = 1e-9  # a difference may equal its tolerance
LONG_TOKENS, LONG_TRIALS = 2_000, 200  # of the check against the formula for endless output
MIN_COST_RATIO, MAX_COST_RATIO = 1e-3, 1e6  # of flags: no pair is outside, and no plot's axis suffers
MAX_TRIALS = 1_000_000  # about 1 GB; a mean is then good to 0.02 %
SCENARIO_NAME = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)  # names become CSV cells
LINE = 110  # characters of a line of text
PLOTS = ("speedup_vs_cost_ratio", "regime_heatmap", "analytical_curves", "min_alpha_needed")
TABLES = (results.SIMULATION, results.REGIME_MAP, results.BREAK_EVEN, results.PREDICTIONS)


def _scenarios(text: str) -> dict[str, float]:
    """Read "name=c,name=c"."""
    pairs = [part.split("=") for part in cli.several(str)(text)]
    for pair in pairs:
        if len(pair) != 2 or not SCENARIO_NAME.fullmatch(pair[0]):
            raise argparse.ArgumentTypeError(
                f"{'='.join(pair)!r} is not name=c with a name of letters, digits, _, - and . that begins with a letter"
            )
    if len({name for name, _ in pairs}) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} names a scenario twice")
    return {name: _cost_ratio(ratio) for name, ratio in pairs}


_cost_ratio = cli.number(MIN_COST_RATIO, MAX_COST_RATIO)
_alpha = cli.number(0, 1)


FLAGS = {
    "PUBLISHED": cli.Flag(None, "analyse the study's published figures and check its tables"),
    "TRIALS": cli.Flag(cli.integer(1, MAX_TRIALS), "simulated requests per prompt and gamma"),
    "SEED": cli.Flag(cli.integer(0, cli.MAX_SEED), "seed of the simulation"),
    "SCENARIOS": cli.Flag(_scenarios, "name=c,name=c: cost ratios to simulate"),
    "GAMMAS": cli.Flag(cli.several(cli.integer(1, 64)), "gammas of break-even table and regime map, comma-separated"),
    "ALPHAS": cli.Flag(cli.several(_alpha), "alphas of the break-even table, comma-separated"),
    "REGIME_ALPHAS": cli.Flag(cli.several(_alpha), "alphas of the regime map, comma-separated"),
    "REGIME_COST_RATIOS": cli.Flag(cli.several(_cost_ratio), "cost ratios of the regime map, comma-separated"),
    "REGIME_GAMMA": cli.Flag(cli.integer(1, 64), "gamma whose regime map is printed and drawn"),
    "CURVE_COST_RATIOS": cli.Flag(cli.several(_cost_ratio), "cost ratios of the analytical curves, comma-separated"),
    "ALLOW_MIXED": cli.Flag(None, "go on although the files are of different runs"),
    **cli.FOLDER_FLAGS,
}


def main(argv: list[str] | None = None) -> int:
    """Run Phase 2 and return its exit code."""
    return cli.run(lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    args = cli.parse(argv, __doc__, FLAGS, globals(), QUICK)
    if args.published:
        args = cli.parse(argv, __doc__, FLAGS, globals() | PUBLISHED_FOLDERS, QUICK | PUBLISHED_FOLDERS)
    folder = Path(args.results_dir)
    run.check_free(folder)
    run.check_writable(results_dir=args.results_dir, plots_dir=args.plots_dir)
    study = published.read_study() if args.published else None
    facts = evidence.study_evidence(study) if study else evidence.read_run(folder, args.allow_mixed)
    with run.lock(folder):
        manifest = _open_run(args, argv, facts)
        analysis = analyse(facts, args, study)
        _write_tables(folder, analysis)
        drawn = plots.analysis_plots(facts, analysis.regime, analysis.simulated.scenarios, vars(args))
        files = plots.save_all(drawn, Path(args.plots_dir))
        _print_analysis(analysis, facts, args)
        off = _print_published(study, analysis) if study else 0
        manifest.complete(plots=files, published_figures_off=off if study else None)
    print(f"\nTables are in {folder}, plots in {args.plots_dir}")
    if not args.published:
        print(f"next, with the pair of Phase 1: {cli.next_command(results.PHASE3, args)}")
    return cli.EXIT_FAILED if off else cli.EXIT_OK


@dataclass(frozen=True)
class Analysis:
    """What the sections found, in their order."""

    roofline: pd.DataFrame
    break_even: BreakEven
    simulated: Simulated
    regime: pd.DataFrame
    overhead: Overhead
    summary: list[str]


def analyse(facts: Evidence, args: Namespace, study: published.Study | None) -> Analysis:
    """Compute every section; nothing is printed or written."""
    roofline = section1_roofline(facts)
    break_even = section2_break_even(args.alphas, args.gammas)
    simulated = section3_simulation(facts, _named_cost_ratios(facts, args, study), args.trials, args.seed)
    regime = section4_regime_map(args.regime_alphas, args.regime_cost_ratios, {*args.gammas, args.regime_gamma})
    overhead = section5_overhead(facts)
    summary = section6_summary(facts, roofline, simulated, overhead)
    return Analysis(roofline, break_even, simulated, regime, overhead, summary)


def _named_cost_ratios(facts: Evidence, args: Namespace, study: published.Study | None) -> dict[str, float]:
    """Return the scenarios to simulate; the study's hold its own machine already."""
    if study:
        return dict(zip(study.scenarios.scenario, study.scenarios.cost_ratio, strict=True))
    own = {f"this_run_{engine}_engine": ratio for engine, ratio in facts.cost_ratios.items()}
    return own | args.scenarios


# --- The six sections ------------------------------------------------------------------------------------------------


def section1_roofline(facts: Evidence) -> pd.DataFrame:
    """Split each model's time per token into reading its weights and the rest, which is divided over its layers.

    Returns ``facts.models`` with rest_ms, rest_per_layer_ms and weights_share (of the measured time) added.
    """
    rest = facts.models.measured_ms - facts.models.weights_ms
    return facts.models.assign(
        rest_ms=rest,
        rest_per_layer_ms=rest / facts.models.layers,
        weights_share=facts.models.weights_ms / facts.models.measured_ms,
    )


@dataclass(frozen=True)
class BreakEven:
    """Rows of ``break_even.csv`` by bisection, and their largest distance from the closed form."""

    table: pd.DataFrame
    largest_difference: float | None


def section2_break_even(alphas: Sequence[float], gammas: Sequence[int]) -> BreakEven:
    """Find the smallest cost ratio that pays for each alpha and gamma, by bisection, and check it in closed form."""
    rows, differences = [], []
    for alpha in alphas:
        for gamma in gammas:
            found = theory.break_even_by_bisection(alpha, gamma)
            rows.append({"alpha": alpha, "gamma": gamma, "min_cost_ratio": math.nan if found is None else found})
            exact = theory.break_even_cost_ratio(alpha, gamma)
            if found is not None and exact is not None:
                differences.append(abs(found - exact))
    return BreakEven(pd.DataFrame(rows), max(differences, default=None))


@dataclass(frozen=True)
class Simulated:
    """Monte Carlo and what it is checked against.

    scenarios: rows of ``simulation_results.csv``. largest_deviation: of mean steps from the exact recursion, in
    standard errors, over ``checked`` pairs of prompt and gamma. long_difference: largest relative distance, for long
    output, from the formula for endless output. replayed: trace replay per gamma.
    """

    scenarios: pd.DataFrame
    largest_deviation: float | None
    checked: int
    long_difference: float | None
    replayed: traces.Replayed | None


def section3_simulation(facts: Evidence, scenarios: dict[str, float], trials: int, seed: int) -> Simulated:
    """Simulate requests of every prompt's own alpha at each scenario's cost ratio, and replay the recorded traces."""
    replayed = traces.replay_traces(facts)
    if facts.alphas.empty or not facts.gammas or facts.new_tokens < 2:
        empty = pd.DataFrame(columns=list(results.SIMULATION.columns))
        return Simulated(empty, None, 0, None, replayed)
    rng = np.random.default_rng(seed)
    alphas = facts.alphas.to_list()
    runs = simulation.simulate_runs(alphas, facts.gammas, facts.new_tokens, trials, rng)
    rows = []
    for name, ratio in scenarios.items():
        speedups = simulation.scenario_speedups(runs, theory.StepCosts(1.0, ratio))
        rows.append(
            {
                "scenario": name,
                "cost_ratio": ratio,
                "helpful_pct": speedups.helpful_pct,
                "mean_speedup": speedups.mean_speedup,
                "low": math.nan if speedups.best_low is None else speedups.best_low,
                "high": math.nan if speedups.best_high is None else speedups.best_high,
                "helpful_pct_all_gammas": speedups.helpful_pct_all_gammas,
                "mean_all_gammas": speedups.mean_all_gammas,
                "trials": trials,
            }
        )
    deviations = _deviations(runs, alphas, trials)
    long = _long_difference(float(facts.alphas.mean()), facts.gammas, scenarios, rng)
    return Simulated(pd.DataFrame(rows), max(deviations, default=None), len(deviations), long, replayed)


def _deviations(runs: simulation.SimulatedRuns, alphas: list[float], trials: int) -> list[float]:
    """Return how far each prompt's and gamma's mean steps are from the exact ones, in standard errors."""
    deviations = []
    for alpha, row in zip(alphas, runs.counts, strict=True):
        for gamma, counts in zip(runs.gammas, row, strict=True):
            spread = theory.steps_standard_deviation(alpha, gamma, counts.new_tokens)
            if spread > 0:
                exact = theory.expected_steps(alpha, gamma, counts.new_tokens)
                deviations.append(abs(counts.steps.mean() - exact) / (spread / math.sqrt(trials)))
    return deviations


def _long_difference(alpha: float, gammas: Sequence[int], scenarios: dict[str, float], rng) -> float | None:
    """Return the largest relative difference between simulated long output and Leviathan's endless one."""
    differences = []
    runs = simulation.simulate_runs([alpha], gammas, LONG_TOKENS, LONG_TRIALS, rng)
    for ratio in scenarios.values():
        simulated = simulation.scenario_speedups(runs, theory.StepCosts(1.0, ratio)).mean[0]
        endless = theory.leviathan_speedup(alpha, np.array(gammas), ratio)
        differences.append(float(np.abs(simulated / endless - 1).max()))
    return max(differences, default=None)


def section4_regime_map(alphas: Sequence[float], cost_ratios: Sequence[float], gammas: set[int]) -> pd.DataFrame:
    """Return Leviathan's speedup at every alpha, cost ratio and gamma: the rows of ``regime_map.csv``."""
    rows = [
        (alpha, ratio, gamma) for alpha in sorted(alphas) for ratio in sorted(cost_ratios) for gamma in sorted(gammas)
    ]
    table = pd.DataFrame(rows, columns=["alpha", "cost_ratio", "gamma"])
    speedup = theory.leviathan_speedup(table.alpha.to_numpy(), table.gamma.to_numpy(), table.cost_ratio.to_numpy())
    return table.assign(speedup=speedup, helpful=speedup > 1)


@dataclass(frozen=True)
class Overhead:
    """Measured / predicted per engine, gamma and prediction, the rows behind it, and what no row could predict."""

    predictions: pd.DataFrame
    factors: pd.DataFrame
    missing: dict[str, str]


def section5_overhead(facts: Evidence) -> Overhead:
    """Compare what was measured with every prediction that this phase can make."""
    rows = facts.predictions
    return Overhead(rows, predictions.overhead_factors(rows), predictions.missing(rows))


def section6_summary(facts: Evidence, roofline: pd.DataFrame, simulated: Simulated, overhead: Overhead) -> list[str]:
    """Return the findings as sentences, each made from its numbers."""
    sentences = [*_helpful_words(facts), *_roofline_words(roofline, facts)]
    sentences += _condition_words(facts) + _replay_words(simulated.replayed) + _overhead_words(overhead)
    return sentences or ["The input holds too little for a finding."]


def _helpful_words(facts: Evidence) -> list[str]:
    if facts.summary is None:
        return []
    sentences = []
    for engine, rows in facts.summary.groupby("engine", sort=False):
        count = findings.count_helpful(rows)
        if count is None:
            sentences.append(f"Engine {engine}: no speedup was measured.")
            continue
        surely = "" if count.surely is None else f" ({count.surely} in every repeat)"
        verdict = "helped on average" if count.mean > 1 else "did not help on average"
        sentences.append(
            f"Engine {engine}: speculation {verdict}: mean speedup {count.mean:.2f}, faster in {count.helpful} of "
            f"{count.total} configurations{surely}, best {count.best:.2f} ({count.best_prompt}, gamma "
            f"{count.best_gamma})."
        )
    return sentences


def _roofline_words(roofline: pd.DataFrame, facts: Evidence) -> list[str]:
    sentences = []
    for engine, rows in roofline.groupby("engine", sort=False):
        draft, target = (rows[rows.role == role].iloc[0] for role in evidence.ROLES)
        measured = facts.cost_ratios.get(engine)
        if measured is None:
            continue
        by_bytes, by_layers = target.weight_bytes / draft.weight_bytes, target.layers / draft.layers
        near_layers = abs(math.log(measured / by_layers)) < abs(math.log(measured / by_bytes))
        sentences.append(
            f"Engine {engine}: a target token takes {target.measured_ms:.2f} ms, a draft token "
            f"{draft.measured_ms:.2f} ms; c = {measured:.2f} is nearer to the "
            f"ratio of {'layers' if near_layers else 'bytes'} ({by_layers:.2f} by layers, {by_bytes:.2f} by bytes of "
            "weights). " + _bound_words(draft, target)
        )
    return sentences


def _bound_words(draft: pd.Series, target: pd.Series) -> str:
    """Say whether memory bandwidth limits the two models."""
    if pd.isna(draft.weights_ms) or pd.isna(target.weights_ms):
        return "The memory's bandwidth was not measured, so its share is not known."
    parts = ", ".join(
        f"{model.weights_ms:.2f} of the {model.role}'s {model.measured_ms:.2f} ms ({model.weights_share:.1%})"
        for model in (draft, target)
    )
    shares = (draft.weights_share, target.weights_share)
    if max(shares) > 1:
        return f"Reading the weights would take {parts}: over 100 % means a wrong ceiling; don't rely on it."
    bound = [share >= conclusions.BANDWIDTH_BOUND_SHARE for share in shares]
    if all(bound):
        verdict = "both models are bound by memory bandwidth"
    elif any(bound):
        verdict = f"only the {'draft' if bound[0] else 'target'} is bound by memory bandwidth"
    else:
        verdict = (
            "neither model is bound by memory bandwidth; the rest goes into other work of the layers, launches, or "
            "kernels that read more slowly"
        )
    return f"Reading the weights takes {parts}: {verdict}."


def _condition_words(facts: Evidence) -> list[str]:
    """Say what alpha and c would have to be, before any overhead."""
    if facts.alpha is None or not facts.gammas:
        return ["No proposed token was tried, so there is no alpha and nothing to say about acceptance."]
    least = {gamma: theory.break_even_cost_ratio(facts.alpha, gamma) for gamma in facts.gammas}
    gamma = min(facts.gammas)
    if least[gamma] is None:
        return ["No proposed token was accepted: no cost ratio can make speculation pay with this pair."]
    need = (
        f"With {facts.alpha_kind} {facts.alpha:.2f} (mean of prompts) speculation pays from c = {least[gamma]:.2f} on"
    )
    sentences = [f"{need} (gamma {gamma}; gamma {max(least)} from {least[max(least)]:.2f}), before any overhead."]
    for engine, ratio in facts.cost_ratios.items():
        speedups = {g: float(theory.leviathan_speedup(facts.alpha, g, ratio)) for g in facts.gammas}
        best = max(speedups, key=speedups.get)
        alpha = theory.min_alpha_needed(ratio, gamma)
        needed = (
            "no alpha would be enough" if alpha is None else f"alpha would have to exceed {alpha:.2f} at gamma {gamma}"
        )
        outcome = "would pay" if speedups[best] > 1 else "can't pay, and " + needed
        sentences.append(
            f"Engine {engine} has c = {ratio:.2f}: by Leviathan's formula the best gamma is {best} with "
            f"{speedups[best]:.2f}: without overhead it {outcome}."
        )
    return sentences


def _replay_words(replayed: traces.Replayed | None) -> list[str]:
    if replayed is None:
        return []
    row = replayed.by_gamma.iloc[-1]
    change = row.replay_over_iid - 1
    steps = f"{abs(change):.1%} {'fewer' if change < 0 else 'more'} steps than" if change else "as many steps as"
    sentence = f"At gamma {row.gamma:.0f} the recorded text takes {steps} independent tokens of the same alpha would"
    if not math.isnan(row.deviation):
        chance = "within what chance gives" if abs(row.deviation) < conclusions.NOISE else "more than chance gives"
        sentence += f" ({row.deviation:+.1f} standard deviations, {chance})"
    return [sentence + "."]


def _overhead_words(overhead: Overhead) -> list[str]:
    """Say how measured and predicted compare, by the best of Leviathan's two predictions that there is."""
    sentences = []
    known = [name for name in ("leviathan_alpha", "leviathan_rate") if name in set(overhead.factors.prediction)]
    factors = overhead.factors[overhead.factors.prediction.isin(known[:1])]
    for engine, rows in factors.groupby("engine", sort=False):
        listed = ", ".join(f"{row.factor:.2f} at gamma {row.gamma}" for row in rows.itertuples())
        reasons = []
        if (rows.factor < 1).any():
            reasons.append(
                "Below 1, time goes where the formula has none (sync, wider target forwards, the host); Phase 3 "
                "measures it."
            )
        if (rows.factor > 1).any():
            reasons.append("Above 1, the formula was given too low an acceptance, or timing noise shows.")
        sentences.append(f"Engine {engine}: measured / predicted ({known[0]}) is {listed}. {' '.join(reasons)}")
    return sentences


# --- Files -----------------------------------------------------------------------------------------------------------


def _open_run(args: Namespace, argv: list[str] | None, facts: Evidence) -> run.Manifest:
    """Move an earlier run's files away and begin the manifest."""
    folder = Path(args.results_dir)
    run.move_to_previous(folder, [*(table.file for table in TABLES), f"manifest_{PHASE}.json"])
    run.move_to_previous(Path(args.plots_dir), [f"{name}.png" for name in PLOTS])
    constants = {name.lower(): getattr(args, name.lower()) for name in FLAGS}
    entries = run.run_entries(argv, constants) | {"input": facts.label, "notes": list(facts.notes)}
    phase1 = None if args.published else run.read_manifest(folder, "phase1")
    if phase1:
        entries |= {
            "phase1_run_id": phase1.get("run_id"),
            "phase1_status": phase1.get("status"),
            "pair": phase1["pair"],
        }
    manifest = run.Manifest(folder, PHASE, entries)
    manifest.write()
    return manifest


def _write_tables(folder: Path, analysis: Analysis) -> None:
    results.write_table(folder, results.SIMULATION, analysis.simulated.scenarios)
    results.write_table(folder, results.REGIME_MAP, analysis.regime)
    results.write_table(folder, results.BREAK_EVEN, analysis.break_even.table)
    results.write_table(folder, results.PREDICTIONS, analysis.overhead.predictions)


# --- What the terminal shows -----------------------------------------------------------------------------------------


def _print_analysis(analysis: Analysis, facts: Evidence, args: Namespace) -> None:
    _say(facts.source)
    for note in facts.notes:
        _say(note)
    _print_roofline(analysis.roofline, facts)
    _print_break_even(analysis.break_even, facts)
    _print_simulation(analysis.simulated, facts)
    _print_regime(analysis.regime, args, facts)
    _print_overhead(analysis.overhead, facts)
    _head(6, "Summary", facts)
    for sentence in analysis.summary:
        _say("- " + sentence)


def _head(section: int, title: str, facts: Evidence) -> None:
    print(f"\n{section}. {title}\n   {facts.label}")


def _say(text: str) -> None:
    """Print wrapped text, every line indented as the first."""
    indent = " " * (len(text) - len(text.lstrip(" ")) + (2 if text.startswith("- ") else 0))
    print(textwrap.fill(text, LINE, subsequent_indent=indent))


def _show(table: pd.DataFrame, digits: int = 2) -> None:
    """Print a table with plain numbers, "-" where there is none."""

    def cell(value: Any) -> str:
        if value is None or pd.isna(value):
            return "-"
        return f"{value:.{digits}f}" if isinstance(value, float) else str(value)

    cells = table.astype(object).map(cell)
    for column in cells.columns[: 1 if isinstance(table.iloc[0, 0], str) else 0]:
        width = max(len(str(column)), *map(len, cells[column]))
        cells = cells.rename(columns={column: f"{column:<{width}}"})
        cells[f"{column:<{width}}"] = cells.iloc[:, 0].str.ljust(width)
    print(textwrap.indent(cells.to_string(index=False), "   "))


def _print_roofline(roofline: pd.DataFrame, facts: Evidence) -> None:
    _head(1, "Roofline: where the time of a token goes", facts)
    table = roofline.assign(weight_mb=roofline.weight_bytes / 1e6, weights_pct=100 * roofline.weights_share)
    columns = ["engine", "role", "layers", "weight_mb", "measured_ms", "weights_ms", "weights_pct", "rest_ms"]
    _show(table[[*columns, "rest_per_layer_ms"]])
    for engine, rows in roofline.groupby("engine", sort=False):
        draft, target = (rows[rows.role == role].iloc[0] for role in evidence.ROLES)
        measured, by_bytes = facts.cost_ratios.get(engine), target.weight_bytes / draft.weight_bytes
        found = (
            "not measured" if measured is None else f"measured {measured:.3f} ({measured / by_bytes:.0%} of by bytes)"
        )
        _say(
            f"   c = T_target / T_draft, engine {engine}: by bytes {by_bytes:.3f}, by layers "
            f"{target.layers / draft.layers:.3f}, {found}"
        )
    _say("   weights: reading every weight once at this memory's bandwidth; rest: all else, divided over the layers.")


def _print_break_even(found: BreakEven, facts: Evidence) -> None:
    _head(2, "Break-even: the smallest c that pays, before any overhead", facts)
    table = found.table.pivot(index="alpha", columns="gamma", values="min_cost_ratio").reset_index()
    _show(table.rename(columns=lambda name: name if name == "alpha" else f"gamma {name}"))
    if found.largest_difference is not None:
        _say(f"   by bisection; the closed form differs by {found.largest_difference:.1e} at most")


def _print_simulation(simulated: Simulated, facts: Evidence) -> None:
    _head(3, f"Simulation: {facts.new_tokens} tokens, each prompt's own {facts.alpha_kind}", facts)
    if simulated.scenarios.empty:
        _say("   nothing to simulate: no prompt has an alpha.")
    else:
        names = {"helpful_pct": "helpful_%", "mean_speedup": "mean", "helpful_pct_all_gammas": "helpful_%_all"}
        table = simulated.scenarios.rename(columns=names | {"mean_all_gammas": "mean_all"}).drop(columns="trials")
        _show(table)
        _say(
            f"   helpful_%, mean, low, high: each of {len(facts.alphas)} prompts at its best gamma in hindsight (low "
            "and high: 5 and 95 % of single requests); _all: over all prompts and gammas."
        )
        if simulated.largest_deviation is not None:
            _say(
                f"   check: mean steps lie within {simulated.largest_deviation:.1f} standard errors of the exact "
                f"recursion ({simulated.checked} pairs of prompt and gamma); for {LONG_TOKENS} tokens speedups lie "
                f"within {simulated.long_difference:.2%} of the formula for endless output"
            )
    if simulated.replayed is None:
        _say("   no agreement trace: nothing to replay.")
    else:
        _print_replayed(simulated.replayed)


def _print_replayed(replayed: traces.Replayed) -> None:
    print("\n   Replay of the recorded agreement against independent (i.i.d.) tokens, all prompts together:")
    _show(replayed.by_gamma)
    best = f", speedup {replayed.oracle_speedup:.2f}" if not math.isnan(replayed.oracle_speedup) else ""
    _say(
        f"   a schedule that knew the text would commit {replayed.oracle_tokens_per_step:.2f} tokens per step{best}; "
        "speedups at this run's c, without overhead"
    )
    lag1 = replayed.autocorrelation
    if len(lag1):
        span = f", from {lag1.min():+.2f} to {lag1.max():+.2f}" if len(lag1) > 1 else ""
        _say(f"   lag-1 autocorrelation of agreement: {lag1.mean():+.2f}{span} (0: independent, above: in runs)")
    else:
        _say("   lag-1 autocorrelation of agreement: none, agreement never changes")
    _say(
        f"   the replay takes the very steps of the run in {replayed.same_steps} of {replayed.compared} configurations"
    )


def _print_regime(regime: pd.DataFrame, args: Namespace, facts: Evidence) -> None:
    _head(4, f"Regime map: speedup by Leviathan's formula at gamma {args.regime_gamma} (* above 1)", facts)
    at_gamma = regime[regime.gamma == args.regime_gamma].pivot(index="alpha", columns="cost_ratio", values="speedup")
    _show_map(at_gamma)
    grouped = regime.groupby(["alpha", "cost_ratio"]).speedup
    print(f"   Over all gammas ({', '.join(map(str, sorted(regime.gamma.unique())))}), the best of each cell:")
    _show_map(grouped.max().unstack())
    rough = theory.rejection_rate_speedup(1 - regime.alpha.to_numpy(), regime.gamma.to_numpy())
    wrong = (rough > 1) & (regime.speedup <= 1)
    _say(
        "   The second document's (gamma + 1) / (1 + rejection rate x gamma) holds no cost ratio and is never below 1: "
        f"it promises a gain in {int((rough > 1).sum())} of these {len(regime)} cells, against Leviathan's formula "
        f"wrongly in {int(wrong.sum())}, where it is up to {float((rough / regime.speedup).max()):.1f} times too high."
    )


def _show_map(table: pd.DataFrame) -> None:
    cells = table.map(lambda speedup: f"{speedup:.2f}" + ("*" if speedup > 1 else " "))
    cells.columns = [f"c={ratio:g} " for ratio in table.columns]
    _show(cells.reset_index().rename(columns={"index": "alpha"}))


def _print_overhead(overhead: Overhead, facts: Evidence) -> None:
    _head(5, "Overhead: measured decode speedup / predicted, by gamma", facts)
    if overhead.factors.empty:
        _say("   nothing was both measured and predicted.")
    else:
        spread = overhead.factors.low.notna().any()
        _show(overhead.factors if spread else overhead.factors.drop(columns=["prompts", "low", "high"]), digits=3)
        if spread:
            _say("   measured, predicted: means over the prompts; factor: their ratio; low, high: of single prompts.")
    for column, need in overhead.missing.items():
        _say(f"   {column} is missing: it needs {need}")


# --- The study's tables ----------------------------------------------------------------------------------------------


def check_published(study: published.Study, analysis: Analysis) -> dict[str, pd.DataFrame]:
    """Return each of the study's tables as published | here | difference | tolerance | within."""
    by_gamma = published.predictions_by_gamma(study)
    simulated = study.scenarios[["scenario"]].merge(analysis.simulated.scenarios, on="scenario")
    found = [theory.break_even_by_bisection(row.alpha, int(row.gamma)) for row in study.break_even.itertuples()]
    scenario = simulated[["scenario"]]
    return {
        "Smallest cost ratio that pays": _compared(
            study.break_even[["alpha", "gamma"]], study.break_even.min_cost_ratio, found, BREAK_EVEN_TOLERANCE
        ),
        "Simulated speedup by scenario, best gamma of each prompt": _compared(
            scenario, study.scenarios.mean_speedup, simulated.mean_speedup, SCENARIO_TOLERANCE
        ),
        "Helpful in percent by scenario": _compared(
            scenario, study.scenarios.helpful_pct, simulated.helpful_pct, ROUNDING
        ),
        f"Predicted speedup at c = {study.cost_ratio}, mean over the eight rates": _compared(
            by_gamma[["gamma"]],
            study.speedups.predicted_speedup,
            by_gamma.leviathan,
            [PREDICTION_TOLERANCES.get(gamma, ROUNDING) for gamma in by_gamma.gamma],
        ),
    }


def _compared(keys: pd.DataFrame, published_values, here, tolerance) -> pd.DataFrame:
    table = keys.reset_index(drop=True).assign(published=list(published_values), here=list(here), tolerance=tolerance)
    table.insert(len(table.columns) - 1, "difference", table.here - table.published)
    return table.assign(within=table.difference.abs() <= table.tolerance + ROUNDING)


def _print_published(study: published.Study, analysis: Analysis) -> int:
    """Print the check of the study's tables and what its figures say; returns how many figures are off."""
    print("\nThe study's tables, from its own figures")
    off = 0
    for title, table in check_published(study, analysis).items():
        wrong = int((~table.within).sum())
        off += wrong
        print(f"\n   {title}: {len(table) - wrong} of {len(table)} within tolerance")
        _show(table.assign(within=table.within.map({True: "yes", False: "OFF"})), digits=3)
    print("\nWhat the study's own figures say about its conclusions")
    for point in conclusions.study_points(study, analysis.simulated.scenarios):
        print()
        _say(f"{point.claim} -> {point.verdict}.")
        _say("  " + point.numbers)
    if off:
        print(f"\n{off} of the study's figures are off their tolerance", file=sys.stderr)
    return off


if __name__ == "__main__":
    sys.exit(main())
