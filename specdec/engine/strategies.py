"""The techniques that Phase 3 sets side by side: who proposes and how many, each put together from parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from specdec.engine.decoding import Generation, speculative_generate, speculative_generate_batch, warm_up_tokens
from specdec.engine.drafting import Draft, EarlyExitDraft, ModelDraft, PromptLookupDraft, TreeDraft, tree_nodes
from specdec.engine.engines import Engine, get_engine
from specdec.engine.exactness import explain_mismatch
from specdec.engine.forward import first_layers
from specdec.engine.isolation import Held, time_passes
from specdec.engine.kv_compression import quantized_cache
from specdec.engine.pair import Pair
from specdec.engine.timing import now, ratio
from specdec.schedules import AdaptiveGamma, CompressionAwareGamma, CostAwareGamma, ForwardCosts, Schedule
from specdec.simulation import OracleGamma

ENGINE = "fast"  # all strategies run on it, so that they differ in nothing else
USUAL_GAMMA = 4  # of strategies that are shown at one gamma
TREE = (2, 2, 1)  # branches at each depth
BATCH_GAMMAS = (0, 2)  # of the batch of all prompts: plain decoding, and one that pays for most pairs
GAMMA_MAX = 8  # the most that schedules may ask for, as in the study
SAMPLING_TEMPERATURES = (0.3, 0.8)  # the ends of the second document's range
SHORT_TOKENS = 16  # an output far below the 50 tokens that the second document calls short
RUNS_PER_BASELINE = 8  # strategies timed against one run of plain decoding
WARM_TOKENS = 4  # enough for a prompt's prefill and one step of both models
COST_LENGTHS = (64, 512)  # cache lengths at which forwards are timed for the cost-aware rule
COST_PASSES = 15  # per width and length; the median counts
COMPRESSED = replace(get_engine(ENGINE), new_cache=quantized_cache(8))  # of the compression-aware rule's draft
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
    layers, _ = exit_layer(pair.target)
    lower = first_layers(pair.target, layers)
    costs = forward_costs(pair.target, [(pair.draft, ENGINE), (pair.draft, COMPRESSED), (lower, ENGINE)])
    own, compressed, early = (CostAwareGamma(each) for each in costs)
    return [
        *(Strategy(f"fixed gamma {gamma}", lambda: pair.draft, gamma) for gamma in gammas),
        *_of_the_draft_model(pair),
        *_schedules(pair, own, compressed),
        *_without_a_draft_model(pair, early),
        *(
            Strategy(f"rejection sampling, gamma {USUAL_GAMMA}", lambda: pair.draft, USUAL_GAMMA, temperature)
            for temperature in SAMPLING_TEMPERATURES
        ),
        Strategy(f"short output, gamma {USUAL_GAMMA}", lambda: pair.draft, USUAL_GAMMA, new_tokens=SHORT_TOKENS),
    ]


def _of_the_draft_model(pair: Pair) -> list[Strategy]:
    """Return the study's sync on fast kernels, and a tree beside chains of its depth and of its size."""
    fast = get_engine(ENGINE)
    nodes, depth = tree_nodes(TREE), len(TREE)
    again = partial(ModelDraft, pair.draft, replace(fast, reforward=True))
    tree = partial(TreeDraft, pair.draft, fast, TREE)
    note = f"{nodes} tokens a step, counted along the path"
    return [
        Strategy(f"fixed gamma {USUAL_GAMMA}, draft run again to sync", again, USUAL_GAMMA),
        Strategy(f"tree {'-'.join(map(str, TREE))}", tree, depth, note=note),
        Strategy(f"chain of as many tokens as the tree, gamma {nodes}", lambda: pair.draft, nodes),
        Strategy(f"chain as deep as the tree, gamma {depth}", lambda: pair.draft, depth),
    ]


def _schedules(pair: Pair, own: CostAwareGamma, compressed: CostAwareGamma) -> list[Strategy]:
    aware = CompressionAwareGamma(compressed, room(pair.target), "int8")
    return [
        Strategy("adaptive gamma", lambda: pair.draft, AdaptiveGamma(GAMMA_MAX)),
        Strategy("cost-aware gamma", lambda: pair.draft, own),
        Strategy(
            "compression-aware gamma, int8 draft cache",
            partial(ModelDraft, pair.draft, COMPRESSED),
            aware,
            note="agreement remembered from request to request",
        ),
        Strategy(ORACLE, lambda: pair.draft, None),
    ]


def _without_a_draft_model(pair: Pair, cost_aware: CostAwareGamma) -> list[Strategy]:
    layers, note = exit_layer(pair.target)
    named = {"early exit, gamma 1": 1, "early exit, cost-aware gamma": cost_aware}
    return [
        *(Strategy(name, partial(EarlyExitDraft, layers), gamma, note=note) for name, gamma in named.items()),
        Strategy(f"prompt lookup, gamma {USUAL_GAMMA}", PromptLookupDraft, USUAL_GAMMA),
    ]


def room(target: torch.nn.Module) -> int:
    """Return the tokens that the model's context holds; a cache of that size fits wherever the model does here."""
    return getattr(target.config, "max_position_embeddings", None) or 1 << 20


