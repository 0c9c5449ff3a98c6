"""Where one model comes from: a Hub id, a folder, a GGUF file, or a configuration alone; and loading it from there.

Weights come from safetensors or GGUF, never from a pickle, and no model's code is run.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from specdec.engine.device import SPREAD, free_gpu_memory
from specdec.errors import InputError
from specdec.run import readable

TINY_FOLDER = Path(__file__).resolve().parent.parent / "tiny_pair"
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
HASH_BLOCK_BYTES = 1 << 24  # large enough that Python's loop costs nothing
HUB_TIMEOUT_S = 5  # a Hub that does not answer the size request in this time counts as no network
WHOLE_FILES = "it takes whole .safetensors files, or one .gguf, of the same model as config.json"
WAYS_OUT = "use --pair tiny, or local files with --draft X --target Y"
HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]  # never pickles, never code
LOCAL = {"trust_remote_code": False, "local_files_only": True}  # no code of a model's, no question, no fetching


@dataclass(frozen=True)
class Source:
    """Where one model comes from: a folder with config and safetensors, a GGUF file, or a config alone."""

    name: str
    folder: Path | None = None
    gguf: str | None = None
    config: transformers.PretrainedConfig | None = None


def resolve(reference: str, random_weights: bool) -> Source:
    """Find a model's files, downloading those of a Hub model if need be; with random weights its config alone."""
    if random_weights and reference in SHIPPED_CONFIGS:
        return Source(reference, config=SHIPPED_CONFIGS[reference])
    source = _find(reference, HUB_FILES if not random_weights else ["*.json"])
    return Source(source.name, config=read_config(source)) if random_weights else source


def _find(reference: str, hub_files: list[str]) -> Source:
    path = Path(reference).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise InputError(f"no such file: {reference}")
        return Source(readable(path.name), folder=path.parent, gguf=path.name)
    if path.is_dir():
        name = f"tiny {path.name}" if path.parent == TINY_FOLDER else readable(path.resolve().name)
        if not (path / "config.json").is_file():
            raise InputError(f"no model in {reference}: it has no config.json; name the folder that holds one")
        return Source(name, folder=path)
    if path.exists() or reference.startswith((".", "/", "~")) or reference.count("/") != 1:
        raise InputError(
            f"{reference!r} is neither a Hub id (owner/name), a folder, nor a .gguf file that exists; {WAYS_OUT}"
        )
    return Source(reference, folder=_hub_folder(reference, hub_files))


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
        raise InputError(f"{model_id} could not be downloaded: {first_line(error)}; {WAYS_OUT}") from error


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


def read_config(source: Source) -> transformers.PretrainedConfig:
    if source.config is not None:
        return source.config
    if source.gguf:
        _check_gguf(source)
    try:
        config = AutoConfig.from_pretrained(source.folder, **LOCAL, **_gguf_argument(source))
    except Exception as error:
        raise InputError(f"{source.name} can't be read: {first_line(error)}") from error
    architectures = config.architectures or []
    if getattr(config, "is_encoder_decoder", False) or (
        architectures and not any("CausalLM" in a or "LMHead" in a for a in architectures)
    ):
        raise InputError(
            f"{source.name} is not a causal language model but {', '.join(architectures)}; a pair takes decoder-only "
            "ones"
        )
    return config


def _check_gguf(source: Source) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise InputError(f"{source.name} needs the package gguf: pip install gguf") from error
    with open(source.folder / source.gguf, "rb") as file:
        if file.read(4) != b"GGUF":
            raise InputError(f"{source.name} is not a GGUF file: it does not begin with GGUF")


def _gguf_argument(source: Source) -> dict:
    return {"gguf_file": source.gguf} if source.gguf else {}


def first_line(error: Exception) -> str:
    """Return an error's first line, and the second where the first ends with a colon."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])


def load_tokenizer(source: Source) -> transformers.PreTrainedTokenizerBase:
    """Return the tokenizer that lies beside the model; InputError if there is none that can be read."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, **LOCAL, **_gguf_argument(source))
    except Exception as error:
        raise InputError(f"{source.name} has no tokenizer that can be read: {first_line(error)}") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # made up for want of files
        raise InputError(f"{source.name} has no tokenizer that can be read: there is no tokenizer.json beside it")
    return tokenizer


def load_model(source: Source, config, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    if source.folder is None:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        return _finish(model.to(device), source)
    print(f"loading {source.name}", flush=True)
    reported = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # they are refused below
    options = {"config": config, "dtype": dtype, **reported, **LOCAL, **_gguf_argument(source)}
    if source.gguf:
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    else:
        options["use_safetensors"] = True
    if device == SPREAD:
        options |= {"device_map": "auto", "max_memory": free_gpu_memory()}  # GPUs only: nothing goes to CPU or disk
    own_bar = contextlib.redirect_stderr(io.StringIO()) if source.gguf else contextlib.nullcontext()
    try:
        with own_bar:  # dequantising draws one that can't be switched off
            model, info = AutoModelForCausalLM.from_pretrained(source.folder, **options)
    except Exception as error:
        raise InputError(f"{source.name} can't be loaded: {first_line(error)}; {WHOLE_FILES}") from error
    lacking = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
    if lacking:
        raise InputError(
            f"{source.name} lacks {len(lacking)} weights of the shape that its config.json says, {lacking[0]} among "
            f"them; {WHOLE_FILES}"
        )
    gc.collect()
    return _finish(model if device == SPREAD else model.to(device), source)


def _finish(model: torch.nn.Module, source: Source) -> torch.nn.Module:
    model.display_name = source.name
    return model.eval().requires_grad_(False)


def weights_sha256(source: Source) -> str | None:
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


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep the library's progress bars and warnings off the terminal; what matters is checked and said here."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
