"""What Phase 3's tables say: numbers, and the lines that its terminal shows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
import scipy.stats

from specdec import findings, theory

PHASE_COLUMNS = ("draft_ms", "catchup_ms", "target_ms", "verify_ms", "sync_ms", "other_ms")
FEW_STEPS = 3  # the study compares the first and the last three


def sampled_alpha(accepted: np.ndarray, overlap: np.ndarray) -> dict:
    """Return what rejection sampling accepted of the tokens it tried, beside what the overlap expects there.

    accepted: (tried,) of bool. overlap: (tried,), sum(min(p, q)) at the same tokens. ``low`` and ``high`` are the 95 %
    Wilson interval of alpha; ``variance`` is that of the accepted count. Nothing tried gives absent values.
    """
    tried, count = len(accepted), int(accepted.sum())
    counts = {"tried": tried, "accepted": count, "expected": float(overlap.sum())}
    counts["variance"] = float((overlap * (1 - overlap)).sum())
    if not tried:
        return {"alpha_sampled": None, "low": None, "high": None, **counts}
    interval = scipy.stats.binomtest(count, tried).proportion_ci(0.95, method="wilson")
    return {"alpha_sampled": count / tried, "low": float(interval.low), "high": float(interval.high), **counts}


def deviation(rows: pd.DataFrame) -> float | None:
    """Return z = (accepted - expected) / sqrt(variance) pooled over ``rows``; None where nothing could vary."""
    variance = rows.variance.sum()
    return float((rows.accepted.sum() - rows.expected.sum()) / math.sqrt(variance)) if variance > 1e-9 else None


def phase_medians(breakdown: pd.DataFrame) -> pd.DataFrame:
    """Return the median ms of each phase and of the step by engine and gamma, and each phase's share of all time."""
    groups = breakdown.groupby(["engine", "gamma"], sort=False)
    medians = groups[[*PHASE_COLUMNS, "step_ms"]].median()
    sums = groups[[*PHASE_COLUMNS, "step_ms"]].sum()
    for name in PHASE_COLUMNS:
        medians[name.replace("_ms", "_share")] = sums[name] / sums.step_ms
    return medians.join(groups.size().rename("steps"))


def step_costs(breakdown: pd.DataFrame, verify_cost: pd.DataFrame) -> dict[tuple[str, int], theory.StepCosts]:
    """Return what a step of each engine and gamma costs, in ms, from Phase 3's own tables alone.

    T_target is a plain decoding step's time, host work included; v(k) is the isolated forward's; T_draft is the draft
    phase per proposed token; sync, catch-up and host work (beyond a plain step's) are medians over the steps.
    """
    costs = {}
    for engine in breakdown.engine.unique():
        own = breakdown[breakdown.engine == engine]
        plain = own[own.gamma == 0]
        widths = verify_cost[(verify_cost.engine == engine) & (verify_cost.model == "target")]
        widths = single_request_widths(widths) if len(widths) else widths
        if plain.empty or widths.empty:
            continue
        host = (plain.verify_ms + plain.other_ms).median()
        for gamma, steps in own[own.gamma > 0].groupby("gamma"):
            behind = steps[steps.catchup_ms > 0]
            costs[engine, int(gamma)] = theory.StepCosts(
                t_draft=float((steps.draft_ms / steps.proposed).median()),
                t_target=float(plain.step_ms.median()),
                verify_ratio=widths.sort_values("tokens").verify_ratio.tolist(),
                sync=float(steps.sync_ms.mean()) if engine == "published" else 0.0,
                catch_up=float(behind.catchup_ms.median()) if len(behind) else 0.0,
                host=max(float((steps.verify_ms + steps.other_ms).median() - host), 0.0),
            )
    return costs


def acceptance_by_place(steps: pd.DataFrame) -> pd.DataFrame:
    """Return acceptance by place in the block, for steps of one gamma: unconditional, and given all before it.

    Columns place (from 1), accepted_share (of the steps that proposed so many), tried (steps that reached the place),
    conditional (accepted of those).
    """
    rows = []
    for place in range(1, int(steps.proposed.max()) + 1):
        proposed = steps[steps.proposed >= place]
        reached = proposed[proposed.accepted >= place - 1]
        taken = int((proposed.accepted >= place).sum())
        conditional = taken / len(reached) if len(reached) else math.nan
        rows.append((place, taken / len(proposed), len(reached), conditional))
    return pd.DataFrame(rows, columns=["place", "accepted_share", "tried", "conditional"])


def position_trend(steps: pd.DataFrame) -> scipy.stats._stats_mstats_common.LinregressResult | None:
    """Return the regression of a step's acceptance rate on its position within prompts.

    None with fewer than three steps or positions, or where acceptance never varies.
    """
    steps = steps.dropna(subset="acceptance_rate")
    if len(steps) < 3 or steps.position.nunique() < 3 or steps.acceptance_rate.nunique() < 2:
        return None
    centred = steps[["position", "acceptance_rate"]].astype(float)
    centred -= centred.groupby(steps["prompt"]).transform("mean")
    return scipy.stats.linregress(centred.position, centred.acceptance_rate)


