"""What the study's own figures say about its conclusions, in words that are made from the numbers.

Each function takes the published tables and returns one :class:`Point`; a changed figure changes its words.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from specdec import published, theory
from specdec.published import Study

HOLDS, MEASURE, IMPOSSIBLE = "holds", "comes from the measure", "can't be"
BANDWIDTH_BOUND_SHARE = 0.5  # reading weights must be at least half of the time before it is called the limit
CLAIMED_PER_LAYER_MS = (2, 5)  # the study's "2-5 ms per layer" for kernel launches
CPU_MEMORY_GB_PER_S = 50  # of a desktop with two channels of DDR4 or DDR5, roughly, for scale only
BATCHED_COST_RATIO = 2.5  # the scenario that the study calls helpful in 100 %
CPU_COST_RATIO = 10.0  # its "CPU draft" scenario
NOISE = 2.0  # standard errors within which a difference is called noise


@dataclass(frozen=True)
class Point:
    """One conclusion of the study: whether it stands (``verdict``), what it says, and the numbers for or against."""

    verdict: str
    claim: str
    numbers: str


def study_points(study: Study, scenarios: pd.DataFrame) -> list[Point]:
    """Return every point; ``scenarios`` are the rows of ``simulation_results.csv`` made from the study's figures."""
    return [
        no_speedup(study),
        bandwidth(study),
        layers(study),
        corrected_model(study),
        implied_acceptance(study),
        rate_by_gamma(study),
        sync_time(study),
        predictions_below_one(study),
        temperature(study),
        rejection_sampling(),
        hindsight(study, scenarios),
        cpu_draft(study),
    ]


def _listed(values: pd.Series, digits: int) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values)


def no_speedup(study: Study) -> Point:
    """State what was found, and that the parts of a step account for it."""
    implied = published.implied_by_time(study)
    ratio = implied.parts_ms / implied.step_ms
    return Point(
        HOLDS,
        "Speculative decoding did not help on that machine.",
        f"{study.summary_value('helpful'):.0f} of {study.summary_value('configurations'):.0f} configurations were "
        f"faster than plain decoding, the best {study.summary_value('best_speedup'):.3f}. The parts of a step, timed "
        f"alone (drafts, target, sync), add up to {_listed(implied.parts_ms, 0)} ms against steps of "
        f"{_listed(implied.step_ms, 0)} ms ({ratio.min():.2f} to {ratio.max():.2f} of them): the times fit together.",
    )


def bandwidth(study: Study) -> Point:
    """Compare the time that reading the weights takes with the time of a token."""
    per_s = study.hardware_value("memory_bandwidth") * 1e9
    models = [study.model(role) for role in ("draft", "target")]
    weights = [model.weight_bytes / per_s * 1e3 for model in models]
    shares = [part / model.ms_per_token for part, model in zip(weights, models, strict=True)]
    bound = max(shares) >= BANDWIDTH_BOUND_SHARE
    return Point(
        HOLDS if bound else IMPOSSIBLE,
        '"Both models are memory-bandwidth-bound."',
        f"Reading all weights once takes {weights[0]:.1f} of the draft's {models[0].ms_per_token:.1f} ms a token and "
        f"{weights[1]:.1f} of the target's {models[1].ms_per_token:.1f} ms ({shares[0]:.0%} and {shares[1]:.0%}). "
        + (
            "Memory is the limit."
            if bound
            else "The rest of the time goes elsewhere: neither model is bound by memory."
        ),
    )


def layers(study: Study) -> Point:
    """Compare the cost ratio with the ratio of layers, and the time per layer with the one claimed."""
    per_s = study.hardware_value("memory_bandwidth") * 1e9
    draft, target = (study.model(role) for role in ("draft", "target"))
    rest = [(m.ms_per_token - m.weight_bytes / per_s * 1e3) / m.layers for m in (draft, target)]
    low, high = CLAIMED_PER_LAYER_MS
    possible = max(rest) >= low
    by_layers, by_bytes = target.layers / draft.layers, target.weight_bytes / draft.weight_bytes
    return Point(
        HOLDS if possible else IMPOSSIBLE,
        f'"Kernel launches cost {low}-{high} ms per layer."',
        f"After the weights {rest[0]:.2f} ms a layer remain for the draft ({draft.layers:.0f} layers) and "
        f"{rest[1]:.2f} ms for the target ({target.layers:.0f}), for everything else together; {low} ms a layer would "
        f"take {low * draft.layers:.0f} ms of the draft's {draft.ms_per_token:.1f}. What does hold: time went with the "
        f"number of layers, {target.layers:.0f}/{draft.layers:.0f} = {by_layers:.3f} against the measured c = "
        f"{study.cost_ratio:.3f}, and not with the bytes ({by_bytes:.2f}).",
    )


