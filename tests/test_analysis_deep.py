"""Phase 2: the study's tables from its own figures, a run's files as findings, and what damage they survive."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic import DRAFT_MS, TARGET_MS, Synthetic, write_run

import analysis_deep
from specdec import conclusions, evidence, figures, published, results, run, theory
from specdec.results import read_table
from specdec.traces import replay_traces

ROOT = Path(__file__).parents[1]
STUDY = published.read_study()


@pytest.fixture(autouse=True)
def quicker(request, monkeypatch):
    """Draw fewer trials, and make figures without rendering them where a test doesn't look at the files."""
    monkeypatch.setattr(analysis_deep, "TRIALS", 300)
    if "rendered" not in request.fixturenames:
        monkeypatch.setattr(figures, "save", lambda figure, folder, name: folder / f"{name}.png")


@pytest.fixture
def rendered():
    """Ask for real PNG files."""


def analyse(folder, *flags):
    return analysis_deep.main(["--results-dir", str(folder), "--plots-dir", str(folder / "plots"), *flags])


def missing_numbers(text):
    """Lines that show a missing value as if it were a number."""
    return [line for line in text.splitlines() if re.search(r"\b(nan|inf|<NA>|None)\b", line)]


def edit(folder, table, change):
    rows = read_table(folder, table)
    results.write_table(folder, table, change(rows))


# The study's figures


@pytest.fixture(scope="module")
def study_analysis():
    facts = evidence.study_evidence(STUDY)
    args = analysis_deep.cli.parse([], "", analysis_deep.FLAGS, vars(analysis_deep) | {"TRIALS": 10_000}, {})
    return analysis_deep.analyse(facts, args, STUDY)


def test_all_of_the_study_s_tables_come_out_within_their_tolerances(study_analysis):
    tables = analysis_deep.check_published(STUDY, study_analysis)
    assert [len(table) for table in tables.values()] == [20, 5, 5, 4]
    for title, table in tables.items():
        assert table.within.all(), (title, table)
        np.testing.assert_allclose(table.difference, table.here - table.published)


def test_the_tolerances_are_those_of_the_design(study_analysis):
    tables = analysis_deep.check_published(STUDY, study_analysis)
    tolerances = [sorted({float(value) for value in table.tolerance}) for table in tables.values()]
    assert tolerances == [[0.01], [0.02], [pytest.approx(0, abs=1e-6)], [0.01, 0.025, 0.045]]


def test_monte_carlo_agrees_with_the_exact_recursion_and_with_endless_output(study_analysis):
    assert study_analysis.simulated.checked == 32
    assert study_analysis.simulated.largest_deviation < 3
    assert study_analysis.simulated.long_difference < 0.01


def test_published_prints_published_here_and_difference_and_ends_with_0(tmp_path, capsys):
    assert analyse(tmp_path, "--published", "--trials", "2000") == 0
    out = capsys.readouterr().out
    assert re.search(r"gamma +published +here +difference +tolerance +within", out)
    assert "OFF" not in out
    assert not missing_numbers(out)


@pytest.mark.parametrize(
    ("table", "column"),
    [("break_even", "min_cost_ratio"), ("scenarios", "mean_speedup"), ("speedups", "predicted_speedup")],
)
def test_published_ends_with_1_if_one_figure_is_off(tmp_path, capsys, monkeypatch, table, column):
    rows = getattr(STUDY, table).copy()
    rows.loc[rows.index[2], column] += 0.09
    monkeypatch.setattr(published, "read_study", lambda: dataclasses.replace(STUDY, **{table: rows}))
    assert analyse(tmp_path, "--published", "--trials", "2000") == 1
    captured = capsys.readouterr()
    assert captured.out.count("OFF") == 1
    assert "1 of the study's figures are off" in captured.err


def test_published_writes_apart_from_the_user_s_run(rendered, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "results")
    before = sorted((tmp_path / "results").iterdir())
    assert analysis_deep.main(["--published", "--trials", "2000"]) == 0
    assert (tmp_path / "results/published/simulation_results.csv").exists()
    assert (tmp_path / "plots/published/regime_heatmap.png").exists()
    assert sorted(path for path in (tmp_path / "results").iterdir() if path.name != "published") == before


