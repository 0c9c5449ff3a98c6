"""Phase 3 from its command line, and acceptance as it measures it."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_model

import phase3_profiling
import speculative_decoding
from specdec import results, run
from specdec.engine import drafting, exactness, isolation, sources, strategies
from specdec.engine.acceptance import PairLogits, pair_logits, tried_positions
from specdec.engine.decoding import Generation, autoregressive_generate, speculative_generate
from specdec.engine.isolation import FEWEST_PASSES, WARM_UP_PASSES, Held, time_passes
from specdec.engine.pair import encode
from specdec.engine.verification import distribution
from specdec.prompts import PROMPTS

SMALL = ["--device", "cpu", "--threads", "1", "--prompts", "code_python,creative_story", "--gammas", "1,4"]
SMALL += ["--steps", "6", "--max-new-tokens", "20", "--temperatures", "0,0.7", "--quick"]


def read(folder, table: results.Table) -> pd.DataFrame:
    return results.read_table(folder, table)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory, tiny_pair):
    """The folder of a small run of Phases 1 and 3 on the embedded pair; its plots lie in ``plots`` below."""
    folder = tmp_path_factory.mktemp("profiled")
    flags = ["--pair", "tiny", *SMALL[:6], *SMALL[6:8], "--results-dir", str(folder)]
    assert speculative_decoding.main([*flags, "--repeats", "1", "--max-new-tokens", "20"]) == 0
    assert (
        phase3_profiling.main(
            ["--pair", "tiny", *SMALL, "--results-dir", str(folder), "--plots-dir", str(folder / "plots")]
        )
        == 0
    )
    return folder


def test_every_engine_and_gamma_gets_its_steps_and_phases_add_up(profiled):
    rows = read(profiled, results.BREAKDOWN)
    assert rows.groupby(["engine", "gamma"]).size().tolist() == [6] * 6
    phases = rows[["draft_ms", "catchup_ms", "target_ms", "verify_ms", "sync_ms", "other_ms"]]
    assert np.allclose(phases.sum(axis=1), rows.step_ms, atol=1e-3)
    assert (rows.proposed == rows.gamma).all()
    assert (phases >= -1e-6).all(axis=None)


def test_only_published_reforwards_and_only_fast_catches_up(profiled):
    rows = read(profiled, results.BREAKDOWN).set_index("engine")
    speculative = rows[rows.gamma > 0]
    published, fast = speculative.loc["published"], speculative.loc["fast"]
    assert (published.sync_ms > 0.2 * published.draft_ms / published.proposed.astype(float)).all()
    assert (published.catchup_ms == 0).all()
    assert (fast.sync_ms < 0.2 * fast.target_ms).mean() > 0.9, "rolling back is no forward"


def test_short_steps_and_the_last_one_which_has_no_sync_are_left_out():
    seconds = {"draft": 0.004, "target": 0.003, "verify": 0.001, "other": 0.0, "step": 0.008}
    generation = Generation(proposed=[2, 1, 2, 2], accepted=[2, 1, 0, 1], step_seconds=[seconds] * 4)
    rows = phase3_profiling._full_steps(generation, gamma=2, catch_up_ms=1.0)
    assert [row["accepted"] for row in rows] == [2, 0]
    assert [row["catchup_ms"] for row in rows] == [0.0, 1.0], "the third step follows a fully accepted one"
    assert [row["draft_ms"] for row in rows] == [4.0, 3.0]


def test_acceptance_by_position_is_what_phase_one_did(profiled):
    steps = read(profiled, results.STEPS)
    steps = steps[steps.engine == "fast"]
    rows = read(profiled, results.BY_POSITION)
    for (prompt, gamma), group in rows.groupby(["prompt", "gamma"]):
        ran = steps[(steps["prompt"] == prompt) & (steps.gamma == gamma)]
        assert group.proposed.tolist() == ran.proposed.tolist()
        assert group.accepted.tolist() == ran.accepted.tolist()
        assert group.position.tolist() == [1, *np.cumsum(ran.accepted.to_numpy(dtype=int) + 1)[:-1] + 1]


def test_at_temperature_zero_all_measures_are_the_greedy_agreement(profiled):
    rows = read(profiled, results.BY_TEMPERATURE)
    trace = read(profiled, results.TRACE)
    agreement = trace[trace.position > 0].groupby("prompt").agrees.mean()
    cold = rows[rows.temperature == 0].set_index("prompt")
    for name in cold.index:
        assert cold.alpha_match[name] == pytest.approx(agreement[name])
        assert cold.alpha_overlap[name] == pytest.approx(agreement[name])
        assert cold.relative_to_greedy[name] == 1.0
        assert cold.expected[name] == cold.accepted[name]


def test_a_hot_draft_matches_less_but_rejection_sampling_accepts_more(profiled):
    rows = read(profiled, results.BY_TEMPERATURE)
    hot, cold = rows[rows.temperature == 0.7], rows[rows.temperature == 0]
    assert hot.alpha_match.mean() < cold.alpha_match.mean()
    assert (hot.alpha_overlap > hot.alpha_match).all()
    assert ((hot.low < hot.alpha_sampled) & (hot.alpha_sampled < hot.high)).all()


def test_single_forwards_are_stored_one_by_one_and_shapes_beside_their_roofline(profiled):
    isolated, shapes = read(profiled, results.ISOLATED), read(profiled, results.VERIFY_COST)
    assert isolated.groupby(["engine", "model"]).size().tolist() == [phase3_profiling.QUICK_REPETITIONS] * 4
    one = shapes[(shapes.tokens == 1)]
    assert (one.verify_ratio == 1).all()
    assert (one.roofline_ratio == 1).all()
    assert (shapes.roofline_ratio >= 1).all()
    widths = shapes[(shapes.batch == 1) & (shapes.cache_length == 64) & (shapes.model == "target")]
    assert widths.groupby("engine").tokens.apply(list).tolist() == [list(range(1, 10))] * 2
    assert shapes.cache_length.max() == 1024, "4096 is beyond what the model allows"


def test_predictions_are_completed_and_plots_drawn(profiled):
    rows = read(profiled, results.PREDICTIONS)
    assert len(rows) == 2 * 2 * 2
    assert rows[["measured", "leviathan_rate", "leviathan_alpha", "corrected", "full", "replay"]].notna().all(axis=None)
    names = {path.stem for path in (profiled / "plots").iterdir()}
    assert names == {
        "time_breakdown",
        "phase_distribution",
        "alpha_vs_position",
        "alpha_vs_temperature",
        "timing_analysis",
        "strategies",
        "kv_compression",
    }
    manifest = run.read_manifest(profiled, "phase3")
    assert manifest["status"] == "complete"
    assert manifest["ceilings"]["target"]["ceiling_ms"] > 0


def test_every_strategy_has_its_row_and_gives_the_baselines_tokens_unless_it_samples(profiled):
    rows = read(profiled, results.STRATEGIES)
    per_prompt = rows[rows["prompt"] != "all"].groupby("prompt").size()
    assert per_prompt.nunique() == 1
    assert {"adaptive gamma", "cost-aware gamma", "early exit, gamma 1", "prompt lookup, gamma 4"} <= set(rows.strategy)
    greedy = rows[rows.temperature == 0]
    assert greedy.tokens_equal_baseline.all()
    assert rows[rows.temperature > 0].tokens_equal_baseline.isna().all()
    assert (rows.speedup - rows.baseline_time_s / rows.time_s).abs().max() < 1e-5
    single = rows[rows["prompt"] != "all"]
    assert (single.new_tokens == 1 + single.accepted + single.steps).all()
    assert len(read(profiled, results.CLAIMS)) > 5


def test_a_strategy_that_gives_other_tokens_gets_no_speed(tiny_pair, monkeypatch):
    class Forgetting(drafting.EarlyExitDraft):
        """Resets the target's lower cache instead of rolling it back, as a faulty suite once did."""

        def propose(self, text, count):
            proposal = yield from super().propose(text, count)
            self.cached.cache.rollback(0)
            return proposal

    input_ids = encode(tiny_pair, PROMPTS[0])
    task = strategies.Task(input_ids, 24, [True] * 24, torch.Generator)
    faulty = strategies.Strategy("faulty", lambda: Forgetting(2), 2)
    with pytest.raises(AssertionError, match="the target's cache"):
        strategies.measure_all(tiny_pair, [faulty], task)
    wrong = strategies.Strategy("wrong", lambda: drafting.EarlyExitDraft(2), 2)
    monkeypatch.setattr(strategies, "explain_mismatch", lambda *args: exactness.Mismatch(3, 5.0, 0.1))
    (row,) = strategies.measure_all(tiny_pair, [wrong], task)
    assert row["time_s"] is row["speedup"] is None
    assert "FAULT" in row["note"]
    assert row["tokens_equal_baseline"] is False


