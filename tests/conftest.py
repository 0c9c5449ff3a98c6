"""Models small enough for tests, and one torch thread: two cores, shared and noisy."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from specdec.engine import device

torch.set_num_threads(1)


def make_model(layers: int, hidden: int, seed: int, vocab: int = 300, positions: int = 512) -> Qwen2ForCausalLM:
    """Return an untrained Qwen2 whose weights are spread widely enough that its greedy text does not repeat itself."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        initializer_range=0.3,
        eos_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()


def make_tokenizer(vocab: int, text: str = "the quick brown fox jumps over the lazy dog") -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with exactly ``vocab`` entries, the last ones never produced."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    spare = ["<|im_start|>", "<|im_end|>"]  # transformers 5.17 adds these to a Qwen2 tokenizer from GGUF
    spare += [f"<|spare{i}|>" for i in range(vocab)]
    tokenizer.add_special_tokens(spare[: vocab - tokenizer.get_vocab_size()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def save_model(folder: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Store a model with its tokenizer as the folder that ``--draft`` and ``--target`` take."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def small_ceilings():
    """Measure bandwidth and peak on small buffers: every run of a phase does, and no test needs the figures right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "LARGE_BUFFER_BYTES", 8_000_000)
        patch.setattr(device, "PEAK_MATRIX", 512)
        yield


@pytest.fixture(scope="session")
def target() -> Qwen2ForCausalLM:
    return make_model(layers=3, hidden=64, seed=0)


@pytest.fixture(scope="session")
def draft() -> Qwen2ForCausalLM:
    return make_model(layers=1, hidden=32, seed=1)


@pytest.fixture(scope="session")
def prompt() -> torch.Tensor:
    """Twenty token ids, (1, 20)."""
    return torch.randint(1, 300, (1, 20), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="session")
def tiny_pair():
    """The embedded pair."""
    from specdec.engine.pair import load_pair

    return load_pair("tiny", device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def greedy_text(tiny_pair):
    """The embedded target's own 96 tokens after one of the eight prompts, by engine; decoded once for all tests."""
    from specdec.engine.decoding import autoregressive_generate
    from specdec.engine.pair import encode

    @functools.cache
    def text(prompt, engine="fast") -> list[int]:
        return autoregressive_generate(tiny_pair.target, encode(tiny_pair, prompt), 96, engine=engine).tokens

    return text


@pytest.fixture(scope="session")
def pair_folders(tmp_path_factory) -> tuple[Path, Path]:
    """Folders of an untrained draft and target that share a tokenizer."""
    folder = tmp_path_factory.mktemp("pair with spaces ü")
    tokenizer = make_tokenizer(300)
    return (
        save_model(folder / "draft", make_model(layers=1, hidden=32, seed=1), tokenizer),
        save_model(folder / "target", make_model(layers=2, hidden=64, seed=0), tokenizer),
    )
