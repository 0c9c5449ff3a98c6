"""The report on why: cost ratio, causes with their sizes, acceptance, predictions, and what would make it pay."""

from __future__ import annotations

import math

from specdec import findings, profile_findings, results, theory
from specdec.report import causes
from specdec.report.collection import Collection
from specdec.report.material import Material, cell, plot_line, table

MODELS = {
    "leviathan_rate": "Leviathan, with the acceptance rate (as the study)",
    "leviathan_alpha": "Leviathan, with alpha",
    "corrected": "corrected: sync added",
    "full": "full: wider forwards, sync or catch-up, host, short last steps",
    "replay": "full costs on the recorded agreement",
}
CAUSE_WORDS = {
    causes.WRONG_GUESSES: "draft time spent on tokens that were then rejected or never tried",
    causes.SLOW_DRAFT: "the draft takes longer than its share of the weights: layers and launches, not bytes",
    causes.WIDER_FORWARD: "the target takes longer over gamma + 1 tokens than over one (less where negative)",
    causes.SYNC: "the draft is run again to bring its cache in line",
    causes.CATCH_UP: "a token that the draft had not seen goes into its next pass",
    causes.HOST: "comparing, bookkeeping and transfers, beyond what plain decoding has",
}


def why(report: Material) -> list[str]:
    """Return the cost ratio and each cause's size in a step, an engine a table."""
    collection = report.collection
    if collection.facts is None:
        return []
    lines = ["## Why", "", *_cost_ratio_words(report)]
    if report.causes.empty:
        return [*lines, "", "How a step's time divides needs `python phase3_profiling.py` (sections 1 and 4)."]
    for engine, rows in report.causes.groupby("engine", sort=False):
        gamma = profile_findings.usual_gamma(rows)
        own = rows[rows.gamma == gamma]
        cost = collection.step_costs[engine, gamma]
        step = cost.step_time(gamma) + cost.sync
        lines += [
            "",
            f"**Engine `{engine}`, gamma {gamma}.** A step takes {step:.1f} ms, {step / cost.t_target:.2f} times a "
            f"plain token's {cost.t_target:.1f} ms, so it must commit more than {step / cost.t_target:.2f} tokens to "
            f"pay; the full model gives a speedup of {own.speedup.iloc[0]:.2f} (mean over the prompts).",
            "",
        ]
        lines += table(
            ("cause", "ms of a step", "percent", "speedup without it", "what it is"),
            [
                (row.cause, f"{row.ms:.2f}", f"{row.share:.0%}", row.speedup_without, CAUSE_WORDS[row.cause])
                for row in own.itertuples()
            ],
        )
    lines += ["", "All gammas are in `causes.csv`.", ""]
    return lines + plot_line(report, "time_breakdown", "time of a step by phase")


def _cost_ratio_words(report: Material) -> list[str]:
    facts = report.collection.facts
    rows = []
    for engine, models in facts.models.groupby("engine", sort=False):
        by_role = models.set_index("role")
        ratio = facts.cost_ratios.get(engine, math.nan)
        rows.append(
            (
                engine,
                *(by_role.measured_ms[role] for role in ("draft", "target")),
                *(cell(by_role.weights_ms[role] / by_role.measured_ms[role], ".0%") for role in ("draft", "target")),
                ratio,
                cell(ratio / causes.bytes_ratio(facts), ".0%"),
            )
        )
    return [
        f"**Cost ratio.** If reading weights were all, the draft would be {causes.bytes_ratio(facts):.2f} times faster "
        f"than the target (by layers {causes.layers_ratio(facts):.2f}). Measured, without prefill:",
        "",
        *table(
            (
                "engine",
                "draft, ms a token",
                "target, ms a token",
                "weights' share of the draft's",
                "of the target's",
                "c",
                "of c by bytes",
            ),
            rows,
        ),
    ]


def acceptance(report: Material) -> list[str]:
    """Return acceptance by gamma, along the text and by temperature."""
    collection = report.collection
    if collection.runs.empty:
        return []
    by_gamma = findings.alpha_by_gamma(collection.runs)
    if by_gamma.empty:
        return []
    first, last = by_gamma.iloc[0], by_gamma.iloc[-1]
    error = math.hypot(first.standard_error, last.standard_error)
    apart = abs(last.alpha - first.alpha) / error if error else math.nan
    flat = "flat within its error" if not apart > 2 else "more than its error explains; agreement comes in runs"
    lines = [
        "## Acceptance",
        "",
        "alpha counts tokens that were tried, the acceptance rate all that were proposed; the rate must fall with "
        f"gamma even where alpha does not. From gamma {by_gamma.index[0]} to {by_gamma.index[-1]} alpha moves by "
        f"{last.alpha - first.alpha:+.3f} (standard error {error:.3f}): {flat}.",
        "",
        *table(
            ("gamma", "acceptance rate", "alpha", "standard error of alpha"),
            [
                (gamma, row.acceptance_rate, row.alpha, f"{row.standard_error:.3f}")
                for gamma, row in by_gamma.iterrows()
            ],
        ),
        "",
    ]
    return lines + _along_the_text(report) + _by_temperature(report)


def _along_the_text(report: Material) -> list[str]:
    steps = report.collection.rows(results.BY_POSITION)
    if steps.empty:
        return []
    gamma = profile_findings.usual_gamma(steps)
    trend = profile_findings.position_trend(steps[steps.gamma == gamma])
    if trend is None:
        return []
    real = abs(trend.slope) >= 2 * trend.stderr
    return [
        f"Along the text (gamma {gamma}) acceptance moves by {trend.slope * 10:+.3f} per 10 tokens, standard error "
        f"{trend.stderr * 10:.3f}: {'a trend' if real else 'no trend'} beyond its error. The study saw "
        "it rise on two prompts, by their first and last three steps.",
        "",
    ]