def test_the_study_s_roofline_leaves_neither_model_bound_by_bandwidth():
    roofline = analysis_deep.section1_roofline(evidence.study_evidence(STUDY)).set_index("role")
    assert roofline.weights_ms.round(1).to_dict() == {"draft": 2.2, "target": 6.9}
    assert roofline.rest_per_layer_ms.round(2).to_dict() == {"draft": 0.88, "target": 0.73}
    assert (roofline.weights_share < 0.3).all()


def test_the_corrected_model_lowers_every_prediction():
    table = published.predictions_by_gamma(STUDY)
    assert table.corrected.round(3).tolist() == [0.574, 0.511, 0.394, 0.254]
    assert (table.corrected < table.leviathan).all()


def test_the_study_s_times_imply_tokens_per_step_and_an_alpha_that_grows():
    implied = published.implied_by_time(STUDY)
    assert implied.tokens_per_step.round(2).tolist() == [1.47, 1.97, 3.16, 4.58]
    assert implied.alpha.round(2).tolist() == [0.47, 0.61, 0.77, 0.82]
    assert implied.acceptance_rate.between(0.44, 0.55).all()
    assert (implied.leviathan > implied.measured).all()


def test_the_acceptance_rate_falls_with_gamma_at_one_alpha():
    expected = published.rates_at_fixed_alpha(STUDY, 0.6).expected
    assert expected.is_monotonic_decreasing


def test_the_temperature_rates_are_shares_of_120_whose_difference_is_noise():
    assert published.smallest_sample(STUDY.temperatures.acceptance_rate) == 120
    assert published.difference_in_standard_errors(0.458, 0.508, 120) == pytest.approx(0.776, abs=5e-4)
    assert published.smallest_sample(pd.Series([0.5, 0.333])) == 6


def test_in_hindsight_everything_helps_at_2_5_and_over_all_gammas_41_percent(study_analysis):
    row = study_analysis.simulated.scenarios.set_index("cost_ratio").loc[2.5]
    assert row.helpful_pct == 100
    assert round(row.helpful_pct_all_gammas) == 41
    assert row.mean_all_gammas == pytest.approx(0.86, abs=0.01)


def points(study, study_analysis):
    return {point.claim: point for point in conclusions.study_points(study, study_analysis.simulated.scenarios)}


@pytest.mark.parametrize(
    ("claim", "verdict", "numbers"),
    [
        ("did not help", conclusions.HOLDS, "0 of 32"),
        ("bandwidth-bound", conclusions.IMPOSSIBLE, "2.2 of the draft's 23.3 ms a token and 6.9 of the target's 27.4"),
        ("2-5 ms per layer", conclusions.IMPOSSIBLE, "28/24 = 1.167 against the measured c = 1.178"),
        ("corrected model", conclusions.IMPOSSIBLE, "0.574 / 0.511 / 0.394 / 0.254"),
        ("Measured exceeds", conclusions.MEASURE, "1.47 / 1.97 / 3.16 / 4.58"),
        ("Alpha grows", conclusions.MEASURE, "0.350 / 0.250 / 0.588 / 0.750"),
        ("Sync costs", conclusions.HOLDS, "0.82 / 0.71 / 0.68 / 0.63"),
        ("zero false positives", conclusions.MEASURE, "no single alpha gives all four"),
        ("T 0.3", conclusions.MEASURE, "0.8 standard errors"),
        ("incompatible", conclusions.MEASURE, "exact match accepts 38%"),
        ("100 % helpful", conclusions.MEASURE, "41 % are helpful"),
        ("CPU draft", conclusions.IMPOSSIBLE, "a slower draft lowers it"),
    ],
)
def test_each_conclusion_of_the_study_is_judged_with_its_numbers(study_analysis, claim, verdict, numbers):
    [point] = [point for text, point in points(STUDY, study_analysis).items() if claim in text]
    assert point.verdict == verdict
    assert numbers in point.numbers


