"""The second document's claims, each beside what Phase 3 measured: its tables in, one verdict per claim out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

HOLDS, FAILS, UNCLEAR, NOT_TESTED = "holds here", "does not hold here", "unclear here", "not tested here"
MARGIN = 0.03  # of a total time, and of alpha; two that differ by less count as equal
USEFUL_GAMMAS = (3, 8)  # the document's range
LOW_AGREEMENT = 0.40  # below it, the document says, ...
LOW_SPEEDUP = 1.1  # ... the speedup is below this
SELF_SPEEDUP = (1.5, 2.0)  # of self-speculation, the document says
SHORT_OUTPUT = 50  # tokens; below it, the document says, overhead dominates
LEAST_BATCH = 8  # the smallest of the document's range
USEFUL_TEMPERATURES = (0.3, 0.8)  # the document's range


@dataclass(frozen=True)
class Verdict:
    """What was measured, in words with numbers, and whether the claim holds."""

    measured: str
    verdict: str


def totals(strategies: pd.DataFrame) -> pd.DataFrame:
    """Return one row per strategy and temperature: counts and times summed over prompts, and what follows from them.

    speedup is summed baseline time / summed time; helpful the prompts with a speedup above 1; equal those whose tokens
    are the baseline's (absent where they were sampled). Rows without a time are left out and counted in ``faults``.
    """
    groups = strategies.groupby(["strategy", "temperature"], sort=False)
    timed = strategies.dropna(subset="time_s").groupby(["strategy", "temperature"], sort=False)
    sums = timed[["steps", "proposed", "accepted", "tried", "time_s", "baseline_time_s"]].sum()
    table = pd.DataFrame(
        {
            "prompts": groups.size(),
            "faults": groups.time_s.apply(lambda times: int(times.isna().sum())),
            "gamma_mean": sums.proposed / sums.steps,
            "alpha": (sums.accepted / sums.tried).where(sums.tried > 0),
            "tokens_per_step": 1 + sums.accepted / sums.steps,
            "time_s": sums.time_s,
            "speedup": sums.baseline_time_s / sums.time_s,
            "helpful": timed.speedup.apply(lambda speedups: int((speedups > 1).sum())),
            "equal": groups.tokens_equal_baseline.sum(min_count=1),
        }
    )
    return table.loc[list(groups.groups)] if len(table) else table


def best_fixed(table: pd.DataFrame) -> pd.Series | None:
    """Return the row of the fixed gamma with the least total time; None if there is none."""
    rows = table[[name.startswith("fixed gamma ") and "," not in name for name, _ in table.index]]
    return None if rows.empty else rows.loc[rows.time_s.idxmin()]


def check_claims(strategies: pd.DataFrame, compressed: pd.DataFrame) -> pd.DataFrame:
    """Return ``claims.csv``: every claim with its place in the document, what was measured, and the verdict.

    ``strategies`` and ``compressed``: rows of ``strategies.csv`` and ``kv_compression.csv``; either may be empty.
    """
    table = totals(strategies)
    checks: list[tuple[str, str, Callable[[], Verdict]]] = [
        ("gamma of 3 to 8 is the useful range", "tuning table", lambda: _gamma_range(table)),
        ("gamma = min(gamma_max, floor(1 / (1 - agreement)))", "adaptive formula", lambda: _adaptive(table)),
        ("self-speculation gives 1.5 to 2x without an extra model", "pattern 3", lambda: _self_speculation(table)),
        ("a lower temperature agrees more; 0.3 to 0.8 is useful", "tuning table", lambda: _temperature(table)),
        ("outputs under 50 tokens: overhead dominates", "when not to use", lambda: _short(table, strategies)),
        ("agreement under 40 %: speedup below 1.1", "when not to use", lambda: _low_agreement(strategies)),
        ("int8 and int4 make the cache 4 to 8 times smaller", "cache compression", lambda: _quantised(compressed)),
        ("a compressed cache does not help where memory bounds", "when not to use", lambda: _faster(compressed)),
        ("skipping lower layers' cache saves memory in the draft", "cache compression", lambda: _skipped(compressed)),
        ("a shared prefix need not be computed again", "cache compression", lambda: _prefix(compressed)),
        ("a tree accepts more than a chain", "tree speculation", lambda: _tree(table)),
        ("a batch of 8 to 64 uses the device better", "tuning table", lambda: _batch(table)),
        ("drafts of 100 M to 1 B parameters", "tuning table", lambda: Verdict("one draft per run", NOT_TESTED)),
    ]
    rows = []
    for claim, source, check in checks:
        found = check()
        rows.append({"claim": claim, "source": source, "measured": found.measured, "verdict": found.verdict})
    return pd.DataFrame(rows)


def _row(table: pd.DataFrame, prefix: str) -> pd.Series | None:
    rows = table[[name.startswith(prefix) for name, _ in table.index]]
    return None if rows.empty else rows.loc[rows.time_s.idxmin()]


def _missing(what: str) -> Verdict:
    return Verdict(f"no {what} in this run", NOT_TESTED)


def _gamma_range(table: pd.DataFrame) -> Verdict:
    best = best_fixed(table)
    if best is None:
        return _missing("fixed gamma")
    gamma = int(best.name[0].split()[-1])
    inside = USEFUL_GAMMAS[0] <= gamma <= USEFUL_GAMMAS[1]
    return Verdict(
        f"best fixed gamma over all prompts: {gamma}, speedup {best.speedup:.2f}", HOLDS if inside else FAILS
    )


def _adaptive(table: pd.DataFrame) -> Verdict:
    best, adaptive, aware = best_fixed(table), _row(table, "adaptive"), _row(table, "cost-aware")
    if best is None or adaptive is None or aware is None:
        return _missing("comparison of schedules")
    ratio = adaptive.time_s / best.time_s
    measured = (
        f"time {ratio:.2f} of the best fixed gamma's, mean gamma {adaptive.gamma_mean:.1f}; the rule that weighs cost "
        f"{aware.time_s / best.time_s:.2f}, mean gamma {aware.gamma_mean:.1f}"
    )
    return Verdict(measured, FAILS if ratio > 1 + MARGIN else HOLDS if ratio < 1 - MARGIN else UNCLEAR)


def _self_speculation(table: pd.DataFrame) -> Verdict:
    best = _row(table, "early exit")
    if best is None:
        return _missing("early exit")
    measured = (
        f"speedup {best.speedup:.2f} ({best.name[0]}), above 1 on {best.helpful:.0f} of {best.prompts:.0f} prompts"
    )
    return Verdict(measured, HOLDS if best.speedup >= SELF_SPEEDUP[0] else FAILS)


def _temperature(table: pd.DataFrame) -> Verdict:
    rows = table[[name.startswith("rejection sampling") for name, _ in table.index]]
    if len(rows) < 2:
        return _missing("pair of temperatures")
    cool, warm = rows.iloc[0], rows.iloc[-1]
    measured = (
        f"alpha {cool.alpha:.2f} at T {cool.name[1]:g} and {warm.alpha:.2f} at T {warm.name[1]:g}, speedup "
        f"{cool.speedup:.2f} and {warm.speedup:.2f}"
    )
    difference = cool.alpha - warm.alpha
    return Verdict(measured, UNCLEAR if abs(difference) < MARGIN else HOLDS if difference > 0 else FAILS)


def _short(table: pd.DataFrame, strategies: pd.DataFrame) -> Verdict:
    short, long = _row(table, "short output"), _row(table, "fixed gamma 4")
    if short is None or long is None:
        return _missing("short output")
    measured = f"speedup {short.speedup:.2f} for short outputs, {long.speedup:.2f} for the run's length, at gamma 4"
    if not _lengths(strategies, "short output").max() < SHORT_OUTPUT <= _lengths(strategies, "fixed gamma 4").min():
        return Verdict(f"{measured}; not both below and above {SHORT_OUTPUT} tokens in this run", NOT_TESTED)
    lower = short.speedup < long.speedup - MARGIN
    return Verdict(measured, HOLDS if lower and short.speedup < 1 else UNCLEAR if lower else FAILS)


def _low_agreement(strategies: pd.DataFrame) -> Verdict:
    drafted = strategies.strategy.str.match("fixed gamma|early exit, gamma")  # prompt lookup drafts for nothing
    rows = strategies[drafted & (strategies.alpha < LOW_AGREEMENT)].dropna(subset="speedup")
    if rows.empty:
        return Verdict(f"no run with a model as draft had an alpha below {LOW_AGREEMENT}", NOT_TESTED)
    below = int((rows.speedup < LOW_SPEEDUP).sum())
    measured = f"{below} of {len(rows)} runs with alpha below {LOW_AGREEMENT} had a speedup below {LOW_SPEEDUP}"
    return Verdict(measured, HOLDS if below == len(rows) else FAILS)


def _compressed(rows: pd.DataFrame, technique: str, where: str) -> pd.Series | None:
    found = rows[(rows.technique == technique) & (rows["where"] == where)]
    return None if found.empty else found.iloc[0]


def _quantised(rows: pd.DataFrame) -> Verdict:
    none, int8, int4 = (_compressed(rows, technique, "target") for technique in ("none", "int8", "int4"))
    if none is None or int8 is None or int4 is None:
        return _missing("quantised cache")
    times = [none.bytes_per_token / row.bytes_per_token for row in (int8, int4)]
    measured = (
        f"{times[0]:.1f} and {times[1]:.1f} times smaller with their scales; {int8.tokens_equal_share:.0%} and "
        f"{int4.tokens_equal_share:.0%} of tokens unchanged in the target"
    )
    return Verdict(measured, HOLDS if times[0] >= 4 and times[1] >= 4 else UNCLEAR if times[1] >= 4 else FAILS)


def _faster(rows: pd.DataFrame) -> Verdict:
    none, int8 = (_compressed(rows, technique, "target") for technique in ("none", "int8"))
    if none is None or int8 is None or not none.time_s:
        return _missing("timed quantised cache")
    ratio = int8.time_s / none.time_s
    return Verdict(f"with int8 in the target {ratio:.2f} of the time", HOLDS if ratio > 1 - MARGIN else FAILS)


def _skipped(rows: pd.DataFrame) -> Verdict:
    none, skipped = (_compressed(rows, technique, "draft") for technique in ("none", "lower layers keep none"))
    if none is None or skipped is None:
        return _missing("draft without lower caches")
    saved = 1 - skipped.bytes_per_token / none.bytes_per_token
    measured = f"{saved:.0%} of the draft's cache saved, alpha {none.alpha:.2f} to {skipped.alpha:.2f}"
    return Verdict(measured, HOLDS if skipped.alpha > none.alpha - MARGIN else FAILS)


def _prefix(rows: pd.DataFrame) -> Verdict:
    found = rows[rows.technique == "shared prefix"]
    if len(found) < 2:
        return _missing("shared prefix")
    second = found.iloc[1]
    return Verdict(second.note, HOLDS if second.tokens_equal_share == 1 else FAILS)


def _tree(table: pd.DataFrame) -> Verdict:
    tree, deep, wide = _row(table, "tree"), _row(table, "chain as deep"), _row(table, "chain of as many")
    if tree is None or deep is None or wide is None:
        return _missing("tree")
    measured = (
        f"tokens a step {tree.tokens_per_step:.2f}, a chain as deep {deep.tokens_per_step:.2f}, one of as many tokens "
        f"{wide.tokens_per_step:.2f}; speedup {tree.speedup:.2f}, {deep.speedup:.2f}, {wide.speedup:.2f}"
    )
    return Verdict(measured, HOLDS if tree.tokens_per_step > deep.tokens_per_step else FAILS)


def _lengths(strategies: pd.DataFrame, prefix: str) -> pd.Series:
    return strategies[strategies.strategy.str.startswith(prefix)].new_tokens


def _batch(table: pd.DataFrame) -> Verdict:
    best, alone = _row(table, "batch of"), best_fixed(table)
    if best is None or alone is None:
        return _missing("batch")
    measured = f"{best.name[0]}: {best.speedup:.2f} times plain decoding one by one; alone at best {alone.speedup:.2f}"
    if int(best.name[0].split(",")[0].split()[-1]) < LEAST_BATCH:
        return Verdict(measured, NOT_TESTED)
    return Verdict(measured, HOLDS if best.speedup > alone.speedup else FAILS)
