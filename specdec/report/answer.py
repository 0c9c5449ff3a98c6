"""The first screen of the report: the question, the answer in one paragraph, what to set."""

from __future__ import annotations

from typing import Any

import pandas as pd

from specdec.report import advice, causes
from specdec.report.advice import Advice
from specdec.report.material import Material, plot_line, table

NEAR = 0.1  # speedups that differ by less do not contradict each other
SLOWER = 1.02  # baselines that differ by less are taken as equal
WORDS = (
    "(Engine `published` works as the study did; `fast` is this suite's own, with the same tokens. *Step*: one pass of "
    "the target and the guesses before it. *The model*: the full prediction below, from costs measured one by one.)"
)
TINY_NOTE = (
    "This is the small embedded pair: real and trained, but with a few million parameters. At that size a token's time "
    "is the cost of launching operations, not of reading weights. It shows that the suite works on this machine; it "
    "says nothing about large models and is not a run of the study."
)


def headline(report: Material) -> str:
    """Return the answer in one sentence."""
    if not report.advices:
        return "No speedup was measured yet"
    last = report.advices[-1]
    verdict = last.verdict if last.certain else f"{last.verdict}, by one repeat and so not certain"
    return (
        f"{verdict}: with the {last.engine} engine and gamma {last.gamma} for everything the mean speedup is "
        f"{last.mean:.2f}, and {last.faster} of {last.prompts} prompts get faster"
    )


def head(report: Material) -> list[str]:
    """Return title, what is asked, what was measured, and what must be known of the input."""
    lines = [
        "# Does speculative decoding help here?",
        "",
        "A small *draft* model guesses gamma tokens ahead; the large *target* model checks them in one pass and keeps "
        "what it would have written itself. The text does not change; the question is whether it comes faster.",
        "",
        f"**Measured:** {report.collection.label}.",
    ]
    if report.note:
        lines += ["", report.note]
    pairs = [(manifest.get("pair") or {}).get("name") for manifest in report.collection.manifests.values()]
    if "tiny" in pairs:
        lines += ["", TINY_NOTE]
    return lines + [line for note in report.collection.notes for line in ("", f"**Note:** {note}")]


def the_answer(report: Material) -> list[str]:
    """Return the answer in one paragraph, what to set by kind of text, and the summary plot."""
    lines = ["## The answer", ""]
    if not report.advices:
        return [*lines, "No speedup was measured: run `python speculative_decoding.py`."]
    lines += [f"**{headline(report)}.**", ""]
    words = [*map(_engine_words, report.advices), *_slower_baseline(report), *_because(report), _same_text(report)]
    lines += [" ".join([*words, *_noise(report), *_disagreement(report)]), "", WORDS, ""]
    last = report.advices[-1]
    rows = [
        (row.prompt, row.category, advice.gamma_to_use(row), row.speedup, _span(row))
        for row in last.by_prompt.itertuples()
    ]
    lines += [f"What to set, by kind of text (engine {last.engine}; each prompt's best gamma, in hindsight):", ""]
    lines += table(("prompt", "kind", "set", "speedup", "slowest to fastest repeat"), rows)
    return lines + ["", *plot_line(report, "master_summary", headline(report))]


def _engine_words(one: Advice) -> str:
    how = "As the study does it (engine `published`)" if one.engine == "published" else f"With engine `{one.engine}`"
    count = one.count
    surely = "" if count.surely is None else f" ({count.surely} in every repeat)"
    return (
        f"{how}, {count.helpful} of {count.total} configurations were faster than plain decoding{surely}: mean speedup "
        f"{count.mean:.2f}, best {count.best:.2f} ({count.best_prompt}, gamma {count.best_gamma})."
    )


def _slower_baseline(report: Material) -> list[str]:
    """Say so where the engine to use decodes plainly slower than another, since that flatters its speedups."""
    last, summaries = report.advices[-1], report.collection.summaries
    plain = {engine: rows.groupby("prompt").baseline_time_s.median() for engine, rows in summaries.items()}
    fastest = min(plain, key=lambda engine: plain[engine].sum())
    slower = (plain[last.engine] / plain[fastest]).mean()
    if not slower >= SLOWER:
        return []
    rows = summaries[last.engine]
    speculative = rows[rows.gamma == last.gamma].set_index("prompt").speculative_time_s
    speedup = (plain[fastest] / speculative).mean()
    return [
        f"Its plain decoding takes {slower - 1:.0%} longer than that of engine `{fastest}`; against the latter, gamma "
        f"{last.gamma} for everything gives {speedup:.2f}."
    ]


def _because(report: Material) -> list[str]:
    """Name what holds each engine back most, at the gamma that suits it best, of the causes that someone can mend."""
    sentences = []
    for one in report.advices:
        own = report.causes[(report.causes.engine == one.engine) & (report.causes.gamma == one.gamma)]
        own = own[own.cause != causes.WRONG_GUESSES]
        if own.empty or own.speedup_without.max() < own.speedup.iloc[0] * 1.01:
            continue
        worst = own.loc[own.speedup_without.idxmax()]
        sentences.append(
            f"What holds `{one.engine}` back most at gamma {one.gamma}, wrong guesses aside: the {worst.cause} "
            f"({worst.ms:.1f} ms of a step, {worst.share:.0%}; without it the model gives {worst.speedup_without:.2f} "
            f"in place of {worst.speedup:.2f})."
        )
    return sentences


def _noise(report: Material) -> list[str]:
    """Say so where most rows of an engine are noisy."""
    sentences = []
    for engine, rows in report.collection.summaries.items():
        count = int(rows.noisy.fillna(False).astype(bool).sum())
        if count > len(rows) / 2:
            sentences.append(
                f"Of engine `{engine}` {count} of {len(rows)} rows are noisy: an idle machine would tell more."
            )
    return sentences


def _disagreement(report: Material) -> list[str]:
    """Say so where what was measured and the model from Phase 3's costs fall on different sides of 1."""
    one = report.advices[-1]
    own = report.causes[(report.causes.engine == one.engine) & (report.causes.gamma == one.gamma)]
    if own.empty or (own.speedup.iloc[0] > 1) == (one.mean > 1) or abs(own.speedup.iloc[0] - one.mean) < NEAR:
        return []
    return [
        f"But the costs that Phase 3 measured give {own.speedup.iloc[0]:.2f} for the same setting: a timing was "
        "disturbed, or the run is too small. Run both again on an idle machine before you rely on this."
    ]


def _same_text(report: Material) -> str:
    runs = report.collection.runs
    same, ties = int(runs.matches_baseline.sum()), int(runs.near_tie.sum())
    text = f"The tokens were the target's own in {same} of {len(runs)} runs"
    if same == len(runs):
        return text + "."
    faults = len(runs) - same - ties
    return f"{text}; {ties} left them at a near tie, where rounding decides" + (
        f", and {faults} are faults." if faults else "."
    )


def _span(row: Any) -> str:
    return "one repeat" if pd.isna(row.speedup_low) else f"{row.speedup_low:.2f} to {row.speedup_high:.2f}"