def usual_gamma(steps: pd.DataFrame) -> int:
    """Return the gamma whose steps are shown where one must do: 4, as in the study, else the largest there is."""
    return 4 if (steps.gamma == 4).any() else int(steps.gamma.max())


def ends_of_text(steps: pd.DataFrame) -> pd.DataFrame:
    """Return each prompt's mean acceptance rate over its first and its last three steps, as the study compares them."""
    groups = steps.dropna(subset="acceptance_rate").groupby("prompt", sort=False).acceptance_rate
    return pd.DataFrame(
        {
            "first": groups.apply(lambda rates: rates.head(FEW_STEPS).mean()),
            "last": groups.apply(lambda rates: rates.tail(FEW_STEPS).mean()),
        }
    )


# --- What the terminal shows -----------------------------------------------------------------------------------------


def show_breakdown(breakdown: pd.DataFrame) -> list[str]:
    """Return the lines of section 1: median ms per phase and its share of the step."""
    lines = ["", "1  Time per step, median ms (share of all steps' time)"]
    lines.append(
        f"  {'engine':9} {'gamma':>5} {'steps':>5} {'step':>8}  "
        + "  ".join(f"{name[:-3]:>14}" for name in PHASE_COLUMNS)
    )
    for (engine, gamma), row in phase_medians(breakdown).iterrows():
        cells = [f"{row[name]:7.2f} ({row[name.replace('_ms', '_share')]:4.0%})" for name in PHASE_COLUMNS]
        lines.append(
            f"  {engine:9} {gamma:5} {int(row.steps):5} {row.step_ms:8.2f}  "
            + "  ".join(f"{cell:>14}" for cell in cells)
        )
    return lines


def show_position(steps: pd.DataFrame) -> list[str]:
    """Return the lines of section 2: both ends of each text, the trend with its error, and acceptance by place."""
    gamma = usual_gamma(steps)
    own = steps[steps.gamma == gamma]
    lines = ["", f"2  Acceptance along the text, gamma {gamma}: first and last three steps"]
    for prompt, row in ends_of_text(own).iterrows():
        lines.append(f"  {prompt:17} {row['first']:.3f} then {row['last']:.3f}")
    trend = position_trend(own)
    if trend is not None:
        flat = "no trend beyond its error" if abs(trend.slope) < 2 * trend.stderr else "a trend beyond twice its error"
        lines.append(f"  per 10 tokens: {trend.slope * 10:+.3f} (standard error {trend.stderr * 10:.3f}): {flat}")
    widest = int(steps.gamma.max())
    lines.append(f"  by place in the block, gamma {widest}: accepted at all, and given that all before it were")
    for row in acceptance_by_place(steps[steps.gamma == widest]).itertuples():
        conditional = "none tried" if math.isnan(row.conditional) else f"{row.conditional:.3f} of {row.tried} tried"
        lines.append(f"    place {row.place}: {row.accepted_share:.3f}   {conditional}")
    return lines


def show_temperature(rows: pd.DataFrame) -> list[str]:
    """Return the lines of section 3: exact match beside rejection sampling, all prompts together."""
    lines = ["", "3  Acceptance by temperature, all prompts together"]
    lines.append("     T   exact match (drawn)   overlap   rejection sampling   z against overlap")
    for temperature, group in rows.groupby("temperature"):
        weights = group.positions.astype(float)
        match, overlap = ((group[name] * weights).sum() / weights.sum() for name in ("alpha_match", "alpha_overlap"))
        drawn = group.match_rate.mean()
        tried = int(group.tried.sum())
        sampled = f"{int(group.accepted.sum()) / tried:.3f} of {tried}" if tried else "none tried"
        z = deviation(group)
        z_text = "exact" if z is None else f"{z:+.2f}"
        lines.append(
            f"  {temperature:4.1f}   {match:11.3f} ({drawn:.3f})   {overlap:7.3f}   {sampled:>18}   {z_text:>17}"
        )
    return lines


