"""Train the embedded pair: corpus, tokenizer, target, target against repetition, draft, export, evaluation.

    python specdec/tiny_pair/train.py --corpus-dir build/corpus --work-dir build/tiny_pair

Every stage leaves its result in the work folder and is skipped when that is there; the three training stages write
checkpoints and resume. Batches are a function of (seed, stage, step), so a resumed run sees the same data as an
unbroken one. Runs on CPU: bfloat16 products under autocast, float32 weights; the pair is stored in float16.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from specdec.prompts import PROMPTS  # noqa: E402
from specdec.tiny_pair import corpus, evaluate  # noqa: E402

SEED = 20261  # any number; all randomness of the stages derives from it
THREADS = 2  # what the run was planned for; more is faster and changes the last bits

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8  # numbers of glibc's malloc.h

VOCABULARY = 4_096  # tokens: about 3.5 characters each, while the tied head stays under a fifth of the target
END = "<|endoftext|>"  # separates documents in training; end of text and padding later
WINDOW_TOKENS = 8  # no window of so many tokens of a prompt may be in the corpus
HELD_OUT_EVERY = 97  # one piece in so many is never trained on

# Time per token of models this small is per-layer overhead: 8 layers against 2 gives a cost ratio near 4.
TARGET_SHAPE = {"num_hidden_layers": 8, "hidden_size": 224, "intermediate_size": 608, "num_attention_heads": 7}
DRAFT_SHAPE = {"num_hidden_layers": 2, "hidden_size": 160, "intermediate_size": 448, "num_attention_heads": 5}
KEY_VALUE_HEADS = 1  # 7 query heads share one, the same ratio as in Qwen2-0.5B
EARLY_EXIT_LAYER = 2  # layers; a quarter of the target's time, so that self-speculation can pay
MAX_POSITIONS = 2_048  # tokens; training windows are shorter

CONTEXT_TOKENS = 256  # per training window: longer than a prompt and its continuation
LONG_CONTEXT_TOKENS = 512  # in the two later stages, which take fewer steps
BATCH_WINDOWS = 32  # 8,192 tokens a step: about 1.1 seconds on two cores
TARGET_STEPS = 850  # about 7 M tokens; 24 minutes on two shared cores
UNLIKELIHOOD_STEPS = 90  # 6 minutes; enough for greedy loops to become rare
DRAFT_STEPS = 600  # 8 minutes
OWN_TEXT_ROWS = 1_024  # rows of the target's own greedy text that the draft learns from

MUON_RATE = 0.02  # for matrices inside layers: the usual value of its authors
ADAM_RATE = 3e-3  # for embedding, norms and biases
TUNING_RATE = 5e-4  # Adam, for all weights, in the stage against repetition
WEIGHT_DECAY = 0.05  # on matrices; little, since each token is seen once or twice
WARMUP_STEPS = 60  # steps of rising rate
DECAY_SHARE = 0.6  # of the steps, at the end, over which the rate falls to zero linearly
CLIP_NORM = 1.0  # gradient norm
EXIT_WEIGHT = 0.3  # of the early exit's loss; more costs the full model
EXIT_ROWS = 8  # of a batch's 32 rows carry it: the head is a large part of a step
DISTIL_WEIGHT = 0.9  # of KL on the target's distribution; the rest is cross-entropy on the text
REPEAT_NGRAM = 4  # tokens; a token that completes a repeated one of these is unlikely to be wanted
REPEAT_PREFIX_TOKENS = 32  # of corpus text before a greedy continuation
REPEAT_NEW_TOKENS = 96  # length of that continuation: loops show within it
REPEAT_ROWS = 40  # continuations per step
REPEAT_WEIGHT = 1.0  # of the unlikelihood term
OWN_TEXT_SHARE = 8  # of the draft's 32 rows are the target's own greedy text: what it will have to predict

CHECKPOINT_STEPS = 100  # between checkpoints: under two minutes of work to lose
LOG_STEPS = 20  # between log lines
HELD_OUT_WINDOWS = 12  # per category in a held-out loss

# How often a category is drawn for a window; small and good ones more often than their size says.
CATEGORY_WEIGHTS = {
    "story": 0.26,
    "science": 0.10,
    "systems": 0.20,
    "learning": 0.10,
    "mathematics": 0.11,
    "python": 0.12,
    "cpp": 0.11,
}


# ---------------------------------------------------------------- tokenizer and data


def train_tokenizer(documents: Iterator[str], folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with one special token, saved so that ``AutoTokenizer`` loads it.

    Text is normalised and split as in Qwen2: beside a Qwen2 ``config.json``, ``AutoTokenizer`` does so in any case.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    splits = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(documents, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, model_max_length=MAX_POSITIONS
    )
    fast.save_pretrained(folder)
    return fast


def window_hashes(ids: np.ndarray) -> np.ndarray:
    """One 64-bit hash per window of ``WINDOW_TOKENS`` tokens; equal windows have equal hashes."""
    if len(ids) < WINDOW_TOKENS:
        return np.zeros(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), WINDOW_TOKENS)
    powers = np.array([pow(6_364_136_223_846_793_005, i, 2**64) for i in range(WINDOW_TOKENS)], dtype=np.uint64)
    return (windows * powers).sum(axis=1, dtype=np.uint64)  # (len(ids) - WINDOW_TOKENS + 1,), wraps modulo 2**64


def prompt_hashes(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Hashes of every window of the eight prompts."""
    return np.unique(np.concatenate([window_hashes(np.array(tokenizer(p.text).input_ids)) for p in PROMPTS]))


