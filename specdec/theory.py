"""How fast speculative decoding should be: closed forms, the exact N-token form, and estimators of alpha.

Three levels of detail, each adding what the one before leaves out:

1. ``leviathan_speedup``: endless output, free overhead (Leviathan et al. 2023, equation 1 and theorem 3.8);
2. ``corrected_speedup``: one constant more per step, the study's sync time;
3. ``full_speedup``: a budget of N tokens with its short last steps, a forward over k tokens that costs v(k) of one over
   a single token, sync or catch-up only in the steps that have one, and the host's time.

alpha is the chance that a proposed token which is tried is accepted; gamma how many tokens a step proposes; the cost
ratio is c = T_target / T_draft (Leviathan's c is its inverse).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import bisect, brentq

ROOT_RELATIVE_TOLERANCE = 1e-13  # a root is asked to 13 of the 16 digits a double holds
ROOT_MAX_ITERATIONS = 200  # bisection halves [0, 1e16] to that tolerance in under 110


# Closed forms: alpha, gamma and costs may be arrays that broadcast; scalars give a scalar.


def tokens_per_step(alpha: ArrayLike, gamma: ArrayLike) -> np.ndarray | float:
    """Return the expected tokens committed by one step, E = (1 - alpha^(gamma+1)) / (1 - alpha); gamma + 1 at alpha 1.

    Broadcasts. Raises ValueError for alpha outside [0, 1] or a gamma that is no integer >= 0.
    Source: Leviathan et al. 2023, equation 1.
    """
    alpha, gamma = _checked_alpha(alpha), _checked_gamma(gamma)
    with np.errstate(divide="ignore", invalid="ignore"):  # log 0 and 0 / 0, both replaced by their limits
        series = np.expm1((gamma + 1) * np.log(alpha)) / (alpha - 1)  # expm1: no cancellation as alpha nears 1
    return np.where(alpha == 1, gamma + 1.0, series)[()]


def leviathan_speedup(alpha: ArrayLike, gamma: ArrayLike, cost_ratio: ArrayLike) -> np.ndarray | float:
    """Return E / (1 + gamma / c): the speedup of endless output when a step costs gamma draft and one target forward.

    Broadcasts. Raises ValueError as ``tokens_per_step`` does, and for a cost ratio that is not > 0.
    Source: Leviathan et al. 2023, theorem 3.8.
    """
    return tokens_per_step(alpha, gamma) / (1 + np.asarray(gamma) / _checked_cost_ratio(cost_ratio))


def corrected_speedup(
    alpha: ArrayLike, gamma: ArrayLike, t_draft: ArrayLike, t_target: ArrayLike, sync: ArrayLike
) -> np.ndarray | float:
    """Return E T_target / (gamma T_draft + T_target + sync): Leviathan's form with one sync per step.

    Broadcasts; the three times share one unit. Raises ValueError for bad alpha or gamma, T_target not > 0 or a
    negative time. Source: the study's design document, "Corrected Model".
    """
    t_draft, t_target, sync = (np.asarray(time, dtype=float) for time in (t_draft, t_target, sync))
    if not (np.all(t_draft >= 0) and np.all(t_target > 0) and np.all(sync >= 0)):
        raise ValueError("times must be >= 0, and the target's > 0")
    return tokens_per_step(alpha, gamma) * t_target / (np.asarray(gamma) * t_draft + t_target + sync)


def rejection_rate_speedup(rejection_rate: ArrayLike, gamma: ArrayLike) -> np.ndarray | float:
    """Return (gamma + 1) / (1 + rejection_rate gamma), the second document's rough formula, kept for comparison.

    It holds no cost ratio and is never below 1, so it can't say that speculation does not pay; free drafts included,
    it is right only at rejection rates 0 and 1, and at gamma 0. Broadcasts. Raises ValueError for a rate outside
    [0, 1] or a gamma that is no integer >= 0. Source: ``optimization_patterns.txt``, "Core Algorithm".
    """
    rejection_rate, gamma = _checked_alpha(rejection_rate, "rejection_rate"), _checked_gamma(gamma)
    return ((gamma + 1) / (1 + rejection_rate * gamma))[()]


# Break-even


def break_even_grid(alpha: ArrayLike, gamma: ArrayLike) -> np.ndarray | float:
    """Return the cost ratio at which Leviathan's speedup is 1, NaN where there is none (alpha 0 or gamma 0).

    c_min = gamma (1 - alpha) / (1 - alpha^(gamma+1) - (1 - alpha)), which is 1 / acceptance rate: a step's gamma draft
    forwards must cost no more than the target forwards that the accepted tokens save. Broadcasts. Raises ValueError
    as ``tokens_per_step`` does. Source: the study's design document, "Break-even condition".
    """
    alpha, gamma = np.broadcast_arrays(_checked_alpha(alpha), _checked_gamma(gamma))
    pays = (gamma > 0) & (alpha >= np.finfo(float).tiny)  # below the smallest normal number the inverse overflows
    rate = acceptance_rate_from_alpha(np.where(pays, alpha, 1.0), np.maximum(gamma, 1))
    return np.where(pays, 1 / rate, np.nan)[()]


def break_even_cost_ratio(alpha: float, gamma: int) -> float | None:
    """Return the smallest cost ratio at which speculation breaks even (closed form); None if no cost ratio does.

    Raises ValueError as ``tokens_per_step`` does.
    """
    ratio = break_even_grid(alpha, gamma)
    return None if np.isnan(ratio) else float(ratio)


def break_even_by_bisection(alpha: float, gamma: int) -> float | None:
    """Return the same as ``break_even_cost_ratio``, found by bisection on ``leviathan_speedup`` alone.

    None if even a free draft gives no speedup above 1 in double precision (alpha 0, or below about 1e-16).
    Raises ValueError as ``tokens_per_step`` does.
    """
    if leviathan_speedup(alpha, gamma, np.inf) <= 1:
        return None
    low = high = 1.0
    while leviathan_speedup(alpha, gamma, high) < 1:
        high *= 2
    while leviathan_speedup(alpha, gamma, low) > 1:
        low /= 2
    return bisect(
        lambda cost_ratio: leviathan_speedup(alpha, gamma, cost_ratio) - 1,
        low,
        high,
        rtol=ROOT_RELATIVE_TOLERANCE,
        maxiter=ROOT_MAX_ITERATIONS,
    )


def min_alpha_needed(cost_ratio: float, gamma: int) -> float | None:
    """Return the alpha above which Leviathan's speedup exceeds 1; None if c < 1, where even alpha 1 is too little.

    It is the alpha whose acceptance rate is 1 / c. Raises ValueError for a cost ratio not > 0 or gamma < 1.
    """
    cost_ratio = float(_checked_cost_ratio(cost_ratio))
    return None if cost_ratio < 1 else alpha_from_acceptance_rate(1 / cost_ratio, gamma)


# A run of N tokens


@dataclass(frozen=True)
class StepCounts:
    """How many steps of each kind a decode of ``new_tokens`` takes: the expected numbers, one run's, or many runs'.

    new_tokens: tokens committed in all, the prefill's one included.
    by_proposed: (..., widest + 1), entry k = steps that proposed k tokens.
    sync_steps: (...), steps that proposed something and were not the last: those the `published` engine syncs after.
    catch_up_steps: (...), steps in which the `fast` engine's draft first reads a token it has not seen: they propose
        something and follow a step whose proposed tokens were all accepted (or that proposed none).
    """

    new_tokens: int
    by_proposed: np.ndarray
    sync_steps: np.ndarray | float
    catch_up_steps: np.ndarray | float

    @property
    def steps(self) -> np.ndarray | float:
        """Target forwards after the prefill, (...)."""
        return self.by_proposed.sum(axis=-1)

    @property
    def proposed(self) -> np.ndarray | float:
        """Tokens proposed in all steps together, (...)."""
        return self.by_proposed @ np.arange(self.by_proposed.shape[-1])

    @property
    def accepted(self) -> np.ndarray | float:
        """Tokens accepted in all steps together, (...): all but the prefill's and one per step."""
        return self.new_tokens - 1 - self.steps


