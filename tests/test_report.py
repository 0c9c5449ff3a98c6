"""The report: made from whatever phases are there, its words from their numbers, no two runs mixed."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from figure_texts import assert_no_two_texts_overlap, assert_text_lies_inside, title
from synthetic import Synthetic, write_run
from synthetic_profile import write_everything, write_profile

import final_report
from specdec import plots, published, results, theory
from specdec import run as runs
from specdec.report import advice, causes, collection, comparison, master_summary, model_figures

ROOT = Path(__file__).parents[1]
SAVE_ALL = plots.save_all
PLOTS = {  # design section 5's twelve, and those of Phase 3's sections 5 and 6
    *("master_summary", "corrected_model", "regime_map_final", "time_breakdown", "alpha_vs_position"),
    *("alpha_vs_temperature", "timing_analysis", "phase_distribution", "speedup_vs_cost_ratio", "regime_heatmap"),
    *("analytical_curves", "min_alpha_needed", "strategies", "kv_compression"),
}
PHASE_FILES = {
    "phase1": [results.RUNS.file, results.TRACE.file, *(table.file for table in results.SUMMARIES.values())],
    "phase2": [table.file for table in collection.PHASE2_TABLES],
    "phase3": [table.file for made in collection.SECTIONS.values() for table in made] + [results.CLAIMS.file],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write_everything(folder)
    assert report(folder) == 0
    return folder


@pytest.fixture
def folder(whole, tmp_path, monkeypatch):
    """A copy of all three phases' files, where a report draws nothing: plots are slow and have tests of their own."""
    shutil.copytree(
        whole, tmp_path / "copy", ignore=shutil.ignore_patterns("plots", "report.md", "manifest_report.json")
    )
    results.write_table(tmp_path / "copy", results.PREDICTIONS, collection.collect(whole).facts.predictions)
    draw_alone(monkeypatch, ())
    return tmp_path / "copy"


def draw_alone(monkeypatch, names=("master_summary",)):
    monkeypatch.setattr(
        plots, "save_all", lambda drawn, folder: SAVE_ALL({n: drawn[n] for n in drawn if n in names}, folder)
    )


def report(folder, *arguments):
    return final_report.main(["--results-dir", str(folder), "--plots-dir", str(folder / "plots"), *arguments])


def text(folder):
    return (folder / "report.md").read_text(encoding="utf-8")


def text_of(folder):
    """Make the report and return it."""
    assert report(folder) == 0
    return text(folder)


def remove(folder, phase):
    for name in [*PHASE_FILES[phase], f"manifest_{phase}.json"]:
        (folder / name).unlink()


def test_a_whole_folder_gives_every_plot_and_a_report_that_shows_them(whole):
    assert {path.stem for path in (whole / "plots").glob("*.png")} == PLOTS
    assert "What is missing" not in text(whole)
    for name in ("master_summary", "time_breakdown", "corrected_model", "regime_map_final", "strategies"):
        assert f"](plots/{name}.png)" in text(whole)
    manifest = json.loads((whole / "manifest_report.json").read_text())
    assert manifest["status"] == "complete"
    assert set(manifest["plots"]) == PLOTS


def test_no_cell_or_sentence_shows_a_missing_number(whole):
    assert "nan" not in text(whole).lower()
    assert "None" not in text(whole)


def test_the_answer_counts_what_the_summaries_hold(whole):
    for engine, table in results.SUMMARIES.items():
        rows = results.read_table(whole, table)
        helpful = f"{int((rows.speedup > 1).sum())} of {len(rows)} configurations were faster"
        assert helpful in text(whole), engine
        assert f"mean speedup {rows.speedup.mean():.2f}, best {rows.speedup.max():.2f}" in text(whole)


