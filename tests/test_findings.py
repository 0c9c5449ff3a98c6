"""What the tables say, on rows small enough to check by hand."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from specdec import findings


def summary(speedups, lows=None, predicted=None) -> pd.DataFrame:
    count = len(speedups)
    return pd.DataFrame(
        {
            "prompt": [f"p{i}" for i in range(count)],
            "gamma": range(count),
            "speedup": speedups,
            "speedup_low": lows or [math.nan] * count,
            "decode_speedup": speedups,
            "predicted_speedup": predicted or [math.nan] * count,
        }
    )


def test_helpful_counts_medians_above_one_and_separately_those_whose_slowest_repeat_is():
    found = findings.count_helpful(summary([0.5, 1.0, 1.2, 1.5], lows=[0.4, 0.9, 0.95, 1.4]))
    assert (found.helpful, found.surely, found.total) == (2, 1, 4)
    assert (found.best, found.best_prompt, found.best_gamma) == (1.5, "p3", 3)
    assert found.mean == pytest.approx(1.05)


def test_with_one_repeat_nothing_is_called_sure():
    assert findings.count_helpful(summary([1.5])).surely is None


def test_configurations_without_a_measured_speed_are_not_counted():
    assert findings.count_helpful(summary([math.nan, 0.5])).total == 1
    assert findings.count_helpful(summary([math.nan])) is None


def test_prediction_quality_compares_with_the_decode_speedup():
    quality = findings.prediction_quality(summary([0.5, 0.9, 1.1], predicted=[0.6, 1.0, 1.2]), "predicted_speedup")
    assert quality.rows == 3
    assert quality.correlation == pytest.approx(1.0)
    assert quality.mean_absolute_error == pytest.approx(0.1)
    assert quality.verdicts_agree == 3
    quality = findings.prediction_quality(summary([0.5, 1.1], predicted=[1.6, 0.9]), "predicted_speedup")
    assert quality.verdicts_agree == 0


@pytest.mark.parametrize("speedups, predicted", [([0.5], [0.6]), ([0.5, 0.7], [0.6, 0.6])])
def test_a_correlation_without_spread_is_absent(speedups, predicted):
    assert findings.prediction_quality(summary(speedups, predicted=predicted), "predicted_speedup").correlation is None


def test_without_predictions_there_is_no_quality():
    assert findings.prediction_quality(summary([0.5]), "predicted_speedup") is None


def test_alpha_by_gamma_pools_prompts_and_counts_a_repeat_once():
    runs = pd.DataFrame(
        {
            "prompt": ["a", "a", "b", "a"],
            "gamma": [4, 4, 4, 0],
            "repeat": [0, 1, 0, 0],
            "proposed": [40, 40, 20, 0],
            "accepted": [20, 20, 10, 0],
            "rejections": [5, 5, 5, 0],
        }
    )
    table = findings.alpha_by_gamma(runs)
    assert table.index.tolist() == [4]
    assert table.acceptance_rate.item() == 0.5
    assert table.alpha.item() == 0.75
    assert table.standard_error.item() == pytest.approx((0.75 * 0.25 / 40) ** 0.5)