@dataclass(frozen=True)
class StepCosts:
    """What the parts of a step cost, all in one unit of time.

    t_draft, t_target: one forward over one token.
    verify_ratio: v(k), the time of a target forward over k tokens / over one: a callable of k, a sequence whose first
        entry is v(1), or None for 1 at every k.
    sync: the `published` engine's second draft forward, in its ``sync_steps``.
    catch_up: what the `fast` engine's ``catch_up_steps`` take longer than others.
    host: time of every step outside any forward, beyond what ``t_target`` already holds.
    Raises ValueError for a time that is negative or not finite, or T_target 0.
    """

    t_draft: float
    t_target: float
    verify_ratio: Callable[[int], float] | Sequence[float] | None = None
    sync: float = 0.0
    catch_up: float = 0.0
    host: float = 0.0

    def __post_init__(self) -> None:
        times = (self.t_draft, self.t_target, self.sync, self.catch_up, self.host)
        if not all(np.isfinite(time) and time >= 0 for time in times) or self.t_target == 0:
            raise ValueError(f"times must be finite and >= 0, and the target's > 0: {self}")

    def step_time(self, proposed: int) -> float:
        """Return the time of a step that proposes ``proposed`` tokens, without sync or catch-up."""
        return proposed * self.t_draft + self.target_time(proposed + 1) + self.host

    def target_time(self, tokens: int) -> float:
        """Return the time of a target forward over ``tokens`` tokens."""
        return self._verify_ratio(tokens) * self.t_target

    def _verify_ratio(self, tokens: int) -> float:
        if self.verify_ratio is None:
            return 1.0
        if callable(self.verify_ratio):
            return self.verify_ratio(tokens)
        if tokens > len(self.verify_ratio):
            raise ValueError(f"verify_ratio ends at {len(self.verify_ratio)} tokens, a step needs {tokens}")
        return self.verify_ratio[tokens - 1]


