"""Phase 1 from its command line: its files, its checks, and what an interruption leaves."""

from __future__ import annotations

import json
import os
import signal

import pandas as pd
import pytest

import speculative_decoding
from specdec import results, run, simulation
from specdec.schedules import FixedGamma

NEW_TOKENS = 12  # of the run on the embedded pair
TABLES = (results.RUNS, results.STEPS, results.TRACE, *results.SUMMARIES.values())


def arguments(folder, pair_folders, **changed) -> list[str]:
    """Flags of a run of two prompts on the untrained pair, changed as given (False leaves a flag out)."""
    draft, target = pair_folders
    flags = {
        "draft": draft,
        "target": target,
        "device": "cpu",
        "threads": 1,
        "results-dir": folder,
        "prompts": "code_python,creative_story",
        "gammas": "1,3",
        "repeats": 2,
        "max-new-tokens": 10,
    } | {name.replace("_", "-"): value for name, value in changed.items()}
    return [part for name, value in flags.items() if value is not False for part in (f"--{name}", str(value))]


def read(folder, table: results.Table) -> pd.DataFrame:
    return results.read_table(folder, table)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_pair):
    """The folder of a whole small run on the embedded pair, with NEW_TOKENS each so that steps are many."""
    folder = tmp_path_factory.mktemp("finished")
    flags = ["--pair", "tiny", "--device", "cpu", "--threads", "1", "--results-dir", str(folder)]
    assert speculative_decoding.main([*flags, "--repeats", "2", "--max-new-tokens", str(NEW_TOKENS)]) == 0
    return folder


def test_a_run_writes_every_configuration_of_both_engines(finished):
    for engine, table in results.SUMMARIES.items():
        rows = read(finished, table)
        assert len(rows) == 32
        assert rows.groupby("prompt").size().tolist() == [4] * 8
        assert set(rows.engine) == {engine}
        assert rows.matches_baseline.all()
        assert (rows.repeats == 2).all()
        assert (rows.new_tokens == NEW_TOKENS).all()
        assert (rows.speedup_low <= rows.speedup).all()
        assert (rows.speedup <= rows.speedup_high).all()
    assert len(read(finished, results.RUNS)) == 2 * 8 * 4 * 2
    manifest = run.read_manifest(finished, "phase1")
    assert manifest["status"] == "complete"
    assert manifest["pair"]["name"] == "tiny"


def test_steps_add_up_to_their_runs(finished):
    runs, steps = read(finished, results.RUNS), read(finished, results.STEPS)
    key = ["prompt", "engine", "gamma", "repeat"]
    sums = steps.groupby(key).agg(steps=("step", "size"), proposed=("proposed", "sum"), accepted=("accepted", "sum"))
    assert len(sums) == len(runs)
    for row in runs.itertuples():
        counted = sums.loc[(row.prompt, row.engine, row.gamma, row.repeat)]
        assert (row.steps, row.proposed, row.accepted) == tuple(counted)
        assert 1 + row.accepted + row.steps == row.new_tokens


def test_replaying_the_agreement_trace_predicts_every_step(finished):
    trace, steps = read(finished, results.TRACE), read(finished, results.STEPS)
    runs = read(finished, results.RUNS)
    assert runs.accepted.sum() > 0
    assert runs.rejections.sum() > 0
    for (prompt, engine, gamma, _), group in steps.groupby(["prompt", "engine", "gamma", "repeat"]):
        agrees = trace[trace["prompt"] == prompt].agrees.to_numpy(dtype=bool)
        assert len(agrees) == NEW_TOKENS
        history = simulation.replay(agrees, FixedGamma(int(gamma)), 1, NEW_TOKENS)
        assert history.proposed == group.proposed.tolist(), (prompt, engine, gamma)
        assert history.accepted == group.accepted.tolist(), (prompt, engine, gamma)


def test_texts_are_kept_with_their_tokens(finished, tiny_pair):
    entries = [json.loads(line) for line in (finished / "generations.jsonl").read_text().splitlines()]
    assert len(entries) == 2 * 8 * (2 + 4)
    baseline = {(e["engine"], e["prompt"]): e["tokens"] for e in entries if e["kind"] == "baseline"}
    for entry in entries:
        assert len(entry["tokens"]) == NEW_TOKENS
        assert entry["text"] == tiny_pair.tokenizer.decode(entry["tokens"])
        if entry["kind"] == "speculative":
            assert entry["tokens"] == baseline[entry["engine"], entry["prompt"]]
    assert all(baseline["published", name] == baseline["fast", name] for _, name in baseline)


def test_the_order_of_gammas_changes_with_the_repeat(finished):
    runs = read(finished, results.RUNS)
    one = runs[(runs["prompt"] == "code_cpp") & (runs.engine == "fast")].sort_values(["repeat", "order"])
    assert one.gamma.tolist() == [1, 2, 4, 8, 2, 4, 8, 1]


