"""Totals and verdicts on rows small enough to check by hand."""

from __future__ import annotations

import pandas as pd
import pytest

from specdec import claims


def row(strategy: str, time_s: float | None, prompt: str = "a", baseline: float = 1.0, **more) -> dict:
    shared = {"steps": 10, "proposed": 20, "accepted": 8, "tried": 16, "temperature": 0.0, "alpha": 0.5}
    equal = {"tokens_equal_baseline": None if more.get("temperature") else time_s is not None}
    times = {"time_s": time_s, "baseline_time_s": baseline, "speedup": baseline / time_s if time_s else None}
    return shared | equal | times | {"strategy": strategy, "prompt": prompt} | more


def table(*rows: dict) -> pd.DataFrame:
    return pd.DataFrame(rows).astype({"tokens_equal_baseline": "boolean", "time_s": float, "speedup": float})


def verdict(claim: str, *rows: dict) -> str:
    found = claims.check_claims(table(*rows)).set_index("claim")
    return found.loc[next(name for name in found.index if claim in name), "verdict"]


def test_totals_sum_times_before_dividing_and_leave_faults_out():
    rows = table(
        row("fixed gamma 2", 0.5), row("fixed gamma 2", 4.0, "b", baseline=2.0), row("fixed gamma 2", None, "c")
    )
    (total,) = claims.totals(rows).itertuples()
    assert total.prompts == 3
    assert total.faults == 1
    assert total.speedup == pytest.approx(3.0 / 4.5)
    assert total.helpful == 1
    assert total.equal == 2
    assert total.gamma_mean == 2
    assert total.alpha == 0.5
    assert total.tokens_per_step == pytest.approx(1.8)


def test_the_best_fixed_gamma_is_that_of_least_time_without_the_variant_that_syncs_again():
    rows = table(
        row("fixed gamma 2", 0.9), row("fixed gamma 4", 0.8), row("fixed gamma 4, draft run again to sync", 0.7)
    )
    assert claims.best_fixed(claims.totals(rows)).name == ("fixed gamma 4", 0.0)


@pytest.mark.parametrize("best, found", [(4, "holds here"), (2, "does not hold here"), (8, "holds here")])
def test_the_useful_range_of_gamma(best, found):
    rows = [row(f"fixed gamma {gamma}", 0.5 if gamma == best else 0.9) for gamma in (1, 2, 4, 8)]
    assert verdict("gamma of 3 to 8", *rows) == found


@pytest.mark.parametrize("time_s, found", [(0.8, "holds here"), (1.2, "does not hold here"), (1.01, "unclear here")])
def test_the_adaptive_rule_against_the_best_fixed_gamma(time_s, found):
    rows = [row("fixed gamma 2", 1.0), row("adaptive gamma", time_s), row("cost-aware gamma", 1.0)]
    assert verdict("floor", *rows) == found


@pytest.mark.parametrize("time_s, found", [(0.6, "holds here"), (0.9, "does not hold here")])
def test_self_speculation(time_s, found):
    assert verdict("self-speculation", row("early exit, gamma 1", time_s)) == found


@pytest.mark.parametrize("warm, found", [(6, "holds here"), (8, "unclear here"), (10, "does not hold here")])
def test_temperature(warm, found):
    sampled = "rejection sampling, gamma 4"
    rows = [row(sampled, 1.0, temperature=0.3), row(sampled, 1.0, temperature=0.8, accepted=warm)]
    assert verdict("lower temperature", *rows) == found


@pytest.mark.parametrize(
    "short, long, found",
    [(1.2, 0.9, "holds here"), (0.95, 0.8, "unclear here"), (1.0, 1.0, "does not hold here")],
)
def test_short_outputs(short, long, found):
    assert verdict("under 50 tokens", row("short output, gamma 4", short), row("fixed gamma 4", long)) == found


def test_low_agreement():
    low, high = row("fixed gamma 2", 0.95, alpha=0.3), row("fixed gamma 2", 0.5, "b", alpha=0.8)
    assert verdict("under 40 %", low, high) == "holds here"
    assert verdict("under 40 %", low | {"speedup": 1.2}, high) == "does not hold here"
    assert verdict("under 40 %", high) == "not tested here"


def test_what_was_not_measured_is_said_so():
    found = claims.check_claims(table(row("something else", 1.0)))
    assert set(found.verdict) == {"not tested here"}