def decode_time(counts: StepCounts, costs: StepCosts) -> np.ndarray | float:
    """Return the time of all steps after the prefill, (...), in the unit of ``costs``."""
    step_times = np.array([costs.step_time(proposed) for proposed in range(counts.by_proposed.shape[-1])])
    overhead = costs.sync * counts.sync_steps + costs.catch_up * counts.catch_up_steps
    return counts.by_proposed @ step_times + overhead


def decode_speedup(counts: StepCounts, costs: StepCosts) -> np.ndarray | float:
    """Return the target's time alone, one forward per token after the prefill, over ``decode_time``: (...).

    Raises ValueError for fewer than two new tokens, since the prefill gives the first.
    """
    if counts.new_tokens < 2:
        raise ValueError("a decode speedup needs at least two new tokens: the prefill gives the first")
    return (counts.new_tokens - 1) * costs.t_target / decode_time(counts, costs)


def expected_counts(alpha: float, gamma: int, new_tokens: int) -> StepCounts:
    """Return the exact expected steps of each kind for ``new_tokens`` tokens, by recursion over the tokens remaining.

    The prefill commits one token; a step with r remaining proposes min(gamma, r - 1) and commits accepted + 1.
    Raises ValueError for bad alpha or gamma, or new_tokens < 1.
    """
    check_run(alpha, gamma, new_tokens)
    starts = np.zeros(new_tokens)  # entry r: the chance that some step starts with r tokens remaining
    starts[-1] = 1.0
    for remaining in range(new_tokens - 1, 0, -1):
        chances = _accepted_chances(alpha, min(gamma, remaining - 1))
        starts[remaining - len(chances) : remaining] += starts[remaining] * chances[::-1]

    proposed = np.minimum(gamma, np.arange(new_tokens - 1))  # of a step with 1, 2, ... remaining
    steps = starts[1:].sum()
    return StepCounts(
        new_tokens=new_tokens,
        by_proposed=np.bincount(proposed, weights=starts[1:], minlength=gamma + 1),
        sync_steps=max(steps - 1, 0.0) if gamma else 0.0,  # only the last step can propose nothing
        catch_up_steps=starts[gamma + 3 :].sum() * alpha**gamma if gamma else 0.0,  # two or more must remain after it
    )


