"""Which two models, on which device, in which dtype, and whether they can work together.

Everything that can be refused is refused here or in :mod:`specdec.engine.sources`, in one line, before anything is
measured.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, dataclass

import psutil
import torch
import transformers
from transformers import AutoModelForCausalLM

from specdec.engine.device import SPREAD, choose_device, free_gpu_memory, nvidia_problem
from specdec.engine.sources import (
    TINY_FOLDER,
    Source,
    first_line,
    gigabytes,
    load_model,
    load_tokenizer,
    quiet_transformers,
    read_config,
    resolve,
    weights_sha256,
)
from specdec.errors import InputError
from specdec.prompts import PROMPTS, Prompt

PRESETS = {
    "qwen2": ("Qwen/Qwen2-0.5B", "Qwen/Qwen2-1.5B"),
    "tiny": (str(TINY_FOLDER / "draft"), str(TINY_FOLDER / "target")),
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MEMORY_MARGIN = 1.1  # caches, activations and the loader's working space, on top of the weights


@dataclass(frozen=True)
class ModelFacts:
    """What the manifest says of one model. ``bytes_per_token``: weights that decoding one token must read."""

    name: str
    sha256: str | None  # of the weight file, or of the sums of several; None for random weights
    parameters: int
    layers: int
    hidden_size: int
    tied_embeddings: bool
    bytes_per_token: int
    device: str
    dtype: str


@dataclass(frozen=True)
class Pair:
    """A draft and a target that share a tokenizer (None for random weights), ready to run."""

    name: str
    draft: torch.nn.Module
    target: torch.nn.Module
    tokenizer: transformers.PreTrainedTokenizerBase | None
    draft_facts: ModelFacts
    target_facts: ModelFacts

    @property
    def label(self) -> str:
        """The pair in one phrase, so that no table can be taken for one of another pair."""
        sizes = f"{millions(self.draft_facts.parameters)} / {millions(self.target_facts.parameters)} parameters"
        note = ", embedded and small: not a run of the study" if self.name == "tiny" else ""
        return f"{self.name} ({self.draft_facts.name} / {self.target_facts.name}, {sizes}{note})"

    def manifest_entry(self) -> dict:
        """Return the pair as the manifest stores it."""
        return {"name": self.name, "draft": asdict(self.draft_facts), "target": asdict(self.target_facts)}


def load_pair(
    name: str = "auto",
    *,
    draft: str | None = None,
    target: str | None = None,
    random_weights: bool = False,
    device: str = "auto",
    draft_device: str | None = None,
    dtype: str = "auto",
) -> Pair:
    """Load a draft and a target that can work together.

    ``name``: ``auto``, ``qwen2`` or ``tiny``. ``draft`` and ``target`` name any other pair: Hub id, folder or
    ``.gguf`` file. ``random_weights``: the pair's architecture without its weights, for timing. ``device``: ``auto``,
    ``cpu``, ``cuda``, ``cuda:N``, ``mps``, or ``spread`` (over several GPUs). ``draft_device``: the draft's, if
    another. ``dtype``: ``auto`` (float16 on CUDA, else float32), ``float32``, ``float16`` or ``bfloat16``.

    Raises InputError, in one line, for whatever can't be loaded or can't work together.
    """
    target_device = choose_device(device)
    devices = (choose_device(draft_device) if draft_device else target_device, target_device)
    if dtype != "auto" and dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}; known: auto, {', '.join(DTYPES)}")
    weights_dtype = DTYPES[dtype] if dtype != "auto" else _default_dtype(target_device)
    pair_name, references = _choose(name, draft, target, target_device)
    with quiet_transformers():
        sources = [resolve(reference, random_weights) for reference in references]
        configs = [read_config(source) for source in sources]
        devices = _place(sources, configs, devices, weights_dtype)
        tokenizer = None if random_weights else _shared_tokenizer(sources, configs)
        models = [
            load_model(source, config, place, weights_dtype)
            for source, config, place in zip(sources, configs, devices, strict=True)
        ]
    vocab = min(config.vocab_size for config in configs)
    for model in models:
        model.usable_vocab = vocab if tokenizer is None else min(vocab, len(tokenizer))
    facts = [_facts(source, model) for source, model in zip(sources, models, strict=True)]
    suffix = " with random weights" if random_weights else ""
    return Pair(pair_name + suffix, *models, tokenizer, *facts)


def pair_from_flags(args: Namespace) -> Pair:
    """Set threads and seed as the flags say, print what ``auto`` chose, and load the pair."""
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if choice := explain_choice(args.pair, args.draft, args.device):
        print(choice)
    return load_pair(
        args.pair,
        draft=args.draft,
        target=args.target,
        random_weights=args.random_weights,
        device=args.device,
        draft_device=args.draft_device,
        dtype=args.dtype,
    )


def encode(pair: Pair, prompt: Prompt, chat: bool = False) -> torch.Tensor:
    """Return the prompt's ids, (1, n), through the chat template if asked. InputError if there is none, or no id."""
    if not chat:
        ids = pair.tokenizer(prompt.text).input_ids
    elif pair.tokenizer.chat_template is None:
        raise InputError(f"the tokenizer of {pair.name} has no chat template; leave out --chat")
    else:
        messages = [{"role": "user", "content": prompt.text}]
        text = pair.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = pair.tokenizer(text, add_special_tokens=False).input_ids
    if not ids:
        raise InputError(f"prompt {prompt.name} has no token")
    return torch.tensor([ids])