def _by_temperature(report: Material) -> list[str]:
    rows = report.collection.rows(results.BY_TEMPERATURE)
    if rows.empty:
        return []
    costs = report.collection.step_costs
    gamma = int(rows.gamma.iloc[0])
    engine = next((e for e in ("fast", "published") if (e, gamma) in costs), None)
    facts = report.collection.facts
    shown = []
    for temperature, group in rows.groupby("temperature"):
        alphas = [group.alpha_match.mean(), group.alpha_sampled.mean()]
        speedups = [math.nan, math.nan]
        if engine and facts is not None:
            cost = costs[engine, gamma]
            speedups = [
                math.nan if math.isnan(a) else theory.full_speedup(a, gamma, facts.new_tokens, cost) for a in alphas
            ]
        shown.append((f"{temperature:g}", *alphas, *speedups, profile_findings.deviation(group)))
    return [
        "At a temperature the rule decides. The study asked whether a *drawn* token equals the target's *greedy* one; "
        "rejection sampling accepts with min(1, p / q), keeps the target's distribution, and is what serving systems "
        "do. z is how far the accepted count is from the overlap of both distributions, in standard deviations"
        + (f"; speedups are the full model's at gamma {gamma}, engine `{engine}`." if engine else "."),
        "",
        *table(
            (
                "T",
                "exact match (the study's rule)",
                "rejection sampling",
                "speedup by exact match",
                "by rejection sampling",
                "z",
            ),
            shown,
        ),
        "",
        *plot_line(report, "alpha_vs_temperature", "acceptance by temperature"),
    ]


def predictions(report: Material) -> list[str]:
    """Return how far each model is from what was measured."""
    rows = report.collection.predictions
    shown = []
    for engine, group in rows.groupby("engine", sort=False):
        for column, name in MODELS.items():
            quality = findings.prediction_quality(group, column, "measured")
            if quality:
                agree = f"{quality.verdicts_agree} of {quality.rows}"
                error = f"{quality.mean_absolute_error:.3f}"
                correlation = None if quality.correlation is None else f"{quality.correlation:.3f}"
                shown.append((engine, name, error, correlation, agree))
    if not shown:
        return []
    how = (
        "Nothing in a row was measured in the run that it predicts: alpha is pooled per prompt, costs are Phase 3's."
        if report.collection.step_costs
        else "Only Leviathan's formula, with each row's own acceptance and cost ratio: Phase 3 was not run, and its "
        "costs (sections 1 and 4) are what the other models need."
    )
    study = report.study
    return [
        "## Predictions against measurement",
        "",
        f"Decode speedup (prefill left out). {how} The study's model had correlation "
        f"{study.summary_value('prediction_correlation'):.3f} and mean absolute error "
        f"{study.summary_value('prediction_mae'):.3f}.",
        "",
        *table(("engine", "model", "mean absolute error", "correlation", "same side of 1"), shown),
        "",
        *plot_line(report, "corrected_model", "measured and predicted speedup by gamma"),
    ]


def what_would_pay(report: Material) -> list[str]:
    """Return the cost ratio that would pay, without and with the measured costs, and the scenarios."""
    facts = report.collection.facts
    if facts is None or facts.alpha is None:
        return []
    lines = ["## What would make it pay", ""]
    shown = []
    for gamma in facts.gammas:
        ideal = theory.break_even_cost_ratio(facts.alpha, gamma)
        with_costs = [_needed(report.collection, engine, gamma) for engine in report.collection.summaries]
        shown.append((gamma, ideal, *with_costs))
    measured = ", ".join(f"{ratio:.2f} (`{engine}`)" for engine, ratio in facts.cost_ratios.items())
    lines += [
        f"The smallest c = T_target / T_draft that pays at these prompts' alphas (mean {facts.alpha:.2f}); measured "
        f"here: c = {measured or 'none'}. With costs: only the draft's time changes, all else is as Phase 3 measured "
        "it.",
        "",
        *table(
            (
                "gamma",
                "c needed by Leviathan's formula",
                *(f"with the costs of `{e}`" for e in report.collection.summaries),
            ),
            shown,
        ),
        "",
    ]
    return lines + _scenarios(report) + plot_line(report, "regime_map_final", "where speculation pays")


def _needed(collection: Collection, engine: str, gamma: int) -> float | str:
    cost = collection.step_costs.get((engine, gamma))
    if cost is None:
        return "not measured"
    ratio = causes.break_even_with_overhead(collection.facts, gamma, cost)
    return f"none up to {causes.LARGEST_COST_RATIO:.0f}" if ratio is None else ratio


def _scenarios(report: Material) -> list[str]:
    scenarios = report.collection.rows(results.SIMULATION)
    if scenarios.empty:
        return ["Scenarios at other cost ratios need `python analysis_deep.py`.", ""]
    return [
        "Simulated with these prompts' alphas at other cost ratios, without any overhead. Only this run's own c are "
        "measured; the others are the study's assumptions. The best gamma of each prompt is hindsight.",
        "",
        *table(
            ("scenario", "c", "best gamma: helpful", "mean", "all gammas: helpful", "mean"),
            [
                (
                    row.scenario.replace("_", " "),
                    row.cost_ratio,
                    f"{row.helpful_pct:.0f} %",
                    row.mean_speedup,
                    f"{row.helpful_pct_all_gammas:.0f} %",
                    row.mean_all_gammas,
                )
                for row in scenarios.itertuples()
            ],
        ),
        "",
    ]
