"""Numbers at their limits: what can't be measured is absent, and nothing is infinite, NaN or made up."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_model
from synthetic import Synthetic, write_run
from test_results import run_row, write_runs

import analysis_deep
import phase3_profiling
import speculative_decoding
from specdec import claims, findings, profile_findings, results, run
from specdec.engine import device, isolation, strategies, timing
from specdec.engine.decoding import autoregressive_generate, speculative_generate
from specdec.engine.exactness import explain_mismatch

DERIVED = ("speedup", "speedup_low", "speedup_high", "decode_speedup", "cost_ratio", "predicted_speedup")


def assert_no_wrong_number(folder) -> None:
    """No table holds an infinite or unreadable number."""
    for path in folder.glob("*.csv"):
        cells = {cell.strip().lower() for cell in path.read_text(encoding="utf-8").replace("\n", ",").split(",")}
        assert not cells & {"nan", "inf", "-inf", "<na>"}, path.name


# --- A clock too coarse ----------------------------------------------------------------------------------------------

CLOCKED = (timing, isolation, strategies)


@pytest.fixture
def standing_clock(monkeypatch):
    """A clock that sees no time pass while models run."""
    for module in CLOCKED:
        monkeypatch.setattr(module, "now", lambda devices: 1.0)


def small(pair_folders, tmp_path, *more: str) -> list[str]:
    draft, target = pair_folders
    flags = ["--draft", str(draft), "--target", str(target), "--device", "cpu", "--gammas", "0,2", "--quick"]
    flags += ["--max-new-tokens", "8", "--results-dir", str(tmp_path), "--plots-dir", str(tmp_path / "plots")]
    return [*flags, *more]


def test_runs_that_take_no_measurable_time_have_times_but_no_ratios(pair_folders, tmp_path, standing_clock, capsys):
    assert speculative_decoding.main(small(pair_folders, tmp_path, "--repeats", "2")) == 0
    rows = results.read_table(tmp_path, results.SUMMARIES["fast"])
    assert (rows.baseline_time_s == 0).all()
    assert rows[list(DERIVED)].isna().all(axis=None)
    assert rows.matches_baseline.all()
    assert not rows.noisy.any()
    shown = capsys.readouterr().out
    assert "no speedup was measured" in shown
    assert "inf" not in shown.replace("findings", "")
    assert_no_wrong_number(tmp_path)
    flags = ["--results-dir", str(tmp_path), "--plots-dir", str(tmp_path / "plots"), "--trials", "20"]
    assert analysis_deep.main(flags) == 0
    assert_no_wrong_number(tmp_path)


@pytest.mark.parametrize("section", ["1", "4", "5"])
def test_sections_that_are_about_time_stop_with_such_a_clock(pair_folders, tmp_path, standing_clock, capsys, section):
    assert phase3_profiling.main(small(pair_folders, tmp_path, "--sections", f"2,{section}")) == 1
    assert "this machine's clock is too coarse: a forward of " in capsys.readouterr().err
    assert {path.name for path in tmp_path.glob("*.csv")} <= {results.BY_POSITION.file, results.BREAKDOWN.file}
    assert run.read_manifest(tmp_path, "phase3")["status"] == "partial"


def test_sections_that_are_not_run_with_such_a_clock(pair_folders, tmp_path, standing_clock):
    assert phase3_profiling.main(small(pair_folders, tmp_path, "--sections", "2,3,6")) == 0
    assert_no_wrong_number(tmp_path)
    assert (results.read_table(tmp_path, results.KV_COMPRESSION).time_s == 0).all()


def test_a_clock_that_can_not_time_a_large_buffer_stops_the_run_in_one_line(
    pair_folders, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(device, "now", lambda devices: 1.0)
    assert speculative_decoding.main(small(pair_folders, tmp_path)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "clock" in line


@pytest.mark.parametrize("baseline, draft, speculative", [(0, 0, 0), (0, 4, 8), (10, 0, 8), (10, 4, 0)])
def test_a_zero_time_makes_its_ratios_absent_and_no_others(tmp_path, baseline, draft, speculative):
    times = {"baseline_time_s": baseline, "draft_time_s": draft, "speculative_time_s": speculative}
    prefills = dict.fromkeys(("baseline_prefill_s", "draft_prefill_s", "speculative_prefill_s"), 0.0)
    rows = [run_row(repeat=repeat, **times, **prefills) for repeat in range(2)]
    (row,) = results.summarise(write_runs(tmp_path, rows), "published").to_dict("records")
    assert math.isnan(row["speedup"]) == (not baseline or not speculative)
    assert math.isnan(row["cost_ratio"]) == (not baseline or not draft)
    assert math.isnan(row["predicted_speedup"]) == (not baseline or not draft)
    assert row["noisy"] is False


@pytest.mark.filterwarnings("error")
def test_repeats_that_took_no_time_are_not_noisy():
    assert results.is_noisy(pd.Series([0.0, 0.0])) is False
    assert results.is_noisy(pd.Series([0.0, 0.0, 0.5])) is True


def test_findings_of_rows_without_numbers_are_absent():
    empty = pd.DataFrame({"speedup": [math.nan], "speedup_low": [math.nan], "decode_speedup": [math.nan]})
    assert findings.count_helpful(empty) is None
    assert findings.prediction_quality(empty.assign(predicted=1.0), "predicted") is None
    none_tried = pd.DataFrame([{"prompt": "a", "gamma": 2, "proposed": 0, "accepted": 0, "rejections": 0}])
    assert findings.alpha_by_gamma(none_tried).empty
    assert profile_findings.sampled_alpha(np.array([], bool), np.array([]))["alpha_sampled"] is None
    assert claims.check_claims(claims_table(), pd.DataFrame(columns=list(results.KV_COMPRESSION.columns))).shape[0] > 5


def claims_table() -> pd.DataFrame:
    return pd.DataFrame(columns=list(results.STRATEGIES.columns))


# --- Acceptance at its ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("repeats", [1, 2])
def test_nothing_or_everything_accepted_gives_exact_rates_and_a_finite_analysis(tmp_path, capsys, alpha, repeats):
    write_run(tmp_path, Synthetic(alphas={"code_python": alpha}, repeats=repeats, gammas=(2, 4), new_tokens=16))
    rows = results.read_table(tmp_path, results.SUMMARIES["fast"])
    assert (rows.acceptance_rate == alpha).all()
    assert (rows.alpha == alpha).all()
    assert rows.speedup_low.isna().all() == (repeats == 1)
    flags = ["--results-dir", str(tmp_path), "--plots-dir", str(tmp_path / "plots"), "--trials", "50"]
    assert analysis_deep.main(flags) == 0
    assert_no_wrong_number(tmp_path)
    assert " nan" not in capsys.readouterr().out


def test_a_draft_that_is_the_target_accepts_everything_in_every_phase(pair_folders, tmp_path):
    _, target = pair_folders
    flags = small((target, target), tmp_path, "--engines", "fast", "--gammas", "1,3")
    assert speculative_decoding.main(flags) == 0
    rows = results.read_table(tmp_path, results.SUMMARIES["fast"])
    assert (rows.acceptance_rate == 1).all()
    assert (rows.alpha == 1).all()
    assert phase3_profiling.main([*flags, "--sections", "2,3"]) == 0
    cold = results.read_table(tmp_path, results.BY_TEMPERATURE)
    assert (cold[cold.temperature == 0].alpha_sampled == 1).all()
    assert_no_wrong_number(tmp_path)


# --- Ties ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_whose_logits_tie_often_is_decoded_alike_by_all_paths_or_at_a_near_tie(dtype):
    """Coarse logits tie on many tokens, in any dtype: the lowest id wins, and rounding alone may move a choice (D5)."""
    model = make_model(layers=2, hidden=64, seed=3).to(dtype)
    head = model.lm_head.forward
    model.lm_head.forward = lambda hidden: (head(hidden).float() / 2).round().to(dtype)
    prompt = torch.randint(1, 300, (1, 12), generator=torch.Generator().manual_seed(4))
    ties = 0
    for engine in ("published", "fast"):
        baseline = autoregressive_generate(model, prompt, 24, engine=engine)
        for gamma in (1, 4):
            generation = speculative_generate(model, model, prompt, 24, gamma, engine=engine)
            mismatch = explain_mismatch(model, prompt, baseline, generation, engine)
            if dtype is torch.float32:
                assert mismatch is None
            assert mismatch is None or mismatch.near_tie, mismatch
        logits = model(torch.cat([prompt, torch.tensor([baseline.tokens])], dim=1)).logits[0, 11:-1].float()
        best = logits.amax(-1, keepdim=True)
        ties += int(((logits == best).sum(-1) > 1).sum())
    assert ties, "the test is about ties"
