"""The techniques that Phase 3 sets side by side: who proposes and how many, each put together from parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from specdec.engine.decoding import Generation, speculative_generate
from specdec.engine.drafting import Draft, EarlyExitDraft, ModelDraft, PromptLookupDraft
from specdec.engine.engines import get_engine
from specdec.engine.exactness import explain_mismatch
from specdec.engine.forward import first_layers
from specdec.engine.isolation import Held, time_passes
from specdec.engine.pair import Pair
from specdec.schedules import AdaptiveGamma, CostAwareGamma, ForwardCosts, Schedule
from specdec.simulation import OracleGamma

ENGINE = "fast"  # all strategies run on it, so that they differ in nothing else
USUAL_GAMMA = 4  # of strategies that are shown at one gamma
GAMMA_MAX = 8  # the most that schedules may ask for, as in the study
SAMPLING_TEMPERATURES = (0.3, 0.8)  # the ends of the second document's range
SHORT_TOKENS = 16  # an output far below the 50 tokens that the second document calls short
RUNS_PER_BASELINE = 3  # strategies timed against one run of plain decoding
COST_LENGTHS = (64, 512)  # cache lengths at which forwards are timed for the cost-aware rule
COST_PASSES = 7  # per width and length; the median counts
ORACLE = "oracle gamma (knows what agrees)"


@dataclass(frozen=True)
class Strategy:
    """One way to decode: ``new_draft()`` proposes, ``gamma`` says how many, None stands for the trace's oracle."""

    name: str
    new_draft: Callable[[], torch.nn.Module | Draft]
    gamma: int | Schedule | None
    temperature: float = 0.0
    new_tokens: int | None = None  # where it is not the run's
    note: str = ""


def strategies(pair: Pair, gammas: Sequence[int]) -> list[Strategy]:
    """Return what section 5 measures on ``pair``, with the costs that the cost-aware rule needs measured now."""
    published_sync = replace(get_engine(ENGINE), reforward=True)
    layers, note = exit_layer(pair.target)
    early_exit, lookup = (lambda: EarlyExitDraft(layers)), PromptLookupDraft
    own = CostAwareGamma(forward_costs(pair.draft, pair.target))
    shared = CostAwareGamma(forward_costs(first_layers(pair.target, layers), pair.target))
    fixed = [Strategy(f"fixed gamma {gamma}", lambda: pair.draft, gamma) for gamma in gammas]
    sampled = [
        Strategy(f"rejection sampling, gamma {USUAL_GAMMA}", lambda: pair.draft, USUAL_GAMMA, temperature)
        for temperature in SAMPLING_TEMPERATURES
    ]
    return [
        *fixed,
        Strategy(
            f"fixed gamma {USUAL_GAMMA}, draft run again to sync",
            lambda: ModelDraft(pair.draft, published_sync),
            USUAL_GAMMA,
        ),
        Strategy("adaptive gamma", lambda: pair.draft, AdaptiveGamma(GAMMA_MAX)),
        Strategy("cost-aware gamma", lambda: pair.draft, own),
        Strategy(ORACLE, lambda: pair.draft, None),
        *(Strategy(f"early exit, gamma {gamma}", early_exit, gamma, note=note) for gamma in (1, 2)),
        Strategy("early exit, cost-aware gamma", early_exit, shared, note=note),
        *(Strategy(f"prompt lookup, gamma {gamma}", lookup, gamma) for gamma in (USUAL_GAMMA, GAMMA_MAX)),
        *sampled,
        Strategy(f"short output, gamma {USUAL_GAMMA}", lambda: pair.draft, USUAL_GAMMA, new_tokens=SHORT_TOKENS),
    ]