def encode_category(documents: list[list[str]], tokenizer, forbidden: np.ndarray) -> dict[str, np.ndarray]:
    """Token streams for training and for the held-out loss; pieces that share a window with a prompt are left out."""
    texts = [piece for document in documents for piece in document]
    encoded = tokenizer(texts, verbose=False).input_ids
    train, held_out, removed, number, end = [], [], 0, 0, tokenizer.eos_token_id
    for document in documents:
        train.append([end])
        for _ in document:
            ids = np.array(encoded[number], dtype=np.uint16)
            number += 1
            if np.isin(window_hashes(ids), forbidden).any():
                removed += 1
                train.append([end])
            elif number % HELD_OUT_EVERY == 0:
                held_out += [[end], ids]
                train.append([end])
            else:
                train.append(ids)
    streams = {"train": np.concatenate(train).astype(np.uint16), "held_out": np.concatenate(held_out).astype(np.uint16)}
    for name, stream in streams.items():
        if np.isin(window_hashes(stream), forbidden).any():
            raise SystemExit(f"a window of a prompt is still in the {name} tokens")
    return streams | {"removed": np.array([removed])}


def prepare(corpus_dir: Path, work: Path) -> None:
    """Corpus, tokenizer and token streams, unless they are there."""
    if (work / "tokens.npz").exists():
        return
    corpus.fetch(corpus_dir)
    documents = corpus.build(corpus_dir)
    texts = ("".join(parts) for group in documents.values() for _, parts in group)
    tokenizer = train_tokenizer(texts, work / "tokenizer")
    forbidden, arrays, sizes = prompt_hashes(tokenizer), {}, {}
    for category, group in documents.items():
        streams = encode_category([parts for _, parts in group], tokenizer, forbidden)
        arrays |= {f"{category}/{name}": stream for name, stream in streams.items() if name != "removed"}
        removed = int(streams["removed"][0])
        sizes[category] = {"tokens": len(streams["train"]), "held_out_tokens": len(streams["held_out"])}
        sizes[category] |= {"pieces_removed": removed, "characters": {}}
        for source, parts in group:
            counts = sizes[category]["characters"]
            counts[source] = counts.get(source, 0) + sum(map(len, parts))
        log(f"tokens  {category:12s} {len(streams['train']):>9,d} tokens, {removed} pieces hold a prompt's window")
    write_json(work / "corpus.json", sizes)
    np.savez(work / "tokens_part.npz", **arrays)
    os.replace(work / "tokens_part.npz", work / "tokens.npz")


