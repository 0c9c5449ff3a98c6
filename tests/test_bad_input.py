"""Whatever a user gives: what can't be used is one line that names it and what is allowed, and nothing is written."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_model, make_tokenizer, save_model
from synthetic import write_run
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from specdec import results, run
from specdec.engine import pair as pair_module
from specdec.prompts import select_prompts

PHASE1, PHASE2, PHASE3, REPORT = "speculative_decoding", "analysis_deep", "phase3_profiling", "final_report"
MEASURING = (PHASE1, PHASE3)
PROMPT = {"prompt": "mine", "category": "own", "text": "the quick brown fox"}


def main(script: str, *argv: str) -> int:
    return importlib.import_module(script).main(list(argv))


def damaged_copies(model: Path, folder: Path) -> dict[str, Path]:
    """Return copies of a sound model's folder, each with one file changed, by what is wrong with it."""

    def damaged(name: str, file: str, change) -> Path:
        copy = folder / name
        shutil.copytree(model, copy)
        change(copy / file)
        return copy

    def set_in_config(**entries):
        return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return {
        "no_config": damaged("no_config", "config.json", Path.unlink),
        "no_json": damaged("no_json", "config.json", lambda path: path.write_text("{ not json")),
        "no_object": damaged("no_object", "config.json", lambda path: path.write_text("[]")),
        "no_type": damaged("no_type", "config.json", lambda path: path.write_text("{}")),
        "new_type": damaged("new_type", "config.json", set_in_config(model_type="of_tomorrow")),
        "odd_heads": damaged("odd_heads", "config.json", set_in_config(num_key_value_heads="two")),
        "wider": damaged("wider", "config.json", set_in_config(hidden_size=64)),
        "no_weights": damaged("no_weights", "model.safetensors", Path.unlink),
        "cut_weights": damaged(
            "cut_weights", "model.safetensors", lambda path: path.write_bytes(path.read_bytes()[:999])
        ),
        "no_tokenizer": damaged("no_tokenizer", "tokenizer.json", Path.unlink),
        "cut_tokenizer": damaged("cut_tokenizer", "tokenizer.json", lambda path: path.write_text('{"model":')),
    }


@pytest.fixture(scope="module")
def places(tmp_path_factory, pair_folders) -> dict[str, Path]:
    """Models and files, sound and unsound, by the names that the cases below put in braces."""
    folder = tmp_path_factory.mktemp("places")
    draft, target = pair_folders
    tokenizer, small = make_tokenizer(300), make_model(layers=1, hidden=32, seed=0)

    bert = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=300)
    BertForMaskedLM(bert).save_pretrained(folder / "bert")
    t5 = T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=300)
    T5ForConditionalGeneration(t5).save_pretrained(folder / "t5")
    narrow = make_model(layers=1, hidden=32, seed=0, vocab=290)
    (folder / "empty").mkdir()
    (folder / "file").write_text("")
    (folder / "letter.gguf").write_text("Dear model,")
    (folder / "cut.gguf").write_bytes(b"GGUF" + bytes(40))
    (folder / "no_header.gguf").write_bytes(b"")
    return {
        "draft": draft,
        "target": target,
        "bert": folder / "bert",
        "t5": folder / "t5",
        "narrow": save_model(folder / "narrow", narrow, tokenizer),
        "other_words": save_model(folder / "other_words", small, make_tokenizer(300, "numbers 123 456 123 456")),
        "more_words": save_model(folder / "more_words", make_model(1, 32, 0, vocab=310), make_tokenizer(310)),
        **damaged_copies(draft, folder),
        "empty": folder / "empty",
        "file": folder / "file",
        "letter": folder / "letter.gguf",
        "cut": folder / "cut.gguf",
        "no_header": folder / "no_header.gguf",
    }