def test_resume_measures_only_what_is_missing(profiled, tmp_path, monkeypatch):
    for table in (results.BREAKDOWN, results.ISOLATED, results.VERIFY_COST):
        (tmp_path / table.file).write_text((profiled / table.file).read_text())
    (tmp_path / "manifest_phase3.json").write_text((profiled / "manifest_phase3.json").read_text())
    rows = read(tmp_path, results.BREAKDOWN)
    results.write_table(tmp_path, results.BREAKDOWN, rows[~((rows.engine == "fast") & (rows.gamma == 4))])
    measured = []
    original = phase3_profiling._breakdown
    monkeypatch.setattr(
        phase3_profiling,
        "_breakdown",
        lambda profile, engine, gamma, ms: measured.append((engine, gamma)) or original(profile, engine, gamma, ms),
    )
    monkeypatch.setattr(phase3_profiling, "_isolated", lambda *args: pytest.fail("measured again"))
    monkeypatch.setattr(phase3_profiling, "_by_shape", lambda *args: pytest.fail("measured again"))
    flags = ["--pair", "tiny", *SMALL, "--sections", "1,4", "--resume", "--results-dir", str(tmp_path)]
    assert phase3_profiling.main([*flags, "--plots-dir", str(tmp_path / "plots")]) == 0
    assert measured == [("fast", 4)]
    assert len(read(tmp_path, results.BREAKDOWN)) == len(rows)