@pytest.mark.parametrize("absent", [("phase1",), ("phase2",), ("phase3",), ("phase1", "phase2"), ("phase2", "phase3")])
def test_any_phase_may_be_missing_and_is_named(absent, folder, capfd, monkeypatch):
    draw_alone(monkeypatch)
    for phase in absent:
        remove(folder, phase)
    assert report(folder) == 0
    shown = capfd.readouterr().out
    for phase in absent:
        assert f"{runs.SCRIPTS[phase]} was not run" in text(folder)
        assert f"left out: {runs.SCRIPTS[phase]} was not run" in shown
    assert (folder / "plots/master_summary.png").exists()
    assert "None" not in text(folder)


@pytest.mark.parametrize("section", collection.SECTIONS)
def test_a_section_that_was_not_run_is_named_with_the_command_for_it(section, folder):
    for table in collection.SECTIONS[section]:
        (folder / table.file).unlink()
    assert report(folder) == 0
    assert f"phase3_profiling.py has no section {section}: run it with --sections {section} --resume" in text(folder)


def test_one_engine_and_one_repeat_make_a_report(tmp_path, monkeypatch):
    draw_alone(monkeypatch, ())
    write_everything(tmp_path, Synthetic(engines=("fast",), repeats=1, gammas=(2,)))
    assert report(tmp_path) == 0
    assert "one repeat, so no spread is known" in text(tmp_path)
    assert "published`, 0 of" not in text(tmp_path)


def test_one_repeat_is_not_called_certain(tmp_path, monkeypatch):
    draw_alone(monkeypatch, ())
    write_everything(tmp_path, Synthetic(repeats=1))
    assert report(tmp_path) == 0
    assert ", by one repeat and so not certain: with the fast engine" in text(tmp_path)
    assert "One repeat: not certain" in text(tmp_path)


def test_a_model_that_contradicts_the_measured_speedup_is_said_so(folder):
    assert "a timing was disturbed" not in text_of(folder)
    for table in results.SUMMARIES.values():
        rows = results.read_table(folder, table)
        results.write_table(folder, table, rows.assign(speedup=0.6, speedup_low=0.5, speedup_high=0.7))
    assert "give 1." in text_of(folder)
    assert "a timing was disturbed" in text_of(folder)


def test_a_slower_baseline_of_the_engine_to_use_is_said_so(folder):
    assert "plain decoding takes" not in text_of(folder)
    table = results.SUMMARIES["published"]
    rows = results.read_table(folder, table)
    fast = results.read_table(folder, results.SUMMARIES["fast"])
    rows["baseline_time_s"] /= 1.25
    results.write_table(folder, table, rows)
    means = fast.assign(speedup=fast.baseline_time_s / 1.25 / fast.speculative_time_s).groupby("gamma").speedup.mean()
    assert (
        "Its plain decoding takes 25% longer than that of engine `published`; against the latter, gamma "
        f"{means.idxmax()} for everything gives {means.max():.2f}." in text_of(folder)
    )


def test_an_engine_whose_rows_are_mostly_noisy_is_named(folder):
    assert "rows are noisy" not in text_of(folder)
    rows = results.read_table(folder, results.SUMMARIES["fast"])
    results.write_table(folder, results.SUMMARIES["fast"], rows.assign(noisy=True))
    assert f"Of engine `fast` {len(rows)} of {len(rows)} rows are noisy" in text_of(folder)


def test_missing_sections_name_the_flags_of_the_run(folder):
    (folder / results.STRATEGIES.file).unlink()
    entries = json.loads((folder / "manifest_phase3.json").read_text())
    command = ["phase3_profiling.py", "--quick", "--sections", "3", "--temperatures", "0,1"]
    (folder / "manifest_phase3.json").write_text(json.dumps(entries | {"command": command}))
    shown = text_of(folder)
    assert "run it with --sections 5 --resume, and the flags it had: --quick --temperatures 0,1." in shown


