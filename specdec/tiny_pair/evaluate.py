"""Measure the embedded pair on the eight prompts and write ``figures.json`` and ``README.md`` beside the weights.

    python specdec/tiny_pair/evaluate.py

Weights are read in float16 and computed in float32, as the suite does on a CPU. ``train.py`` calls ``evaluate`` as its
last stage with what only it knows (losses, times, corpus); alone, this script keeps those from ``figures.json``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from specdec.prompts import PROMPTS  # noqa: E402
from specdec.tiny_pair.corpus import SOURCES  # noqa: E402

NEW_TOKENS = 64  # per prompt, as in the benchmark
GAMMA = 4  # proposals per step of the speculative run
NGRAM = 4  # tokens; share of distinct ones shows loops
TIMING_REPEATS = 9  # per model, alternating; the median is reported
THREADS = 2  # of the timing


@dataclass
class Pair:
    """Both models in float32 and the tokenizer."""

    target: Qwen2ForCausalLM
    draft: Qwen2ForCausalLM
    tokenizer: PreTrainedTokenizerFast


def load(folder: Path) -> Pair:
    """The pair as shipped in ``folder``; the two tokenizers must be identical."""
    roles = ("target", "draft")
    models = [Qwen2ForCausalLM.from_pretrained(folder / role, dtype=torch.float32).eval() for role in roles]
    files = [(folder / role / "tokenizer.json").read_bytes() for role in roles]
    if files[0] != files[1]:
        raise SystemExit("the two tokenizers differ")
    return Pair(*models, AutoTokenizer.from_pretrained(folder / "target"))


@torch.no_grad()
def greedy(model: Qwen2ForCausalLM, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """(1, n + new_tokens): greedy continuation that runs on over an end of text."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    return model.generate(ids, max_new_tokens=new_tokens, **options)


@torch.no_grad()
def predictions(model: Qwen2ForCausalLM, ids: torch.Tensor, layers: int | None = None) -> torch.Tensor:
    """(n,): the greedy token after each position, from all layers or from the first ``layers``."""
    if layers is None:
        return model(ids).logits[0].argmax(-1)
    hidden = model.model(ids, output_hidden_states=True).hidden_states[layers]  # (1, n, hidden), before the norm
    return model.lm_head(model.model.norm(hidden))[0].argmax(-1)


def agreement(predicted: torch.Tensor, ids: torch.Tensor, prompt_tokens: int) -> float:
    """Share of the new tokens in ``ids`` (1, n) that ``predicted`` names, each after the true text before it."""
    return (predicted[prompt_tokens - 1 : -1] == ids[0, prompt_tokens:]).float().mean().item()


def speculate(pair: Pair, ids: torch.Tensor, new_tokens: int) -> dict[str, float]:
    """A plain speculative run without caches: counts, and whether its text is the target's own."""
    text, accepted, rejections, steps, proposed = greedy(pair.target, ids, 1), 0, 0, 0, 0
    while text.shape[1] < ids.shape[1] + new_tokens:
        count = min(GAMMA, ids.shape[1] + new_tokens - text.shape[1] - 1)
        proposal = greedy(pair.draft, text, count)[0, text.shape[1] :] if count else text[0, :0]
        scored = predictions(pair.target, torch.cat([text, proposal[None]], dim=1))[text.shape[1] - 1 :]
        agrees = (proposal == scored[:count]).long().cumprod(0).sum().item()
        text = torch.cat([text, scored[None, : agrees + 1]], dim=1)
        accepted, steps, proposed = accepted + agrees, steps + 1, proposed + count
        rejections += agrees < count
    same = torch.equal(text, greedy(pair.target, ids, new_tokens))
    counts = {"accepted": accepted, "rejections": rejections, "steps": steps, "proposed": proposed}
    return counts | {"alpha": accepted / (accepted + rejections), "same_text": same}


def distinct_ngrams(tokens: list[int]) -> float:
    """Share of different ones among all n-grams of the tokens."""
    ngrams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return len(set(ngrams)) / len(ngrams)


