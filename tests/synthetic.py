"""A made-up Phase 1 run, for tests of what reads one: Bernoulli traces, steps by replay, times from known costs."""

import json
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from specdec import results
from specdec.simulation import counts_of, replay
from specdec.theory import StepCosts, decode_time

DRAFT_MS, TARGET_MS, PREFILL_MS = 2.0, 7.0, 10.0  # c = 3.5
COSTS_MS = {
    "published": StepCosts(
        DRAFT_MS, TARGET_MS, verify_ratio=lambda tokens: 1 + 0.02 * (tokens - 1), sync=2.0, host=0.5
    ),
    "fast": StepCosts(DRAFT_MS, TARGET_MS, verify_ratio=lambda tokens: 1 + 0.02 * (tokens - 1), catch_up=0.3, host=0.1),
}


@dataclass
class Synthetic:
    """What the run looks like; ``alphas`` is the chance of agreement by prompt."""

    alphas: dict = field(default_factory=lambda: {"code_python": 0.8, "creative_story": 0.5, "mathematical": 0.65})
    gammas: tuple = (1, 2, 4, 8)
    repeats: int = 3
    new_tokens: int = 64
    engines: tuple = ("published", "fast")
    status: str = "complete"
    seed: int = 0


def write_run(folder, run=None):
    """Write the files of one whole run to ``folder`` and return its ``Synthetic``."""
    run = run or Synthetic()
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(run.seed)
    traces = {name: rng.random(run.new_tokens) < alpha for name, alpha in run.alphas.items()}
    rows = [
        _run_row(run, traces[name], {"prompt": name, "engine": engine, "gamma": gamma, "repeat": repeat})
        for engine in run.engines
        for name in run.alphas
        for repeat in range(run.repeats)
        for gamma in run.gammas
    ]
    runs = pd.DataFrame(rows)
    results.write_table(folder, results.RUNS, runs)
    for engine in run.engines:
        results.write_table(folder, results.SUMMARIES[engine], results.summarise(runs, engine))
    results.write_table(folder, results.TRACE, _trace_rows(traces))
    (folder / "manifest_phase1.json").write_text(json.dumps(_manifest(run)))
    return run


def _run_row(run, trace, key):
    history = replay(trace, key["gamma"], 10, run.new_tokens)
    slower = 1 + 0.02 * key["repeat"]  # so that repeats differ
    tokens = run.new_tokens - 1
    step_ms = float(decode_time(counts_of(history), COSTS_MS[key["engine"]]))
    pairs = list(zip(history.proposed, history.accepted, strict=True))
    return key | {
        "category": "made_up",
        "order": 0,
        "prompt_tokens": 10,
        "baseline_time_s": (PREFILL_MS + tokens * TARGET_MS) / 1e3,
        "draft_time_s": (PREFILL_MS + tokens * DRAFT_MS) / 1e3,
        "speculative_time_s": (PREFILL_MS + step_ms * slower) / 1e3,
        "baseline_prefill_s": PREFILL_MS / 1e3,
        "draft_prefill_s": PREFILL_MS / 1e3,
        "speculative_prefill_s": PREFILL_MS / 1e3,
        "new_tokens": run.new_tokens,
        "steps": len(pairs),
        "proposed": sum(history.proposed),
        "accepted": sum(history.accepted),
        "rejections": sum(accepted < proposed for proposed, accepted in pairs),
        "matches_baseline": True,
        "near_tie": False,
        "first_mismatch": None,
        "mismatch_top2_gap": None,
        "eos_at": None,
    }


def _trace_rows(traces):
    rows = [
        {
            "prompt": name,
            "position": position,
            "draft_token": 1,
            "target_token": 1 if agrees else 2,
            "agrees": bool(agrees),
            "top2_gap": 1.0,
        }
        for name, trace in traces.items()
        for position, agrees in enumerate(trace)
    ]
    return pd.DataFrame(rows)


def _manifest(run):
    model = {"hidden_size": 64, "tied_embeddings": True, "device": "cpu", "dtype": "float32", "sha256": "0"}
    return {
        "phase": "phase1",
        "status": run.status,
        "run_id": "made-up",
        "constants": {"gammas": list(run.gammas), "prompts": list(run.alphas), "max_new_tokens": run.new_tokens},
        "pair": {
            "name": "made-up-pair",
            "draft": model | {"name": "little", "layers": 2, "bytes_per_token": 4_000_000, "parameters": 1_000_000},
            "target": model | {"name": "large", "layers": 6, "bytes_per_token": 16_000_000, "parameters": 4_000_000},
        },
        "device": {"type": "cpu", "name": "a made-up processor"},
        "ceilings": {
            "read_bandwidth_bytes_per_s": 32e9,
            "draft": {"ceiling_ms": 0.125, "measured_ms": 2.0, "ceiling_share": 0.0625},
            "target": {"ceiling_ms": 0.5, "measured_ms": 7.0, "ceiling_share": 0.0714},
        },
    }