def test_the_fast_engine_runs_the_kernels_that_phase_one_decided_on(profiled):
    phases = [json.loads((profiled / f"manifest_{phase}.json").read_text()) for phase in ("phase1", "phase3")]
    before, after = (manifest["fast_kernels"] for manifest in phases)
    for who in ("draft", "target"):
        assert "as decided before" in after[who]["outcome"]
        assert after[who]["rows"] == before[who]["rows"]


def test_random_weights_run_the_timing_sections_and_say_why_others_are_skipped(tmp_path, monkeypatch, capsys):
    small = {name: make_model(layers=1, hidden=32, seed=0).config for name in sources.SHIPPED_CONFIGS}
    monkeypatch.setattr(sources, "SHIPPED_CONFIGS", small)
    flags = ["--pair", "qwen2", "--random-weights", *SMALL, "--results-dir", str(tmp_path)]
    assert phase3_profiling.main([*flags, "--plots-dir", str(tmp_path / "plots")]) == 0
    shown = capsys.readouterr().out
    assert "Section 2 is skipped" in shown
    assert "Section 3 is skipped" in shown
    assert "random weights" in shown
    assert "No predictions" in shown
    assert {path.name for path in tmp_path.glob("*.csv")} == {
        "time_breakdown.csv",
        "timing_isolation.csv",
        "verify_cost.csv",
    }


def test_a_folder_with_another_pairs_run_is_refused(profiled, pair_folders, tmp_path, capsys):
    for name in ("manifest_phase1.json", results.RUNS.file):
        (tmp_path / name).write_text((profiled / name).read_text())
    draft, target = pair_folders
    flags = ["--draft", str(draft), "--target", str(target), *SMALL, "--sections", "2", "--results-dir", str(tmp_path)]
    assert phase3_profiling.main([*flags, "--plots-dir", str(tmp_path / "plots")]) == 2
    shown = capsys.readouterr().err
    assert "is of another pair, device or dtype" in shown
    assert "tiny" in shown
    assert not (tmp_path / results.BY_POSITION.file).exists()