def show_isolated(isolated: pd.DataFrame, ceilings: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the lines of section 4's single-token timing, with the cost ratio and the share of the ceiling."""
    lines = ["", "4  One token, isolated"]
    for engine, of_engine in isolated.groupby("engine", sort=False):
        medians = {}
        for model, group in of_engine.groupby("model", sort=False):
            p50, p90 = group.ms.quantile(0.5), group.ms.quantile(0.9)
            spread = (group.ms.quantile(0.75) - group.ms.quantile(0.25)) / p50
            ceiling = ceilings[model]["ceiling_ms"]
            medians[model] = p50
            noisy = "  noisy" if spread > 0.10 else ""
            lines.append(
                f"  {engine:9} {model:6} p50 {p50:8.3f} ms, p90 {p90:8.3f}, spread {spread:4.0%} over {len(group)}; "
                f"reading the weights takes {ceiling:.3f} ms: {ceiling / p50:.0%} of the ceiling{noisy}"
            )
        if len(medians) == 2:
            lines.append(f"  {engine:9} cost ratio c = {medians['target'] / medians['draft']:.3f}")
    return lines


def show_shapes(shapes: pd.DataFrame) -> list[str]:
    """Return the lines of section 4's verify cost, and of the cost ratio by cache length and by batch."""
    lines = [
        "",
        "   Target forward over k tokens: v(k) measured / by the ceilings, which count only where time is near them",
    ]
    widths = single_request_widths(shapes[shapes.model == "target"])
    for engine, group in widths.groupby("engine", sort=False):
        cells = [f"v({row.tokens}) {row.verify_ratio:.2f}/{row.roofline_ratio:.2f}" for row in group.itertuples()]
        lines.append(f"  {engine:9} " + "  ".join(cells))
    for column, what in (("cache_length", "tokens held"), ("batch", "requests")):
        lines += ["", f"   By {what}: T_draft and T_target in ms, c, v(5), c with one draft request"]
        for row in cost_by(shapes, column).itertuples():
            lines.append(
                f"  {row.engine:9} {row.value:5}  {row.t_draft:9.3f} {row.t_target:9.3f}   c {row.cost_ratio:.2f}   "
                f"v(5) {row.verify_ratio:.2f}   {row.target_alone:.2f}"
            )
    return lines


def single_request_widths(shapes: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of one request at the shortest cache: v(k) by k."""
    return shapes[(shapes.batch == shapes.batch.min()) & (shapes.cache_length == shapes.cache_length.min())]


def cost_by(shapes: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return T_draft, T_target (ms), c and v(5) by engine and by ``column``: ``cache_length`` or ``batch``.

    ``target_alone``: c with the target's batch or cache as given, but the draft's smallest.
    """
    other = "batch" if column == "cache_length" else "cache_length"
    rows = []
    for engine, group in shapes[shapes[other] == shapes[other].min()].groupby("engine", sort=False):
        ms = group.pivot_table(index=column, columns=["model", "tokens"], values="ms", sort=True)
        if not {("draft", 1), ("target", 1), ("target", 5)} <= set(ms.columns):
            continue
        for value, row in ms.iterrows():
            draft, target, five = row["draft", 1], row["target", 1], row["target", 5]
            alone = target / ms["draft", 1].iloc[0]
            rows.append((engine, value, draft, target, target / draft, five / target, alone))
    columns = ["engine", "value", "t_draft", "t_target", "cost_ratio", "verify_ratio", "target_alone"]
    return pd.DataFrame(rows, columns=columns)


def show_predictions(rows: pd.DataFrame) -> list[str]:
    """Return a line per engine and prediction: error, correlation, and the spread of what is predicted."""
    lines = []
    for engine, group in rows.groupby("engine", sort=False):
        measured = group.measured.dropna()
        lines.append(
            f"  {engine}: measured {measured.min():.2f} to {measured.max():.2f}, "
            f"standard deviation {measured.std():.3f}"
        )
        for column in ("leviathan_rate", "leviathan_alpha", "corrected", "full", "replay"):
            quality = findings.prediction_quality(group, column, "measured")
            if quality is not None:
                correlation = "none" if quality.correlation is None else f"{quality.correlation:.3f}"
                lines.append(
                    f"    {column:16} mean absolute error {quality.mean_absolute_error:.3f}, "
                    f"correlation {correlation}, same side of 1 in {quality.verdicts_agree} of {quality.rows}, "
                    f"predicted {group[column].min():.2f} to {group[column].max():.2f}"
                )
    return lines


def show_strategies(table: pd.DataFrame) -> list[str]:
    """Return the lines that say what each strategy brings, from ``claims.totals``."""
    lines = ["\nSection 5, strategies over all prompts (engine fast; time against plain decoding, prefill included):"]
    for (name, temperature), row in table.iterrows():
        shown = f"{name}, T {temperature:g}" if temperature else name
        alpha = "none" if pd.isna(row.alpha) else f"{row.alpha:.2f}"
        equal = "sampled" if pd.isna(row.equal) else f"tokens equal on {row.equal} of {row.prompts}"
        lines.append(
            f"  {shown:44} speedup {row.speedup:.2f} (above 1 on {row.helpful}), gamma {row.gamma_mean:.1f}, "
            f"alpha {alpha}, {row.tokens_per_step:.2f} tokens a step, {equal}"
        )
    return lines


def show_kv_compression(rows: pd.DataFrame) -> list[str]:
    """Return the lines that say what each compressed cache saves and costs."""
    lines = ["\nSection 6, smaller key/value caches (engine fast; bytes of the entries that are held):"]
    return lines + [
        f"  {row.where:6} {row.technique:24} {row.bytes_per_token:8.0f} bytes a token, alpha {row.alpha:.2f}, "
        f"{row.tokens_equal_share:.0%} of tokens the target's own, {row.time_s:.2f} s ({row.note})"
        for row in rows.itertuples()
    ]


def show_claims(claimed: pd.DataFrame) -> list[str]:
    """Return one line per claim of the second document."""
    lines = ["\nThe second document's claims:"]
    return lines + [f"  {claim.claim}: {claim.verdict} ({claim.measured})" for claim in claimed.itertuples()]