def test_a_conclusion_turns_with_its_figures(study_analysis):
    hardware = STUDY.hardware.copy()
    hardware.loc[hardware.quantity == "memory_bandwidth", "value"] = 120
    timing = STUDY.timing.copy()
    timing["layers"] = 6
    slow_memory = dataclasses.replace(STUDY, hardware=hardware)
    deep = dataclasses.replace(STUDY, timing=timing)
    assert conclusions.bandwidth(slow_memory).verdict == conclusions.HOLDS
    assert conclusions.layers(deep).verdict == conclusions.HOLDS


# A run of one's own


def test_a_run_becomes_tables_plots_and_a_complete_manifest(rendered, tmp_path, capsys):
    write_run(tmp_path)
    assert analyse(tmp_path) == 0
    for table, rows in zip(analysis_deep.TABLES, (7, 400, 20, 24), strict=True):
        assert len(read_table(tmp_path, table)) == rows
    assert sorted(path.stem for path in (tmp_path / "plots").iterdir()) == sorted(analysis_deep.PLOTS)
    manifest = json.loads((tmp_path / "manifest_phase2.json").read_text())
    assert manifest["status"] == "complete"
    assert manifest["phase1_run_id"] == "made-up"
    assert manifest["constants"]["trials"] == 300
    out = capsys.readouterr().out
    assert out.count("pair made-up-pair: draft little, target large") == 6
    assert not missing_numbers(out)


def test_this_run_s_own_cost_ratio_is_one_of_the_scenarios(tmp_path):
    write_run(tmp_path)
    analyse(tmp_path)
    simulated = read_table(tmp_path, results.SIMULATION).set_index("scenario")
    assert simulated.cost_ratio["this_run_fast_engine"] == pytest.approx(TARGET_MS / DRAFT_MS, rel=1e-4)
    assert simulated.cost_ratio["batch8_on_target"] == 2.5


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(tmp_path):
    write_run(tmp_path)

    def numbers(seed):
        analyse(tmp_path, "--seed", seed)
        return (tmp_path / "simulation_results.csv").read_text()

    assert numbers("1") == numbers("1")
    assert numbers("1") != numbers("2")


def test_a_new_run_moves_its_old_files_to_previous(rendered, tmp_path):
    write_run(tmp_path)
    analyse(tmp_path)
    first = (tmp_path / "manifest_phase2.json").read_text()
    analyse(tmp_path)
    assert (tmp_path / "previous/manifest_phase2.json").read_text() == first
    assert (tmp_path / "previous/break_even.csv").exists()
    assert (tmp_path / "plots/previous/regime_heatmap.png").exists()
    assert not (tmp_path / "previous/speculative_runs.csv").exists()


def test_quick_reads_and_writes_the_quick_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "results/quick", Synthetic(repeats=1, new_tokens=16))
    assert analysis_deep.main(["--quick"]) == 0
    assert read_table(tmp_path / "results/quick", results.SIMULATION).trials.tolist() == [1000] * 7


def test_the_regime_map_is_leviathan_s_formula_and_break_even_its_root(tmp_path):
    write_run(tmp_path)
    analyse(tmp_path, "--alphas", "0,0.5")
    regime = read_table(tmp_path, results.REGIME_MAP)
    speedups = theory.leviathan_speedup(
        regime.alpha.to_numpy(), regime.gamma.to_numpy(int), regime.cost_ratio.to_numpy()
    )
    np.testing.assert_allclose(regime.speedup, speedups, rtol=1e-6)
    assert (regime.helpful == (speedups > 1)).all()
    least = read_table(tmp_path, results.BREAK_EVEN)
    assert least[least.alpha == 0].min_cost_ratio.isna().all()
    paying = least[least.alpha == 0.5]
    at_root = theory.leviathan_speedup(0.5, paying.gamma.to_numpy(int), paying.min_cost_ratio.to_numpy())
    np.testing.assert_allclose(at_root, 1, rtol=1e-6)


