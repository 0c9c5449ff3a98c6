"""The report on what else there is: other techniques, the study's recommendations, and its figures beside this run."""

from __future__ import annotations

import pandas as pd

from specdec import claims, profile_findings, results
from specdec.report import causes
from specdec.report.material import Material, cell, plot_line, table


def techniques(report: Material) -> list[str]:
    """Return what the second document's techniques bring, and its claims."""
    lines = [*_strategies(report), *_smaller_caches(report), *_claims(report)]
    return ["## Other techniques", "", *lines] if lines else []


def _strategies(report: Material) -> list[str]:
    rows = report.collection.rows(results.STRATEGIES)
    if rows.empty:
        return []
    totals = claims.totals(rows).sort_values("speedup", ascending=False)
    columns = (
        "strategy",
        "T",
        "speedup",
        "faster on",
        "mean gamma",
        "alpha",
        "tokens a step",
        "tokens the target's own",
    )
    return [
        "All prompts together, engine `fast`, one run each (differences of a few percent are noise):",
        "",
        *table(columns, [_strategy_cells(name, temperature, row) for (name, temperature), row in totals.iterrows()]),
        "",
        *plot_line(report, "strategies", "speedup by strategy"),
    ]


def _smaller_caches(report: Material) -> list[str]:
    rows = report.collection.rows(results.KV_COMPRESSION)
    if rows.empty:
        return []
    cells = [
        (
            row.where,
            row.technique,
            f"{row.bytes_per_token:.0f}",
            row.alpha,
            cell(row.tokens_equal_share, ".0%"),
            row.time_s,
        )
        for row in rows.itertuples()
    ]
    return [
        "Smaller key/value caches, at the same gamma:",
        "",
        *table(("in the", "technique", "bytes a token", "alpha", "tokens unchanged", "time (s)"), cells),
        "",
    ]


def _claims(report: Material) -> list[str]:
    rows = report.collection.rows(results.CLAIMS)
    if rows.empty:
        return []
    cells = [(row.claim, row.verdict, row.measured) for row in rows.itertuples()]
    return ["The second document's claims:", "", *table(("claim", "verdict", "measured"), cells), ""]


def _strategy_cells(name: str, temperature: float, row: pd.Series) -> tuple:
    equal = "drawn" if pd.isna(row.equal) else f"{row.equal:.0f} of {row.prompts:.0f}"
    faster = f"{row.helpful:.0f} of {row.prompts:.0f}"
    return (
        name,
        f"{temperature:g}",
        row.speedup,
        faster,
        cell(row.gamma_mean, ".1f"),
        row.alpha,
        row.tokens_per_step,
        equal,
    )


def recommendations(report: Material) -> list[str]:
    """Return the study's recommendations, cited, and what this run says of each."""
    cited = (
        ("Single GPU, models of the same size class", "Do not use speculative decoding", _same_size),
        ("Single GPU, only a 7B+ target", "Try a draft on the CPU", _cpu_draft),
        ("Several A100, 7B and 70B", "Viable, 1.2 to 1.5 times", _large_target),
        ("Batches of 8 and more", "c rises to about 2.5", _batched),
        ("Serving (vLLM, TGI)", "Use what is built in: no sync", _without_sync),
        ("Any temperature above 0", "Accept by probability, not by equality", _at_temperature),
    )
    rows = [(case, said, here(report)) for case, said, here in cited]
    return [
        "## Recommendations",
        "",
        "The study's table (cited), and what this run says of each line.",
        "",
        *table(("case", "the study's recommendation", "this run"), rows),
    ]


def _same_size(report: Material) -> str:
    if not report.advices:
        return "not measured"
    parts = [
        f"`{one.engine}`: mean {one.mean:.2f} at its best single gamma ({one.gamma}), {one.faster} of {one.prompts} "
        "prompts faster"
        for one in report.advices
    ]
    last = report.advices[-1]
    return "; ".join(parts) + (f". {last.verdict}, on this machine" if last.certain else ". One repeat: not certain")


def _cpu_draft(report: Material) -> str:
    return (
        "not measured (`--draft-device cpu` on a GPU machine measures it); c is T_target / T_draft, so a slower draft "
        "lowers c"
    )


