"""Totals and verdicts on rows small enough to check by hand."""

from __future__ import annotations

import pandas as pd
import pytest

from specdec import claims

CACHE_COLUMNS = [
    "technique",
    "where",
    "bytes_per_token",
    "cache_bytes",
    "alpha",
    "tokens_equal_share",
    "time_s",
    "note",
]
NO_CACHES = pd.DataFrame(columns=CACHE_COLUMNS)


def row(strategy: str, time_s: float | None, prompt: str = "a", baseline: float = 1.0, **more) -> dict:
    shared = {"steps": 10, "proposed": 20, "accepted": 8, "tried": 16, "temperature": 0.0, "alpha": 0.5}
    equal = {"tokens_equal_baseline": None if more.get("temperature") else time_s is not None}
    times = {"time_s": time_s, "baseline_time_s": baseline, "speedup": baseline / time_s if time_s else None}
    return shared | equal | times | {"strategy": strategy, "prompt": prompt} | more


def table(*rows: dict) -> pd.DataFrame:
    return pd.DataFrame(rows).astype({"tokens_equal_baseline": "boolean", "time_s": float, "speedup": float})


def verdict(claim: str, *rows: dict) -> str:
    found = claims.check_claims(table(*rows), NO_CACHES).set_index("claim")
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
    rows = row("short output, gamma 4", short, new_tokens=16), row("fixed gamma 4", long, new_tokens=64)
    assert verdict("under 50 tokens", *rows) == found


@pytest.mark.parametrize("lengths", [(16, 24), (64, 128)])
def test_short_outputs_are_not_tested_by_lengths_on_one_side_of_fifty(lengths):
    short, long = (row(name, 1.2, new_tokens=n) for name, n in zip(("short output, gamma 4", "fixed gamma 4"), lengths))
    assert verdict("under 50 tokens", short, long) == "not tested here"


def test_a_batch_below_the_documents_range_tests_nothing():
    assert verdict("a batch", row("batch of 2, gamma 0", 0.2, "all"), row("fixed gamma 2", 0.8)) == "not tested here"


def test_low_agreement():
    low, high = row("fixed gamma 2", 0.95, alpha=0.3), row("fixed gamma 2", 0.5, "b", alpha=0.8)
    assert verdict("under 40 %", low, high) == "holds here"
    assert verdict("under 40 %", low | {"speedup": 1.2}, high) == "does not hold here"
    assert verdict("under 40 %", high) == "not tested here"


def test_what_was_not_measured_is_said_so():
    found = claims.check_claims(table(row("something else", 1.0)), NO_CACHES)
    assert set(found.verdict) == {"not tested here"}


def caches(**changed) -> pd.DataFrame:
    rows = [
        ["none", "target", 100.0, 1e4, 0.6, 1.0, 1.0, ""],
        ["int8", "target", 27.0, 3e3, 0.6, 0.9, 1.2, ""],
        ["int4", "target", 16.0, 2e3, 0.5, 0.7, 1.3, ""],
        ["none", "draft", 40.0, 4e3, 0.6, 1.0, 1.0, ""],
        ["lower layers keep none", "draft", 20.0, 2e3, 0.3, 1.0, 1.0, ""],
        ["shared prefix", "both", 140.0, 1e4, 0.6, 1.0, 1.0, "request 1"],
        ["shared prefix", "both", 140.0, 1e4, 0.6, 1.0, 0.8, "request 2"],
    ]
    table = pd.DataFrame(rows, columns=CACHE_COLUMNS)
    for name, value in changed.items():
        technique, column = name.split("__")
        table.loc[table.technique == technique.replace("_", " "), column] = value
    return table


@pytest.mark.parametrize(
    "claim, changed, found",
    [
        ("int8 and int4", {}, "unclear here"),  # 3.7 times with its scales: not the 4 that is claimed
        ("int8 and int4", {"int8__bytes_per_token": 25.0}, "holds here"),
        ("int8 and int4", {"int4__bytes_per_token": 30.0}, "does not hold here"),
        ("memory bounds", {}, "holds here"),
        ("memory bounds", {"int8__time_s": 0.8}, "does not hold here"),
        ("skipping lower", {}, "does not hold here"),
        ("skipping lower", {"lower_layers_keep_none__alpha": 0.59}, "holds here"),
        ("shared prefix", {}, "holds here"),
        ("shared prefix", {"shared_prefix__tokens_equal_share": 0.9}, "does not hold here"),
    ],
)
def test_claims_about_the_cache(claim, changed, found):
    verdicts = claims.check_claims(table(row("something else", 1.0)), caches(**changed)).set_index("claim").verdict
    assert verdicts[next(name for name in verdicts.index if claim in name)] == found


@pytest.mark.parametrize("accepted, found", [(9, "holds here"), (8, "does not hold here")])
def test_tree_against_chain(accepted, found):
    chains = [row("chain as deep as the tree, gamma 3", 1.0), row("chain of as many tokens as the tree, gamma 10", 1.0)]
    assert verdict("a tree accepts", row("tree 2-2-1", 1.0, accepted=accepted), *chains) == found


@pytest.mark.parametrize("time_s, found", [(0.4, "holds here"), (0.9, "does not hold here")])
def test_batch_against_one_by_one(time_s, found):
    assert verdict("a batch", row("batch of 8, gamma 0", time_s, "all"), row("fixed gamma 2", 0.8)) == found
