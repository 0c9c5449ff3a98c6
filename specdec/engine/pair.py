"""Which two models: from where, on which device, in which dtype, and whether they can work together.

Everything that can be refused is refused here, in one line, before anything is measured.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from specdec.engine.device import SPREAD, choose_device, nvidia_problem
from specdec.errors import InputError
from specdec.prompts import PROMPTS, Prompt

TINY_FOLDER = Path(__file__).resolve().parent.parent / "tiny_pair"
PRESETS = {
    "qwen2": ("Qwen/Qwen2-0.5B", "Qwen/Qwen2-1.5B"),
    "tiny": (str(TINY_FOLDER / "draft"), str(TINY_FOLDER / "target")),
}
_QWEN2_COMMON = {
    "vocab_size": 151_936,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": True,
}
# The study's architectures as published with the models, so that --random-weights needs no download.
SHIPPED_CONFIGS = {
    "Qwen/Qwen2-0.5B": Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, **_QWEN2_COMMON
    ),
    "Qwen/Qwen2-1.5B": Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, **_QWEN2_COMMON
    ),
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
HASH_BLOCK_BYTES = 1 << 24  # large enough that Python's loop costs nothing
HUB_TIMEOUT_S = 5  # a Hub that does not answer the size request in this time counts as no network
MEMORY_MARGIN = 1.1  # caches, activations and the loader's working space, on top of the weights
WAYS_OUT = "use --pair tiny, or local files with --draft X --target Y"
HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]  # never pickles, never code


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


@dataclass(frozen=True)
class _Source:
    """Where one model comes from: a folder with config and safetensors, a GGUF file, or a config alone."""

    name: str
    folder: Path | None = None
    gguf: str | None = None
    config: transformers.PretrainedConfig | None = None


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
    with _quiet_transformers():
        sources = [_resolve(reference, random_weights) for reference in references]
        configs = [_read_config(source) for source in sources]
        devices = _place(sources, configs, devices, weights_dtype)
        tokenizer = None if random_weights else _shared_tokenizer(sources, configs)
        models = [
            _load_model(source, config, place, weights_dtype)
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
    return torch.float16 if device.type == "cuda" else torch.float32


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


def _resolve(reference: str, random_weights: bool) -> _Source:
    """Find a model's files, downloading those of a Hub model if need be; with random weights its config alone."""
    if random_weights and reference in SHIPPED_CONFIGS:
        return _Source(reference, config=SHIPPED_CONFIGS[reference])
    source = _find(reference, HUB_FILES if not random_weights else ["*.json"])
    return _Source(source.name, config=_read_config(source)) if random_weights else source


def _find(reference: str, hub_files: list[str]) -> _Source:
    path = Path(reference).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise InputError(f"no such file: {reference}")
        return _Source(path.name, folder=path.parent, gguf=path.name)
    if path.is_dir():
        name = f"tiny {path.name}" if path.parent == TINY_FOLDER else path.resolve().name
        if not (path / "config.json").is_file():
            raise InputError(f"no model in {reference}: it has no config.json")
        return _Source(name, folder=path)
    if path.exists() or reference.startswith((".", "/", "~")) or reference.count("/") != 1:
        raise InputError(f"{reference!r} is neither a Hub id (owner/name), a folder, nor a .gguf file that exists")
    return _Source(reference, folder=_hub_folder(reference, hub_files))


def _hub_folder(model_id: str, patterns: list[str]) -> Path:
    """Return the folder of a Hub model: the local cache's if it is whole, else a download after a look at the room."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model_id, allow_patterns=patterns, local_files_only=True))
        if any(folder.glob(patterns[0])):
            return folder
    except Exception:
        pass
    if patterns == HUB_FILES:
        _check_download(model_id)
    try:
        return Path(snapshot_download(model_id, allow_patterns=patterns))
    except Exception as error:
        raise InputError(f"{model_id} could not be downloaded: {_first_line(error)}; {WAYS_OUT}") from error


def _check_download(model_id: str) -> None:
    """Say how large the download is; refuse an unknown model, no network, no safetensors, or too little disk."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        files = HfApi().model_info(model_id, timeout=HUB_TIMEOUT_S, files_metadata=True).siblings
    except (RepositoryNotFoundError, GatedRepoError, HFValidationError) as error:
        raise InputError(f"the Hub has no model {model_id!r} that this account may read; {WAYS_OUT}") from error
    except Exception as error:
        raise InputError(f"{model_id} is not in the local cache and the Hub can't be reached; {WAYS_OUT}") from error
    needed = sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors"))
    if not needed:
        raise InputError(f"{model_id} has no .safetensors weights; {WAYS_OUT}")
    cache = Path(HF_HUB_CACHE)
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    if needed > free:
        raise InputError(f"{model_id} needs {gigabytes(needed)} of disk, {gigabytes(free)} are free; {WAYS_OUT}")
    print(f"downloading {model_id}: {gigabytes(needed)} ({gigabytes(free)} free)", flush=True)