def test_replaying_the_trace_takes_the_very_steps_of_the_run(tmp_path):
    write_run(tmp_path)
    replayed = replay_traces(evidence.read_run(tmp_path))
    assert (replayed.same_steps, replayed.compared) == (24, 24)
    assert replayed.oracle_speedup >= replayed.by_gamma.replay_speedup.max()


def test_the_replay_is_compared_with_independent_tokens_of_the_same_alpha(tmp_path):
    write_run(tmp_path)
    halves = np.array([True] * 48 + [False] * 16)
    facts = dataclasses.replace(evidence.read_run(tmp_path), traces={"code_python": halves})
    replayed = replay_traces(facts)
    assert replayed.autocorrelation["code_python"] > 0.8
    last = replayed.by_gamma.set_index("gamma").loc[8]
    assert last.replay_steps == 5 + 1 + 15  # whole steps of 9 tokens, one that accepts 2, then none is accepted
    assert last.iid_steps == pytest.approx(theory.expected_steps(47 / 62, 8, 64))
    assert last.replay_over_iid == pytest.approx(21 / last.iid_steps)
    assert replayed.oracle_tokens_per_step == 63 / 21  # the same steps, but it proposes only the 42 that agree
    assert replayed.oracle_speedup == pytest.approx(63 * TARGET_MS / (42 * DRAFT_MS + 21 * TARGET_MS), rel=1e-4)
    assert last.deviation == pytest.approx((21 - last.iid_steps) / theory.steps_standard_deviation(47 / 62, 8, 64))


def test_alphas_are_pooled_over_gammas_and_not_over_repeats_or_engines(tmp_path):
    write_run(tmp_path)

    def others_accept_nothing(rows):
        rows.loc[(rows.repeat > 0) | (rows.engine == "fast"), "accepted"] = 0
        return rows

    edit(tmp_path, results.RUNS, others_accept_nothing)
    runs = read_table(tmp_path, results.RUNS)
    one = runs[(runs["prompt"] == "mathematical") & (runs.engine == "published") & (runs.repeat == 0)]
    expected = one.accepted.sum() / (one.accepted.sum() + one.rejections.sum())
    assert evidence.read_run(tmp_path).alphas["mathematical"] == pytest.approx(expected)


