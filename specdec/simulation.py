"""Speculative decoding without a model: random runs at a given alpha, and exact replay of a recorded agreement trace.

Both count steps (``theory.StepCounts``) and know nothing of time, so that one set of draws, or one trace, serves every
cost model: ``theory.decode_speedup(counts, costs)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from specdec.schedules import History, Schedule, as_schedule
from specdec.theory import (
    StepCosts,
    StepCounts,
    alpha_estimate,
    check_run,
    decode_speedup,
    expected_steps,
    steps_standard_deviation,
)

LOW_QUANTILE, HIGH_QUANTILE = 0.05, 0.95  # of single requests: nine in ten lie between


# Monte Carlo


def simulate_counts(alpha: float, gamma: int, new_tokens: int, trials: int, rng: np.random.Generator) -> StepCounts:
    """Draw ``trials`` independent runs of exactly ``new_tokens`` tokens; every tried token is accepted with ``alpha``.

    The counts have one row per trial: ``steps`` and ``proposed`` (trials,), ``by_proposed`` (trials, gamma + 1).
    Raises ValueError for bad alpha or gamma, or new_tokens or trials < 1.
    """
    check_run(alpha, gamma, new_tokens)
    if trials < 1:
        raise ValueError(f"trials must be >= 1, got {trials}")
    widths = np.arange(gamma + 1)[:, None]
    by_proposed = np.zeros((gamma + 1, trials), dtype=np.int32)
    catch_up_steps = np.zeros(trials, dtype=np.int32)
    remaining = np.full(trials, new_tokens - 1, dtype=np.int32)
    while remaining.any():
        proposed = np.minimum(remaining - 1, gamma)  # -1 in a finished trial, which then commits 0 and counts nowhere
        accepted = np.minimum(_draw_run_lengths(alpha, gamma, trials, rng), proposed)
        remaining -= accepted + 1
        by_proposed += proposed == widths
        catch_up_steps += (accepted == gamma) & (remaining >= 2)

    sync_steps = np.maximum(by_proposed.sum(axis=0) - 1, 0)  # only the last step can propose nothing
    return StepCounts(new_tokens, by_proposed.T, sync_steps * (gamma > 0), catch_up_steps * (gamma > 0))


def _draw_run_lengths(alpha: float, longest: int, trials: int, rng: np.random.Generator) -> np.ndarray:
    """Draw how many tokens agree before the first that does not, (trials,) of int32, cut at ``longest``.

    A run reaches length k if u < alpha^k, so its length is log u / log alpha. Single precision is off by less than
    1e-6 in a probability, far below the noise of any number of trials used here, and takes half the time.
    """
    if alpha in (0, 1):
        return np.full(trials, longest if alpha else 0, dtype=np.int32)
    logs = np.log(1 - rng.random(trials, dtype=np.float32))  # 1 - u is never 0
    return np.minimum(logs * (1 / math.log(alpha)), longest).astype(np.int32)


@dataclass(frozen=True)
class SimulatedRuns:
    """Runs drawn for every prompt and gamma: ``counts[prompt][gamma's place]`` holds the trials of one pair."""

    gammas: tuple[int, ...]
    counts: tuple[tuple[StepCounts, ...], ...]


def simulate_runs(
    alphas: Sequence[float], gammas: Sequence[int], new_tokens: int, trials: int, rng: np.random.Generator
) -> SimulatedRuns:
    """Draw ``trials`` runs for each prompt's alpha and each gamma, once for all scenarios.

    Raises ValueError for no alphas or gammas, and as ``simulate_counts`` does.
    """
    if not len(alphas) or not len(gammas):
        raise ValueError("simulation needs at least one alpha and one gamma")
    counts = tuple(
        tuple(simulate_counts(alpha, gamma, new_tokens, trials, rng) for gamma in gammas) for alpha in alphas
    )
    return SimulatedRuns(tuple(gammas), counts)


@dataclass(frozen=True)
class ScenarioSpeedups:
    """Decode speedups of one scenario, each array (prompts, gammas).

    mean: the target's time alone / the mean time of the trials, so that it estimates what ``full_speedup`` gives.
    low, high: the 5 % and 95 % quantiles of single trials.
    best_low, best_high: the same quantiles over the trials of all prompts, each at its own best gamma; None if all
        trials took the same time.
    """

    gammas: tuple[int, ...]
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    best_low: float | None
    best_high: float | None

    @cached_property
    def best_gammas(self) -> tuple[int, ...]:
        """For each prompt the gamma with the highest mean: a choice in hindsight."""
        return tuple(self.gammas[place] for place in self.mean.argmax(axis=1))

    @property
    def helpful_pct(self) -> float:
        """Percent of prompts whose best gamma has a mean speedup above 1."""
        return float(100 * np.mean(self.mean.max(axis=1) > 1))

    @property
    def mean_speedup(self) -> float:
        """Mean over prompts of the speedup at each prompt's best gamma."""
        return float(self.mean.max(axis=1).mean())

    @property
    def helpful_pct_all_gammas(self) -> float:
        """Percent of all (prompt, gamma) pairs with a mean speedup above 1."""
        return float(100 * np.mean(self.mean > 1))

    @property
    def mean_all_gammas(self) -> float:
        """Mean speedup over all (prompt, gamma) pairs."""
        return float(self.mean.mean())


def scenario_speedups(runs: SimulatedRuns, costs: StepCosts) -> ScenarioSpeedups:
    """Price the drawn runs with one scenario's costs; Leviathan's are ``StepCosts(t_draft=1, t_target=cost_ratio)``.

    Raises ValueError for runs of fewer than two new tokens, or a verify ratio too short for their gammas.
    """
    trials = np.array([[decode_speedup(counts, costs) for counts in row] for row in runs.counts])
    # (prompts, gammas, trials)
    mean = 1 / np.mean(1 / trials, axis=-1)  # of times, not of ratios
    low, high = np.quantile(trials, [LOW_QUANTILE, HIGH_QUANTILE], axis=-1)
    at_best = trials[np.arange(len(trials)), mean.argmax(axis=1)]  # (prompts, trials)
    best_low, best_high = (float(limit) for limit in np.quantile(at_best, [LOW_QUANTILE, HIGH_QUANTILE]))
    if best_low == best_high:
        best_low = best_high = None
    return ScenarioSpeedups(runs.gammas, mean, low, high, best_low, best_high)


# Trace replay


@dataclass(frozen=True)
class OracleGamma:
    """The schedule that knows the trace: it proposes exactly the tokens that will be accepted, gamma_max at most.

    agrees: (tokens,), see ``replay``. It wastes no draft forward, which no schedule that learns from the past can.
    """

    agrees: Sequence[bool]
    gamma_max: int

    def __call__(self, history: History) -> int:
        return _agreeing_prefix(self.agrees, history.new_tokens, self.gamma_max)


def replay(agrees: Sequence[bool], schedule: int | Schedule, prompt_tokens: int, new_tokens: int) -> History:
    """Return the steps that greedy speculative decoding takes under ``schedule`` on a recorded trace, exactly.

    agrees: (tokens,) of bool, at least ``new_tokens`` long: whether the draft's greedy token agrees with the target's
        new token i, given the target's own text before it. Token 0 is the prefill's and is never proposed; a step
        after t committed new tokens proposes tokens t, t + 1, ...
    Nothing is assumed about how agreement is distributed: in greedy decoding the text doesn't depend on the schedule.
    Raises ValueError for new_tokens < 1, a trace that is too short or not of bools, or a schedule's gamma < 0.
    """
    agrees = _checked_trace(agrees, new_tokens)
    schedule = as_schedule(schedule)
    history = History(prompt_tokens)
    while history.new_tokens < new_tokens:
        gamma = schedule(history)
        if gamma < 0:
            raise ValueError(f"the schedule asked for {gamma} tokens")
        proposed = min(gamma, new_tokens - history.new_tokens - 1)
        accepted = _agreeing_prefix(agrees, history.new_tokens, proposed)
        history.proposed.append(proposed)
        history.accepted.append(accepted)
    return history


def counts_of(history: History) -> StepCounts:
    """Return the counts of one finished run, for ``theory.decode_time`` and ``theory.decode_speedup``."""
    proposed, accepted = np.asarray(history.proposed, dtype=int), np.asarray(history.accepted, dtype=int)
    proposes = proposed > 0
    draft_lags = accepted == proposed  # after such a step the `fast` engine's draft has not seen all committed tokens
    return StepCounts(
        new_tokens=history.new_tokens,
        by_proposed=np.bincount(proposed, minlength=1),
        sync_steps=int(np.count_nonzero(proposes[:-1])),
        catch_up_steps=int(np.count_nonzero(proposes[1:] & draft_lags[:-1])),
    )


def lag1_autocorrelation(agrees: Sequence[bool]) -> float | None:
    """Return the correlation of agreement at neighbouring positions, (tokens,): 0 if independent, > 0 if in runs.

    The usual sample form, sum (x_i - m)(x_i+1 - m) / sum (x_i - m)^2. None for fewer than two tokens or if all are
    equal. Raises ValueError for a trace that is not of bools.
    """
    deviations = _checked_trace(agrees).astype(float)
    if len(deviations) < 2 or np.ptp(deviations) == 0:
        return None
    deviations -= deviations.mean()
    return float(deviations[:-1] @ deviations[1:] / (deviations @ deviations))


@dataclass(frozen=True)
class IidComparison:
    """Steps of one trace at one gamma beside those of independent agreement with the same alpha.

    alpha: share of the trace's proposable tokens (1 to new_tokens - 2) that agree.
    replay_alpha: share of those that this gamma tries, None at gamma 0. Bonus tokens are never tried and follow
        agreement, so if agreement comes in runs it is below ``alpha``, most so at a small gamma: an alpha that rises
        with gamma.
    replay_steps: the trace's own. iid_steps, iid_steps_sd: exact mean and standard deviation at ``alpha``.
    """

    gamma: int
    alpha: float
    replay_alpha: float | None
    replay_steps: int
    iid_steps: float
    iid_steps_sd: float

    @property
    def replay_over_iid(self) -> float:
        """Steps of the trace / steps expected if agreement were independent: above 1, the order costs steps."""
        return self.replay_steps / self.iid_steps

    @property
    def deviation(self) -> float | None:
        """The difference in standard deviations (within 2 it may be chance); None if independent runs don't vary."""
        return (self.replay_steps - self.iid_steps) / self.iid_steps_sd if self.iid_steps_sd else None


def compare_with_iid(agrees: Sequence[bool], gamma: int, new_tokens: int) -> IidComparison:
    """Return how far independent agreement is from the trace itself, at one fixed gamma.

    agrees: as in ``replay``. Raises ValueError as ``replay`` does, and for fewer than three new tokens, where nothing
    can be proposed.
    """
    if new_tokens < 3:
        raise ValueError("fewer than three new tokens leave nothing to propose")
    agrees = _checked_trace(agrees, new_tokens)
    alpha = float(agrees[1 : new_tokens - 1].mean())
    history = replay(agrees, gamma, 0, new_tokens)
    return IidComparison(
        gamma=gamma,
        alpha=alpha,
        replay_alpha=alpha_estimate(history.proposed, history.accepted),
        replay_steps=len(history.proposed),
        iid_steps=expected_steps(alpha, gamma, new_tokens),
        iid_steps_sd=steps_standard_deviation(alpha, gamma, new_tokens),
    )


def _agreeing_prefix(agrees: Sequence[bool], start: int, longest: int) -> int:
    """Count the tokens from ``start`` on that agree before the first that does not, ``longest`` at most."""
    for length, agree in enumerate(agrees[start : start + longest]):
        if not agree:
            return length
    return len(agrees[start : start + longest])


def _checked_trace(agrees: ArrayLike, new_tokens: int | None = None) -> np.ndarray:
    agrees = np.asarray(agrees)
    if agrees.ndim != 1 or agrees.dtype != bool:
        raise ValueError(f"an agreement trace is one row of bools, got {agrees.dtype} of shape {agrees.shape}")
    if new_tokens is not None and not 1 <= new_tokens <= len(agrees):
        raise ValueError(f"new_tokens must be 1 to the trace's {len(agrees)} tokens, got {new_tokens}")
    return agrees