def assert_refused(capsys, tmp_path: Path, script: str, argv: list[str], message: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert main(script, *argv) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err + captured.out
    assert message in captured.err
    assert sorted(tmp_path.rglob("*")) == before, "something was written"


def output_flags(tmp_path: Path) -> list[str]:
    return ["--results-dir", str(tmp_path / "out"), "--plots-dir", str(tmp_path / "plots")]


# --- Flags of the phases that measure --------------------------------------------------------------------------------

FLAGS = [
    (["--pair", "llama"], "'llama' is unknown; known: auto, qwen2, tiny"),
    (["--pair", ""], "'' is unknown; known: auto, qwen2, tiny"),
    (["--draft", "{draft}"], "--draft needs --target"),
    (["--target", "{target}"], "--target needs --draft"),
    (["--draft", "", "--target", ""], "argument --draft: it is empty; give a name or leave the flag out"),
    (["--device", "toaster"], "; known: auto, cpu, cuda, cuda:N, mps, spread"),
    (["--device", ""], "argument --device: it is empty"),
    (["--device", "cuda:99"], "device 'cuda:99' can't be used"),
    (["--device", "spread"], "--device spread needs several GPUs"),
    (["--device", "meta"], "device 'meta' is not supported; known: auto, cpu, cuda, cuda:N, mps, spread"),
    (["--device", "cpu", "--draft-device", "toaster"], "device 'toaster' can't be used"),
    (["--dtype", "float8"], "'float8' is unknown; known: auto, float32, float16, bfloat16"),
    (["--compile", "maybe"], "'maybe' is unknown; known: auto, on, off"),
    (["--threads", "-1"], "-1 is not a whole number from 0 to 1024"),
    (["--threads", "1000000000000"], "1000000000000 is not a whole number from 0 to 1024"),
    (["--threads", "two"], "'two' is not a whole number from 0 to 1024"),
    (["--seed", "-1"], "-1 is not a whole number from 0 to 4294967295"),
    (["--seed", "99999999999999999999"], "99999999999999999999 is not a whole number from 0 to 4294967295"),
    (["--seed", "1.5"], "'1.5' is not a whole number from 0 to 4294967295"),
    (["--gammas", ""], "the list is empty"),
    (["--gammas", ","], "the list is empty"),
    (["--gammas", "-1"], "-1 is not a whole number from 0 to 64"),
    (["--gammas", "65"], "65 is not a whole number from 0 to 64"),
    (["--gammas", "9999999999"], "9999999999 is not a whole number from 0 to 64"),
    (["--gammas", "1.5"], "'1.5' is not a whole number from 0 to 64"),
    (["--gammas", "2,02"], "'2,02' names something twice"),
    (["--gammas", "9" * 5000], "is not a whole number from 0 to 64"),
    (["--prompts", "code_pyton"], "unknown prompt 'code_pyton'; known: code_python, code_cpp"),
    (["--prompts", "code_cpp,code_cpp"], "names something twice"),
    (["--prompts", " , "], "the list is empty"),
    (["--prompt-file", ""], "argument --prompt-file: it is empty"),
    (["--prompt-file", "{empty}/gone.jsonl"], "gone.jsonl can't be read as UTF-8 text: [Errno 2]"),
    (["--prompt-file", "{empty}"], "can't be read as UTF-8 text: [Errno 21] Is a directory"),
    (["--engines", "warp"], "'warp' is unknown; known: published, fast"),
    (["--engines", "fast,fast"], "names something twice"),
    (["--max-new-tokens", "0"], "0 is not a whole number >= "),
    (["--max-new-tokens", "-5"], "-5 is not a whole number >= "),
    (["--max-new-tokens", "nan"], "'nan' is not a whole number >= "),
    (["--max-new-tokens", "100000"], "100000 new tokens exceed the 2048 positions of tiny draft"),
    (["--chat"], "the tokenizer of tiny has no chat template; leave out --chat"),
    (["--no-such-flag", "1"], "unrecognized arguments: --no-such-flag 1"),
    (["--gamma", "1"], "unrecognized arguments: --gamma 1"),
    (["left", "over"], "unrecognized arguments: left over"),
    (["--gammas"], "argument --gammas: expected one argument"),
    (["--results-dir", ""], "argument --results-dir: it is empty"),
    (["--results-dir", "{file}"], "file can't be written: Not a directory; choose a folder with --results-dir"),
    (["--results-dir", "{file}/below"], "below can't be written: Not a directory; choose a folder with --results-dir"),
    (["--results-dir", "/proc/nowhere/results"], "/proc/nowhere/results can't be written: "),
]
OF_PHASE1 = [
    (["--repeats", "0"], "0 is not a whole number >= 1"),
    (["--repeats", "many"], "'many' is not a whole number >= 1"),
    (["--random-weights"], "run phase3_profiling.py for timing"),
    (["--temperatures", "1"], "unrecognized arguments: --temperatures 1"),
]
OF_PHASE3 = [
    (["--sections", "0"], "0 is not a whole number from 1 to 6"),
    (["--sections", "7"], "7 is not a whole number from 1 to 6"),
    (["--sections", ""], "the list is empty"),
    (["--sections", "1,1"], "names something twice"),
    (["--steps", "0"], "0 is not a whole number >= 1"),
    (["--temperatures", "-0.1"], "'-0.1' is not a number from 0 to 100"),
    (["--temperatures", "nan"], "'nan' is not a number from 0 to 100"),
    (["--temperatures", "inf"], "'inf' is not a number from 0 to 100"),
    (["--temperatures", "1e308"], "'1e308' is not a number from 0 to 100"),
    (["--temperatures", "0;5"], "'0;5' is not a number from 0 to 100"),
    (["--temperatures", "1,1.0"], "names something twice"),
    (["--max-new-tokens", "1"], "1 is not a whole number >= 2"),
    (["--plots-dir", "{file}"], "file can't be written: Not a directory; choose a folder with --plots-dir"),
    (["--plots-dir", "/proc/nowhere"], "/proc/nowhere can't be written: "),
]
CASES = [
    *((script, *case) for case in FLAGS for script in MEASURING),
    *((PHASE1, *case) for case in OF_PHASE1),
    *((PHASE3, *case) for case in OF_PHASE3),
]


@pytest.mark.parametrize(
    "script, argv, message", CASES, ids=lambda part: (part if isinstance(part, str) else " ".join(part))[:40]
)
def test_a_flag_that_can_not_be_used_is_one_line_and_writes_nothing(places, tmp_path, capsys, script, argv, message):
    given = [part.format(**places) for part in argv]
    flags = ["--pair", "tiny", "--device", "cpu", *output_flags(tmp_path), *given]
    assert_refused(capsys, tmp_path, script, flags, message)


# --- Models ----------------------------------------------------------------------------------------------------------

MODELS = [
    (
        "{empty}/nothing",
        "{target}",
        "nothing' is neither a Hub id (owner/name), a folder, nor a .gguf file that exists",
    ),
    ("no/such/model", "{target}", "'no/such/model' is neither a Hub id"),
    ("{empty}/gone.gguf", "{target}", "no such file: "),
    ("{file}", "{target}", "file' is neither a Hub id"),
    ("{empty}", "{target}", "it has no config.json"),
    ("{no_config}", "{target}", "it has no config.json"),
    ("{no_json}", "{target}", "no_json can't be read"),
    ("{no_object}", "{target}", "no_object can't be read"),
    ("{no_type}", "{target}", "no_type can't be read"),
    ("{new_type}", "{target}", "new_type can't be read"),
    ("{odd_heads}", "{target}", "odd_heads can't be read: Validation error for field 'num_key_value_heads': "),
    ("{wider}", "{target}", "weights of the shape that its config.json says, "),
    ("{no_weights}", "{target}", "no_weights can't be loaded"),
    ("{target}", "{cut_weights}", "cut_weights can't be loaded"),
    ("{no_tokenizer}", "{target}", "no_tokenizer has no tokenizer that can be read: there is no tokenizer.json"),
    ("{no_tokenizer}", "{no_tokenizer}", "no_tokenizer has no tokenizer that can be read"),
    ("{cut_tokenizer}", "{target}", "cut_tokenizer has no tokenizer that can be read"),
    ("{letter}", "{letter}", "letter.gguf is not a GGUF file: it does not begin with GGUF"),
    ("{no_header}", "{no_header}", "no_header.gguf is not a GGUF file"),
    ("{cut}", "{cut}", "cut.gguf can't be read"),
    ("{bert}", "{target}", "bert is not a causal language model but BertForMaskedLM"),
    ("{draft}", "{t5}", "t5 is not a causal language model but T5ForConditionalGeneration"),
    ("{other_words}", "{target}", "other_words and target have different tokenizers (300 and 300 entries)"),
    ("{more_words}", "{target}", "more_words and target have different tokenizers (310 and 300 entries)"),
    ("{narrow}", "{target}", "narrow has logits for 290 ids, fewer than its tokenizer's 300"),
]


@pytest.mark.parametrize("script", MEASURING)
@pytest.mark.parametrize("draft, target, message", MODELS, ids=lambda part: part[:24])
def test_a_model_that_can_not_be_used_is_one_line_and_writes_nothing(
    places, tmp_path, capsys, script, draft, target, message
):
    pair = ["--draft", draft.format(**places), "--target", target.format(**places)]
    assert_refused(capsys, tmp_path, script, [*pair, "--device", "cpu", *output_flags(tmp_path)], message)


@pytest.mark.parametrize("script", MEASURING)
def test_too_little_memory_is_one_line_with_needed_and_free(places, tmp_path, capsys, monkeypatch, script):
    monkeypatch.setattr(pair_module, "_free_memory", lambda device: 1000)
    pair = ["--draft", str(places["draft"]), "--target", str(places["target"]), "--device", "cpu"]
    message = "GB on cpu, 0.0 GB are free; try --dtype bfloat16, --draft-device, or a smaller pair"
    assert_refused(capsys, tmp_path, script, [*pair, *output_flags(tmp_path)], message)


def test_gguf_without_its_package_is_one_line_that_says_what_to_install(places, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    pair = ["--draft", str(places["cut"]), "--target", str(places["cut"]), "--device", "cpu"]
    assert_refused(capsys, tmp_path, PHASE1, [*pair, *output_flags(tmp_path)], "pip install gguf")


# --- Prompt files ----------------------------------------------------------------------------------------------------


def line(**changed) -> bytes:
    return json.dumps(PROMPT | changed).encode() + b"\n"


PROMPT_FILES = [
    (b"", "has no prompt; it takes a JSON object a line"),
    (b"\n \n", "has no prompt"),
    (b"{", "line 1: not a JSON object with prompt, category and text, as in {"),
    (line() + b"mine,own,text", "line 2: not a JSON object"),
    (b"[1, 2, 3]", "line 1: not a JSON object"),
    (b'"text"', "line 1: not a JSON object"),
    (b"null", "line 1: not a JSON object"),
    (b"[" * 100_000, "line 1: not a JSON object"),
    (b'{"prompt": "mine", "category": "own"}', "line 1: not a JSON object"),
    (line(text=""), "line 1: prompt, category and text must be text, and not empty"),
    (line(text=7), "line 1: prompt, category and text must be text"),
    (line(prompt=None), "line 1: prompt, category and text must be text"),
    (line(prompt="=1+1"), "'=1+1' may have only letters, digits, _ and -, and must begin with a letter"),
    (line(prompt="a,b"), "'a,b' may have only letters"),
    (line(prompt="größe"), "may have only letters"),
    (line(category="@sum"), "'@sum' may have only letters"),
    (line(prompt="all"), "'all' stands for all prompts together"),
    (line(text="\ud800"), "line 1: not a JSON object"),
    (line() + line(), "has two prompts of the name 'mine'; each needs its own"),
    (line(text="größer").replace(b"\\u00f6", b"\xf6"), "can't be read as UTF-8 text"),
    (b"\x00\xff\xfe", "can't be read as UTF-8 text"),
    (line(text="word " * 600), "prompt tokens + 64 new tokens exceed the 512 positions of draft"),
]


@pytest.mark.parametrize("script", MEASURING)
@pytest.mark.parametrize("content, message", PROMPT_FILES, ids=range(len(PROMPT_FILES)))
def test_a_prompt_file_that_can_not_be_used_is_one_line(places, tmp_path, capsys, script, content, message):
    (tmp_path / "prompts.jsonl").write_bytes(content)
    flags = ["--draft", str(places["draft"]), "--target", str(places["target"]), "--device", "cpu"]
    flags += ["--prompt-file", str(tmp_path / "prompts.jsonl"), *output_flags(tmp_path)]
    assert_refused(capsys, tmp_path, script, flags, message)


def test_a_prompt_file_may_have_a_byte_order_mark_other_line_ends_and_any_letters(tmp_path):
    text = "größer \u2028 \x85 数"
    raw = json.dumps(PROMPT | {"text": text}, ensure_ascii=False)
    (tmp_path / "prompts.jsonl").write_bytes(b"\xef\xbb\xbf" + raw.encode() + b"\r\n\r\n")
    (prompt,) = select_prompts((), str(tmp_path / "prompts.jsonl"))
    assert prompt.text == text


# --- Phase 2 ---------------------------------------------------------------------------------------------------------

OF_PHASE2 = [
    (["--trials", "0"], "0 is not a whole number from 1 to 1000000"),
    (["--trials", "9999999999"], "9999999999 is not a whole number from 1 to 1000000"),
    (["--seed", "-1"], "-1 is not a whole number from 0 to 4294967295"),
    (["--gammas", "0"], "0 is not a whole number from 1 to 64"),
    (["--gammas", ""], "the list is empty"),
    (["--regime-gamma", "65"], "65 is not a whole number from 1 to 64"),
    (["--alphas", "1.5"], "'1.5' is not a number from 0 to 1"),
    (["--alphas", "nan"], "'nan' is not a number from 0 to 1"),
    (["--alphas", "0.5,0.5"], "names something twice"),
    (["--regime-alphas", "-0.1"], "'-0.1' is not a number from 0 to 1"),
    (["--regime-cost-ratios", "0"], "'0' is not a number from 0.001 to 1e+06"),
    (["--curve-cost-ratios", "inf"], "'inf' is not a number from 0.001 to 1e+06"),
    (["--scenarios", "2.5"], "'2.5' is not name=c"),
    (["--scenarios", ""], "the list is empty"),
    (["--scenarios", "a=0"], "'0' is not a number from 0.001 to 1e+06"),
    (["--scenarios", "a=1,a=2"], "names a scenario twice"),
    (["--scenarios", "=1+1=2"], "'=1+1=2' is not name=c"),
    (["--scenarios", "@sum=2"], "'@sum=2' is not name=c"),
    (["--results-dir", "{empty}"], "manifest_phase1.json is missing; run speculative_decoding.py to make it"),
    (["--results-dir", "{file}"], "file can't be written: Not a directory"),
    (["--plots-dir", "{file}"], "file can't be written: Not a directory; choose a folder with --plots-dir"),
    (["--resume"], "unrecognized arguments: --resume"),
]


@pytest.mark.parametrize("argv, message", OF_PHASE2, ids=[" ".join(argv) for argv, _ in OF_PHASE2])
def test_what_phase_two_can_not_use_is_one_line_and_writes_nothing(places, tmp_path, capsys, argv, message):
    write_run(tmp_path / "run")
    flags = ["--results-dir", str(tmp_path / "run"), "--plots-dir", str(tmp_path / "plots")]
    assert_refused(capsys, tmp_path, PHASE2, [*flags, *(part.format(**places) for part in argv)], message)


# --- The report ------------------------------------------------------------------------------------------------------

OF_REPORT = [
    (["--note", ""], "argument --note: it is empty"),
    (["--results-dir", "{empty}"], "there is no run in"),
    (["--results-dir", "{empty}/gone"], "run python speculative_decoding.py first, or name its --results-dir"),
    (["--results-dir", "{file}"], "file can't be written: Not a directory"),
    (["--plots-dir", "{file}"], "file can't be written: Not a directory; choose a folder with --plots-dir"),
    (["--pair", "tiny"], "unrecognized arguments: --pair tiny"),
    (["--resume"], "unrecognized arguments: --resume"),
]


@pytest.mark.parametrize("argv, message", OF_REPORT, ids=[" ".join(argv) for argv, _ in OF_REPORT])
def test_what_the_report_can_not_use_is_one_line_and_writes_nothing(places, tmp_path, capsys, argv, message):
    write_run(tmp_path / "run")
    flags = ["--results-dir", str(tmp_path / "run"), "--plots-dir", str(tmp_path / "plots")]
    assert_refused(capsys, tmp_path, REPORT, [*flags, *(part.format(**places) for part in argv)], message)


def empty(path: Path) -> None:
    path.write_text("")


def tear(path: Path) -> None:
    path.write_text(path.read_text()[:-3])


@pytest.mark.parametrize("file", ["speculative_runs.csv", "speculative_results_fast.csv", "manifest_phase1.json"])
@pytest.mark.parametrize("damage", [empty, tear])
def test_a_damaged_file_stops_the_report_by_name(tmp_path, capsys, file, damage):
    write_run(tmp_path / "run")
    damage(tmp_path / "run" / file)
    flags = ["--results-dir", str(tmp_path / "run"), "--plots-dir", str(tmp_path / "plots")]
    assert_refused(capsys, tmp_path, REPORT, flags, file)


# --- What is unusual and allowed -------------------------------------------------------------------------------------

SMALL = ["--repeats", "1", "--prompts", "code_python", "--gammas", "2", "--max-new-tokens", "6", "--engines", "fast"]


def runs_of(places, tmp_path, *flags: str):
    pair = ["--draft", str(places["draft"]), "--target", str(places["target"]), "--device", "cpu"]
    assert main(PHASE1, *pair, *SMALL, *output_flags(tmp_path), *flags) == 0
    assert run.read_manifest(tmp_path / "out", "phase1")["status"] == "complete"
    return results.read_table(tmp_path / "out", results.RUNS)


def test_gamma_zero_is_plain_decoding_with_no_acceptance(places, tmp_path):
    (row,) = runs_of(places, tmp_path, "--gammas", "0").to_dict("records")
    assert (row["proposed"], row["accepted"], row["steps"], row["new_tokens"]) == (0, 0, 5, 6)
    (summary,) = results.read_table(tmp_path / "out", results.SUMMARIES["fast"]).to_dict("records")
    assert summary["matches_baseline"] is True
    assert all(summary[name] != summary[name] for name in ("acceptance_rate", "alpha", "predicted_speedup"))


def test_one_new_token_takes_no_step(places, tmp_path):
    (row,) = runs_of(places, tmp_path, "--max-new-tokens", "1").to_dict("records")
    assert (row["proposed"], row["steps"], row["new_tokens"]) == (0, 0, 1)
    (summary,) = results.read_table(tmp_path / "out", results.SUMMARIES["fast"]).to_dict("records")
    assert summary["speedup"] > 0
    assert all(summary[name] != summary[name] for name in ("tokens_per_step", "cost_ratio", "decode_speedup"))


def test_a_gamma_far_beyond_the_budget_proposes_what_is_left(places, tmp_path):
    (row,) = runs_of(places, tmp_path, "--gammas", "64").to_dict("records")
    assert row["new_tokens"] == 6
    assert row["proposed"] <= sum(range(5))


def test_a_prompt_of_one_token_runs_and_matches(places, tmp_path):
    (tmp_path / "one.jsonl").write_bytes(line(text="t"))
    (row,) = runs_of(places, tmp_path, "--prompt-file", str(tmp_path / "one.jsonl")).to_dict("records")
    assert (row["prompt_tokens"], row["matches_baseline"]) == (1, True)


def test_padded_vocabularies_of_different_width_run_and_match(tmp_path, places):
    widths = {width: make_model(layers=1, hidden=32, seed=width, vocab=width) for width in (320, 384)}
    folders = {w: save_model(tmp_path / str(w), model, make_tokenizer(300)) for w, model in widths.items()}
    rows = runs_of({"draft": folders[320], "target": folders[384]}, tmp_path)
    assert rows.matches_baseline.all()


@pytest.mark.parametrize("temperature", ["1e-300", "1e-45", "100"])
def test_a_temperature_at_either_end_of_its_range_samples_without_nan(places, tmp_path, temperature):
    pair = ["--draft", str(places["draft"]), "--target", str(places["target"]), "--device", "cpu"]
    flags = ["--sections", "3", "--temperatures", f"0,{temperature}", *SMALL[2:]]
    assert main(PHASE3, *pair, *flags, *output_flags(tmp_path)) == 0
    cold, extreme = results.read_table(tmp_path / "out", results.BY_TEMPERATURE).to_dict("records")
    assert 0 <= extreme["alpha_sampled"] <= 1
    if temperature != "100":
        assert extreme["alpha_match"] == cold["alpha_match"]
        assert extreme["alpha_overlap"] == cold["alpha_overlap"]
    assert torch.isfinite(torch.tensor([extreme["alpha_match"], extreme["alpha_overlap"]])).all()


def phase3(places, tmp_path, *flags: str) -> int:
    pair = ["--draft", str(places["draft"]), "--target", str(places["target"]), "--device", "cpu", "--quick"]
    return main(PHASE3, *pair, *SMALL[2:], *output_flags(tmp_path), *flags)


def test_a_gamma_beyond_the_usual_widths_is_timed_and_predicted_too(places, tmp_path):
    flags = ["--gammas", "12", "--max-new-tokens", "16"]
    runs_of(places, tmp_path, *flags)
    assert phase3(places, tmp_path, *flags, "--steps", "2", "--sections", "1,4") == 0
    (row,) = results.read_table(tmp_path / "out", results.PREDICTIONS).to_dict("records")
    assert row["gamma"] == 12
    assert row["full"] > 0


def test_phase_three_runs_with_plain_decoding_alone(places, tmp_path):
    assert phase3(places, tmp_path, "--gammas", "0") == 0
    rows = results.read_table(tmp_path / "out", results.BY_POSITION)
    assert (rows.proposed == 0).all()
    assert rows.acceptance_rate.isna().all()
