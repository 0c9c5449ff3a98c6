"""Loading a pair: every source works, and what can't work together is refused in one line before anything runs."""

from __future__ import annotations

import json
import shutil
import time

import pytest
import torch
from conftest import make_model, make_tokenizer, save_model
from gguf_file import write_gguf
from transformers import BertConfig, BertForMaskedLM

from specdec.engine import device as device_module
from specdec.engine import pair as pair_module
from specdec.engine import sources
from specdec.engine.acceptance import trace_agreement
from specdec.engine.decoding import autoregressive_generate, speculative_generate
from specdec.engine.pair import eos_ids, explain_choice, load_pair
from specdec.engine.sources import SHIPPED_CONFIGS
from specdec.errors import InputError


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """An empty Hub cache, and a Hub that can't be reached."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


def refusal(*args, **kwargs) -> str:
    with pytest.raises(InputError) as caught:
        load_pair(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_folders_load_and_run_without_the_network(pair_folders):
    draft, target = pair_folders
    pair = load_pair(draft=str(draft), target=str(target), device="cpu")
    assert pair.name == "custom"
    assert (pair.draft_facts.name, pair.target_facts.name) == ("draft", "target")
    assert pair.target.dtype == torch.float32
    assert not pair.target.training
    input_ids = pair.tokenizer("the quick fox", return_tensors="pt").input_ids
    assert len(speculative_generate(pair.draft, pair.target, input_ids, 5, 2).tokens) == 5


def test_facts_describe_the_weights(pair_folders):
    draft, target = pair_folders
    facts = load_pair(draft=str(draft), target=str(target), device="cpu", dtype="bfloat16").target_facts
    model = make_model(layers=2, hidden=64, seed=0)
    assert facts.parameters == sum(weight.numel() for weight in model.parameters())
    assert (facts.layers, facts.hidden_size, facts.tied_embeddings) == (2, 64, True)
    assert facts.bytes_per_token == 2 * facts.parameters, "a tied embedding is read as the head"
    assert facts.dtype == "bfloat16"
    assert len(facts.sha256) == 64


def test_the_embedding_of_an_untied_model_is_not_read_per_token(tmp_path):
    model = make_model(layers=1, hidden=32, seed=0)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    folder = save_model(tmp_path / "untied", model, make_tokenizer(300))
    facts = load_pair(draft=str(folder), target=str(folder), device="cpu").target_facts
    assert not facts.tied_embeddings
    assert facts.bytes_per_token == 4 * (facts.parameters - 300 * 32)


def test_the_embedded_pair_says_that_it_is_small(tiny_pair):
    assert "tiny" in tiny_pair.label
    assert "not a run of the study" in tiny_pair.label
    assert eos_ids(tiny_pair) == {tiny_pair.tokenizer.eos_token_id}
    early_exit = tiny_pair.target.config.early_exit_layer
    assert 0 < early_exit < tiny_pair.target.config.num_hidden_layers


def test_a_gguf_file_loads_as_dense_weights_and_gives_the_folders_tokens(tmp_path):
    model, tokenizer = make_model(layers=1, hidden=64, seed=0), make_tokenizer(300)
    folder = save_model(tmp_path / "model", model, tokenizer)
    file = write_gguf(tmp_path / "model.gguf", model, tokenizer)
    pair = load_pair(draft=str(file), target=str(file), device="cpu")
    assert pair.target_facts.name == "model.gguf"
    reference = load_pair(draft=str(folder), target=str(folder), device="cpu")
    input_ids = reference.tokenizer("the quick fox", return_tensors="pt").input_ids
    assert pair.tokenizer("the quick fox", return_tensors="pt").input_ids.tolist() == input_ids.tolist()
    expected = autoregressive_generate(reference.target, input_ids, 12).tokens
    assert autoregressive_generate(pair.target, input_ids, 12).tokens == expected


@pytest.mark.parametrize("engine", ["published", "fast"])
def test_padded_vocabularies_of_different_width_work_on_the_shared_ids(tmp_path, engine):
    tokenizer = make_tokenizer(300)
    models = {width: make_model(layers=1, hidden=32, seed=width, vocab=width) for width in (320, 384)}
    for model in models.values():  # padding would win every choice
        model.get_output_embeddings().weight.data[300:] *= 50
    folders = {width: str(save_model(tmp_path / str(width), model, tokenizer)) for width, model in models.items()}
    for draft, target in ((320, 384), (384, 320)):
        pair = load_pair(draft=folders[draft], target=folders[target], device="cpu")
        input_ids = torch.arange(1, 12).unsqueeze(0)
        baseline = autoregressive_generate(pair.target, input_ids, 32, engine=engine)
        generation = speculative_generate(pair.draft, pair.target, input_ids, 32, 4, engine=engine)
        assert generation.tokens == baseline.tokens
        assert max(baseline.tokens) < 300
        trace = trace_agreement(pair, input_ids, baseline.tokens)
        assert max(row["draft_token"] for row in trace) < 300


def test_logits_narrower_than_the_tokenizer_are_refused(tmp_path):
    folder = save_model(tmp_path / "narrow", make_model(layers=1, hidden=32, seed=0, vocab=290), make_tokenizer(300))
    assert "narrow has logits for 290 ids, fewer than its tokenizer's 300" in refusal(
        draft=str(folder), target=str(folder), device="cpu"
    )


def test_two_tokenizers_that_differ_are_refused(tmp_path, pair_folders):
    other = save_model(
        tmp_path / "other", make_model(layers=1, hidden=32, seed=0), make_tokenizer(300, "numbers 123 456 123 456")
    )
    message = refusal(draft=str(other), target=str(pair_folders[1]), device="cpu")
    assert "other and target have different tokenizers (300 and 300 entries)" in message


def test_qwen2_without_a_network_is_refused_soon_with_ways_out(no_network):
    started = time.perf_counter()
    message = refusal("qwen2", device="cpu")
    assert time.perf_counter() - started < 15
    assert "Qwen/Qwen2-0.5B" in message
    assert "--pair tiny" in message
    assert "--draft X --target Y" in message


@pytest.mark.parametrize(
    "given, message",
    [
        ({"name": "huge"}, "unknown pair 'huge'; known: auto, qwen2, tiny"),
        ({"draft": "x/y"}, "--draft needs --target"),
        ({"target": "x/y"}, "--target needs --draft"),
        ({"draft": "no/such/folder", "target": "no/such/folder"}, "'no/such/folder' is neither a Hub id"),
        ({"draft": "./nothing", "target": "./nothing"}, "'./nothing' is neither a Hub id"),
        ({"draft": "gone.gguf", "target": "gone.gguf"}, "no such file: gone.gguf"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"device": "cuda:99"}, "device 'cuda:99' can't be used"),
        ({"device": "toaster"}, "device 'toaster' can't be used"),
        ({"device": "spread"}, "--device spread needs several GPUs"),
        ({"draft_device": "toaster"}, "device 'toaster' can't be used"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(given, message):
    assert message in refusal(**({"name": "tiny", "device": "cpu"} | given))


def test_a_folder_without_a_model_is_refused(tmp_path):
    assert "it has no config.json" in refusal(draft=str(tmp_path), target=str(tmp_path), device="cpu")


def test_a_model_that_is_not_a_causal_language_model_is_refused(tmp_path):
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=300
    )
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    assert "bert is not a causal language model" in refusal(
        draft=str(tmp_path / "bert"), target=str(tmp_path / "bert"), device="cpu"
    )


def spoil_text(path) -> None:
    path.write_text("{ not json")


def cut_weights(path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize("file, spoil", [("config.json", spoil_text), ("model.safetensors", cut_weights)])
def test_a_damaged_folder_is_refused(tmp_path, pair_folders, file, spoil):
    folder = tmp_path / "damaged"
    shutil.copytree(pair_folders[1], folder)
    spoil(folder / file)
    assert "damaged can't be" in refusal(draft=str(folder), target=str(folder), device="cpu")


def test_missing_weights_are_not_filled_at_random(tmp_path, pair_folders):
    folder = tmp_path / "deeper"
    shutil.copytree(pair_folders[1], folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 3
    config["layer_types"] = ["full_attention"] * 3
    (folder / "config.json").write_text(json.dumps(config))
    assert "deeper lacks 12 weights" in refusal(draft=str(folder), target=str(folder), device="cpu")


def test_pickled_weights_are_never_loaded(tmp_path, pair_folders):
    folder = tmp_path / "pickled"
    shutil.copytree(pair_folders[1], folder)
    (folder / "model.safetensors").unlink()
    torch.save(make_model(layers=2, hidden=64, seed=0).state_dict(), folder / "pytorch_model.bin")
    assert "pickled can't be loaded" in refusal(draft=str(folder), target=str(folder), device="cpu")


@pytest.mark.parametrize("content", [b"not a model", b"GGUF" + b"\0" * 40])
def test_a_corrupt_gguf_file_is_refused(tmp_path, content):
    (tmp_path / "bad.gguf").write_bytes(content)
    assert "bad.gguf" in refusal(draft=str(tmp_path / "bad.gguf"), target=str(tmp_path / "bad.gguf"), device="cpu")


def test_too_little_memory_is_refused_with_needed_and_free(pair_folders, monkeypatch):
    draft, target = pair_folders
    monkeypatch.setattr(pair_module, "_free_memory", lambda device: 1000)
    message = refusal(draft=str(draft), target=str(target), device="cpu")
    assert "draft in float32 needs" in message
    assert "0.0 GB are free" in message


def test_random_weights_need_no_download_and_have_the_studys_sizes(no_network, monkeypatch):
    sizes = {}
    for name, config in SHIPPED_CONFIGS.items():
        sizes[name] = pair_module._parameters(sources.Source(name), config)
    assert sizes == {"Qwen/Qwen2-0.5B": 494_032_768, "Qwen/Qwen2-1.5B": 1_543_714_304}
    small = make_model(layers=1, hidden=32, seed=0).config
    monkeypatch.setattr(sources, "SHIPPED_CONFIGS", dict.fromkeys(SHIPPED_CONFIGS, small))
    pair = load_pair("qwen2", random_weights=True, device="cpu")
    assert "random weights" in pair.label
    assert pair.tokenizer is None
    assert pair.target_facts.sha256 is None
    assert len(speculative_generate(pair.draft, pair.target, torch.ones(1, 4, dtype=torch.long), 4, 2).tokens) == 4


def test_auto_says_what_it_chose_and_how_to_choose_otherwise():
    lines = explain_choice("auto", None, "cpu").splitlines()
    assert len(lines) == 2
    assert "tiny" in lines[0]
    assert "--pair qwen2" in lines[1]
    assert explain_choice("tiny", None, "cpu") is None
    assert explain_choice("auto", "a/draft", "cpu") is None


@pytest.mark.parametrize("built_for, remedy", [(None, "CPU build"), ("12.8", "update the driver")])
def test_auto_says_why_a_visible_nvidia_device_is_not_used(monkeypatch, built_for, remedy):
    monkeypatch.setattr(device_module, "_nvidia_visible", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = explain_choice("auto", None, "auto")
    assert "an NVIDIA device is visible" in message
    assert remedy in message
    assert len(message.splitlines()) == 2


def test_a_pair_too_large_for_one_gpu_is_spread_and_one_that_fits_is_not(monkeypatch, pair_folders):
    config = make_model(layers=1, hidden=32, seed=0).config
    needed = pair_module._parameters(sources.Source("x"), config) * 4 * pair_module.MEMORY_MARGIN
    gpu = torch.device("cuda", 0)
    one = [sources.Source("x")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for free, place in ((needed * 1.1, gpu), (needed * 0.6, pair_module.SPREAD)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index, free=free: (free, free))
        assert pair_module._place(one, [config], [gpu], torch.float32) == [place]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (needed * 0.4, needed))
    with pytest.raises(InputError, match="x in float32 needs"):
        pair_module._place(one, [config], [gpu], torch.float32)