def gigabytes(count: float) -> str:
    """Return a number of bytes for people."""
    return f"{count / 1e9:.1f} GB"


def _read_config(source: _Source) -> transformers.PretrainedConfig:
    if source.config is not None:
        return source.config
    if source.gguf:
        _check_gguf(source)
    try:
        config = AutoConfig.from_pretrained(source.folder, **_gguf_argument(source))
    except Exception as error:
        raise InputError(f"{source.name} can't be read: {_first_line(error)}") from error
    architectures = config.architectures or []
    if getattr(config, "is_encoder_decoder", False) or (
        architectures and not any("CausalLM" in a or "LMHead" in a for a in architectures)
    ):
        raise InputError(f"{source.name} is not a causal language model but {', '.join(architectures)}")
    return config


def _check_gguf(source: _Source) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise InputError(f"{source.name} needs the package gguf: pip install gguf") from error
    with open(source.folder / source.gguf, "rb") as file:
        if file.read(4) != b"GGUF":
            raise InputError(f"{source.name} is not a GGUF file: it does not begin with GGUF")


def _gguf_argument(source: _Source) -> dict:
    return {"gguf_file": source.gguf} if source.gguf else {}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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


def _parameters(source: _Source, config: transformers.PretrainedConfig) -> int:
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config).num_parameters()
        except ValueError as error:
            raise InputError(f"{source.name} is not a causal language model: {_first_line(error)}") from error


def _free_memory(device: torch.device) -> float | None:
    """Return the free bytes of ``device``: all GPUs' together where a model is to be spread; None if unknown."""
    if device.type == "cpu":
        return psutil.virtual_memory().available
    if device == SPREAD:
        return sum(_free_gpu_memory().values())
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _free_gpu_memory() -> dict[int, int]:
    return {index: torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())}


def _shared_tokenizer(sources, configs) -> transformers.PreTrainedTokenizerBase:
    """Return the tokenizer of the pair, once both models' tokenizers were found to be the same."""
    tokenizers = []
    for source in sources:
        try:
            tokenizers.append(AutoTokenizer.from_pretrained(source.folder, **_gguf_argument(source)))
        except Exception as error:
            raise InputError(f"{source.name} has no tokenizer that can be read: {_first_line(error)}") from error
    draft, target = tokenizers
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
                f"{source.name} has logits for {config.vocab_size} ids, fewer than its tokenizer's {len(target)}"
            )
    return target


def _load_model(source: _Source, config, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    if source.folder is None:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return _finish(model.to(device), source)
    print(f"loading {source.name}", flush=True)
    options = {"config": config, "dtype": dtype, "output_loading_info": True, **_gguf_argument(source)}
    if source.gguf:
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    else:
        options["use_safetensors"] = True
    if device == SPREAD:
        options |= {"device_map": "auto", "max_memory": _free_gpu_memory()}  # GPUs only: nothing goes to CPU or disk
    try:
        model, info = AutoModelForCausalLM.from_pretrained(source.folder, **options)
    except Exception as error:
        raise InputError(f"{source.name} can't be loaded: {_first_line(error)}") from error
    lacking = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
    if lacking:
        raise InputError(f"{source.name} lacks {len(lacking)} weights, {lacking[0]} among them")
    gc.collect()
    return _finish(model if device == SPREAD else model.to(device), source)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep the library's progress bars and warnings off the terminal; what matters is checked and said here."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # dequantising draws a bar of its own
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _finish(model: torch.nn.Module, source: _Source) -> torch.nn.Module:
    model.display_name = source.name
    return model.eval().requires_grad_(False)


def _facts(source: _Source, model: torch.nn.Module) -> ModelFacts:
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    unread = 0 if tied else model.get_input_embeddings().weight.numel()
    parameters = model.num_parameters()
    return ModelFacts(
        name=source.name,
        sha256=_weights_sha256(source),
        parameters=parameters,
        layers=model.config.num_hidden_layers,
        hidden_size=model.config.hidden_size,
        tied_embeddings=tied,
        bytes_per_token=(parameters - unread) * model.dtype.itemsize,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
    )


def _weights_sha256(source: _Source) -> str | None:
    if source.folder is None:
        return None
    files = [source.folder / source.gguf] if source.gguf else sorted(source.folder.glob("*.safetensors"))
    sums = []
    for path in files:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(HASH_BLOCK_BYTES):
                digest.update(block)
        sums.append(digest.hexdigest())
    return sums[0] if len(sums) == 1 else hashlib.sha256(json.dumps(sums).encode()).hexdigest()