def test_a_run_without_any_gain_says_no(tmp_path, monkeypatch):
    draw_alone(monkeypatch, ())
    write_everything(tmp_path, Synthetic(alphas={"code_python": 0.05, "creative_story": 0.02}))
    assert report(tmp_path) == 0
    assert "**No: with the fast engine" in text(tmp_path)
    assert "don't" in text(tmp_path)


@pytest.mark.parametrize(
    "run",
    [
        Synthetic(gammas=(0,)),
        Synthetic(new_tokens=1),
        Synthetic(new_tokens=2, gammas=(1,)),
        Synthetic(alphas={"nothing": 0.0, "all": 1.0}),
        Synthetic(alphas={"nothing": 0.0}),
        Synthetic(engines=("published",), gammas=(1, 2)),
    ],
    ids=["plain decoding", "one token", "two tokens", "nothing or all accepted", "nothing accepted", "one engine"],
)
def test_an_unusual_run_makes_a_report_without_invented_numbers(run, tmp_path, monkeypatch):
    draw_alone(monkeypatch, final_report.OWN_PLOTS)
    write_everything(tmp_path, run)
    assert report(tmp_path) == 0
    assert "nan" not in text(tmp_path).lower()
    assert "inf " not in text(tmp_path)


def test_an_empty_folder_is_refused_with_the_script_to_run(tmp_path, capfd):
    assert report(tmp_path) == 2
    assert "run python speculative_decoding.py first" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def other_pair(folder):
    entries = json.loads((folder / "manifest_phase3.json").read_text())
    entries["pair"]["target"]["dtype"] = "float16"
    (folder / "manifest_phase3.json").write_text(json.dumps(entries))


def other_device(folder):
    entries = json.loads((folder / "manifest_phase3.json").read_text())
    entries["device"]["name"] = "another processor"
    (folder / "manifest_phase3.json").write_text(json.dumps(entries))


def other_variant(folder):
    entries = json.loads((folder / "manifest_phase3.json").read_text())
    entries["device"]["variant"] = "model 99"
    (folder / "manifest_phase3.json").write_text(json.dumps(entries))


@pytest.mark.parametrize(
    "change, named",
    [(other_pair, "float16"), (other_device, "another processor"), (other_variant, "another variant")],
)
def test_phases_of_different_pairs_or_devices_are_refused_by_name(change, named, folder, capfd):
    change(folder)
    assert report(folder) == 2
    message = capfd.readouterr().err
    assert named in message
    assert "--allow-mixed" in message
    assert not (folder / "report.md").exists()
    assert report(folder, "--allow-mixed") == 0
    assert "MIXED INPUT" in text(folder)


def test_a_constant_that_differs_between_phases_is_listed(folder):
    entries = json.loads((folder / "manifest_phase3.json").read_text())
    entries["constants"]["max_new_tokens"] = 32
    (folder / "manifest_phase3.json").write_text(json.dumps(entries))
    assert report(folder) == 0
    assert "max_new_tokens was 64 in Phase 1, 32 in Phase 3" in text(folder)


def test_phase_2_of_an_earlier_run_is_left_out(folder):
    entries = json.loads((folder / "manifest_phase2.json").read_text())
    (folder / "manifest_phase2.json").write_text(json.dumps(entries | {"phase1_run_id": "another"}))
    assert report(folder) == 0
    assert "Phase 2's tables are of an earlier run" in text(folder)
    assert "regime_heatmap" not in json.loads((folder / "manifest_report.json").read_text())["plots"]
    assert "target70b" not in text(folder)


def test_an_unfinished_phase_is_named(folder):
    write_profile(folder, status="partial")
    assert report(folder) == 0
    assert "phase3_profiling.py was not finished" in text(folder)


def test_a_new_report_keeps_the_old_one_apart(folder):
    assert report(folder) == 0
    assert report(folder, "--note", "the second") == 0
    assert "the second" in text(folder)
    assert "the second" not in (folder / "previous/report.md").read_text()