@pytest.mark.parametrize(
    "flag, value, message",
    [
        ("--sections", "7", "7 is not a whole number from 1 to 6"),
        ("--temperatures", "-1", "'-1' is not a number from 0 to 100"),
        ("--temperatures", "nan", "'nan' is not a number from 0 to 100"),
        ("--steps", "0", "0 is not a whole number >= 1"),
        ("--prompts", "nobody", "unknown prompt 'nobody'"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys, flag, value, message):
    assert phase3_profiling.main(["--pair", "tiny", flag, value, "--results-dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


# --- Acceptance along a text -----------------------------------------------------------------------------------------


def test_match_and_overlap_follow_their_definitions():
    draft = torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]))
    target = torch.log(torch.tensor([[0.2, 0.7, 0.1], [0.3, 0.2, 0.5]]))
    logits = PairLogits(draft, target)
    assert logits.match(1.0).tolist() == pytest.approx([0.3, 0.8])
    assert logits.overlap(1.0).tolist() == pytest.approx([0.2 + 0.3 + 0.1, 0.1 + 0.1 + 0.5])
    assert logits.match(0).tolist() == logits.overlap(0).tolist() == [0.0, 1.0]
    p, q = distribution(target, 2.0), distribution(draft, 2.0)
    assert torch.allclose(logits.overlap(2.0), torch.minimum(p, q).sum(-1))


def test_tried_positions_are_the_accepted_ones_and_the_first_rejected():
    generation = Generation(tokens=list(range(9)), proposed=[3, 3, 0, 1], accepted=[1, 3, 0, 0])
    places, accepted = tried_positions(generation)
    assert places == [1, 2, 3, 4, 5, 8]
    assert accepted == [True, False, True, True, True, False]


def test_teacher_forced_logits_choose_the_greedy_text(tiny_pair):
    input_ids = tiny_pair.tokenizer(PROMPTS[3].text, return_tensors="pt").input_ids
    tokens = autoregressive_generate(tiny_pair.target, input_ids, 24).tokens
    assert pair_logits(tiny_pair, input_ids, tokens).target.argmax(-1).tolist() == tokens


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.5])
def test_rejection_sampling_accepts_as_often_as_the_distributions_overlap(tiny_pair, temperature):
    accepted, expected, variance = 0, 0.0, 0.0
    for place, prompt in enumerate(PROMPTS):
        input_ids = tiny_pair.tokenizer(prompt.text, return_tensors="pt").input_ids
        for seed in range(3):
            generator = torch.Generator().manual_seed(100 * place + seed)
            generation = speculative_generate(
                tiny_pair.draft,
                tiny_pair.target,
                input_ids,
                32,
                4,
                engine="fast",
                temperature=temperature,
                generator=generator,
            )
            places, taken = tried_positions(generation)
            overlap = pair_logits(tiny_pair, input_ids, generation.tokens).overlap(temperature)[places]
            accepted += sum(taken)
            expected += overlap.sum().item()
            variance += (overlap * (1 - overlap)).sum().item()
    assert abs(accepted - expected) / variance**0.5 < 4  # a sound program fails with probability 6e-5


# --- Single forwards -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["published", "fast"])
def test_isolated_passes_have_the_shape_asked_for_and_start_from_the_same_cache(target, engine, monkeypatch):
    seen = []
    original = type(target).forward

    def watched(self, token_ids, mask, positions, cache, **kwargs):
        seen.append((*token_ids.shape, cache.get_seq_length()))
        return original(self, token_ids, mask, positions, cache, **kwargs)

    monkeypatch.setattr(type(target), "forward", watched)
    times = time_passes(target, engine, (1, 3), repetitions=4, held=Held(cache_length=10, batch=2))
    assert {width: len(passes) for width, passes in times.items()} == {1: 4, 3: 4}
    assert min(times[1] + times[3]) > 0
    assert seen[0] == (2, 10, 0)
    assert seen[1:] == [(2, 1, 10), (2, 3, 10)] * (4 + WARM_UP_PASSES), "in turn"


def test_slow_passes_are_timed_less_often(target, monkeypatch):
    monkeypatch.setattr(isolation, "LONGEST_WARM_UP", 0.0)
    monkeypatch.setattr(isolation, "LONGEST", 0.0)
    opened = []
    monkeypatch.setattr(isolation, "_one_pass", lambda *_: opened.append(1) or 1.0)
    times = time_passes(target, "published", (1, 3), repetitions=50)
    assert [len(passes) for passes in times.values()] == [FEWEST_PASSES] * 2
    assert len(opened) == 2 * (1 + FEWEST_PASSES), "one round before"
