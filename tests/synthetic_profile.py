"""Made-up Phase 2 and 3 files beside a made-up Phase 1 run, for tests of the report."""

import json

import numpy as np
import pandas as pd
from synthetic import COSTS_MS, DRAFT_MS, TARGET_MS, Synthetic, write_run

import analysis_deep
from specdec import claims, results
from specdec.report.collection import SECTIONS

STEPS = 8
TEMPERATURES = (0.0, 0.7, 1.5)
STRATEGIES = {"fixed gamma 2": 1.2, "fixed gamma 4": 1.1, "cost-aware gamma": 1.25, "oracle gamma (knows)": 1.6}


def write_everything(folder, run=None):
    """Write the files of all three phases to ``folder``."""
    run = write_run(folder, run)
    arguments = ["--results-dir", str(folder), "--plots-dir", str(folder / "plots"), "--trials", "50"]
    assert analysis_deep.main(arguments) == 0
    write_profile(folder, run)
    return run


def write_profile(folder, run=None, **manifest):
    """Write Phase 3's tables and manifest to ``folder``; ``manifest`` replaces entries of it."""
    run = run or Synthetic()
    prompts = list(run.alphas)
    tables = {
        results.BREAKDOWN.file: [
            _step(run, e, g, n) for e in run.engines for g in (0, *run.gammas) for n in range(STEPS)
        ],
        results.VERIFY_COST.file: [row for engine in run.engines for row in _widths(engine)],
        results.ISOLATED.file: [
            {"engine": e, "model": m, "repetition": n, "cache_length": 64, "ms": ms + 0.01 * n}
            for e in run.engines
            for m, ms in (("draft", DRAFT_MS), ("target", TARGET_MS))
            for n in range(STEPS)
        ],
        results.BY_POSITION.file: [_position(p, n) for p in prompts for n in range(STEPS)],
        results.BY_TEMPERATURE.file: [_temperature(p, t) for p in prompts for t in TEMPERATURES],
        results.STRATEGIES.file: [_strategy(name, p, up) for name, up in STRATEGIES.items() for p in prompts],
        results.KV_COMPRESSION.file: [
            _compressed(where, name) for where in ("draft", "target") for name in ("none", "int8")
        ],
    }
    for table in [table for made in SECTIONS.values() for table in made]:
        results.write_table(folder, table, pd.DataFrame(tables[table.file], columns=list(table.columns)))
    stored = [pd.DataFrame(tables[table.file]) for table in (results.STRATEGIES, results.KV_COMPRESSION)]
    results.write_table(folder, results.CLAIMS, claims.check_claims(*stored))
    entries = json.loads((folder / "manifest_phase1.json").read_text()) | {"phase": "phase3"} | manifest
    (folder / "manifest_phase3.json").write_text(json.dumps(entries))


def _step(run, engine, gamma, number):
    costs = COSTS_MS[engine]
    parts = {
        "draft_ms": gamma * costs.t_draft,
        "target_ms": costs.t_target * costs.verify_ratio(gamma + 1),
        "sync_ms": costs.sync if gamma else 0.0,
        "catchup_ms": costs.catch_up if gamma and number % 2 else 0.0,
        "verify_ms": costs.host if gamma else 0.0,
        "other_ms": 0.0,
    }
    key = {"engine": engine, "gamma": gamma, "step": number, "prompt": next(iter(run.alphas))}
    return key | parts | {"step_ms": sum(parts.values()), "proposed": gamma, "accepted": gamma // 2}


def _widths(engine):
    ratio = COSTS_MS[engine].verify_ratio
    shared = {"engine": engine, "cache_length": 64, "spread": 0.01, "roofline_ratio": 1.0}
    rows = [
        shared | {"model": "target", "tokens": k, "batch": b, "ms": TARGET_MS * ratio(k), "verify_ratio": ratio(k)}
        for b in (1, 8)
        for k in range(1, 10)
    ]
    return rows + [
        shared | {"model": "draft", "tokens": 1, "batch": b, "ms": DRAFT_MS, "verify_ratio": 1.0} for b in (1, 8)
    ]


def _position(prompt, number):
    accepted = number % 3
    key = {"prompt": prompt, "gamma": 4, "step": number, "position": 1 + 3 * number}
    return key | {"proposed": 4, "accepted": accepted, "acceptance_rate": accepted / 4}


def _temperature(prompt, temperature):
    match = 0.7 * np.exp(-temperature)
    return {
        "prompt": prompt,
        "temperature": temperature,
        "gamma": 4,
        "positions": 64,
        "alpha_match": match,
        "match_rate": 0.6 * match,
        "alpha_overlap": 0.72,
        "alpha_sampled": 0.7,
        "low": 0.6,
        "high": 0.8,
        "relative_to_greedy": match / 0.7,
        "tried": 100,
        "accepted": 70,
        "expected": 72.0,
        "variance": 20.0,
    }


def _strategy(name, prompt, speedup):
    return {
        "strategy": name,
        "prompt": prompt,
        "gamma_mean": 2.0,
        "temperature": 0.0,
        "acceptance_rate": 0.6,
        "alpha": 0.7,
        "tokens_per_step": 2.2,
        "steps": 30,
        "time_s": 1 / speedup,
        "speedup": speedup,
        "tokens_equal_baseline": True,
        "note": "",
        "new_tokens": 64,
        "proposed": 60,
        "accepted": 36,
        "tried": 51,
        "baseline_time_s": 1.0,
    }


def _compressed(where, technique):
    size = {"none": 2048.0, "int8": 544.0}[technique]
    row = {"technique": technique, "where": where, "bytes_per_token": size, "cache_bytes": 64 * size}
    return row | {"alpha": 0.6, "tokens_equal_share": 1.0, "time_s": 1.0, "note": "made up"}
