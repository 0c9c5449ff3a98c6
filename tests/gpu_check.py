"""What a GPU machine without network must show before its numbers are believed; under five minutes.

    python tests/gpu_check.py                                  # on the GPU
    python tests/gpu_check.py --device cpu --timing-pair tiny  # that the script itself works

First, both engines, eager and compiled, must give the baseline's tokens on the embedded pair in float32; in float16
near ties are counted. Then single forwards of the study's sizes with random weights are timed beside what reading their
weights takes at this device's measured bandwidth. Ends with 1 on a fault, on any mismatch in float32, or where
compiling failed.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from specdec.engine.compiling import Wanted, forget_compiled_steps, prepare_fast_kernels
from specdec.engine.decoding import autoregressive_generate, speculative_generate
from specdec.engine.device import describe, weights_bandwidth
from specdec.engine.exactness import explain_mismatch
from specdec.engine.isolation import time_passes
from specdec.engine.pair import Pair, encode, load_pair
from specdec.engine.timing import PhaseClock
from specdec.prompts import PROMPTS

GAMMAS = (1, 4, 8)
NEW_TOKENS = 64
WIDTHS = (1, 2, 3, 5, 9)  # tokens per forward
REPETITIONS = 20
PATHS = ("published", "fast", "fast compiled")


def main() -> int:
    """Run both checks and return the exit code."""
    args = _arguments()
    device = torch.device(args.device)
    print(f"device  {describe(device)}")
    problems: list[str] = []
    for dtype in ("float32", "float16"):
        problems += _check_tokens(args.device, dtype)
    _time_forwards(args, problems)
    print("\n" + ("\n".join(problems) if problems else "all checks passed"))
    return 1 if problems else 0


def _arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--timing-pair", default="qwen2", choices=("qwen2", "tiny"))
    parser.add_argument("--dtype", default="auto", help="of the timed models; float16 on a GPU, else float32")
    return parser.parse_args()


def _use(pair: Pair, path: str, longest: int, problems: list[str]) -> str:
    """Set ``pair`` up for one of PATHS; returns its engine."""
    for model in (pair.draft, pair.target):
        forget_compiled_steps(model)
    if path == "fast compiled":
        decided = prepare_fast_kernels(pair, "on", Wanted(GAMMAS, longest, 0), print)
        problems += [f"{who}: {of_model['outcome']}" for who, of_model in decided.items() if not of_model["compiled"]]
    return path.split()[0]


def _check_tokens(device: str, dtype: str) -> list[str]:
    """Return what is wrong with the tokens of each path on the embedded pair."""
    pair = load_pair("tiny", device=device, dtype=dtype)
    inputs = {prompt.name: encode(pair, prompt) for prompt in PROMPTS}
    longest = max(ids.shape[1] for ids in inputs.values()) + NEW_TOKENS
    problems: list[str] = []
    for path in PATHS:
        engine = _use(pair, path, longest, problems)
        runs = mismatches = 0
        for name, input_ids in inputs.items():
            baseline = autoregressive_generate(pair.target, input_ids, NEW_TOKENS, engine=engine)
            for gamma in GAMMAS:
                generation = speculative_generate(pair.draft, pair.target, input_ids, NEW_TOKENS, gamma, engine=engine)
                mismatch = explain_mismatch(pair.target, input_ids, baseline, generation, engine)
                runs += 1
                mismatches += mismatch is not None
                if mismatch and (dtype == "float32" or not mismatch.near_tie):
                    problems.append(f"{dtype} {path} {name} gamma {gamma}: {mismatch}")
        print(f"tokens  {dtype} {path}: {mismatches} of {runs} runs leave the baseline", flush=True)
    return problems


def _time_forwards(args: Namespace, problems: list[str]) -> None:
    """Print one table: a token's time, wider forwards relative to it, the sync of a step, and the read ceiling."""
    pair = load_pair(args.timing_pair, random_weights=True, device=args.device, dtype=args.dtype)
    print(f"\n{pair.label}, {pair.target_facts.dtype}, milliseconds (median of {REPETITIONS})")
    ratios = " ".join(f"{f'v({width})':>6}" for width in WIDTHS[1:])
    print(f"{'path':14} {'model':6} {'token':>8} {'ceiling':>8} {'share':>6} {ratios}   sync")
    prompt = torch.arange(48).unsqueeze(0)
    for path in PATHS:
        engine = _use(pair, path, prompt.shape[1] + NEW_TOKENS, problems)
        clock = PhaseClock()
        for _ in range(2):  # the first run warms up
            generation = speculative_generate(pair.draft, pair.target, prompt, 32, 4, engine=engine, clock=clock)
        sync = median(step.get("sync", 0.0) for step in generation.step_seconds) * 1e3
        for name, model, facts in (("draft", pair.draft, pair.draft_facts), ("target", pair.target, pair.target_facts)):
            passes = time_passes(model, engine, WIDTHS, REPETITIONS)
            times = {width: median(seconds) for width, seconds in passes.items()}
            ceiling = facts.bytes_per_token / weights_bandwidth(model.device, facts.bytes_per_token)
            ratios = " ".join(f"{times[width] / times[1]:6.2f}" for width in WIDTHS[1:])
            of_draft = f"{sync:6.2f}" if name == "draft" else ""
            print(
                f"{path:14} {name:6} {times[1] * 1e3:8.2f} {ceiling * 1e3:8.2f} {ceiling / times[1]:6.0%} {ratios} "
                f"{of_draft}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
