"""How many tokens each schedule asks for, worked out by hand."""

from __future__ import annotations

import pytest

from specdec.schedules import AdaptiveGamma, CostAwareGamma, FixedGamma, ForwardCosts, History, as_schedule
from specdec.simulation import replay

COSTS = ForwardCosts(lengths=(64, 256), draft=(1.0, 2.0), target=((4.0, 4.2, 4.4, 4.6, 4.8), (8.0, 8.4, 8.8, 9.2, 9.6)))


def history(*steps: tuple[int, int], prompt_tokens: int = 10) -> History:
    return History(prompt_tokens, [proposed for proposed, _ in steps], [accepted for _, accepted in steps])


@pytest.mark.parametrize(
    "steps, gamma",
    [
        ((), 4),  # half of the most before anything was tried
        (((4, 4),), 8),  # nothing rejected
        (((4, 0),), 1),  # agreement 0: never 0 tokens
        (((4, 1),), 2),  # 1 of 2 tried: 1 / (1 - 0.5)
        (((4, 3), (2, 2)), 6),  # 5 of 6 tried: in floating point 1 / (1 - 5 / 6) is just above 6
        (((4, 2),), 3),  # 2 of 3 tried: in floating point just below 3
        (((8, 8), (8, 8), (8, 3)), 8),  # 19 of 20 tried: 20, but 8 at most
        (((0, 0), (0, 0)), 4),  # steps that proposed nothing tell nothing
    ],
)
def test_the_adaptive_rule_is_the_floor_of_tried_over_rejected(steps, gamma):
    assert AdaptiveGamma(8)(history(*steps)) == gamma


def test_half_of_one_is_still_one():
    assert AdaptiveGamma(1)(history()) == 1


def test_costs_are_interpolated_between_cache_lengths_and_kept_beyond_them():
    assert COSTS.step(0, 10) == 4.0
    assert COSTS.step(2, 64) == 2 * 1.0 + 4.4
    assert COSTS.step(2, 160) == pytest.approx(2 * 1.5 + 6.6)
    assert COSTS.step(1, 5000) == 2.0 + 8.4
    assert COSTS.gamma_max == 4


@pytest.mark.parametrize("alpha, gamma", [(0.0, 0), (0.25, 0), (0.35, 1), (1.0, 4)])
def test_the_cost_aware_rule_takes_the_most_tokens_per_time(alpha, gamma):
    rule = CostAwareGamma(COSTS)
    assert rule.best_gamma(alpha, 64) == gamma
    worth = [sum(alpha**k for k in range(g + 1)) / COSTS.step(g, 64) for g in range(5)]
    assert worth[gamma] == max(worth)


def test_a_longer_cache_can_change_the_choice():
    costs = ForwardCosts(lengths=(10, 1000), draft=(1.0, 10.0), target=((10.0, 10.0), (10.0, 10.0)))
    rule = CostAwareGamma(costs, prior_alpha=0.5)
    assert rule(history(prompt_tokens=5)) == 1
    assert rule(history(prompt_tokens=2000)) == 0


def test_what_was_tried_long_ago_counts_less():
    rule = CostAwareGamma(COSTS, memory=0.9)
    early, late = history((4, 4), (1, 0), (1, 0)), history((1, 0), (1, 0), (4, 4))
    assert rule.alpha(late) > rule.alpha(early)
    assert CostAwareGamma(COSTS, memory=1.0).alpha(early) == pytest.approx((4 + 2.5) / (6 + 5))


def test_a_request_that_never_agrees_is_decoded_plainly_and_probed_every_so_many_tokens():
    steps = replay([False] * 200, CostAwareGamma(COSTS), 10, 200)
    probes = [place for place, proposed in enumerate(steps.proposed) if proposed]
    first = [place for place in probes if place < 16]
    assert 2 <= len(first) <= 6, "the prior is given up after a few rejections"
    assert all(steps.proposed[place] == 1 for place in probes[len(first) :])
    assert {b - a for a, b in zip(probes[len(first) :], probes[len(first) + 1 :], strict=False)} == {17}


def test_a_draft_that_never_agrees_costs_at_most_a_twentieth():
    steps = replay([False] * 64, CostAwareGamma(COSTS), 10, 64)
    assert 63 * COSTS.step(0, 64) / sum(COSTS.step(proposed, 64) for proposed in steps.proposed) >= 0.95


def test_a_request_that_begins_to_agree_is_noticed():
    steps = replay([False] * 60 + [True] * 140, CostAwareGamma(COSTS), 10, 200)
    assert max(steps.proposed[-5:]) == 4


@pytest.mark.parametrize("schedule", [AdaptiveGamma(8), CostAwareGamma(COSTS)])
def test_a_schedule_keeps_nothing_between_requests(schedule):
    easy, hard = [True] * 80, [False] * 80
    alone = replay(hard, schedule, 10, 64).proposed
    replay(easy, schedule, 10, 64)
    assert replay(hard, schedule, 10, 64).proposed == alone


def test_a_number_is_a_fixed_schedule():
    assert as_schedule(3)(history()) == 3
    assert as_schedule(3) == FixedGamma(3)
    rule = AdaptiveGamma()
    assert as_schedule(rule) is rule