def measure_prompt(pair: Pair, text: str) -> dict:
    """Everything measured on one prompt."""
    ids = pair.tokenizer(text, return_tensors="pt").input_ids
    full = greedy(pair.target, ids, NEW_TOKENS)
    new = full[0, ids.shape[1] :].tolist()
    early = pair.target.config.early_exit_layer
    run = speculate(pair, ids, NEW_TOKENS)
    return {
        "prompt_tokens": ids.shape[1],
        "alpha_teacher_forced": agreement(predictions(pair.draft, full), full, ids.shape[1]),
        "alpha_speculative": run["alpha"],
        "acceptance_rate": run["accepted"] / run["proposed"],
        "same_text": run["same_text"],
        "early_exit_agreement": agreement(predictions(pair.target, full, early), full, ids.shape[1]),
        "distinct_4grams": distinct_ngrams(new),
        "eos_at": new.index(0) if 0 in new else None,
        "text": pair.tokenizer.decode(new),
    }


def cost(pair: Pair) -> dict[str, float]:
    """Median milliseconds per token of greedy generation with a cache, one prompt, both models in turn."""
    torch.set_num_threads(THREADS)
    ids = pair.tokenizer(PROMPTS[2].text, return_tensors="pt").input_ids
    times: dict[str, list[float]] = {"target": [], "draft": []}
    for repeat in range(TIMING_REPEATS + 1):
        for role, model in (("target", pair.target), ("draft", pair.draft)):
            start = time.perf_counter()
            greedy(model, ids, NEW_TOKENS)
            if repeat:  # the first warms up
                times[role].append((time.perf_counter() - start) / NEW_TOKENS * 1e3)
    medians = {f"{role}_ms_per_token": statistics.median(values) for role, values in times.items()}
    return medians | {"cost_ratio": medians["target_ms_per_token"] / medians["draft_ms_per_token"]}


def sizes(pair: Pair, folder: Path) -> dict[str, dict]:
    """Parameters, shape and bytes of both models."""
    result = {}
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        config = model.config
        result[role] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "heads": config.num_attention_heads,
            "key_value_heads": config.num_key_value_heads,
            "feed_forward": config.intermediate_size,
            "bytes_of_folder": sum(path.stat().st_size for path in (folder / role).iterdir()),
        }
    return result | {"vocabulary": len(pair.tokenizer)}


def evaluate(folder: Path, known: dict) -> None:
    """Measure the pair in ``folder`` and write its figures and README; ``known`` are figures of the training."""
    pair = load(folder)
    figures = known | {"sizes": sizes(pair, folder), "cost": cost(pair)}
    figures["early_exit_layer"] = pair.target.config.early_exit_layer
    figures["prompts"] = {prompt.name: measure_prompt(pair, prompt.text) for prompt in PROMPTS}
    (folder / "figures.json.part").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    os.replace(folder / "figures.json.part", folder / "figures.json")
    (folder / "README.md").write_text(readme(figures), encoding="utf-8")


# ---------------------------------------------------------------- README