def exit_layer(target: torch.nn.Module) -> tuple[int, str]:
    """Return after which layer an early exit is taken, and what must be said of it."""
    trained = getattr(target.config, "early_exit_layer", None)
    if trained:
        return trained, f"after layer {trained}, trained for it"
    layers = max(1, target.config.num_hidden_layers // 4)
    return layers, f"after layer {layers}, not trained for it"


def forward_costs(draft: torch.nn.Module, target: torch.nn.Module) -> ForwardCosts:
    """Time one-token forwards of ``draft`` and forwards of ``target`` over 1 to GAMMA_MAX + 1 tokens."""
    limit = getattr(target.config, "max_position_embeddings", None) or max(COST_LENGTHS)
    lengths = tuple(length for length in COST_LENGTHS if length + GAMMA_MAX < limit)
    drafts, targets = [], []
    for length in lengths:
        drafts.append(median(time_passes(draft, ENGINE, (1,), COST_PASSES, Held(length))[1]))
        passes = time_passes(target, ENGINE, range(1, GAMMA_MAX + 2), COST_PASSES, Held(length))
        targets.append(tuple(median(seconds) for seconds in passes.values()))
    return ForwardCosts(lengths, tuple(drafts), tuple(targets))


@dataclass(frozen=True)
class Task:
    """One prompt to run every strategy on. ``agrees``: the draft's agreement with the greedy text, for the oracle."""

    input_ids: torch.Tensor
    new_tokens: int
    agrees: Sequence[bool]
    new_generator: Callable[[], torch.Generator]  # a fresh one a run, so that no run depends on another


def measure_all(pair: Pair, compared: Sequence[Strategy], task: Task) -> list[dict]:
    """Return one row per strategy on one prompt, beside plain decoding of the same length and temperature.

    Plain decoding is timed again for every RUNS_PER_BASELINE strategies. The first strategy is run once before, so
    that the prompt's shapes are warm.
    """
    _run(pair, compared[0], task)
    rows, baseline, shared = [], None, None
    for place, strategy in enumerate(compared):
        asked = (strategy.temperature, strategy.new_tokens)
        if asked != shared or place % RUNS_PER_BASELINE == 0:
            baseline, shared = _run(pair, replace(strategy, new_draft=Draft, gamma=0), task), asked
        rows.append(_row(pair, strategy, task, baseline))
    return rows


def _run(pair: Pair, strategy: Strategy, task: Task) -> Generation:
    sampling = {"temperature": strategy.temperature, "generator": task.new_generator()} if strategy.temperature else {}
    gamma = OracleGamma(task.agrees, GAMMA_MAX) if strategy.gamma is None else strategy.gamma
    tokens = strategy.new_tokens or task.new_tokens
    return speculative_generate(
        strategy.new_draft(), pair.target, task.input_ids, tokens, gamma, engine=ENGINE, **sampling
    )


def _row(pair: Pair, strategy: Strategy, task: Task, baseline: Generation) -> dict:
    """Return one strategy's row; its time only if the tokens are the baseline's, or leave it at a near tie."""
    generation = _run(pair, strategy, task)
    sampled = strategy.temperature > 0
    mismatch = None if sampled else explain_mismatch(pair.target, task.input_ids, baseline, generation, ENGINE)
    notes = [strategy.note] if strategy.note else []
    if mismatch:
        notes.append(f"near tie at token {mismatch.position}" if mismatch.near_tie else f"FAULT: {mismatch}")
    valid = mismatch is None or mismatch.near_tie
    return {
        "strategy": strategy.name,
        "temperature": strategy.temperature,
        **_counts(generation),
        "new_tokens": len(generation.tokens),
        "baseline_time_s": baseline.wall_time,
        "time_s": generation.wall_time if valid else None,
        "speedup": baseline.wall_time / generation.wall_time if valid else None,
        "tokens_equal_baseline": None if sampled else mismatch is None,
        "note": "; ".join(notes),
    }


def _counts(generation: Generation) -> dict:
    proposed, accepted = sum(generation.proposed), sum(generation.accepted)
    steps = len(generation.accepted)
    rejections = sum(a < p for a, p in zip(generation.accepted, generation.proposed, strict=True))
    return {
        "gamma_mean": proposed / steps if steps else None,
        "acceptance_rate": generation.acceptance_rate,
        "alpha": generation.alpha,
        "tokens_per_step": generation.tokens_per_step,
        "steps": steps,
        "proposed": proposed,
        "accepted": accepted,
        "tried": accepted + rejections,
    }