def corrected_model(study: Study) -> Point:
    """Compare both models with what was measured, by gamma."""
    table = published.predictions_by_gamma(study)
    long = table[table.gamma >= 4]
    fits = bool((abs(long.corrected - long.measured) < abs(long.leviathan - long.measured)).all())
    return Point(
        HOLDS if fits else IMPOSSIBLE,
        '"The corrected model fits better at high gamma."',
        "A sync time can only lower a prediction. From the eight rates the corrected model gives "
        f"{_listed(table.corrected, 3)} by gamma {_listed(table.gamma, 0)}, Leviathan's {_listed(table.leviathan, 3)}, "
        f"measured was {_listed(table.measured, 3)}: "
        + ("closer at high gamma." if fits else "where Leviathan's is too low already, it moves further away."),
    )


def implied_acceptance(study: Study) -> Point:
    """Say which acceptance the measured times imply, and where Leviathan's model then lies."""
    implied = published.implied_by_time(study)
    above = bool((implied.leviathan > implied.measured).all())
    return Point(
        MEASURE,
        '"Measured exceeds predicted at gamma 4 and 8, since sync is amortised."',
        "A model without overhead can't be slower than the run itself; the alpha fed to it was too low. A step's time "
        f"is its sync time over its share; the measured speedup then needs {_listed(implied.tokens_per_step, 2)} "
        f"tokens per step by gamma {_listed(implied.gamma, 0)}. That is an acceptance rate of "
        f"{_listed(implied.acceptance_rate, 2)} (published: {study.rates.acceptance_rate.mean():.2f} on average), "
        f"or alpha {_listed(implied.alpha, 2)}. With those, Leviathan's model "
        f"gives {_listed(implied.leviathan, 3)}, "
        + ("above every measurement, as it must." if above else "yet not above every measurement: the times disagree.")
        + " The study put acceptance_rate (accepted / proposed) where the formula wants the chance per tried token.",
    )


def rate_by_gamma(study: Study) -> Point:
    """Compare acceptance by gamma with what one alpha allows."""
    alpha = float(published.implied_by_time(study).alpha.mean())
    table = published.rates_at_fixed_alpha(study, alpha)
    first = table.iloc[0]
    error = (first.published * (1 - first.published) / (first.gamma * published.PROFILED_STEPS)) ** 0.5
    return Point(
        MEASURE,
        f'"Alpha grows with gamma, {first.published:.3f} to {table.published.iloc[-1]:.3f}."',
        "At one alpha the acceptance rate must fall as gamma grows, because tokens after a rejection are proposed but "
        f"never tried: at alpha {alpha:.2f} it is {_listed(table.expected, 2)} by gamma {_listed(table.gamma, 0)}. The "
        f"published {_listed(table.published, 3)} rise, and would need alpha {_listed(table.implied_alpha, 2)}. They "
        f"are one small sample ({published.PROFILED_STEPS} steps each; at gamma {first.gamma:.0f} the standard error "
        f"is {error:.2f}) from different stretches of text, not an effect of gamma.",
    )


def sync_time(study: Study) -> Point:
    """Say what the measured speedups would have been without any sync."""
    implied = published.implied_by_time(study)
    best = implied.without_sync.max()
    return Point(
        HOLDS if best < 1 else MEASURE,
        '"Sync costs about 23 ms a step."',
        f"It took {_listed(study.sync.share_of_step * 100, 1)} % of a step. But it does not decide: had it taken no "
        f"time, the same runs would have reached {_listed(implied.without_sync, 2)}, "
        + ("still below 1 at every gamma." if best < 1 else "above 1 at the best gamma.")
        + f" The draft is as slow as the target (c = {study.cost_ratio:.2f}); that decides.",
    )


def predictions_below_one(study: Study) -> Point:
    """Say what "zero false positives" is worth, and which alphas the published predictions imply."""
    needed = {gamma: theory.min_alpha_needed(study.cost_ratio, gamma) for gamma in study.gammas}
    implied = published.alphas_implied_by_predictions(study)
    return Point(
        MEASURE,
        '"The model never recommended speculation wrongly: zero false positives."',
        f"With no positive case there is nothing to tell apart: at c = {study.cost_ratio:.3f} every alpha below "
        f"{min(needed.values()):.2f} is predicted below 1 at every gamma. What the model can be judged by, its "
        f"correlation with the measured speedups, is {study.summary_value('prediction_correlation'):.3f}. The four "
        f"published predictions imply alpha {_listed(implied, 3)}: "
        + ("one alpha gives all four." if implied.max() - implied.min() < 0.005 else "no single alpha gives all four."),
    )


