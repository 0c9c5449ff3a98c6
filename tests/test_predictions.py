"""predictions.csv: what each model makes of a run whose costs are known exactly."""

import math

import numpy as np
import pytest
from synthetic import COSTS_MS, DRAFT_MS, TARGET_MS, Synthetic, write_run

from specdec import results, theory
from specdec.evidence import read_run
from specdec.predictions import NEEDS, missing, overhead_factors, predict

ONE_REPEAT = Synthetic(repeats=1)


def made_up(tmp_path, run=ONE_REPEAT):
    write_run(tmp_path, run)
    return read_run(tmp_path)


def test_replay_with_the_true_costs_is_what_was_measured(tmp_path):
    facts = made_up(tmp_path)
    rows = predict(facts.summary, facts.traces, COSTS_MS)
    assert len(rows) == 24
    np.testing.assert_allclose(rows.replay, rows.measured, rtol=1e-5)


def test_full_and_corrected_are_the_theory_s_for_each_engine(tmp_path):
    facts = made_up(tmp_path)
    rows = predict(facts.summary, facts.traces, COSTS_MS)
    for row, source in zip(rows.itertuples(), facts.summary.itertuples(), strict=True):
        costs = COSTS_MS[row.engine]
        assert row.full == pytest.approx(theory.full_speedup(source.alpha, row.gamma, 64, costs))
        corrected = theory.corrected_speedup(source.alpha, row.gamma, DRAFT_MS, TARGET_MS, costs.sync)
        assert row.corrected == pytest.approx(corrected)


def test_both_leviathan_columns_are_those_of_the_summary(tmp_path):
    facts = made_up(tmp_path)
    rows = predict(facts.summary, facts.traces)
    np.testing.assert_array_equal(rows.leviathan_rate, facts.summary.predicted_speedup)
    np.testing.assert_array_equal(rows.leviathan_alpha, facts.summary.predicted_speedup_alpha)
    wide = rows.gamma > 1
    assert (rows.leviathan_rate[wide] < rows.leviathan_alpha[wide]).all()


def test_replay_free_leaves_every_overhead_out(tmp_path):
    facts = made_up(tmp_path)
    rows = predict(facts.summary, facts.traces, COSTS_MS)
    assert (rows.replay_free > rows.replay).all()
    free = {engine: theory.StepCosts(DRAFT_MS, TARGET_MS) for engine in COSTS_MS}
    np.testing.assert_allclose(rows.replay_free, predict(facts.summary, facts.traces, free).replay, rtol=1e-5)


def test_without_costs_three_predictions_are_missing_and_named(tmp_path):
    facts = made_up(tmp_path)
    rows = predict(facts.summary, facts.traces)
    assert set(missing(rows)) == {"corrected", "full", "replay"}
    assert all("phase3_profiling.py" in need for need in missing(rows).values())
    assert missing(predict(facts.summary, facts.traces, COSTS_MS)) == {}


def test_costs_of_one_engine_leave_the_other_blank(tmp_path):
    facts = made_up(tmp_path)
    rows = predict(facts.summary, facts.traces, {"fast": COSTS_MS["fast"]}).set_index("engine")
    assert missing(rows) == {}
    assert rows.full.notna()["fast"].all()
    assert rows.full.isna()["published"].all()


def test_a_prompt_without_a_whole_trace_has_no_replay_but_the_rest(tmp_path):
    facts = made_up(tmp_path)
    short = dict(facts.traces) | {"code_python": facts.traces["code_python"][:63]}
    rows = predict(facts.summary, short, COSTS_MS).set_index("prompt")
    assert rows.loc["code_python", ["replay", "replay_free"]].isna().all(axis=None)
    assert rows.loc["code_python", "full"].notna().all()
    assert rows.loc["mathematical", "replay"].notna().all()


def test_a_run_that_proposed_nothing_has_a_measurement_and_no_prediction_by_alpha(tmp_path):
    facts = made_up(tmp_path, Synthetic(gammas=(0, 2), repeats=1))
    rows = predict(facts.summary, facts.traces, COSTS_MS)
    plain = rows[rows.gamma == 0]
    assert plain.measured.notna().all()
    assert plain[["leviathan_rate", "leviathan_alpha", "corrected", "full"]].isna().all(axis=None)


def test_rows_survive_the_file(tmp_path):
    facts = made_up(tmp_path)
    rows = predict(facts.summary, facts.traces)
    results.write_table(tmp_path, results.PREDICTIONS, rows)
    read = results.read_table(tmp_path, results.PREDICTIONS)
    assert read.full.isna().all()
    np.testing.assert_allclose(read.measured, rows.measured, rtol=1e-6)


def test_an_overhead_factor_is_mean_measured_over_mean_predicted_with_the_span_of_prompts(tmp_path):
    facts = made_up(tmp_path)
    rows = predict(facts.summary, facts.traces)
    factors = overhead_factors(rows).set_index(["engine", "gamma", "prediction"])
    group = rows[(rows.engine == "fast") & (rows.gamma == 4)]
    factor = factors.loc[("fast", 4, "leviathan_alpha")]
    assert factor.factor == pytest.approx(group.measured.mean() / group.leviathan_alpha.mean())
    assert factor.low == pytest.approx((group.measured / group.leviathan_alpha).min())
    assert factor.high == pytest.approx((group.measured / group.leviathan_alpha).max())
    assert "full" not in factors.index.get_level_values("prediction")


def test_one_prompt_has_a_factor_but_no_span(tmp_path):
    facts = made_up(tmp_path, Synthetic(alphas={"code_python": 0.7}, repeats=1))
    factors = overhead_factors(facts.predictions)
    assert len(factors) == 2 * 4 * 3
    assert factors.factor.notna().all()
    assert factors.low.isna().all()
    assert factors.high.isna().all()


def test_rows_without_a_measurement_count_in_no_factor(tmp_path):
    facts = made_up(tmp_path)
    rows = predict(facts.summary, facts.traces)
    rows.loc[rows["prompt"] == "code_python", "measured"] = math.nan
    assert (overhead_factors(rows).prompts == 2).all()


def test_every_prediction_says_what_it_needs():
    columns = set(results.PREDICTIONS.columns) - {"prompt", "engine", "gamma", "measured"}
    assert set(NEEDS) == columns