def expected_steps(alpha: float, gamma: int, new_tokens: int) -> float:
    """Return the exact expected number of steps for ``new_tokens`` tokens; see ``expected_counts``."""
    return float(expected_counts(alpha, gamma, new_tokens).steps)


def steps_standard_deviation(alpha: float, gamma: int, new_tokens: int) -> float:
    """Return the exact standard deviation of the number of steps that ``expected_steps`` gives the mean of.

    Raises ValueError for bad alpha or gamma, or new_tokens < 1.
    """
    check_run(alpha, gamma, new_tokens)
    mean = np.zeros(new_tokens)  # entry r: of the steps still to come with r tokens remaining
    variance = np.zeros(new_tokens)
    for remaining in range(1, new_tokens):
        chances = _accepted_chances(alpha, min(gamma, remaining - 1))
        after = remaining - 1 - np.arange(len(chances))
        mean[remaining] = 1 + chances @ mean[after]
        spread = mean[after] + 1 - mean[remaining]
        variance[remaining] = chances @ (variance[after] + spread**2)
    return float(np.sqrt(variance[-1]))


def full_speedup(alpha: float, gamma: int, new_tokens: int, costs: StepCosts) -> float:
    """Return the decode speedup for ``new_tokens`` tokens: the target's time alone / the expected speculative time.

    Raises ValueError for bad alpha, gamma or costs, or fewer than two new tokens.
    """
    return float(decode_speedup(expected_counts(alpha, gamma, new_tokens), costs))


# Estimators: alpha and the acceptance rate are two measures, and these convert one to the other.


def acceptance_rate(proposed: Sequence[int], accepted: Sequence[int]) -> float | None:
    """Return accepted / proposed pooled over steps (the study's alpha), both (steps,); None if nothing was proposed.

    Raises ValueError unless 0 <= accepted <= proposed in every step.
    """
    proposed, accepted = _checked_steps(proposed, accepted)
    return float(accepted.sum() / proposed.sum()) if proposed.sum() else None


def alpha_estimate(proposed: Sequence[int], accepted: Sequence[int]) -> float | None:
    """Return accepted / (accepted + rejections), the maximum-likelihood alpha; None if nothing was tried.

    Tokens after a step's first rejection were never tried and don't count. ``proposed``, ``accepted``: (steps,).
    Raises ValueError unless 0 <= accepted <= proposed in every step.
    """
    proposed, accepted = _checked_steps(proposed, accepted)
    tried = _tokens_tried(proposed, accepted)
    return float(accepted.sum() / tried) if tried else None


def alpha_standard_error(proposed: Sequence[int], accepted: Sequence[int]) -> float | None:
    """Return sqrt(alpha (1 - alpha) / tried), the standard error of ``alpha_estimate``.

    None if nothing was tried, or at an estimate of 0 or 1, where the formula would claim certainty.
    Raises ValueError unless 0 <= accepted <= proposed in every step.
    """
    alpha = alpha_estimate(proposed, accepted)
    if alpha is None or alpha in (0.0, 1.0):
        return None
    return float(np.sqrt(alpha * (1 - alpha) / _tokens_tried(*_checked_steps(proposed, accepted))))


def acceptance_rate_from_alpha(alpha: ArrayLike, gamma: ArrayLike) -> np.ndarray | float:
    """Return the expected acceptance rate of endless output, (E - 1) / gamma: it falls with gamma at a fixed alpha.

    Broadcasts. Raises ValueError for alpha outside [0, 1] or gamma < 1.
    """
    gamma = _checked_gamma(gamma, least=1)
    return np.asarray(alpha) * tokens_per_step(alpha, gamma - 1) / gamma  # E - 1 without cancellation at small alpha