class Windows:
    """Draws windows of tokens; what is drawn depends on the seed, the stage and the step only."""

    def __init__(self, path: Path, split: str) -> None:
        with np.load(path) as arrays:
            self.streams = {name: arrays[f"{name}/{split}"] for name in CATEGORY_WEIGHTS}

    def draw(self, stage: int, step: int, rows: int, tokens: int) -> torch.Tensor:
        """(rows, tokens) ids; rows are spread over the categories by ``CATEGORY_WEIGHTS``."""
        random = np.random.default_rng([SEED, stage, step])
        names, weights = list(CATEGORY_WEIGHTS), np.array(list(CATEGORY_WEIGHTS.values()))
        chosen = random.choice(len(names), size=rows, p=weights / weights.sum())
        return torch.stack([self._window(names[i], random, tokens) for i in chosen])

    def category(self, name: str, rows: int, tokens: int) -> torch.Tensor:
        """(rows, tokens) ids of one category, always the same."""
        random = np.random.default_rng(SEED)
        return torch.stack([self._window(name, random, tokens) for _ in range(rows)])

    def _window(self, name: str, random: np.random.Generator, tokens: int) -> torch.Tensor:
        stream = self.streams[name]
        start = int(random.integers(0, len(stream) - tokens))
        return torch.from_numpy(stream[start : start + tokens].astype(np.int64))


# ---------------------------------------------------------------- models and losses


def new_model(shape: dict, seed: int) -> Qwen2ForCausalLM:
    """A model of a shape with random weights; what writes to the residual stream starts at zero."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        num_key_value_heads=KEY_VALUE_HEADS,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        **shape,
    )
    model = Qwen2ForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def hidden_states(model: Qwen2ForCausalLM, ids: torch.Tensor) -> list[torch.Tensor]:
    """(batch, tokens, hidden) after each layer, before the final norm."""
    body = model.model
    hidden = body.embed_tokens(ids)
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    rotary = body.rotary_emb(hidden, positions)
    states = []
    for layer in body.layers:
        hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        states.append(hidden)
    return states


def logits_of(model: Qwen2ForCausalLM, hidden: torch.Tensor) -> torch.Tensor:
    """(batch, tokens, vocab) float32 through the final norm and the tied head."""
    return model.lm_head(model.model.norm(hidden)).float()


def divergence(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Mean KL(teacher || student) over all positions of two logit tensors of one shape."""
    teacher, student = teacher.flatten(0, 1).log_softmax(-1), student.flatten(0, 1).log_softmax(-1)
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean")