def test_the_report_completes_the_predictions_that_phase_2_left(folder):
    assert results.read_table(folder, results.PREDICTIONS).full.isna().all()
    assert report(folder) == 0
    assert results.read_table(folder, results.PREDICTIONS).full.notna().all()


def test_the_same_files_give_the_same_report_where_torch_can_t_be_imported(whole, tmp_path):
    here = text(whole)
    for package in ("torch", "transformers", "accelerate"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('not here')\n")
    command = [sys.executable, str(ROOT / "final_report.py"), "--results-dir", str(whole)]
    command += ["--plots-dir", str(whole / "plots")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert text(whole) == here


# The numbers behind the words


@pytest.fixture(scope="module")
def found(whole):
    return collection.collect(whole)


def test_a_cause_taken_away_gives_the_full_model_without_its_cost(found):
    rows = causes.causes(found.facts, found.step_costs).set_index(["engine", "gamma", "cause"])
    cost = found.step_costs["published", 4]
    without_sync = causes.mean_speedup(found.facts, 4, replace(cost, sync=0.0))
    row = rows.loc[("published", 4, causes.SYNC)]
    assert row.speedup_without == pytest.approx(without_sync)
    assert row.speedup_without > row.speedup
    assert row.ms == pytest.approx(cost.sync)
    step = cost.step_time(4) + cost.sync
    assert row.share == pytest.approx(cost.sync / step)
    wider = rows.loc[("published", 4, causes.WIDER_FORWARD)]
    assert wider.ms == pytest.approx(0.08 * cost.t_target)
    wrong = rows.loc[("fast", 8, causes.WRONG_GUESSES)]
    assert wrong.speedup_without == pytest.approx(theory.full_speedup(1.0, 8, 64, found.step_costs["fast", 8]))
    assert wrong.speedup_without > wrong.speedup


def test_a_draft_as_fast_as_its_weights_is_no_cause(found):
    # the made-up weights are 4 times fewer and the draft 3.5 times faster: it could be faster by an eighth
    rows = causes.causes(found.facts, found.step_costs)
    slow = rows[(rows.cause == causes.SLOW_DRAFT) & (rows.gamma == 4) & (rows.engine == "fast")].iloc[0]
    cost = found.step_costs["fast", 4]
    assert slow.ms == pytest.approx(4 * (cost.t_draft - cost.t_target / 4))
    quick = replace(cost, t_draft=cost.t_target / 5)
    assert causes._parts(found.facts, 4, quick)[causes.SLOW_DRAFT][0] == 0


def test_at_the_break_even_the_full_model_gives_one(found):
    cost = found.step_costs["fast", 4]
    ratio = causes.break_even_with_overhead(found.facts, 4, cost)
    there = replace(cost, t_draft=cost.t_target / ratio)
    assert causes.mean_speedup(found.facts, 4, there) == pytest.approx(1)
    hopeless = replace(cost, verify_ratio=lambda tokens: 10.0)
    assert causes.break_even_with_overhead(found.facts, 4, hopeless) is None


def test_the_comparison_puts_each_figure_in_its_own_column(whole, found):
    rows = comparison.compare_with_study(found, published.read_study()).set_index("quantity")
    own = results.read_table(whole, results.SUMMARIES["fast"])
    assert rows.study["mean speedup"] == 0.559
    assert rows.fast["mean speedup"] == pytest.approx(own.speedup.mean())
    assert rows.published["sync, ms a step, gamma 4"] == pytest.approx(2.0)
    assert rows.fast["sync, ms a step, gamma 4"] == 0
    assert rows.published["target over 5 tokens / over one"] == pytest.approx(1.08)
    assert pd.isna(rows.study["target over 5 tokens / over one"])
    assert rows.fast["exact match, accepted / proposed, T 0.7"] > 0
    assert pd.isna(rows.published["exact match, accepted / proposed, T 0.7"])
    assert rows.study["cost ratio c"] == 1.178
    assert rows.published["c by layers"] == 3


def summary(speedups, low=0.02):
    rows = [
        {"prompt": prompt, "category": "text", "gamma": gamma, "speedup": speedup}
        | {"speedup_low": speedup - low, "speedup_high": speedup + low}
        for prompt, by_gamma in speedups.items()
        for gamma, speedup in by_gamma.items()
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    "speedups, verdict, gamma",
    [
        ({"a": {1: 1.2, 4: 1.1}, "b": {1: 1.3, 4: 0.9}}, advice.YES, 1),
        ({"a": {1: 1.0, 4: 1.9}, "b": {1: 0.9, 4: 1.1}, "c": {1: 1.0, 4: 0.9}}, advice.MOSTLY, 4),
        ({"a": {1: 1.9, 4: 0.8}, "b": {1: 0.9, 4: 0.8}, "c": {1: 0.9, 4: 0.8}}, advice.SOMETIMES, 1),
        ({"a": {1: 1.01, 4: 0.8}, "b": {1: 0.9, 4: 0.8}}, advice.SOMETIMES, 1),
        ({"a": {1: 1.0, 4: 0.8}, "b": {1: 0.9, 4: 0.8}}, advice.NO, 1),
    ],
)
def test_the_verdict_follows_from_one_gamma_for_everything(speedups, verdict, gamma):
    found = advice.advise("fast", summary(speedups))
    assert (found.verdict, found.gamma) == (verdict, gamma)


def test_without_a_speedup_there_is_no_advice():
    assert advice.advise("fast", summary({"a": {1: float("nan")}})) is None


def test_what_to_set_is_a_gamma_only_where_it_was_faster():
    rows = advice.advise("fast", summary({"a": {1: 1.2}, "b": {1: 1.01}, "c": {1: 1.0}})).by_prompt
    assert [advice.gamma_to_use(row) for row in rows.itertuples()] == [
        "gamma 1",
        "gamma 1, if at all: not faster in every repeat",
        "don't",
    ]


# Plots


def made(found):
    return {
        "master_summary": master_summary.plot_master_summary(found, "An answer"),
        "corrected_model": model_figures.plot_corrected_model(found.predictions, found.label),
        "regime_map_final": model_figures.plot_regime_map_final(found),
    }


@pytest.mark.parametrize("name", ["master_summary", "corrected_model", "regime_map_final"])
def test_text_of_the_report_s_plots_is_inside_and_apart(name, found):
    figure = made(found)[name]
    assert_text_lies_inside(figure)
    assert_no_two_texts_overlap(figure)
    assert any(found.label in " ".join(shown.get_text().split()) for shown in figure.texts)


def test_a_summary_panel_without_data_says_what_makes_it(tmp_path):
    write_run(tmp_path)
    figure = master_summary.plot_master_summary(collection.collect(tmp_path), "An answer")
    shown = [each.get_text() for axes in figure.axes for each in axes.texts]
    assert any("phase3_profiling.py (section 3)" in each for each in shown)
    assert any("analysis_deep.py" in each for each in shown)


def test_the_map_s_title_counts_prompts_with_and_without_overhead(found):
    facts = found.facts
    ideal = sum(
        max(theory.leviathan_speedup(alpha, gamma, facts.cost_ratios["fast"]) for gamma in facts.gammas) > 1
        for alpha in facts.alphas
    )
    shown = title(model_figures.plot_regime_map_final(found))
    assert f"{ideal} (fast) of {len(facts.alphas)} prompts before overhead" in shown
    real = {
        engine: sum(
            max(theory.full_speedup(alpha, g, facts.new_tokens, found.step_costs[engine, g]) for g in facts.gammas) > 1
            for alpha in facts.alphas
        )
        for engine in ("published", "fast")
    }
    assert f"for {real['published']} (published) and {real['fast']} (fast) with it" in shown
    assert real["published"] < real["fast"]