def test_everything_runs_where_torch_can_t_be_imported(tmp_path):
    write_run(tmp_path)
    for package in ("torch", "transformers", "accelerate"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('not here')\n")
    command = [sys.executable, str(ROOT / "analysis_deep.py"), "--results-dir", str(tmp_path), "--trials", "100"]
    command += ["--plots-dir", str(tmp_path / "plots")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert (tmp_path / "plots/regime_heatmap.png").exists()


# Input trouble


def delete(path):
    path.unlink()


def empty(path):
    path.write_text("")


def tear(path):
    path.write_text(path.read_text()[:-5])


def drop_a_column(path):
    rows = pd.read_csv(path)
    rows.drop(columns=rows.columns[2]).to_csv(path, index=False)


def only_a_header(path):
    path.write_text(path.read_text().splitlines()[0] + "\n")


@pytest.mark.parametrize("damage", [delete, empty, tear, drop_a_column])
@pytest.mark.parametrize(
    "file", ["speculative_results.csv", "speculative_results_fast.csv", "speculative_runs.csv", "agreement_trace.csv"]
)
def test_a_missing_or_damaged_file_is_one_line_with_file_and_remedy(tmp_path, capsys, file, damage):
    write_run(tmp_path)
    damage(tmp_path / file)
    assert analyse(tmp_path) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert file in captured.err
    assert "run speculative_decoding.py" in captured.err
    assert not captured.out
    assert not (tmp_path / "manifest_phase2.json").exists()


@pytest.mark.parametrize("file", ["speculative_results.csv", "speculative_runs.csv"])
def test_a_table_without_rows_is_one_line(tmp_path, capsys, file):
    write_run(tmp_path)
    only_a_header(tmp_path / file)
    assert analyse(tmp_path) == 2
    assert f"{file} has no rows; run speculative_decoding.py" in capsys.readouterr().err


def test_a_row_without_gamma_is_one_line(tmp_path, capsys):
    write_run(tmp_path)
    path = tmp_path / "speculative_results.csv"
    path.write_text(path.read_text().replace("made_up,4,", "made_up,,", 1))
    assert analyse(tmp_path) == 2
    assert "speculative_results.csv has a row without gamma" in capsys.readouterr().err


def test_a_trace_with_a_gap_is_named_and_not_replayed(tmp_path, capsys):
    write_run(tmp_path)
    edit(tmp_path, results.TRACE, lambda rows: rows[(rows["prompt"] != "code_python") | (rows.position != 5)])
    assert analyse(tmp_path) == 0
    out = capsys.readouterr().out
    assert "code_python: its agreement trace has gaps" in out
    assert "in 16 of 16 configurations" in out


def test_a_folder_without_a_manifest_is_refused_and_not_made(tmp_path, capsys):
    assert analyse(tmp_path / "nowhere") == 2
    assert "manifest_phase1.json is missing; run speculative_decoding.py" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


NO_LAYERS = '{"pair": {"draft": {"name": "x"}, "target": {"name": "y"}}}'


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"pair": null}', '{"pair": {"draft": {"name": "x"}}}', NO_LAYERS])
def test_a_manifest_that_says_too_little_is_one_line(tmp_path, capsys, text):
    write_run(tmp_path)
    (tmp_path / "manifest_phase1.json").write_text(text)
    assert analyse(tmp_path) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "manifest_phase1.json" in error


def test_an_unfinished_run_is_used_and_said_to_be_one(tmp_path, capsys):
    write_run(tmp_path, Synthetic(status="partial", engines=("published",)))
    (tmp_path / "agreement_trace.csv").unlink()
    assert analyse(tmp_path) == 0
    out = capsys.readouterr().out
    assert "was not finished" in out
    assert "no agreement trace" in out
    assert "replay_free is missing" in out


@pytest.mark.parametrize(
    "small",
    [
        Synthetic(alphas={"code_python": 0.7}),
        Synthetic(gammas=(4,)),
        Synthetic(repeats=1),
        Synthetic(engines=("fast",)),
        Synthetic(alphas={"code_python": 0.7}, gammas=(2,), repeats=1, new_tokens=5, engines=("published",)),
        Synthetic(alphas={"code_python": 0.7, "mathematical": 0.0}),
        Synthetic(alphas={"code_python": 0.0}),
        Synthetic(alphas={"code_python": 1.0}),
        Synthetic(gammas=(0, 4)),
        Synthetic(gammas=(0,)),
        Synthetic(new_tokens=3),
        Synthetic(new_tokens=2),
        Synthetic(new_tokens=1),
    ],
    ids=lambda small: (
        f"{len(small.alphas)}-prompts-{small.gammas}-{small.repeats}-{small.new_tokens}-{small.engines[0]}"
    ),
)
def test_a_small_run_gives_a_smaller_result_without_nan_or_intervals_of_no_width(tmp_path, capsys, small):
    write_run(tmp_path, small)
    assert analyse(tmp_path) == 0
    captured = capsys.readouterr()
    assert not captured.err
    assert not missing_numbers(captured.out)
    simulated = read_table(tmp_path, results.SIMULATION)
    spread = simulated.dropna(subset=["low"])
    assert (spread.high > spread.low).all()
    for table in analysis_deep.TABLES:
        assert "nan" not in (tmp_path / table.file).read_text()


def test_configurations_without_speedup_are_counted_and_left_out(tmp_path, capsys):
    write_run(tmp_path)

    def blank(rows):
        columns = ["speculative_time_s", "speedup", "speedup_low", "speedup_high", "decode_speedup"]
        rows.loc[rows["prompt"] == "code_python", columns] = np.nan
        return rows

    edit(tmp_path, results.SUMMARIES["published"], blank)
    assert analyse(tmp_path) == 0
    out = capsys.readouterr().out
    assert "4 of 24 configurations have no speedup" in out
    assert not missing_numbers(out)
    rows = read_table(tmp_path, results.PREDICTIONS)
    assert rows.measured.isna().sum() == 4


def test_a_run_in_which_no_speedup_was_measured_says_so(tmp_path, capsys):
    write_run(tmp_path, Synthetic(engines=("published",)))

    def blank(rows):
        return rows.assign(speedup=np.nan, speedup_low=np.nan, speedup_high=np.nan, decode_speedup=np.nan)

    edit(tmp_path, results.SUMMARIES["published"], blank)
    assert analyse(tmp_path) == 0
    out = capsys.readouterr().out
    assert "Engine published: no speedup was measured" in out
    assert "nothing was both measured and predicted" in out


def test_a_prompt_that_accepted_nothing_is_named(tmp_path, capsys):
    write_run(tmp_path, Synthetic(alphas={"code_python": 0.7, "mathematical": 0.0}))
    analyse(tmp_path)
    assert "mathematical: no proposed token was accepted" in capsys.readouterr().out


def test_files_of_two_runs_are_refused_unless_allowed(tmp_path, capsys):
    write_run(tmp_path)
    edit(tmp_path, results.RUNS, lambda rows: rows[rows.gamma != 8])
    assert analyse(tmp_path) == 2
    assert "are of different runs: code_python, engine fast, gamma 8" in capsys.readouterr().err
    assert analyse(tmp_path, "--allow-mixed") == 0
    assert "MIXED INPUT" in capsys.readouterr().out


def test_unmeasured_ceilings_leave_the_shares_open(tmp_path, capsys):
    write_run(tmp_path)
    path = tmp_path / "manifest_phase1.json"
    manifest = json.loads(path.read_text())
    del manifest["ceilings"]
    path.write_text(json.dumps(manifest))
    assert analyse(tmp_path) == 0
    out = capsys.readouterr().out
    assert "bandwidth was not measured" in out
    assert not missing_numbers(out)


@pytest.mark.parametrize(
    ("draft_ms", "target_ms", "words"),
    [
        (0.1, 0.2, "neither model is bound"),
        (1.5, 4.0, "both models are bound"),
        (0.1, 4.0, "only the target is bound"),
        (3.0, 4.0, "over 100 % means a wrong ceiling"),
    ],
)
def test_the_share_of_the_ceiling_decides_what_is_said_of_bandwidth(tmp_path, draft_ms, target_ms, words):
    write_run(tmp_path)
    facts = evidence.read_run(tmp_path)
    ceilings = facts.models.role.map({"draft": draft_ms, "target": target_ms})
    facts = dataclasses.replace(facts, models=facts.models.assign(weights_ms=ceilings))
    sentences = " ".join(analysis_deep._roofline_words(analysis_deep.section1_roofline(facts), facts))
    assert words in sentences


@pytest.mark.parametrize(
    "flags",
    [
        ("--alphas", "1.5"),
        ("--regime-cost-ratios", "0"),
        ("--scenarios", "2.5"),
        ("--scenarios", "a=0"),
        ("--trials", "0"),
        ("--gammas", "0"),
        ("--gama", "1"),
    ],
)
def test_a_bad_flag_ends_with_2_and_one_line(tmp_path, capsys, flags):
    write_run(tmp_path)
    assert analyse(tmp_path, *flags) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_folder_that_another_run_holds_is_refused(tmp_path, capsys):
    write_run(tmp_path)
    with run.lock(tmp_path):
        assert analyse(tmp_path) == 2
    assert "another run is writing" in capsys.readouterr().err


def test_own_scenarios_and_gammas_replace_the_study_s(tmp_path):
    write_run(tmp_path)
    analyse(tmp_path, "--scenarios", "mine=3.3", "--gammas", "3", "--regime-gamma", "5")
    names = read_table(tmp_path, results.SIMULATION).scenario.tolist()
    assert names == ["this_run_published_engine", "this_run_fast_engine", "mine"]
    assert set(read_table(tmp_path, results.BREAK_EVEN).gamma) == {3}
    assert set(read_table(tmp_path, results.REGIME_MAP).gamma) == {3, 5}
