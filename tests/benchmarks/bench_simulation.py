"""How many times faster the vectorised Monte Carlo is than a plain Python loop over the same number of trials.

    python tests/benchmarks/bench_simulation.py

The aim is 10 times at gamma 4 and 8. It is no test, since a busy machine would fail it.
"""

import random
import sys
from pathlib import Path
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from specdec.simulation import scenario_speedups, simulate_counts, simulate_runs
from specdec.theory import StepCosts

TRIALS = 10_000  # what Phase 2 draws for each prompt and gamma
NEW_TOKENS = 64  # the study's
ALPHA = 0.54  # the mean of the study's eight prompts
REPEATS = 3  # the fastest counts
PROMPT_ALPHAS = [0.606, 0.598, 0.560, 0.559, 0.556, 0.496, 0.494, 0.446]  # the study's
COST_RATIOS = [1.18, 2.5, 4.0, 8.0, 10.0, 3.0]  # the study's scenarios and one for this machine


def plain_mean_steps(gamma: int, draw: random.Random) -> float:
    """Return the mean number of steps of ``TRIALS`` runs, one token at a time."""
    total_steps = 0
    for _ in range(TRIALS):
        remaining = NEW_TOKENS - 1
        while remaining:
            proposed = min(gamma, remaining - 1)
            accepted = 0
            while accepted < proposed and draw.random() < ALPHA:
                accepted += 1
            remaining -= accepted + 1
            total_steps += 1
    return total_steps / TRIALS


def fastest(work) -> tuple[float, float]:
    """Return the shortest time of ``REPEATS`` calls, in seconds, and the last result."""
    times = []
    for _ in range(REPEATS):
        start = perf_counter()
        result = work()
        times.append(perf_counter() - start)
    return min(times), result


def all_scenarios() -> None:
    """Do the Monte Carlo of Phase 2: eight prompts, four gammas, six scenarios."""
    runs = simulate_runs(PROMPT_ALPHAS, [1, 2, 4, 8], NEW_TOKENS, TRIALS, np.random.default_rng(0))
    for cost_ratio in COST_RATIOS:
        scenario_speedups(runs, StepCosts(t_draft=1.0, t_target=cost_ratio))


def main() -> None:
    """Print both times, their ratio and the mean steps of both, then the time of all scenarios."""
    for gamma in (4, 8):
        plain_s, plain_steps = fastest(lambda gamma=gamma: plain_mean_steps(gamma, random.Random(0)))
        vector_s, vector_steps = fastest(
            lambda gamma=gamma: simulate_counts(ALPHA, gamma, NEW_TOKENS, TRIALS, np.random.default_rng(0)).steps.mean()
        )
        print(
            f"gamma {gamma}: plain {1000 * plain_s:.0f} ms ({plain_steps:.2f} steps), "
            f"vectorised {1000 * vector_s:.1f} ms ({vector_steps:.2f} steps), {plain_s / vector_s:.1f} times"
        )
    seconds, _ = fastest(all_scenarios)
    print(f"{len(COST_RATIOS)} scenarios, 8 prompts, 4 gammas, {TRIALS} trials: {seconds:.2f} s")


if __name__ == "__main__":
    main()