def eos_ids(pair: Pair) -> frozenset[int]:
    """Return the ids that end a text, as the target's generation config and the tokenizer name them."""
    configured = pair.target.generation_config.eos_token_id
    configured = [configured] if isinstance(configured, int) else configured or []
    own = pair.tokenizer.eos_token_id
    return frozenset([*configured] + ([own] if own is not None else []))


def millions(count: int) -> str:
    """Return a parameter count for people: 0.41 M, 494 M, 1544 M."""
    return f"{count / 1e6:.2f} M" if count < 10e6 else f"{count / 1e6:.0f} M"


def explain_choice(name: str, draft: str | None, device: str) -> str | None:
    """Return the two lines that say what ``auto`` chose and how to choose otherwise; None where the user chose."""
    if name != "auto" or draft is not None:
        return None
    chosen = choose_device(device)
    problem = nvidia_problem()
    if chosen.type == "cuda":
        return (
            "auto: CUDA works here, so the pair is qwen2, the study's.\n"
            "Choose otherwise with --pair tiny, or --draft X --target Y."
        )
    why = f"auto: {problem} So the pair is tiny" if problem else "auto: no GPU here, so the pair is tiny"
    return (
        f"{why}, the embedded one: real and trained, but small.\n"
        "Choose otherwise with --pair qwen2 (the study's, 4.1 GB to download), or --draft X --target Y."
    )


def _default_dtype(device: torch.device) -> torch.dtype:
    return torch.float16 if device.type == "cuda" or device == SPREAD else torch.float32


def _choose(name: str, draft: str | None, target: str | None, device: torch.device) -> tuple[str, tuple[str, str]]:
    if (draft is None) != (target is None):
        given, missing = ("--draft", "--target") if target is None else ("--target", "--draft")
        raise InputError(f"{given} needs {missing} beside it: a pair is two models")
    if draft is not None:
        return "custom", (draft, target)
    if name == "auto":
        name = "qwen2" if device.type == "cuda" else "tiny"
    if name not in PRESETS:
        raise InputError(f"unknown pair {name!r}; known: auto, {', '.join(PRESETS)}, or --draft X --target Y")
    return name, PRESETS[name]


def _place(sources, configs, devices, dtype: torch.dtype) -> list[torch.device]:
    """Return each model's device; a model that fits no single GPU is spread over several. InputError without room."""
    places: list[torch.device] = []
    left: dict[torch.device, float | None] = {}
    for source, config, device in zip(sources, configs, devices, strict=True):
        needed = _parameters(source, config) * dtype.itemsize * MEMORY_MARGIN
        room = left.setdefault(device, _free_memory(device))
        if room is not None and needed > room and device.type == "cuda" and torch.cuda.device_count() > 1:
            device, room = SPREAD, _free_memory(SPREAD)
        if room is not None and needed > room:
            raise InputError(
                f"{source.name} in {str(dtype).removeprefix('torch.')} needs {gigabytes(needed)} on {device}, "
                f"{gigabytes(room)} are free; try --dtype bfloat16, --draft-device, or a smaller pair"
            )
        left[device] = None if room is None else room - needed
        places.append(device)
    return places


def _parameters(source: Source, config: transformers.PretrainedConfig) -> int:
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False).num_parameters()
        except ValueError as error:
            raise InputError(f"{source.name} is not a causal language model: {first_line(error)}") from error


def _free_memory(device: torch.device) -> float | None:
    """Return the free bytes of ``device``: all GPUs' together where a model is to be spread; None if unknown."""
    if device.type == "cpu":
        return psutil.virtual_memory().available
    if device == SPREAD:
        return sum(free_gpu_memory().values())
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _shared_tokenizer(sources, configs) -> transformers.PreTrainedTokenizerBase:
    """Return the tokenizer of the pair, once both models' tokenizers were found to be the same."""
    draft, target = (load_tokenizer(source) for source in sources)
    if draft.get_vocab() != target.get_vocab() or any(
        draft(prompt.text).input_ids != target(prompt.text).input_ids for prompt in PROMPTS
    ):
        raise InputError(
            f"{sources[0].name} and {sources[1].name} have different tokenizers ({len(draft)} and {len(target)} "
            "entries): a draft must be of the target's family"
        )
    for source, config in zip(sources, configs, strict=True):
        if config.vocab_size < len(target):
            raise InputError(
                f"{source.name} has logits for {config.vocab_size} ids, fewer than its tokenizer's {len(target)}: "
                "one of them is another model's"
            )
    return target


def _facts(source: Source, model: torch.nn.Module) -> ModelFacts:
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    unread = 0 if tied else model.get_input_embeddings().weight.numel()
    parameters = model.num_parameters()
    return ModelFacts(
        name=source.name,
        sha256=weights_sha256(source),
        parameters=parameters,
        layers=model.config.num_hidden_layers,
        hidden_size=model.config.hidden_size,
        tied_embeddings=tied,
        bytes_per_token=(parameters - unread) * model.dtype.itemsize,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
    )
