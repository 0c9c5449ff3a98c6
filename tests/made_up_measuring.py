"""Phases 1 and 3 with measuring functions that run no model, so that their loops and files can be cut many times.

Everything that writes, resumes and derives is the real code; what would take a forward is made up, always the same.
"""

from __future__ import annotations

import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

import phase3_profiling
import speculative_decoding
from specdec import results, simulation
from specdec.engine.decoding import Generation

PROMPTS = ("code_python", "creative_story")
GAMMAS = (1, 3)
NEW_TOKENS = 12
PHASE1_FILES = (*speculative_decoding.FILES,)
PHASE3_TABLES = (results.BREAKDOWN, results.BY_POSITION)
MODEL = {"layers": 2, "bytes_per_token": 1000, "dtype": "float32", "device": "cpu"}


class MadeUpPair:
    """What the phases ask of a pair besides its models' forwards."""

    name, label = "made up", "made up (little / large)"
    draft, target = SimpleNamespace(device="cpu"), SimpleNamespace(device="cpu")
    tokenizer = SimpleNamespace(decode=lambda tokens: " ".join(map(str, tokens)))

    def manifest_entry(self) -> dict:
        return {"name": self.name, "draft": {"name": "little", **MODEL}, "target": {"name": "large", **MODEL}}


def agreement(name: str) -> np.ndarray:
    """Return whether draft and target agree at each new token of a prompt, (NEW_TOKENS,) of bool."""
    return np.random.default_rng(zlib.crc32(name.encode())).random(NEW_TOKENS) < 0.6


def generation(name: str, count: int, gamma: int) -> Generation:
    """Return what a run over ``count`` tokens at ``gamma`` does where agreement is as made up."""
    history = simulation.replay(agreement(name)[:count], gamma, 7, count)
    seconds = 0.010 + 0.004 * len(history.proposed) + 0.001 * sum(history.proposed)
    return Generation(list(range(count)), seconds, 0.010, history.proposed, history.accepted)


def common(module, tell) -> dict:
    """Return what both phases need in place of torch's work."""

    def encode(pair, prompt, chat):
        return SimpleNamespace(shape=(1, 7), name=prompt.name)

    return {
        "pair_from_flags": lambda args: MadeUpPair(),
        "encode": encode,
        "check_request": lambda *args: None,
        "prepare_fast_kernels": lambda *args: {},
        "devices": SimpleNamespace(describe=lambda device: {"name": "a made-up machine"}),
    }


def phase1(tell) -> dict:
    """Return the names to put in place in Phase 1, which tell when a measurement begins and a row is stored."""
    store_run = speculative_decoding._store_run

    def alone(model, input_ids, count, engine):
        tell("measuring")
        return generation(input_ids.name, count, 0)

    def speculative(draft, target, input_ids, count, gamma, engine):
        tell("measuring")
        return generation(input_ids.name, count, gamma)

    def store(*args):
        store_run(*args)
        tell("stored")

    def trace(pair, input_ids, tokens, engine):
        tell("measuring")
        rows = zip(agreement(input_ids.name), tokens)
        return [
            {"position": place, "draft_token": token if agrees else 99, "target_token": token, "agrees": bool(agrees)}
            | {"top2_gap": 1.0}
            for place, (agrees, token) in enumerate(rows)
        ]

    return common(speculative_decoding, tell) | {
        "eos_ids": lambda pair: frozenset({5}),
        "autoregressive_generate": alone,
        "speculative_generate": speculative,
        "explain_mismatch": lambda *args: None,
        "trace_agreement": trace,
        "_store_run": store,
        "_print_ceilings": lambda benchmark: {},
    }


def phase3(tell) -> dict:
    """Return the names to put in place in Phase 3."""

    def breakdown(profile, engine, gamma, catch_up_ms):
        tell("measuring")
        milliseconds = {name: 0.5 for name, kind in results.BREAKDOWN.columns.items() if kind == "number"}
        counts = {"proposed": gamma, "accepted": gamma // 2, "prompt": PROMPTS[0]}
        return [{"step": step, **milliseconds, **counts} for step in range(4)]

    def by_position(profile, name):
        tell("measuring")
        row = {"gamma": 3, "proposed": 3, "accepted": 1, "acceptance_rate": 1 / 3}
        return [{**row, "step": step, "position": 1 + 2 * step} for step in range(5)]

    return common(phase3_profiling, tell) | {
        "_breakdown": breakdown,
        "_catch_up_ms": lambda profile, engine: 0.0,
        "_steps_by_position": by_position,
        "_instrumentation_cost": lambda *args: 0.0,
        "_wanted": lambda profile: None,
        "_ceilings": lambda pair: {},
        "plots": SimpleNamespace(profile_plots=lambda *args: {}, save_all=lambda *args: []),
    }


SCRIPTS = {
    "phase1": (speculative_decoding, phase1, ["--repeats", "2", "--engines", "published,fast"]),
    "phase3": (phase3_profiling, phase3, ["--sections", "1,2"]),
}


def run(phase: str, folder: Path, tell, *more: str) -> int:
    """Run a phase's ``main`` over ``folder`` and return its exit code."""
    script, made_up, flags = SCRIPTS[phase]
    flags = [*flags, "--prompts", ",".join(PROMPTS), "--gammas", ",".join(map(str, GAMMAS))]
    flags += ["--max-new-tokens", str(NEW_TOKENS), "--results-dir", str(folder), "--plots-dir", str(folder / "plots")]
    with mock.patch.multiple(script, **made_up(tell)):
        return script.main([*flags, *more])


def run_in_child(phase: str, folder: Path, pipe: Connection, *more: str) -> None:
    """Be a process that tells its progress through ``pipe`` and ends with the phase's exit code."""
    raise SystemExit(run(phase, folder, pipe.send, *more))