def target_loss(model: Qwen2ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """(2,): cross-entropy of the full model, and the early exit's KL from it on the first rows."""
    states = hidden_states(model, ids[:, :-1])
    logits = logits_of(model, states[-1])
    entropy = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    early = logits_of(model, states[EARLY_EXIT_LAYER - 1][:EXIT_ROWS])
    return torch.stack([entropy, divergence(logits[:EXIT_ROWS].detach(), early)])


def draft_loss(draft: Qwen2ForCausalLM, ids: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """(2,): cross-entropy on the text and KL from the target's logits ``teacher`` (batch, tokens - 1, vocab)."""
    logits = logits_of(draft, hidden_states(draft, ids[:, :-1])[-1])
    return torch.stack([F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), divergence(teacher, logits)])


def repeated(ids: torch.Tensor, first: int) -> torch.Tensor:
    """(batch, tokens) bool: from position ``first``, tokens that lie in an n-gram seen before in their row."""
    marks = torch.zeros_like(ids, dtype=torch.bool)
    for row, tokens in enumerate(ids.tolist()):
        seen: set[tuple[int, ...]] = set()
        for end in range(REPEAT_NGRAM, len(tokens) + 1):
            ngram = tuple(tokens[end - REPEAT_NGRAM : end])
            if ngram in seen and end > first:
                marks[row, max(first, end - REPEAT_NGRAM) : end] = True
            seen.add(ngram)
    return marks


def unlikelihood(model: Qwen2ForCausalLM, ids: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    """(2,): sequence-level unlikelihood (Welleck et al. 2019) of the marked tokens, and the early exit's KL."""
    states = hidden_states(model, ids[:, :-1])
    logits = logits_of(model, states[-1])
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)  # (batch, tokens - 1)
    penalty = -torch.log1p(-chosen.exp().clamp(max=1 - 1e-5))
    wanted = marks[:, 1:].float()
    early = logits_of(model, states[EARLY_EXIT_LAYER - 1][:EXIT_ROWS])
    exit_loss = divergence(logits[:EXIT_ROWS].detach(), early)
    return torch.stack([(penalty * wanted).sum() / wanted.sum().clamp(min=1), exit_loss])


@torch.no_grad()
def continue_greedily(model: Qwen2ForCausalLM, prefix: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """(batch, prefix + new_tokens): greedy text that runs on over an end of text."""
    model.eval()
    mask = torch.ones_like(prefix)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ids = model.generate(
            prefix, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    model.train()
    return ids


# ---------------------------------------------------------------- training


@dataclass
class Stage:
    """One training stage: a model, its optimisers, a loss of a step and how long it runs."""

    name: str
    model: Qwen2ForCausalLM
    optimisers: list[torch.optim.Optimizer]
    loss: Callable[[int], torch.Tensor]  # step -> (parts,) losses, the total first
    steps: int
    work: Path
    seconds: float = 0.0

    @property
    def checkpoint(self) -> Path:
        return self.work / f"{self.name}.pt"

    def save(self, step: int) -> None:
        state = {"step": step, "model": self.model.state_dict(), "seconds": self.seconds}
        state["optimisers"] = [optimiser.state_dict() for optimiser in self.optimisers]
        torch.save(state, self.checkpoint.with_suffix(".part"))
        os.replace(self.checkpoint.with_suffix(".part"), self.checkpoint)

    def resume(self) -> int:
        if not self.checkpoint.exists():
            return 0
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.seconds = state["seconds"]
        return state["step"]


def rate_factor(step: int, steps: int) -> float:
    """Warm-up, constant, then linear to zero."""
    return min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / (DECAY_SHARE * steps))


def run_stage(stage: Stage) -> None:
    """Train from the last checkpoint to the end of the stage."""
    base_rates = [[group["lr"] for group in optimiser.param_groups] for optimiser in stage.optimisers]
    first = stage.resume()
    stage.model.train()
    for step in range(first, stage.steps):
        start = time.perf_counter()
        for optimiser, rates in zip(stage.optimisers, base_rates, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * rate_factor(step, stage.steps)
        losses = stage.loss(step)
        losses[0].backward()
        norm = torch.nn.utils.clip_grad_norm_(stage.model.parameters(), CLIP_NORM)
        if not torch.isfinite(norm):
            raise SystemExit(f"{stage.name}: gradient not finite at step {step}")
        for optimiser in stage.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        stage.seconds += time.perf_counter() - start
        if step % LOG_STEPS == 0 or step + 1 == stage.steps:
            parts = " ".join(f"{value:.3f}" for value in losses.tolist())
            log(f"{stage.name:12s} step {step:5d}/{stage.steps} losses {parts} norm {norm:.2f} {stage.seconds:.0f} s")
        if (step + 1) % CHECKPOINT_STEPS == 0 or step + 1 == stage.steps:
            stage.save(step + 1)


def optimisers_of(model: Qwen2ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside layers, Adam for everything else."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    muon = torch.optim.Muon(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=WEIGHT_DECAY)
    return [muon, torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0)]


def amp() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def train_target(options: argparse.Namespace, windows: Windows) -> Qwen2ForCausalLM:
    """Language modelling, with the early exit's loss beside it."""
    model = new_model(TARGET_SHAPE, SEED)
    compiled = torch.compile(target_loss, dynamic=False, disable=options.no_compile)

    def loss(step: int) -> torch.Tensor:
        ids = windows.draw(1, step, BATCH_WINDOWS, CONTEXT_TOKENS + 1)
        with amp():
            entropy, early = compiled(model, ids)
        return torch.stack([entropy + EXIT_WEIGHT * early, entropy, early])

    run_stage(Stage("target", model, optimisers_of(model), loss, options.target_steps, options.work_dir))
    return model


def train_against_repetition(options: argparse.Namespace, windows: Windows, model: Qwen2ForCausalLM) -> None:
    """Tune the target so that its greedy text repeats itself less, with language modelling beside it."""
    compiled = torch.compile(target_loss, dynamic=False, disable=options.no_compile)
    compiled_penalty = torch.compile(unlikelihood, dynamic=False, disable=options.no_compile)

    def loss(step: int) -> torch.Tensor:
        prefix = windows.draw(2, 2 * step, REPEAT_ROWS, REPEAT_PREFIX_TOKENS)
        ids = continue_greedily(model, prefix, REPEAT_NEW_TOKENS)
        marks = repeated(ids, REPEAT_PREFIX_TOKENS)
        text = windows.draw(2, 2 * step + 1, BATCH_WINDOWS // 4, LONG_CONTEXT_TOKENS + 1)
        with amp():
            entropy, early = compiled(model, text)
            penalty, early_own = compiled_penalty(model, ids, marks)
        total = entropy + REPEAT_WEIGHT * penalty + EXIT_WEIGHT * (early + early_own)
        share = marks[:, REPEAT_PREFIX_TOKENS:].float().mean()
        return torch.stack([total, entropy, penalty, early, early_own, share])

    adam = torch.optim.AdamW(model.parameters(), lr=TUNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    run_stage(Stage("repetition", model, [adam], loss, options.repetition_steps, options.work_dir))


def own_text(options: argparse.Namespace, windows: Windows, target: Qwen2ForCausalLM) -> torch.Tensor:
    """(rows, prefix + new): the target's greedy continuations of corpus text, made once."""
    path = options.work_dir / "own_text.pt"
    if not path.exists():
        rows = []
        for step in range(options.own_text_rows // 128):
            prefix = windows.draw(3, step, 128, REPEAT_PREFIX_TOKENS)
            rows.append(continue_greedily(target, prefix, CONTEXT_TOKENS // 2 + 1 - REPEAT_PREFIX_TOKENS))
            log(f"own text     rows {128 * (step + 1)}")
        torch.save(torch.cat(rows), path)
    return torch.load(path, weights_only=True)


def train_draft(options: argparse.Namespace, windows: Windows, target: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    """Distil the draft from the target, on corpus text and on the target's own greedy text."""
    rows = own_text(options, windows, target)
    draft = new_model(DRAFT_SHAPE, SEED + 1)
    target.eval().requires_grad_(False)
    compiled = torch.compile(draft_loss, dynamic=False, disable=options.no_compile)
    teach = torch.compile(lambda ids: logits_of(target, hidden_states(target, ids)[-1]), disable=options.no_compile)

    def part(ids: torch.Tensor) -> torch.Tensor:
        with amp():
            with torch.no_grad():
                teacher = teach(ids[:, :-1])
            return compiled(draft, ids, teacher)

    def loss(step: int) -> torch.Tensor:
        text = windows.draw(4, step, (BATCH_WINDOWS - OWN_TEXT_SHARE) // 2, LONG_CONTEXT_TOKENS + 1)
        chosen = np.random.default_rng([SEED, 5, step]).integers(0, len(rows), size=2 * OWN_TEXT_SHARE)
        entropy, distance = part(text)
        _, own_distance = part(rows[chosen])
        mean = ((BATCH_WINDOWS - OWN_TEXT_SHARE) * distance + OWN_TEXT_SHARE * own_distance) / BATCH_WINDOWS
        total = (1 - DISTIL_WEIGHT) * entropy + DISTIL_WEIGHT * mean
        return torch.stack([total, entropy, distance, own_distance])

    run_stage(Stage("draft", draft, optimisers_of(draft), loss, options.draft_steps, options.work_dir))
    return draft


@torch.no_grad()
def held_out_losses(model: Qwen2ForCausalLM, windows: Windows) -> dict[str, float]:
    """Cross-entropy in nats per token by category, and their mean by the training weights."""
    losses = {}
    for name in CATEGORY_WEIGHTS:
        ids = windows.category(name, HELD_OUT_WINDOWS, CONTEXT_TOKENS + 1)
        logits = logits_of(model, hidden_states(model, ids[:, :-1])[-1])
        losses[name] = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    losses["all"] = sum(CATEGORY_WEIGHTS[name] * losses[name] for name in CATEGORY_WEIGHTS)
    return losses


# ---------------------------------------------------------------- export and main


def export(model: Qwen2ForCausalLM, tokenizer_dir: Path, folder: Path, early_exit: int | None) -> None:
    """Write a model with its tokenizer in float16 beside ``folder``, then put it in its place."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    copy = Qwen2ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    if early_exit is not None:
        copy.config.early_exit_layer = early_exit
    copy.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0, do_sample=False)
    copy.half().save_pretrained(fresh)
    for path in tokenizer_dir.iterdir():
        shutil.copy(path, fresh / path.name)
    check_tokenizer(tokenizer_dir, fresh)
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        os.replace(folder, old)
    os.replace(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)


def check_tokenizer(trained: Path, shipped: Path) -> None:
    """Fail unless ``AutoTokenizer`` gives the ids that the corpus was encoded with."""
    first, second = PreTrainedTokenizerFast.from_pretrained(trained), AutoTokenizer.from_pretrained(shipped)
    for prompt in PROMPTS:
        if first(prompt.text).input_ids != second(prompt.text).input_ids:
            raise SystemExit(f"AutoTokenizer splits prompt {prompt.name} in another way than training did")


def measure(options: argparse.Namespace) -> None:
    """Losses of the shipped weights on trained and held-out windows; then everything else, and the README."""
    losses = {}
    for role in ("target", "draft"):
        model = Qwen2ForCausalLM.from_pretrained(options.out_dir / role, dtype=torch.float32)
        for split in ("train", "held_out"):
            losses[f"{role}_{split}"] = held_out_losses(model, Windows(options.work_dir / "tokens.npz", split))
    stages = {}
    for name in ("target", "repetition", "draft"):
        if not (options.work_dir / f"{name}.pt").exists():
            continue  # a stage of zero steps
        state = torch.load(options.work_dir / f"{name}.pt", weights_only=True)
        stages[name] = {"steps": state["step"], "seconds": round(state["seconds"])}
    sizes = json.loads((options.work_dir / "corpus.json").read_text(encoding="utf-8"))
    evaluate.evaluate(options.out_dir, {"losses": losses, "stages": stages, "corpus": sizes})


def keep_freed_memory() -> None:
    """Tell glibc to reuse freed memory: returning each large tensor to the system costs more than computing it."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # another C library: slower, nothing else
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1), (M_TOP_PAD, 1 << 28)):
        mallopt(option, value)


def log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus-dir", type=Path, default=Path("build/corpus"), help="unpacked sources")
    parser.add_argument("--work-dir", type=Path, default=Path("build/tiny_pair"), help="tokens, checkpoints")
    parser.add_argument("--out-dir", type=Path, default=HERE, help="where target/, draft/ and README.md go")
    parser.add_argument("--target-steps", type=int, default=TARGET_STEPS)
    parser.add_argument("--repetition-steps", type=int, default=UNLIKELIHOOD_STEPS)
    parser.add_argument("--draft-steps", type=int, default=DRAFT_STEPS)
    parser.add_argument("--own-text-rows", type=int, default=OWN_TEXT_ROWS)
    parser.add_argument("--no-compile", action="store_true", help="where no C++ compiler is found; about 1.4 x slower")
    parser.add_argument("--prepare-only", action="store_true", help="stop after corpus and tokenizer")
    return parser.parse_args()


def main() -> None:
    options = parse()
    keep_freed_memory()
    torch.set_num_threads(THREADS)
    options.work_dir.mkdir(parents=True, exist_ok=True)
    prepare(options.corpus_dir, options.work_dir)
    if options.prepare_only:
        return
    windows = Windows(options.work_dir / "tokens.npz", "train")
    target = train_target(options, windows)
    train_against_repetition(options, windows, target)
    draft = train_draft(options, windows, target)
    options.out_dir.mkdir(parents=True, exist_ok=True)
    export(target, options.work_dir / "tokenizer", options.out_dir / "target", EARLY_EXIT_LAYER)
    export(draft, options.work_dir / "tokenizer", options.out_dir / "draft", None)
    measure(options)


if __name__ == "__main__":
    main()