def alpha_from_acceptance_rate(rate: float, gamma: int) -> float:
    """Return the alpha whose expected acceptance rate at ``gamma`` is ``rate``: what an acceptance rate implies.

    Raises ValueError for a rate outside [0, 1] or gamma < 1.
    """
    rate, gamma = float(_checked_alpha(rate, "rate")), int(_checked_gamma(gamma, least=1))
    if rate in (0.0, 1.0):
        return rate
    # The rate is a mean of gamma powers of alpha, the largest of them alpha: so alpha lies in [rate, 1].
    return brentq(lambda alpha: acceptance_rate_from_alpha(alpha, gamma) - rate, 0.0, 1.0, rtol=ROOT_RELATIVE_TOLERANCE)


def alpha_from_tokens_per_step(tokens: float, gamma: int) -> float:
    """Return the alpha at which a step commits ``tokens`` tokens on average: what a speedup and its step time imply.

    Raises ValueError for tokens outside [1, gamma + 1] or gamma < 1.
    """
    gamma = int(_checked_gamma(gamma, least=1))
    if not 1 <= tokens <= gamma + 1:
        raise ValueError(f"a step at gamma {gamma} commits 1 to {gamma + 1} tokens, not {tokens}")
    return alpha_from_acceptance_rate((tokens - 1) / gamma, gamma)


# Checks


def _checked_alpha(alpha: ArrayLike, name: str = "alpha") -> np.ndarray:
    alpha = np.asarray(alpha, dtype=float)
    if not np.all((alpha >= 0) & (alpha <= 1)):  # NaN fails both
        raise ValueError(f"{name} must lie in [0, 1], got {alpha}")
    return alpha


def _checked_gamma(gamma: ArrayLike, least: int = 0) -> np.ndarray:
    gamma = np.asarray(gamma)
    if not np.issubdtype(gamma.dtype, np.integer) or np.any(gamma < least):
        raise ValueError(f"gamma must be an integer >= {least}, got {gamma}")
    return gamma


def _checked_cost_ratio(cost_ratio: ArrayLike) -> np.ndarray:
    cost_ratio = np.asarray(cost_ratio, dtype=float)
    if not np.all(cost_ratio > 0):
        raise ValueError(f"the cost ratio must be > 0, got {cost_ratio}")
    return cost_ratio


def _checked_steps(proposed: Sequence[int], accepted: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    proposed, accepted = np.asarray(proposed, dtype=int), np.asarray(accepted, dtype=int)
    if proposed.ndim != 1 or proposed.shape != accepted.shape:
        raise ValueError(f"proposed and accepted need one entry per step each: {proposed.shape}, {accepted.shape}")
    if np.any((accepted < 0) | (accepted > proposed)):
        raise ValueError("a step accepts between 0 and all of its proposed tokens")
    return proposed, accepted


def check_run(alpha: float, gamma: int, new_tokens: int) -> None:
    """Raise ValueError unless one alpha in [0, 1], one integer gamma >= 0 and new_tokens >= 1 are given."""
    if _checked_alpha(alpha).ndim or _checked_gamma(gamma).ndim:
        raise ValueError("a run has one alpha and one gamma")
    if new_tokens < 1:
        raise ValueError(f"new_tokens must be >= 1, got {new_tokens}")


def _tokens_tried(proposed: np.ndarray, accepted: np.ndarray) -> int:
    return int(accepted.sum() + (accepted < proposed).sum())


def _accepted_chances(alpha: float, proposed: int) -> np.ndarray:
    """Return the chance of each number of accepted tokens, (proposed + 1,): a geometric, cut at ``proposed``."""
    chances = float(alpha) ** np.arange(proposed + 1)
    chances[:-1] *= 1 - alpha
    return chances