def test_the_terminal_names_pair_ceiling_findings_and_both_predictions(pair_folders, tmp_path, capsys):
    assert speculative_decoding.main(arguments(tmp_path, pair_folders)) == 0
    shown = capsys.readouterr().out
    for phrase in (
        "custom (draft / target",
        "of the ceiling",
        "cost ratio c",
        "by acceptance_rate",
        "by alpha",
        "Engine published: helpful",
        "Engine fast: helpful",
        "mean by gamma:\n    1 ",
        "mean by prompt:\n    code_python ",
        "alpha at gamma 3 minus gamma 1",
        "standard error",
    ):
        assert phrase in shown
    assert "nan" not in shown.lower()


def test_quick_is_a_small_run_in_a_folder_of_its_own(pair_folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draft, target = pair_folders
    flags = ["--quick", "--draft", str(draft), "--target", str(target), "--device", "cpu", "--engines", "fast"]
    assert speculative_decoding.main(flags) == 0
    runs = read(tmp_path / "results" / "quick", results.RUNS)
    assert len(runs) == 2 * 4
    assert (runs.new_tokens == 16).all()
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["quick"]


def test_a_new_run_puts_the_earlier_one_aside(pair_folders, tmp_path):
    assert speculative_decoding.main(arguments(tmp_path, pair_folders, engines="fast")) == 0
    first = run.read_manifest(tmp_path, "phase1")["run_id"]
    assert speculative_decoding.main(arguments(tmp_path, pair_folders, engines="fast", repeats=1)) == 0
    assert len(read(tmp_path, results.RUNS)) == 4
    assert len(read(tmp_path / "previous", results.RUNS)) == 8
    assert run.read_manifest(tmp_path / "previous", "phase1")["run_id"] == first


# --- Interruptions ---------------------------------------------------------------------------------------------------


def ten_prompts(tmp_path):
    path = tmp_path / "ten.jsonl"
    lines = [{"prompt": f"p{i}", "category": "test", "text": f"number {i} of ten"} for i in range(10)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def interrupted_at(monkeypatch, calls: int, ending) -> None:
    """Let ``ending`` happen in place of the measured speculative run number ``calls`` (warm-ups not counted)."""
    original, count = speculative_decoding._run_row, iter(range(1, 10_000))

    def watched(*args):
        if next(count) == calls:
            ending()
        return original(*args)

    monkeypatch.setattr(speculative_decoding, "_run_row", watched)


def ctrl_c():
    raise KeyboardInterrupt


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()


def out_of_memory():
    raise MemoryError


def disk_full():
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("ending, code", [(ctrl_c, 130), (terminate, 130), (disk_full, 1), (out_of_memory, 1)])
def test_an_end_at_prompt_seven_of_ten_keeps_six(pair_folders, tmp_path, monkeypatch, capsys, ending, code):
    interrupted_at(monkeypatch, 13, ending)
    flags = arguments(
        tmp_path / "out", pair_folders, prompt_file=ten_prompts(tmp_path), engines="fast", repeats=1, prompts=False
    )
    assert speculative_decoding.main(flags) == code
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    rows = read(tmp_path / "out", results.SUMMARIES["fast"])
    assert list(rows["prompt"].unique()) == [f"p{i}" for i in range(6)]
    assert len(rows) == 12
    assert run.read_manifest(tmp_path / "out", "phase1")["status"] == "partial"


@pytest.mark.parametrize("calls", [1, 8])
def test_resume_redoes_the_cut_unit_and_ends_as_an_uninterrupted_run(pair_folders, tmp_path, monkeypatch, calls):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert speculative_decoding.main(arguments(whole, pair_folders)) == 0
    with monkeypatch.context() as patch:
        interrupted_at(patch, calls, ctrl_c)
        assert speculative_decoding.main(arguments(cut, pair_folders)) == 130
    started = run.read_manifest(cut, "phase1")["run_id"]
    for name in (results.RUNS.file, results.STEPS.file, "generations.jsonl"):
        if (cut / name).exists():
            with open(cut / name, "a") as file:
                file.write("torn,li")
    assert speculative_decoding.main([*arguments(cut, pair_folders), "--resume"]) == 0
    manifest = run.read_manifest(cut, "phase1")
    assert (manifest["run_id"], manifest["status"]) == (started, "complete")
    for table in TABLES:
        timings = [name for name, kind in table.columns.items() if kind == "number" and name.endswith("_s")]
        derived = ["speedup", "speedup_low", "speedup_high", "decode_speedup", "cost_ratio", "noisy"]
        derived += ["predicted_speedup", "predicted_speedup_alpha"]
        drop = [name for name in timings + derived if name in table.columns]
        pd.testing.assert_frame_equal(read(cut, table).drop(columns=drop), read(whole, table).drop(columns=drop))
    assert (cut / "generations.jsonl").read_text() == (whole / "generations.jsonl").read_text()


def test_resume_measures_nothing_again_that_is_whole(pair_folders, tmp_path, monkeypatch):
    assert speculative_decoding.main(arguments(tmp_path, pair_folders)) == 0
    before = (tmp_path / results.RUNS.file).read_text()
    interrupted_at(monkeypatch, 1, lambda: pytest.fail("a run was measured again"))
    assert speculative_decoding.main([*arguments(tmp_path, pair_folders), "--resume"]) == 0
    assert (tmp_path / results.RUNS.file).read_text() == before


@pytest.mark.parametrize(
    "changed, named",
    [({"gammas": "1,2"}, "gammas: [1, 3] then, [1, 2] now"), ({"dtype": "bfloat16"}, "dtype: auto then, bfloat16 now")],
)
def test_resume_of_another_run_is_refused(pair_folders, tmp_path, capsys, changed, named):
    assert speculative_decoding.main(arguments(tmp_path, pair_folders, engines="fast")) == 0
    before = (tmp_path / results.RUNS.file).read_text()
    flags = [*arguments(tmp_path, pair_folders, engines="fast", **changed), "--resume"]
    assert speculative_decoding.main(flags) == 2
    assert named in capsys.readouterr().err
    assert (tmp_path / results.RUNS.file).read_text() == before


def test_a_second_run_in_the_same_folder_is_refused(pair_folders, tmp_path, capsys):
    with run.lock(tmp_path):
        assert speculative_decoding.main(arguments(tmp_path, pair_folders)) == 2
    assert "another run is writing to" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [run.LOCK_NAME]


# --- Faults and near ties --------------------------------------------------------------------------------------------


def test_a_run_that_differs_from_its_baseline_fails_and_its_speed_is_not_stored(
    pair_folders, tmp_path, monkeypatch, capsys
):
    original = speculative_decoding.speculative_generate

    def wrong_at_gamma_three(draft, target, input_ids, count, gamma, **kwargs):
        generation = original(draft, target, input_ids, count, gamma, **kwargs)
        if gamma == 3 and len(generation.tokens) == 10:
            generation.tokens[5] = (generation.tokens[5] + 1) % 300
        return generation

    monkeypatch.setattr(speculative_decoding, "speculative_generate", wrong_at_gamma_three)
    assert speculative_decoding.main(arguments(tmp_path, pair_folders, engines="fast", repeats=1)) == 1
    captured = capsys.readouterr()
    assert "error: 2 runs did not give the target's own tokens" in captured.err
    assert "FAULT" in captured.out
    rows = read(tmp_path, results.SUMMARIES["fast"]).set_index("gamma")
    assert rows.loc[1].matches_baseline.all()
    assert rows.loc[1].speedup.notna().all()
    assert not rows.loc[3].matches_baseline.any()
    assert rows.loc[3].first_mismatch.tolist() == [5, 5]
    assert rows.loc[3][["speculative_time_s", "speedup", "decode_speedup"]].isna().all(axis=None)


# --- Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"prompts": "code_pyton"}, "unknown prompt 'code_pyton'; known: code_python, code_cpp"),
        ({"prompts": "code_cpp,code_cpp"}, "names something twice"),
        ({"prompts": ","}, "the list is empty"),
        ({"gammas": "-1"}, "-1 is not a whole number from 0 to 64"),
        ({"gammas": "two"}, "'two' is not a whole number"),
        ({"gammas": "1,1"}, "names something twice"),
        ({"repeats": "0"}, "0 is not a whole number >= 1"),
        ({"max-new-tokens": "0"}, "0 is not a whole number >= 1"),
        ({"max-new-tokens": "100000"}, "100000 new tokens exceed the 512 positions of"),
        ({"engines": "warp"}, "'warp' is unknown; known: published, fast"),
        ({"pair": "llama"}, "'llama' is unknown; known: auto, qwen2, tiny"),
        ({"prompt-file": "nowhere.jsonl"}, "prompt file nowhere.jsonl can't be read"),
        ({"no-such-flag": "1"}, "unrecognized arguments: --no-such-flag"),
        ({"target": False}, "--draft needs --target"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(pair_folders, tmp_path, capsys, changed, message):
    folder = tmp_path / "out"
    assert speculative_decoding.main(arguments(folder, pair_folders, **changed)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not folder.exists()


@pytest.mark.parametrize("flag, message", [("--random-weights", "phase3_profiling.py"), ("--chat", "no chat template")])
def test_switches_that_can_not_apply_are_refused(pair_folders, tmp_path, capsys, flag, message):
    assert speculative_decoding.main([*arguments(tmp_path / "out", pair_folders), flag]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 1: not a JSON object with prompt, category and text"),
        ('{"prompt": "a", "category": "b"}', "line 1: not a JSON object with prompt, category and text"),
        ('{"prompt": "a", "category": "b", "text": ""}', "must be text, and not empty"),
        ('{"prompt": "=1+1", "category": "b", "text": "x"}', "'=1+1' may have only letters"),
        ("", "has no prompt"),
    ],
)
def test_a_prompt_file_that_can_not_be_used_is_refused(pair_folders, tmp_path, capsys, line, message):
    (tmp_path / "prompts.jsonl").write_text(line + "\n")
    flags = arguments(tmp_path / "out", pair_folders, prompt_file=tmp_path / "prompts.jsonl")
    assert speculative_decoding.main(flags) == 2
    assert message in capsys.readouterr().err
