"""CSV files: what is written comes back, damage is named, and the summary follows from the runs."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from specdec import results
from specdec.errors import InputError


def run_row(**changes) -> dict:
    """One repeat: a 10 s baseline, a 4 s draft, an 8 s speculative run, prefill 1 s each, 20 of 40 accepted."""
    return {
        "prompt": "story",
        "category": "creative",
        "engine": "published",
        "gamma": 4,
        "repeat": 0,
        "order": 0,
        "prompt_tokens": 12,
        "baseline_time_s": 10.0,
        "draft_time_s": 4.0,
        "speculative_time_s": 8.0,
        "baseline_prefill_s": 1.0,
        "draft_prefill_s": 1.0,
        "speculative_prefill_s": 2.0,
        "new_tokens": 31,
        "steps": 10,
        "proposed": 40,
        "accepted": 20,
        "rejections": 5,
        "matches_baseline": True,
        "near_tie": False,
        "first_mismatch": None,
        "mismatch_top2_gap": None,
        "eos_at": None,
    } | changes


def write_runs(folder, rows) -> pd.DataFrame:
    results.write_table(folder, results.RUNS, pd.DataFrame(rows, dtype=object))
    return results.read_table(folder, results.RUNS)


def test_a_table_comes_back_as_it_was_written(tmp_path):
    frame = write_runs(tmp_path, [run_row(prompt="null"), run_row(repeat=1, first_mismatch=3, speculative_time_s=None)])
    assert list(frame["prompt"]) == ["null", "story"]
    assert list(frame.matches_baseline) == [True, True]
    assert frame.first_mismatch.isna().tolist() == [True, False]
    assert frame.speculative_time_s.isna().tolist() == [False, True]
    assert frame.baseline_time_s.tolist() == [10.0, 10.0]


@pytest.mark.parametrize(
    "spoil, message",
    [
        (None, "is missing; run speculative_decoding.py"),
        (lambda text: "", "is empty"),
        (lambda text: text[:-4], "ends in the middle of a row"),
        (lambda text: text.replace("gamma,", "gama,"), "lacks the column gamma"),
        (lambda text: text.replace(",4,0,0,", ",four,0,0,"), "has 'four' in column gamma, row 1: not integer"),
        (lambda text: text.replace(",10,", ",nan,"), "column baseline_time_s, row 1: not number"),
        (lambda text: text.replace(",10,", ",inf,"), "column baseline_time_s, row 1: not number"),
        (lambda text: text.replace("True", "yes"), "has 'yes' in column matches_baseline"),
        (lambda text: text + '"open\n', "is not a CSV file"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path, spoil, message):
    path = tmp_path / results.RUNS.file
    if spoil:
        write_runs(tmp_path, [run_row()])
        path.write_text(spoil(path.read_text()))
    with pytest.raises(InputError) as caught:
        results.read_table(tmp_path, results.RUNS)
    assert message in str(caught.value)
    assert results.RUNS.file in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_columns_than_known_are_no_trouble(tmp_path):
    write_runs(tmp_path, [run_row()])
    path = tmp_path / results.RUNS.file
    header, row = path.read_text().splitlines()
    path.write_text(f"{header},newer\n{row},1\n")
    assert list(results.read_table(tmp_path, results.RUNS)) == list(results.RUNS.columns)


def test_the_summary_follows_from_the_runs(tmp_path):
    rows = [run_row(), run_row(repeat=1, speculative_time_s=5.0), run_row(repeat=2, speculative_time_s=10.0)]
    (row,) = results.summarise(write_runs(tmp_path, rows), "published").to_dict("records")
    assert (row["repeats"], row["new_tokens"], row["prompt_tokens"]) == (3, 31, 12)
    assert (row["speculative_time_s"], row["speedup"]) == (8.0, 1.25)
    assert (row["speedup_low"], row["speedup_high"]) == (1.0, 2.0)
    assert row["decode_speedup"] == 9 / 6  # prefill of both models left out
    assert row["cost_ratio"] == 9 / 3
    assert row["acceptance_rate"] == 0.5
    assert row["alpha"] == 0.8
    assert row["tokens_per_step"] == 3.0
    assert row["predicted_speedup"] == pytest.approx((1 - 0.5**5) / 0.5 / (1 + 4 / 3))
    assert row["predicted_speedup_alpha"] == pytest.approx((1 - 0.8**5) / 0.2 / (1 + 4 / 3))
    assert row["noisy"] is True
    assert results.summarise(write_runs(tmp_path, rows), "fast").empty


def test_one_repeat_has_no_spread(tmp_path):
    (row,) = results.summarise(write_runs(tmp_path, [run_row()]), "published").to_dict("records")
    assert row["speedup"] == 1.25
    assert math.isnan(row["speedup_low"])
    assert math.isnan(row["speedup_high"])
    assert row["noisy"] is None


@pytest.mark.parametrize("decode_speedup, noisy", [(3.0, None), (3.4, None), (3.6, True)])
def test_a_speedup_beyond_the_tokens_of_a_step_is_noisy_even_with_one_repeat(tmp_path, decode_speedup, noisy):
    prefill = run_row()["speculative_prefill_s"]
    impossible = run_row(speculative_time_s=prefill + 9 / decode_speedup)
    (row,) = results.summarise(write_runs(tmp_path, [impossible]), "published").to_dict("records")
    assert row["tokens_per_step"] == 3.0
    assert row["decode_speedup"] == pytest.approx(decode_speedup)
    assert row["noisy"] is noisy


def test_what_was_not_measured_is_absent_and_not_zero(tmp_path):
    nothing = run_row(gamma=0, proposed=0, accepted=0, rejections=0)
    fault = run_row(speculative_time_s=None, speculative_prefill_s=None, matches_baseline=False, first_mismatch=3)
    first, second = results.summarise(write_runs(tmp_path, [nothing, fault]), "published").to_dict("records")
    assert all(math.isnan(first[name]) for name in ("acceptance_rate", "alpha", "predicted_speedup"))
    assert all(math.isnan(second[name]) for name in ("speculative_time_s", "speedup", "decode_speedup"))
    assert (second["matches_baseline"], second["first_mismatch"]) == (False, 3)


@pytest.mark.parametrize(
    "times, noisy",
    [
        ([1.0, 1.05, 1.1], False),
        ([1.0, 1.05, 1.2], True),
        ([1.0, 1.0, 1.0, 1.0, 9.0], False),  # from five on one outlier does not make it noisy
        ([1.0, 1.2, 1.0, 1.2, 1.1], True),
        ([1.0], False),
    ],
)
def test_a_timing_is_noisy_where_it_spreads_by_more_than_a_tenth(times, noisy):
    assert results.is_noisy(pd.Series(times)) is noisy
