"""What Phase 3's tables say, on rows small enough to check by hand."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from specdec import profile_findings


def step(engine="published", gamma=4, **changes) -> dict:
    """One step of 100 ms: 40 draft, 30 target, 20 sync, 6 verify, 4 other; 3 of 4 accepted."""
    return {
        "engine": engine,
        "gamma": gamma,
        "draft_ms": 40.0,
        "catchup_ms": 0.0,
        "target_ms": 30.0,
        "verify_ms": 6.0,
        "sync_ms": 20.0,
        "other_ms": 4.0,
        "step_ms": 100.0,
        "proposed": gamma,
        "accepted": 3,
    } | changes


PLAIN = {"gamma": 0, "draft_ms": 0.0, "sync_ms": 0.0, "target_ms": 22.0, "verify_ms": 2.0, "other_ms": 1.0}


def widths(engine="published") -> pd.DataFrame:
    rows = [(engine, "target", k, 64, 1, 10.0 * k, 1.0 + (k - 1) / 2) for k in range(1, 10)]
    rows += [(engine, "target", 5, 1024, 1, 99.0, 9.0), (engine, "target", 5, 64, 8, 99.0, 9.0)]
    rows += [(engine, "draft", 1, 64, 1, 3.0, 1.0)]
    columns = ["engine", "model", "tokens", "cache_length", "batch", "ms", "verify_ratio"]
    return pd.DataFrame(rows, columns=columns)


def test_sampled_alpha_counts_acceptance_beside_what_the_overlap_expects():
    accepted = np.array([True, True, False, True])
    overlap = np.array([0.5, 1.0, 0.5, 0.75])
    found = profile_findings.sampled_alpha(accepted, overlap)
    assert (found["alpha_sampled"], found["tried"], found["accepted"]) == (0.75, 4, 3)
    assert found["low"] < 0.75 < found["high"]
    assert found["expected"] == 2.75
    assert found["variance"] == 0.25 + 0 + 0.25 + 0.1875


def test_without_a_tried_token_alpha_and_its_interval_are_absent():
    found = profile_findings.sampled_alpha(np.array([], dtype=bool), np.array([]))
    assert (found["alpha_sampled"], found["low"], found["high"], found["tried"]) == (None, None, None, 0)


def test_an_interval_at_full_acceptance_has_a_width():
    found = profile_findings.sampled_alpha(np.ones(20, dtype=bool), np.ones(20))
    assert found["alpha_sampled"] == 1.0
    assert found["low"] < 0.9


def test_the_deviation_pools_counts_and_is_absent_where_nothing_varies():
    rows = pd.DataFrame({"accepted": [10, 14], "expected": [9.0, 11.0], "variance": [1.5, 2.5]})
    assert profile_findings.deviation(rows) == pytest.approx((24 - 20) / 2)
    assert profile_findings.deviation(rows.assign(variance=0.0)) is None


def test_phases_are_medians_and_shares_of_all_time():
    rows = pd.DataFrame([step(), step(draft_ms=50.0, step_ms=110.0), step(draft_ms=90.0, step_ms=150.0)])
    medians = profile_findings.phase_medians(rows).loc[("published", 4)]
    assert medians.draft_ms == 50.0
    assert medians.draft_share == pytest.approx(180 / 360)
    assert medians.steps == 3
    shares = [medians[name.replace("_ms", "_share")] for name in profile_findings.PHASE_COLUMNS]
    assert sum(shares) == pytest.approx(1.0)


def test_step_costs_come_from_plain_steps_draft_passes_and_isolated_widths():
    rows = pd.DataFrame([step(**PLAIN, step_ms=25.0), step(), step(sync_ms=30.0)])
    costs = profile_findings.step_costs(rows, widths())["published", 4]
    assert costs.t_target == 25.0
    assert costs.t_draft == 10.0
    assert list(costs.verify_ratio) == [1.0 + k / 2 for k in range(9)], "only batch 1 at the shortest cache"
    assert costs.sync == 25.0
    assert costs.catch_up == 0.0
    assert costs.host == pytest.approx(10.0 - 3.0)


def test_the_fast_engine_has_catch_up_and_no_sync():
    rows = pd.DataFrame(
        [
            step("fast", **PLAIN, step_ms=25.0),
            step("fast", sync_ms=0.1, catchup_ms=2.0, draft_ms=38.0),
            step("fast", sync_ms=0.1),
        ]
    )
    costs = profile_findings.step_costs(rows, widths("fast"))["fast", 4]
    assert (costs.sync, costs.catch_up) == (0.0, 2.0)


def test_without_plain_steps_or_widths_there_are_no_costs():
    assert profile_findings.step_costs(pd.DataFrame([step()]), widths()) == {}
    assert profile_findings.step_costs(pd.DataFrame([step(**PLAIN)]), widths("fast")) == {}


def test_acceptance_by_place_is_given_at_all_and_given_all_before_it():
    steps = pd.DataFrame({"proposed": [3, 3, 3, 3, 1], "accepted": [3, 1, 0, 3, 1]})
    table = profile_findings.acceptance_by_place(steps)
    assert table.place.tolist() == [1, 2, 3]
    assert table.accepted_share.tolist() == [4 / 5, 2 / 4, 2 / 4]
    assert table.tried.tolist() == [5, 3, 2]
    assert table.conditional.tolist() == [4 / 5, 2 / 3, 1.0]


def test_a_place_that_no_step_reached_has_no_conditional_acceptance():
    table = profile_findings.acceptance_by_place(pd.DataFrame({"proposed": [2, 2], "accepted": [0, 0]}))
    assert math.isnan(table.conditional[1])


def positions(slope: float, offsets=(0.0, 0.5)) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = [
        (f"p{prompt}", place, offset + slope * place + rng.normal(0, 0.01))
        for prompt, offset in enumerate(offsets)
        for place in range(1, 60, 3)
    ]
    return pd.DataFrame(rows, columns=["prompt", "position", "acceptance_rate"])


def test_the_trend_finds_a_slope_and_is_not_fooled_by_prompts_of_different_level():
    assert profile_findings.position_trend(positions(0.005)).slope == pytest.approx(0.005, abs=5e-4)
    late_and_high = positions(0.0)
    late_and_high.loc[late_and_high["prompt"] == "p1", "position"] += 100
    trend = profile_findings.position_trend(late_and_high)
    assert abs(trend.slope) < 3 * trend.stderr


def test_a_trend_needs_three_steps():
    assert profile_findings.position_trend(positions(0.1).head(2)) is None


def test_the_ends_of_a_text_are_its_first_and_last_three_steps():
    steps = pd.DataFrame({"prompt": ["a"] * 7, "acceptance_rate": [0.0, 0.0, 0.3, 0.9, 1.0, 1.0, 0.7]})
    row = profile_findings.ends_of_text(steps).loc["a"]
    assert (row["first"], row["last"]) == (pytest.approx(0.1), pytest.approx(0.9))


def test_costs_by_batch_compare_both_batched_and_the_target_alone():
    rows = [
        ("fast", model, k, 64, batch, ms)
        for model, k, batch, ms in (
            ("draft", 1, 1, 2.0),
            ("target", 1, 1, 6.0),
            ("target", 5, 1, 12.0),
            ("draft", 1, 8, 4.0),
            ("target", 1, 8, 10.0),
            ("target", 5, 8, 30.0),
        )
    ]
    shapes = pd.DataFrame(rows, columns=["engine", "model", "tokens", "cache_length", "batch", "ms"])
    table = profile_findings.cost_by(shapes, "batch").set_index("value")
    assert table.cost_ratio.tolist() == [3.0, 2.5]
    assert table.target_alone.tolist() == [3.0, 5.0]
    assert table.verify_ratio.tolist() == [2.0, 3.0]
    assert profile_findings.cost_by(shapes, "cache_length").value.tolist() == [64]


def test_acceptance_that_never_varies_has_no_trend():
    assert profile_findings.position_trend(positions(0.0).assign(acceptance_rate=0.0)) is None