def _large_target(report: Material) -> str:
    scenarios = report.collection.rows(results.SIMULATION)
    row = scenarios[scenarios.scenario.str.startswith("target70b")] if len(scenarios) else scenarios
    if row.empty:
        return "not simulated in this run"
    one = row.iloc[0]
    return (
        f"simulated with these alphas at an assumed c = {one.cost_ratio:g}: {one.mean_speedup:.2f} with each prompt's "
        f"best gamma, {one.mean_all_gammas:.2f} over all gammas, without overhead"
    )


def _batched(report: Material) -> str:
    shapes = report.collection.rows(results.VERIFY_COST)
    noisy = " (noisy)" if (shapes.spread > results.NOISY_SPREAD).any() else ""
    parts = []
    if len(shapes):
        by_batch = profile_findings.cost_by(shapes, "batch")
        for engine, group in by_batch.groupby("engine", sort=False):
            alone, together = group.iloc[0], group.iloc[-1]
            if together.value > alone.value:
                parts.append(
                    f"`{engine}`: c {alone.cost_ratio:.2f} for one request, {together.cost_ratio:.2f} for "
                    f"{together.value:.0f} with both models batched, {together.target_alone:.2f} with the target alone"
                    f"{noisy}"
                )
    batches = claims.totals(report.collection.rows(results.STRATEGIES))
    batches = batches[[name.startswith("batch of") for name, _ in batches.index]] if len(batches) else batches
    if len(batches):
        plain, best = batches.iloc[0], batches.iloc[-1]
        parts.append(
            f"batched plain decoding is {plain.speedup:.2f} and speculation {best.speedup:.2f} times one by one"
        )
    return "; ".join(parts) or "not measured"


def _without_sync(report: Material) -> str:
    own = report.causes[(report.causes.engine == "published") & (report.causes.cause == causes.SYNC)]
    if own.empty:
        return "not measured"
    worst = own.loc[own.share.idxmax()]
    text = (
        f"sync takes up to {worst.share:.0%} of a step (gamma {worst.gamma}); without it the model gives "
        f"{own.speedup_without.max():.2f} at best"
    )
    fast = [one for one in report.advices if one.engine == "fast"]
    return text + (
        f"; engine `fast`, which has none, measured {fast[0].mean:.2f} at its best single gamma" if fast else ""
    )


def _at_temperature(report: Material) -> str:
    rows = report.collection.rows(results.BY_TEMPERATURE)
    if rows.empty:
        return "not measured"
    means = rows.groupby("temperature")[["alpha_match", "alpha_sampled"]].mean().iloc[-1]
    return (
        f"confirmed: at T {means.name:g} exact match accepts {means.alpha_match:.2f}, rejection sampling "
        f"{means.alpha_sampled:.2f}"
        if means.alpha_sampled > means.alpha_match
        else f"at T {means.name:g} exact match accepts {means.alpha_match:.2f}, rejection sampling no more "
        f"({means.alpha_sampled:.2f})"
    )


def beside_the_study(report: Material) -> list[str]:
    """Return the study's figures beside this run's."""
    return [
        "## Beside the published RTX 2070 run",
        "",
        "The study: Qwen2-0.5B and Qwen2-1.5B, float16, RTX 2070. Its alpha is the acceptance rate here. Other "
        "hardware and, unless said otherwise, other weights: the columns show how the same questions come out, not who "
        "is faster.",
        "",
        *comparison_table(report.comparison),
    ]


def comparison_table(comparison: pd.DataFrame) -> list[str]:
    """Return ``comparison.csv`` as a Markdown table; rows that nothing fills are left out."""
    rows = comparison.dropna(subset=["study", "published", "fast"], how="all")
    return table(
        ("quantity", "study, RTX 2070", "this run, as published", "this run, fast"),
        [
            (row.quantity, *(quantity_cell(row.quantity, value) for value in (row.study, row.published, row.fast)))
            for row in rows.itertuples()
        ],
    )


def quantity_cell(name: str, value: float) -> str:
    """Return one figure of the comparison with as many digits as fit its quantity."""
    if pd.isna(value):
        return cell(None)
    if "configurations" in name:
        return f"{value:.0f}"
    return f"{value:.2f}" if "ms a" in name else f"{value:.3f}"