def temperature(study: Study) -> Point:
    """Judge whether the rates by temperature differ by more than chance."""
    table = study.temperatures.set_index("temperature").acceptance_rate
    trials = published.smallest_sample(table)
    low, high = float(table[0.3]), float(table[0.5])
    sample = f"All six are whole shares of {trials}, so about {trials} tokens were proposed at each. " if trials else ""
    apart = published.difference_in_standard_errors(low, high, trials) if trials else None
    noise = apart is not None and apart < NOISE
    return Point(
        MEASURE,
        f'"Acceptance is {low:.3f} at T 0.3 and {high:.3f} at T 0.5."',
        sample
        + ("" if apart is None else f"The two differ by {apart:.1f} standard errors: ")
        + ("one draw's noise, no rise. " if noise else "more than chance explains. " if apart is not None else "")
        + "The fall towards higher temperatures is real, but it belongs to the rule that was used (next point).",
    )


def rejection_sampling() -> Point:
    """Show that exact match and rejection sampling differ even where draft and target are the same."""
    example = published.SamplingExample()
    shares = ", ".join(f"{share:g}" for share in example.probabilities)
    return Point(
        MEASURE,
        '"Temperature is incompatible with speculative decoding."',
        "What was counted is whether the target's own random token happened to be the draft's (exact match). That is "
        "not how sampled speculation accepts. Take a draft that equals the target, with chances "
        f"{shares} for three tokens: exact match accepts {example.exact_match:.0%}, rejection sampling (accept with "
        f"min(1, p / q)) {example.rejection_sampling:.0%}, with the same distribution of texts. Phase 3 measures both.",
    )


def hindsight(study: Study, scenarios: pd.DataFrame) -> Point:
    """Compare helpful by each prompt's best gamma with helpful over all configurations."""
    row = scenarios.set_index("cost_ratio").loc[BATCHED_COST_RATIO]
    rates, gammas = study.rates.acceptance_rate.to_numpy(), np.array(study.gammas)
    endless = theory.leviathan_speedup(rates[:, None], gammas, BATCHED_COST_RATIO)  # (prompts, gammas)
    return Point(
        MEASURE,
        f'"{row.helpful_pct:.0f} % helpful" at c = {BATCHED_COST_RATIO}.',
        f"That takes for each prompt the gamma that turned out best, which nobody knows beforehand. Over all "
        f"{endless.size} configurations {row.helpful_pct_all_gammas:.0f} % are helpful, and the mean speedup is "
        f"{row.mean_all_gammas:.2f} in place of {row.mean_speedup:.2f} (by the formula for endless output "
        f"{endless.mean():.2f}, {np.mean(endless > 1):.0%} helpful). And every c but the first is assumed, "
        "not measured.",
    )


def cpu_draft(study: Study) -> Point:
    """Say which time per token the "CPU draft" scenario asks of the draft."""
    draft, target = (study.model(role) for role in ("draft", "target"))
    needed_ms = target.ms_per_token / CPU_COST_RATIO
    needed_gb_per_s = draft.weight_bytes / needed_ms / 1e6
    on_cpu_ms = draft.weight_bytes / (CPU_MEMORY_GB_PER_S * 1e6)
    return Point(
        IMPOSSIBLE if needed_gb_per_s > CPU_MEMORY_GB_PER_S else HOLDS,
        f'"CPU draft, GPU target: c = {CPU_COST_RATIO:g}."',
        f"c is target time / draft time, so a slower draft lowers it. For c = {CPU_COST_RATIO:g} the draft would need "
        f"{needed_ms:.1f} ms a token, {draft.ms_per_token / needed_ms:.1f} times faster than it was on the GPU, and "
        f"its {draft.weight_bytes / 1e9:.2f} GB would have to be read at {needed_gb_per_s:.0f} GB/s. A desktop's "
        f"memory gives some {CPU_MEMORY_GB_PER_S} GB/s, {on_cpu_ms:.0f} ms a token at best: c = "
        f"{target.ms_per_token / on_cpu_ms:.1f}.",
    )
