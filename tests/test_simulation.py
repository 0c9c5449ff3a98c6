"""Monte Carlo against the exact recursion, and trace replay against runs counted by hand."""

import csv
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.simulation import (
    OracleGamma,
    compare_with_iid,
    counts_of,
    lag1_autocorrelation,
    replay,
    scenario_speedups,
    simulate_counts,
    simulate_runs,
)
from specdec.theory import (
    StepCosts,
    decode_speedup,
    expected_counts,
    expected_steps,
    full_speedup,
    steps_standard_deviation,
    tokens_per_step,
)

PUBLISHED = Path(__file__).parents[1] / "results" / "published_rtx2070"
TRIALS = 4000
# In standard errors. One check in 370 falls outside three by chance, one in 16,000 outside four; the seeds are fixed,
# so that each passes or fails for good.
TOLERANCE_OF_ONE_CHECK, TOLERANCE_OF_MANY_CHECKS = 3, 4
TRACES = st.lists(st.booleans(), min_size=2, max_size=40)
few_examples = settings(max_examples=60, deadline=None, derandomize=True)


def published(name):
    with open(PUBLISHED / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def trace(text):
    """'+' agrees, '-' does not; one sign for each new token, the prefill's first."""
    return [sign == "+" for sign in text]


# Monte Carlo


@pytest.mark.parametrize("alpha", [0.2, 0.55, 0.9])
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_mean_steps_for_64_tokens_are_those_of_the_recursion(alpha, gamma):
    counts = simulate_counts(alpha, gamma, 64, TRIALS, np.random.default_rng(1))
    standard_error = steps_standard_deviation(alpha, gamma, 64) / np.sqrt(TRIALS)
    assert abs(counts.steps.mean() - expected_steps(alpha, gamma, 64)) < TOLERANCE_OF_ONE_CHECK * standard_error


@pytest.mark.parametrize("gamma", [0, 1, 8])
def test_mean_counts_of_every_kind_of_step_are_those_of_the_recursion(gamma):
    drawn = simulate_counts(0.7, gamma, 20, TRIALS, np.random.default_rng(2))
    exact = expected_counts(0.7, gamma, 20)
    for name in ("by_proposed", "sync_steps", "catch_up_steps", "proposed"):
        values = getattr(drawn, name)
        standard_error = values.std(axis=0) / np.sqrt(TRIALS)
        off = np.abs(values.mean(axis=0) - getattr(exact, name))
        assert np.all(off <= TOLERANCE_OF_MANY_CHECKS * standard_error + 1e-12), name


def test_tokens_per_step_of_long_output_are_within_one_percent_of_the_closed_form():
    steps = simulate_counts(0.6, 4, 3000, 200, np.random.default_rng(3)).steps
    assert 2999 / steps.mean() == pytest.approx(tokens_per_step(0.6, 4), rel=0.01)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("new_tokens", [1, 2, 64])
def test_runs_without_chance_are_the_exact_run(alpha, new_tokens):
    drawn = simulate_counts(alpha, 4, new_tokens, 3, np.random.default_rng(0))
    exact = expected_counts(alpha, 4, new_tokens)
    assert drawn.by_proposed.tolist() == [exact.by_proposed.tolist()] * 3
    assert drawn.sync_steps.tolist() == [exact.sync_steps] * 3
    assert drawn.catch_up_steps.tolist() == [exact.catch_up_steps] * 3


def test_every_trial_spends_exactly_its_budget():
    counts = simulate_counts(0.5, 4, 10, TRIALS, np.random.default_rng(4))
    assert counts.steps.min() >= 2  # nine tokens, five at most a step
    assert counts.steps.max() <= 9
    assert np.all(counts.accepted <= counts.proposed)


def test_the_same_generator_seed_gives_the_same_runs_and_another_gives_others():
    first, again, other = (simulate_counts(0.5, 4, 64, 100, np.random.default_rng(seed)).steps for seed in (5, 5, 6))
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()


@pytest.mark.parametrize("new_tokens, trials", [(0, 10), (64, 0)])
def test_a_simulation_of_nothing_is_refused(new_tokens, trials):
    with pytest.raises(ValueError):
        simulate_counts(0.5, 4, new_tokens, trials, np.random.default_rng(0))


# Scenarios


def test_one_set_of_runs_prices_any_scenario_as_the_exact_form_does():
    runs = simulate_runs([0.4, 0.8], [2, 8], 64, TRIALS, np.random.default_rng(7))
    for costs in (StepCosts(1, 4), StepCosts(1, 4, [1 + 0.1 * k for k in range(9)], sync=1, catch_up=0.5, host=0.2)):
        speedups = scenario_speedups(runs, costs)
        exact = [[full_speedup(alpha, gamma, 64, costs) for gamma in (2, 8)] for alpha in (0.4, 0.8)]
        assert speedups.mean == pytest.approx(np.array(exact), rel=0.01)
        assert np.all(speedups.low < speedups.mean)
        assert np.all(speedups.mean < speedups.high)


def test_a_scenario_takes_each_prompts_best_gamma_and_also_says_what_all_gammas_give():
    runs = simulate_runs([0.1, 0.9], [1, 8], 64, 500, np.random.default_rng(8))
    costs = StepCosts(1, 4)  # exact means 0.88 and 0.39 at alpha 0.1, 1.51 and 2.03 at alpha 0.9
    speedups = scenario_speedups(runs, costs)
    assert speedups.best_gammas == (1, 8)
    assert speedups.helpful_pct == 50
    assert speedups.helpful_pct_all_gammas == 50
    assert speedups.mean_speedup == pytest.approx((speedups.mean[0, 0] + speedups.mean[1, 1]) / 2)
    assert speedups.mean_all_gammas == pytest.approx(speedups.mean.mean())
    pooled = np.concatenate([decode_speedup(runs.counts[0][0], costs), decode_speedup(runs.counts[1][1], costs)])
    assert [speedups.best_low, speedups.best_high] == pytest.approx(np.quantile(pooled, [0.05, 0.95]))


def test_nine_in_ten_requests_lie_between_low_and_high():
    runs = simulate_runs([0.7], [4], 64, TRIALS, np.random.default_rng(9))
    costs = StepCosts(1, 4)
    speedups, trials = scenario_speedups(runs, costs), decode_speedup(runs.counts[0][0], costs)
    inside = np.mean((trials >= speedups.low[0, 0]) & (trials <= speedups.high[0, 0]))
    assert 0.88 < inside < 0.97  # a speedup is one of few values, so ties widen the interval
    assert (speedups.best_low, speedups.best_high) == (speedups.low[0, 0], speedups.high[0, 0])


def test_runs_that_do_not_vary_have_no_interval():
    speedups = scenario_speedups(simulate_runs([1.0], [4], 64, 50, np.random.default_rng(0)), StepCosts(1, 4))
    assert (speedups.best_low, speedups.best_high) == (None, None)


@pytest.mark.parametrize("alphas, gammas", [([], [4]), ([0.5], [])])
def test_a_scenario_needs_a_prompt_and_a_gamma(alphas, gammas):
    with pytest.raises(ValueError, match="at least one"):
        simulate_runs(alphas, gammas, 64, 10, np.random.default_rng(0))


def test_the_published_scenarios_come_out_to_two_hundredths():
    alphas = [float(row["acceptance_rate"]) for row in published("alpha_by_prompt")]
    runs = simulate_runs(alphas, [1, 2, 4, 8], 64, TRIALS, np.random.default_rng(10))
    for row in published("scenarios"):
        speedups = scenario_speedups(runs, StepCosts(1, float(row["cost_ratio"])))
        assert speedups.mean_speedup == pytest.approx(float(row["mean_speedup"]), abs=0.02), row["scenario"]
        assert speedups.helpful_pct == float(row["helpful_pct"]), row["scenario"]


# Trace replay


def test_a_replayed_run_is_the_one_counted_by_hand():
    # 0 is the prefill's; 1 and 2 agree, 3 does not; 4 to 6 agree, 7 is the bonus; 8 agrees and 9 is the last.
    history = replay(trace("-++-+++-+-"), 3, prompt_tokens=5, new_tokens=10)
    assert history.prompt_tokens == 5
    assert history.proposed == [3, 3, 1]
    assert history.accepted == [2, 3, 1]
    assert history.new_tokens == 10


def test_the_prefills_token_and_the_last_one_are_never_proposed():
    for first, last in product("+-", repeat=2):
        history = replay(trace(f"{first}++{last}"), 8, 0, 4)
        assert (history.proposed, history.accepted) == ([2], [2])


def test_a_schedule_sees_the_history_of_the_steps_before_its_own():
    seen = []

    def growing(history):
        seen.append((history.new_tokens, list(history.accepted)))
        return len(history.proposed)

    history = replay(trace("++++++++"), growing, 0, 8)
    assert seen == [(1, []), (2, [0]), (4, [0, 1]), (7, [0, 1, 2])]
    assert history.proposed == [0, 1, 2, 0]


def test_a_schedule_of_zero_is_plain_decoding():
    history = replay(trace("++++"), 0, 0, 4)
    assert (history.proposed, history.accepted) == ([0, 0, 0], [0, 0, 0])


def test_a_single_token_takes_no_step():
    assert replay(trace("+"), 4, 0, 1).proposed == []


def test_a_trace_may_be_longer_than_the_run():
    assert replay(trace("++++++"), 4, 0, 3).proposed == [1]


@few_examples
@given(TRACES, st.integers(0, 8))
def test_the_oracle_takes_the_steps_of_its_longest_gamma_and_wastes_no_proposal(agrees, gamma_max):
    oracle = replay(agrees, OracleGamma(agrees, gamma_max), 0, len(agrees))
    fixed = replay(agrees, gamma_max, 0, len(agrees))
    assert oracle.proposed == oracle.accepted == fixed.accepted


@few_examples
@given(TRACES, st.integers(0, 8))
def test_a_replay_commits_every_token_once(agrees, gamma):
    history = replay(agrees, gamma, 0, len(agrees))
    assert 1 + sum(history.accepted) + len(history.proposed) == len(agrees)


@pytest.mark.parametrize("gamma", [1, 3])
def test_replays_of_all_traces_weighted_by_their_chance_are_the_recursion(gamma):
    alpha, new_tokens = 0.7, 8
    mean = {"steps": 0.0, "proposed": 0.0, "sync_steps": 0.0, "catch_up_steps": 0.0}
    for agrees in product([True, False], repeat=new_tokens):
        counts = counts_of(replay(agrees, gamma, 0, new_tokens))
        for name in mean:
            mean[name] += alpha ** sum(agrees) * (1 - alpha) ** (new_tokens - sum(agrees)) * getattr(counts, name)
    exact = expected_counts(alpha, gamma, new_tokens)
    assert mean == {name: pytest.approx(getattr(exact, name)) for name in mean}


@pytest.mark.parametrize(
    "agrees, schedule, new_tokens, message",
    [
        (trace("+++"), 4, 4, "trace's 3 tokens"),
        (trace("+++"), 4, 0, "trace's 3 tokens"),
        ([0.5, 1.0, 1.0], 4, 3, "row of bools"),
        ([[True, True]], 4, 1, "row of bools"),
        (trace("+++"), lambda history: -1, 3, "asked for -1"),
    ],
)
def test_a_replay_that_can_not_be_exact_is_refused(agrees, schedule, new_tokens, message):
    with pytest.raises(ValueError, match=message):
        replay(agrees, schedule, 0, new_tokens)


def test_counts_of_a_run_with_an_idle_step_say_where_each_engine_pays_extra():
    gammas = iter([2, 0, 2, 2, 2])
    history = replay(trace("-++--+-+-"), lambda _: next(gammas), 0, 9)
    assert (history.proposed, history.accepted) == ([2, 0, 2, 1], [2, 0, 1, 1])
    counts = counts_of(history)
    assert counts.by_proposed.tolist() == [1, 1, 2]
    assert counts.sync_steps == 2  # not after the idle step, nor after the last
    assert counts.catch_up_steps == 1  # after the idle step; not after the rejection


# Independence


def test_lag1_autocorrelation_tells_runs_from_alternation():
    assert lag1_autocorrelation(trace("+++---")) == pytest.approx(0.5)
    assert lag1_autocorrelation(trace("+-+-")) == pytest.approx(-0.75)


def test_lag1_autocorrelation_of_an_independent_trace_is_near_zero():
    assert abs(lag1_autocorrelation(np.random.default_rng(11).random(10_000) < 0.7)) < 0.03


@pytest.mark.parametrize("text", ["", "+", "+++"])
def test_lag1_autocorrelation_is_absent_without_variation(text):
    assert lag1_autocorrelation(np.array(trace(text), dtype=bool)) is None


def test_runs_of_agreement_take_more_steps_than_independence_and_alternation_fewer():
    in_runs = compare_with_iid(trace("-" + 31 * "+" + 31 * "-" + "-"), 4, 64)
    assert (in_runs.alpha, in_runs.replay_steps) == (0.5, 38)  # six steps of five, one of two, one for each of the rest
    assert in_runs.replay_alpha == pytest.approx(25 / 56)  # 25 accepted, 31 rejected, the bonus tokens never tried
    assert in_runs.replay_over_iid == pytest.approx(38 / expected_steps(0.5, 4, 64))
    assert in_runs.deviation == pytest.approx((38 - in_runs.iid_steps) / steps_standard_deviation(0.5, 4, 64))
    alternating = compare_with_iid(trace(32 * "-+"), 4, 64)
    assert alternating.alpha == 0.5
    assert alternating.replay_over_iid < 1 < in_runs.replay_over_iid


def test_only_tokens_that_can_be_proposed_tell_the_alpha_of_a_trace():
    assert compare_with_iid(trace("+--+" + "+++"), 4, 4).alpha == 0.0


def test_without_variation_the_deviation_is_absent():
    assert compare_with_iid(trace("++++++"), 2, 6).deviation is None


def test_a_comparison_needs_a_token_to_propose():
    with pytest.raises(ValueError, match="fewer than three"):
        compare_with_iid(trace("++"), 2, 2)