def exit_layer(target: torch.nn.Module) -> tuple[int, str]:
    """Return after which layer an early exit is taken, and what must be said of it."""
    trained = getattr(target.config, "early_exit_layer", None)
    if trained:
        return trained, f"after layer {trained}, trained for it"
    layers = max(1, target.config.num_hidden_layers // 4)
    return layers, f"after layer {layers}, not trained for it"


def forward_costs(
    target: torch.nn.Module, drafts: Sequence[tuple[torch.nn.Module, str | Engine]]
) -> list[ForwardCosts]:
    """Time forwards of ``target`` over 1 to GAMMA_MAX + 1 tokens, and of each draft, with its engine, over one.

    Returns the costs beside each of ``drafts``.
    """
    limit = getattr(target.config, "max_position_embeddings", None) or max(COST_LENGTHS)
    lengths = tuple(length for length in COST_LENGTHS if length + GAMMA_MAX < limit)

    def timed(model: torch.nn.Module, engine: str | Engine, widths: Sequence[int]) -> tuple[tuple[float, ...], ...]:
        passes = [time_passes(model, engine, widths, COST_PASSES, Held(length)) for length in lengths]
        return tuple(tuple(median(seconds) for seconds in by_width.values()) for by_width in passes)

    of_target = timed(target, ENGINE, range(1, GAMMA_MAX + 2))
    of_drafts = [timed(model, engine, (1,)) for model, engine in drafts]
    return [ForwardCosts(lengths, tuple(one for (one,) in by_length), of_target) for by_length in of_drafts]


@dataclass(frozen=True)
class Task:
    """One prompt to run every strategy on. ``agrees``: the draft's agreement with the greedy text, for the oracle."""

    input_ids: torch.Tensor
    new_tokens: int
    agrees: Sequence[bool]
    new_generator: Callable[[], torch.Generator]  # a fresh one a run, so that no run depends on another


def measure_all(pair: Pair, compared: Sequence[Strategy], task: Task) -> list[dict]:
    """Return one row per strategy on one prompt, beside plain decoding of the same length, greedy or sampled alike.

    Plain decoding is timed again for every RUNS_PER_BASELINE strategies. The first strategy runs over a few tokens
    before, so that the prompt's shapes are warm.
    """
    _run(pair, replace(compared[0], new_tokens=min(WARM_TOKENS, task.new_tokens)), task)
    rows, baseline, shared = [], None, None
    for place, strategy in enumerate(compared):
        asked = (strategy.temperature > 0, strategy.new_tokens)
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
        "speedup": ratio(baseline.wall_time, generation.wall_time) if valid else None,
        "tokens_equal_baseline": None if sampled else mismatch is None,
        "note": "; ".join(notes),
    }


def _counts(generation: Generation) -> dict:
    proposed, accepted = sum(generation.proposed), sum(generation.accepted)
    steps = len(generation.accepted)
    return {
        "gamma_mean": proposed / steps if steps else None,
        "acceptance_rate": generation.acceptance_rate,
        "alpha": generation.alpha,
        "tokens_per_step": generation.tokens_per_step,
        "steps": steps,
        "proposed": proposed,
        "accepted": accepted,
        "tried": accepted + generation.rejections,
    }


def measure_batch(pair: Pair, inputs: Sequence[torch.Tensor], new_tokens: int) -> list[dict]:
    """Return one row per gamma of BATCH_GAMMAS for all prompts as one batch, beside plain decoding one by one."""
    gamma = max(BATCH_GAMMAS)
    speculative_generate_batch(pair.draft, pair.target, inputs, warm_up_tokens(gamma, new_tokens), gamma)
    alone = [speculative_generate(Draft(), pair.target, ids, new_tokens, 0, engine=ENGINE) for ids in inputs]
    rows = []
    for gamma in BATCH_GAMMAS:
        started = now((pair.target.device,))
        together = speculative_generate_batch(pair.draft, pair.target, inputs, new_tokens, gamma)
        seconds = now((pair.target.device,)) - started
        mismatches = [
            explain_mismatch(pair.target, ids, single, batched, ENGINE)
            for ids, single, batched in zip(inputs, alone, together, strict=True)
        ]
        valid = all(mismatch is None or mismatch.near_tie for mismatch in mismatches)
        baseline = sum(single.wall_time for single in alone)
        rows.append(
            {
                "strategy": f"batch of {len(inputs)}, gamma {gamma}",
                "temperature": 0.0,
                **_counts(_joined(together)),
                "new_tokens": sum(len(generation.tokens) for generation in together),
                "baseline_time_s": baseline,
                "time_s": seconds if valid else None,
                "speedup": ratio(baseline, seconds) if valid else None,
                "tokens_equal_baseline": not any(mismatches),
                "note": "all prompts at once against one by one",
            }
        )
    return rows


def _joined(generations: Sequence[Generation]) -> Generation:
    return Generation(
        proposed=[count for generation in generations for count in generation.proposed],
        accepted=[count for generation in generations for count in generation.accepted],
    )
