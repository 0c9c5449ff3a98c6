"""Closed forms, the exact N-token recursion, the estimators, and the study's published tables."""

import csv
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdec.theory import (
    StepCosts,
    acceptance_rate,
    acceptance_rate_from_alpha,
    alpha_estimate,
    alpha_from_acceptance_rate,
    alpha_from_tokens_per_step,
    alpha_standard_error,
    break_even_by_bisection,
    break_even_cost_ratio,
    break_even_grid,
    corrected_speedup,
    decode_speedup,
    expected_counts,
    expected_steps,
    full_speedup,
    leviathan_speedup,
    min_alpha_needed,
    rejection_rate_speedup,
    steps_standard_deviation,
    tokens_per_step,
)

PUBLISHED = Path(__file__).parents[1] / "results" / "published_rtx2070"
ALPHAS = st.floats(0, 1)
INNER_ALPHAS = st.floats(0.01, 0.99)
GAMMAS = st.integers(1, 12)
COST_RATIOS = st.floats(0.1, 100)
few_examples = settings(max_examples=60, deadline=None, derandomize=True)


def published(name):
    with open(PUBLISHED / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def column(name, key):
    return np.array([float(row[key]) for row in published(name)])


# Closed forms


def test_a_step_commits_one_token_at_alpha_0_and_gamma_plus_one_at_alpha_1():
    assert tokens_per_step([[0.0], [1.0]], [0, 1, 8]).tolist() == [[1, 1, 1], [1, 2, 9]]


@few_examples
@given(ALPHAS, st.integers(0, 12))
@example(1 - 1e-12, 8)  # 1 - alpha^9 over 1 - alpha would keep four digits only
def test_tokens_per_step_is_the_sum_of_the_first_powers_of_alpha(alpha, gamma):
    assert tokens_per_step(alpha, gamma) == pytest.approx(sum(alpha**power for power in range(gamma + 1)), rel=1e-12)


@few_examples
@given(st.floats(0, 0.98), GAMMAS, COST_RATIOS)
def test_speedup_rises_with_alpha_and_with_the_cost_ratio(alpha, gamma, cost_ratio):
    speedup = leviathan_speedup(alpha, gamma, cost_ratio)
    assert leviathan_speedup(alpha + 0.01, gamma, cost_ratio) > speedup
    assert leviathan_speedup(alpha, gamma, 1.01 * cost_ratio) > speedup


def test_speedup_of_a_perfect_draft_counts_its_own_forwards():
    assert leviathan_speedup(1.0, 4, 2.0) == pytest.approx(5 / 3)


def test_one_sync_a_step_takes_its_time_from_leviathans_speedup():
    assert corrected_speedup(0.7, 4, 10.0, 25.0, 0.0) == pytest.approx(leviathan_speedup(0.7, 4, 2.5))
    assert corrected_speedup(1.0, 4, 10.0, 25.0, 35.0) == pytest.approx(5 * 25 / 100)


@few_examples
@given(ALPHAS, st.integers(0, 12))
def test_the_rejection_rate_formula_lies_between_1_and_the_tokens_of_a_step(alpha, gamma):
    assert 1 <= rejection_rate_speedup(1 - alpha, gamma) <= tokens_per_step(alpha, gamma) * (1 + 1e-12)


def test_the_rejection_rate_formula_is_the_second_documents():
    assert rejection_rate_speedup([0.0, 0.5, 1.0], 4).tolist() == [5, pytest.approx(5 / 3), 1]


# Break-even


@few_examples
@given(INNER_ALPHAS, GAMMAS)
def test_bisection_finds_the_closed_form_break_even(alpha, gamma):
    assert break_even_by_bisection(alpha, gamma) == pytest.approx(break_even_cost_ratio(alpha, gamma), rel=1e-9)


@few_examples
@given(INNER_ALPHAS, GAMMAS)
def test_break_even_is_the_documents_formula(alpha, gamma):
    document = gamma * (1 - alpha) / (1 - alpha ** (gamma + 1) - (1 - alpha))
    assert break_even_cost_ratio(alpha, gamma) == pytest.approx(document, rel=1e-9)


@pytest.mark.parametrize("find", [break_even_cost_ratio, break_even_by_bisection])
def test_break_even_is_absent_where_speculation_can_never_pay(find):
    assert find(0.0, 4) is None
    assert find(0.5, 0) is None
    assert find(1.0, 4) == 1.0


def test_the_break_even_grid_is_nan_only_where_break_even_is_absent():
    grid = break_even_grid([[0.0], [1e-310], [1e-9], [1.0]], [0, 1, 8])
    assert np.isnan(grid).tolist() == [[True] * 3, [True] * 3, [True, False, False], [True, False, False]]
    assert not np.isinf(grid).any()


@few_examples
@given(st.floats(1, 100), GAMMAS)
def test_at_the_least_alpha_needed_the_speedup_is_1(cost_ratio, gamma):
    assert leviathan_speedup(min_alpha_needed(cost_ratio, gamma), gamma, cost_ratio) == pytest.approx(1, rel=1e-9)


def test_no_alpha_is_enough_if_the_draft_is_slower_than_the_target():
    assert min_alpha_needed(0.99, 4) is None
    assert min_alpha_needed(1.0, 4) == 1.0


# A run of N tokens


def enumerated_runs(alpha, gamma, new_tokens):
    """Every outcome of every try: a list of (chance, [(remaining, proposed, accepted) of each step])."""
    runs, open_runs = [], [(1.0, new_tokens - 1, [])]
    while open_runs:
        chance, remaining, steps = open_runs.pop()
        if remaining == 0:
            runs.append((chance, steps))
            continue
        proposed = min(gamma, remaining - 1)
        outcomes = {tries.index(False) if False in tries else proposed for tries in product([0, 1], repeat=proposed)}
        for accepted in outcomes:
            chance_here = alpha**accepted * ((1 - alpha) if accepted < proposed else 1)
            step = (remaining, proposed, accepted)
            open_runs.append((chance * chance_here, remaining - accepted - 1, [*steps, step]))
    return runs


@settings(max_examples=25, deadline=None, derandomize=True)
@given(ALPHAS, st.integers(0, 4), st.integers(1, 8))
def test_the_recursion_equals_the_enumeration_of_every_run(alpha, gamma, new_tokens):
    runs = enumerated_runs(alpha, gamma, new_tokens)
    counts = expected_counts(alpha, gamma, new_tokens)
    steps = sum(chance * len(run) for chance, run in runs)
    assert counts.steps == pytest.approx(steps)
    assert counts.accepted == pytest.approx(sum(chance * accepted for chance, run in runs for _, _, accepted in run))
    for width in range(gamma + 1):
        of_width = sum(chance * sum(proposed == width for _, proposed, _ in run) for chance, run in runs)
        assert counts.by_proposed[width] == pytest.approx(of_width)
    syncs = sum(chance * sum(proposed > 0 for _, proposed, _ in run[:-1]) for chance, run in runs)
    assert counts.sync_steps == pytest.approx(syncs)
    caught_up = sum(
        chance * sum(before[1] == before[2] and step[1] > 0 for before, step in pairwise(run)) for chance, run in runs
    )
    assert counts.catch_up_steps == pytest.approx(caught_up)
    variance = sum(chance * (len(run) - steps) ** 2 for chance, run in runs)
    assert steps_standard_deviation(alpha, gamma, new_tokens) ** 2 == pytest.approx(variance, abs=1e-12)


def test_the_last_steps_propose_no_more_than_the_budget_leaves():
    counts = expected_counts(1.0, 4, 64)  # 63 tokens in steps of five: twelve whole ones, and three tokens left
    assert counts.by_proposed.tolist() == [0, 0, 1, 0, 12]
    assert (counts.steps, counts.proposed, counts.accepted) == (13, 50, 50)


def test_the_prefill_alone_gives_a_single_token():
    assert expected_steps(0.5, 4, 1) == 0
    with pytest.raises(ValueError, match="two new tokens"):
        full_speedup(0.5, 4, 1, StepCosts(1, 2))


def test_without_proposals_every_token_is_a_step_and_nothing_is_gained():
    assert expected_steps(0.5, 0, 64) == 63
    assert full_speedup(0.5, 0, 64, StepCosts(10, 25, sync=5, catch_up=5)) == 1


def test_long_output_reaches_the_closed_form():
    assert 2999 / expected_steps(0.8, 8, 3000) == pytest.approx(tokens_per_step(0.8, 8), rel=0.005)
    assert full_speedup(0.8, 8, 3000, StepCosts(10, 40)) == pytest.approx(leviathan_speedup(0.8, 8, 4.0), rel=0.005)


def test_every_part_of_a_step_is_charged_where_it_occurs():
    # alpha 1, gamma 4, 9 tokens: a step of four proposals and one of two, the first synced, the second catching up.
    forwards = 6 * 1 + (1.5 + 1.2) * 10
    verify_ratio = [1.0, 1.1, 1.2, 1.3, 1.5]
    published_engine = StepCosts(1, 10, verify_ratio, sync=3, host=0.5)
    fast_engine = StepCosts(1, 10, verify_ratio, catch_up=2, host=0.5)
    assert full_speedup(1.0, 4, 9, published_engine) == pytest.approx(80 / (forwards + 3 + 2 * 0.5))
    assert full_speedup(1.0, 4, 9, fast_engine) == pytest.approx(80 / (forwards + 2 + 2 * 0.5))


def test_the_verify_ratio_may_be_a_function_of_the_tokens_scored():
    counts = expected_counts(0.6, 4, 64)
    by_function = decode_speedup(counts, StepCosts(10, 25, lambda tokens: 1 + 0.1 * (tokens - 1)))
    assert by_function == pytest.approx(decode_speedup(counts, StepCosts(10, 25, [1, 1.1, 1.2, 1.3, 1.4])))


def test_a_verify_ratio_that_ends_too_early_is_refused():
    with pytest.raises(ValueError, match="ends at 4 tokens"):
        full_speedup(0.5, 4, 64, StepCosts(10, 25, [1, 1, 1, 1]))


# Estimators


def test_tokens_after_a_rejection_count_as_proposed_but_not_as_tried():
    proposed, accepted = [4, 4, 1], [4, 1, 0]  # tried: four, two, one
    assert acceptance_rate(proposed, accepted) == pytest.approx(5 / 9)
    assert alpha_estimate(proposed, accepted) == pytest.approx(5 / 7)
    assert alpha_standard_error(proposed, accepted) == pytest.approx(np.sqrt(5 / 7 * 2 / 7 / 7))


def test_nothing_proposed_leaves_every_estimate_absent():
    for estimate in (acceptance_rate, alpha_estimate, alpha_standard_error):
        assert estimate([], []) is None
        assert estimate([0, 0], [0, 0]) is None


def test_an_estimate_of_0_or_1_claims_no_certainty():
    assert (alpha_estimate([2], [2]), alpha_standard_error([2], [2])) == (1.0, None)
    assert (alpha_estimate([2], [0]), alpha_standard_error([2], [0])) == (0.0, None)


def test_the_two_rates_are_far_apart_at_a_long_gamma():
    assert acceptance_rate_from_alpha(0.8, 8) == pytest.approx(0.42, abs=0.005)


@few_examples
@given(INNER_ALPHAS, GAMMAS)
def test_the_acceptance_rate_falls_with_gamma_at_a_fixed_alpha(alpha, gamma):
    assert acceptance_rate_from_alpha(alpha, gamma + 1) < acceptance_rate_from_alpha(alpha, gamma)


@few_examples
@given(st.one_of(st.sampled_from([0.0, 1.0]), INNER_ALPHAS), GAMMAS)
def test_alpha_comes_back_from_the_rate_and_from_the_tokens_it_implies(alpha, gamma):
    assert alpha_from_acceptance_rate(acceptance_rate_from_alpha(alpha, gamma), gamma) == pytest.approx(alpha, abs=1e-9)
    assert alpha_from_tokens_per_step(tokens_per_step(alpha, gamma), gamma) == pytest.approx(alpha, abs=1e-9)


# Bad input


@pytest.mark.parametrize(
    "call",
    [
        lambda: tokens_per_step(1.01, 4),
        lambda: tokens_per_step(float("nan"), 4),
        lambda: tokens_per_step(0.5, -1),
        lambda: tokens_per_step(0.5, 2.5),
        lambda: leviathan_speedup(0.5, 4, 0.0),
        lambda: leviathan_speedup(0.5, 4, float("nan")),
        lambda: corrected_speedup(0.5, 4, 1.0, 0.0, 1.0),
        lambda: rejection_rate_speedup(-0.1, 4),
        lambda: expected_counts(0.5, 4, 0),
        lambda: expected_counts([0.5, 0.6], 4, 64),
        lambda: StepCosts(1.0, 0.0),
        lambda: StepCosts(1.0, 2.0, sync=-1.0),
        lambda: StepCosts(1.0, float("nan")),
        lambda: alpha_estimate([1], [2]),
        lambda: acceptance_rate([1, 2], [1]),
        lambda: acceptance_rate_from_alpha(0.5, 0),
        lambda: alpha_from_acceptance_rate(1.1, 4),
        lambda: alpha_from_tokens_per_step(5.1, 4),
        lambda: alpha_from_tokens_per_step(0.9, 4),
    ],
)
def test_input_without_meaning_is_refused(call):
    with pytest.raises(ValueError):
        call()


# The study's published figures


def test_the_published_break_even_table_comes_out_to_a_hundredth():
    for row in published("min_cost_ratio"):
        here = break_even_cost_ratio(float(row["alpha"]), int(row["gamma"]))
        assert here == pytest.approx(float(row["min_cost_ratio"]), abs=0.01)


def test_the_predicted_speedups_by_gamma_come_out_from_the_eight_alphas():
    alphas = column("alpha_by_prompt", "acceptance_rate")[:, None]
    here = leviathan_speedup(alphas, [1, 2, 4, 8], 1.178).mean(axis=0)
    assert here == pytest.approx([0.833, 0.679, 0.474, 0.281], abs=0.0005)
    off = np.abs(here - column("predicted_vs_measured", "predicted_speedup"))
    assert np.all(off < [0.01, 0.025, 0.045, 0.01])


def test_no_single_alpha_gives_all_four_predicted_speedups():
    predicted = column("predicted_vs_measured", "predicted_speedup")
    implied = [
        alpha_from_tokens_per_step(speedup * (1 + gamma / 1.178), gamma)
        for gamma, speedup in zip([1, 2, 4, 8], predicted, strict=True)
    ]
    assert implied == pytest.approx([0.529, 0.511, 0.590, 0.552], abs=0.0005)


def test_the_corrected_model_only_lowers_the_prediction():
    alphas, gammas = column("alpha_by_prompt", "acceptance_rate")[:, None], np.array([1, 2, 4, 8])
    t_draft, t_target = column("timing", "ms_per_token")
    corrected = corrected_speedup(alphas, gammas, t_draft, t_target, column("kv_sync", "sync_ms"))
    assert corrected.mean(axis=0) == pytest.approx([0.574, 0.511, 0.394, 0.254], abs=0.0007)
    assert np.all(corrected < leviathan_speedup(alphas, gammas, t_target / t_draft))


def test_the_measured_speedups_imply_an_alpha_that_puts_leviathans_model_above_them():
    step_ms = column("kv_sync", "sync_ms") / column("kv_sync", "share_of_step")
    measured = column("predicted_vs_measured", "measured_speedup")
    tokens = measured * step_ms / column("timing", "ms_per_token")[1]
    alphas = [alpha_from_tokens_per_step(*pair) for pair in zip(tokens, [1, 2, 4, 8], strict=True)]
    assert tokens == pytest.approx([1.47, 1.97, 3.16, 4.58], abs=0.006)
    assert alphas == pytest.approx([0.47, 0.61, 0.77, 0.82], abs=0.006)
    assert acceptance_rate_from_alpha(alphas, np.array([1, 2, 4, 8])) == pytest.approx(0.5, abs=0.06)
    assert np.all(leviathan_speedup(alphas, [1, 2, 4, 8], 1.178) > measured)


def test_in_hindsight_all_prompts_gain_at_cost_ratio_2_5_but_only_41_percent_of_configurations():
    speedups = leviathan_speedup(column("alpha_by_prompt", "acceptance_rate")[:, None], [1, 2, 4, 8], 2.5)
    assert np.all(speedups.max(axis=1) > 1)
    assert np.mean(speedups > 1) == pytest.approx(0.41, abs=0.005)
    assert speedups.mean() == pytest.approx(0.86, abs=0.005)


# What every model of a run must do


COSTS = st.builds(
    StepCosts, t_draft=st.floats(0.01, 10), t_target=st.floats(0.1, 10), sync=st.floats(0, 5), host=st.floats(0, 5)
)


@few_examples
@given(COSTS, st.integers(0, 12), st.integers(2, 40))
def test_at_alpha_0_every_step_commits_one_token_and_pays_for_its_proposals(costs, gamma, new_tokens):
    counts = expected_counts(0.0, gamma, new_tokens)
    assert counts.steps == pytest.approx(new_tokens - 1)
    assert counts.accepted == pytest.approx(0, abs=1e-9)
    assert full_speedup(0.0, gamma, new_tokens, costs) <= 1 + 1e-12
    assert leviathan_speedup(0.0, gamma, 2.5) == pytest.approx(1 / (1 + gamma / 2.5))


@few_examples
@given(COSTS, st.integers(0, 12), st.integers(2, 40))
def test_at_alpha_1_every_step_commits_all_it_may(costs, gamma, new_tokens):
    counts = expected_counts(1.0, gamma, new_tokens)
    assert counts.steps == pytest.approx(-(-(new_tokens - 1) // (gamma + 1)))
    assert leviathan_speedup(1.0, gamma, 2.5) == pytest.approx((gamma + 1) / (1 + gamma / 2.5))
    corrected = corrected_speedup(1.0, gamma, costs.t_draft, costs.t_target, costs.sync)
    spent = gamma * costs.t_draft + costs.t_target + costs.sync
    assert corrected == pytest.approx((gamma + 1) * costs.t_target / spent)


@few_examples
@given(st.floats(0, 0.98), GAMMAS, st.integers(3, 40), COSTS)
def test_every_model_rises_with_alpha_and_falls_as_the_draft_gets_dearer(alpha, gamma, new_tokens, costs):
    dearer = replace(costs, t_draft=1.1 * costs.t_draft)
    assert expected_steps(alpha + 0.01, gamma, new_tokens) < expected_steps(alpha, gamma, new_tokens)
    assert full_speedup(alpha, gamma, new_tokens, dearer) < full_speedup(alpha, gamma, new_tokens, costs)
    times = costs.t_target, costs.sync
    corrected = corrected_speedup(alpha, gamma, costs.t_draft, *times)
    assert corrected_speedup(alpha + 0.01, gamma, costs.t_draft, *times) > corrected
    assert corrected_speedup(alpha, gamma, dearer.t_draft, *times) < corrected


@few_examples
@given(INNER_ALPHAS, GAMMAS)
def test_break_even_falls_with_alpha_rises_with_gamma_and_is_where_speedup_crosses_1(alpha, gamma):
    least = break_even_cost_ratio(alpha, gamma)
    assert break_even_cost_ratio(min(alpha + 0.01, 1.0), gamma) < least
    assert break_even_cost_ratio(alpha, gamma + 1) > least
    assert leviathan_speedup(alpha, gamma, least * 1.001) > 1 > leviathan_speedup(alpha, gamma, least * 0.999)
    assert min_alpha_needed(least, gamma) == pytest.approx(alpha, rel=1e-6)


@few_examples
@given(st.floats(1e-12, 1e-3) | st.floats(1 - 1e-3, 1), GAMMAS)
def test_bisection_is_the_closed_form_near_both_ends_too(alpha, gamma):
    assert break_even_by_bisection(alpha, gamma) == pytest.approx(break_even_cost_ratio(alpha, gamma), rel=1e-3)