def table(header: list[str], rows: list[list]) -> str:
    """A Markdown table; fractions with two decimals."""

    def cell(value: object) -> str:
        return f"{value:.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)

    lines = [header, ["---"] * len(header), *[[cell(value) for value in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def model_table(figures: dict) -> str:
    keys = ("parameters", "layers", "hidden", "feed_forward", "heads", "key_value_heads", "bytes_of_folder")
    rows = [[key.replace("_", " "), figures["sizes"]["target"][key], figures["sizes"]["draft"][key]] for key in keys]
    for split in ("train", "held_out"):
        name = f"loss, {'trained' if split == 'train' else 'held-out'} windows (nats per token)"
        rows.append([name, *[figures["losses"][f"{role}_{split}"]["all"] for role in ("target", "draft")]])
    rows.append(["ms per token", *[figures["cost"][f"{role}_ms_per_token"] for role in ("target", "draft")]])
    return table(["", "target", "draft"], rows)


def prompt_table(figures: dict) -> str:
    keys = ("alpha_teacher_forced", "alpha_speculative", "acceptance_rate", "early_exit_agreement", "distinct_4grams")
    rows = [[name, *[row[key] for key in keys]] for name, row in figures["prompts"].items()]
    means = [statistics.mean(row[key] for row in figures["prompts"].values()) for key in keys]
    header = ["prompt", "alpha, teacher-forced", f"alpha, gamma {GAMMA}", "acceptance rate", "early exit"]
    header.append("distinct 4-grams")
    return table(header, [*rows, ["mean", *means]])


def corpus_tables(figures: dict) -> str:
    rows = [
        [name, row["tokens"], row["held_out_tokens"], row["pieces_removed"]] for name, row in figures["corpus"].items()
    ]
    counts = {source: count for row in figures["corpus"].values() for source, count in row["characters"].items()}
    sources = [[name, package, licence, counts.get(name, 0)] for name, (package, licence) in SOURCES.items()]
    first = table(["category", "tokens", "held-out tokens", "pieces removed"], rows)
    return first + "\n\n" + table(["source", "package", "licence", "characters"], sources)


def texts(figures: dict) -> str:
    names = {prompt.name: prompt.text for prompt in PROMPTS}
    blocks = []
    for name, row in figures["prompts"].items():
        end = "" if row["eos_at"] is None else f" (end of text at token {row['eos_at']})"
        blocks.append(f"**{name}**{end}\n\n````text\n{names[name]}⟶{row['text']}\n````")
    return "\n\n".join(blocks)


def results_part(figures: dict) -> str:
    """What the pair is and what it does on the prompts."""
    cost_ratio = figures["cost"]["cost_ratio"]
    vocabulary = figures["sizes"]["vocabulary"]
    return f"""# The embedded pair

Two small language models of one family (`Qwen2ForCausalLM`) with one tokenizer ({vocabulary:,} tokens):
a real trained target, and a draft distilled from it. They let the suite run and be tested without a network.
They are far too small to be useful writers or programmers: their text is grammatical in places and means little. The
weights are stored in float16; the figures below were measured on those, computed in float32. This file is written by
`evaluate.py`; the same figures stand in `figures.json`.

{model_table(figures)}

Cost ratio c = {cost_ratio:.2f} (greedy, one request, {THREADS} CPU threads, float32).

The target's own final norm and head also read the hidden state after layer {figures["early_exit_layer"]}
(`early_exit_layer` in its `config.json`), trained with an extra loss.

## On the eight prompts

Greedy, {NEW_TOKENS} new tokens, running on over an end of text. *alpha, teacher-forced*: share of the target's tokens
that the draft names after the same text. *alpha, gamma {GAMMA}*: accepted / (accepted + rejections) of a speculative
run. *acceptance rate*: accepted / proposed. *early exit*: share of the target's tokens that its layer
{figures["early_exit_layer"]} names. *distinct 4-grams*: share of different ones in the new tokens (loops lower it).

{prompt_table(figures)}
"""


def making_part(figures: dict) -> str:
    """How the pair was made, from what, and what it writes."""
    spent = figures["stages"].items()
    stages = "; ".join(f"{name}: {stage['steps']:,} steps, {stage['seconds'] / 60:.0f} min" for name, stage in spent)
    return f"""## How it was made

    python specdec/tiny_pair/train.py --corpus-dir build/corpus --work-dir build/tiny_pair

Time of the training steps on two CPU cores that other work shared:
{stages}.
The run was interrupted and resumed from checkpoints; batches and rates are those of an unbroken one.

The stage *repetition* tunes the target with sequence-level unlikelihood (Welleck et al. 2019), since small models loop
under greedy decoding; the draft is distilled afterwards, on corpus text and on the target's own greedy text
(continuations of corpus text, none of the prompts).
Training windows were at most 512 tokens long; beyond that the pair works but was never trained.

## Text

Packages fetched by name with `apt-get` and `pip`, or found in the running Python. A piece (about 6,000 characters) that
has an 8-token window of one of the prompts is left out.

{corpus_tables(figures)}

## Greedy texts

The prompt stands before the arrow.

{texts(figures)}
"""


def readme(figures: dict) -> str:
    """The README of the pair, every number of it from ``figures``."""
    return results_part(figures) + "\n" + making_part(figures)


if __name__ == "__main__":
    evaluate(
        HERE,
        {k: v for k, v in json.loads((HERE / "figures.json").read_text(encoding="utf-8")).items() if k != "prompts"},
    )
