"""What each way of making a key/value cache smaller saves, and what it costs in agreement, tokens and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from specdec.engine.decoding import Generation, speculative_generate, warm_up_tokens
from specdec.engine.drafting import Draft, ModelDraft
from specdec.engine.engines import Engine, get_engine
from specdec.engine.kv_cache import KVCache, preallocated_cache
from specdec.engine.kv_compression import (
    CacheMaker,
    PrefixStore,
    entry_bytes,
    quantized_cache,
    upper_layers_cache,
    window_cache,
)
from specdec.engine.pair import Pair

GAMMA = 2  # draft tokens per step in every run here
SINKS, WINDOW = 4, 32  # tokens; small, so that prompts and texts of the study's length go beyond them
PREFIX_TOKENS = 200  # of the prompt that two requests share


@dataclass
class Recorded:
    """A maker of caches that remembers what it made, so that their real tensors can be measured afterwards."""

    maker: CacheMaker
    made: list[KVCache] = field(default_factory=list)

    def __call__(self, model: torch.nn.Module, capacity: int) -> KVCache:
        self.made.append(self.maker(model, capacity))
        return self.made[-1]


TECHNIQUES: dict[str, CacheMaker] = {
    "none": preallocated_cache,
    "int8": quantized_cache(8),
    "int4": quantized_cache(4),
    f"window of {WINDOW}, {SINKS} sinks": window_cache(SINKS, WINDOW),
}
SKIPPED = "lower layers keep none"  # of the draft alone
PREFIX = "shared prefix"


def greedy_texts(pair: Pair, inputs: Sequence[torch.Tensor], new_tokens: int) -> list[list[int]]:
    """Return the uncompressed target's own greedy tokens for each prompt."""
    return [speculative_generate(Draft(), pair.target, ids, new_tokens, 0, engine="fast").tokens for ids in inputs]


def measure(
    pair: Pair, inputs: Sequence[torch.Tensor], texts: Sequence[Sequence[int]], where: str, technique: str
) -> dict:
    """Return the row of one technique in the cache of ``where``, draft or target, over all prompts.

    ``texts``: the target's own greedy tokens for each of ``inputs``; as many are generated. alpha is pooled;
    tokens_equal_share is the share of new tokens that are those.
    """
    maker = upper_layers_cache(skipped_layers(pair)) if technique == SKIPPED else TECHNIQUES[technique]
    recorded = Recorded(maker)
    engine = replace(get_engine("fast"), new_cache=recorded)
    draft: torch.nn.Module | Draft = ModelDraft(pair.draft, engine if where == "draft" else get_engine("fast"))
    of_target: Engine | str = engine if where == "target" else "fast"
    speculative_generate(draft, pair.target, inputs[0], warm_up_tokens(GAMMA, len(texts[0])), GAMMA, engine=of_target)
    recorded.made.clear()
    runs = [
        speculative_generate(draft, pair.target, ids, len(text), GAMMA, engine=of_target)
        for ids, text in zip(inputs, texts, strict=True)
    ]
    accepted = sum(sum(run.accepted) for run in runs)
    tried = accepted + sum(run.rejections for run in runs)
    held = sum(cache.length for cache in recorded.made)
    stored = [entry_bytes(cache) for cache in recorded.made]
    return {
        "technique": technique,
        "where": where,
        "bytes_per_token": sum(stored) / held,
        "cache_bytes": max(stored),
        "alpha": accepted / tried if tried else None,
        "tokens_equal_share": _equal_share(texts, runs),
        "time_s": sum(run.wall_time for run in runs),
        "note": f"gamma {GAMMA}" + (f", lowest {skipped_layers(pair)} layers" if technique == SKIPPED else ""),
    }


def skipped_layers(pair: Pair) -> int:
    """Return how many of the draft's layers keep no cache: the lower half."""
    return max(1, pair.draft.config.num_hidden_layers // 2)


def _equal_share(texts: Sequence[Sequence[int]], runs: Sequence[Generation]) -> float:
    pairs = [a == b for text, run in zip(texts, runs, strict=True) for a, b in zip(text, run.tokens, strict=True)]
    return sum(pairs) / len(pairs)


def measure_prefix(pair: Pair, inputs: Sequence[torch.Tensor], new_tokens: int) -> list[dict]:
    """Return the rows of two requests that begin with the same PREFIX_TOKENS tokens: the first, and one that shares."""
    joined = torch.cat([ids[0] for ids in inputs] * 20)
    prefix = joined[:PREFIX_TOKENS]
    requests = [torch.cat([prefix, ids[0]]).unsqueeze(0) for ids in (inputs[0], inputs[-1])]
    store = PrefixStore()
    rows = []
    for place, input_ids in enumerate(requests):
        recorded = Recorded(store.new_cache_for(input_ids))
        engine = replace(get_engine("fast"), new_cache=recorded)
        (text,) = greedy_texts(pair, [input_ids], new_tokens)
        plain = speculative_generate(pair.draft, pair.target, input_ids, new_tokens, GAMMA, engine="fast")
        run = speculative_generate(pair.draft, pair.target, input_ids, new_tokens, GAMMA, engine=engine)
        store.remember(input_ids)
        known = store.shared_tokens
        rows.append(
            {
                "technique": PREFIX,
                "where": "both",
                "bytes_per_token": sum(map(entry_bytes, recorded.made)) / recorded.made[0].length,
                "cache_bytes": sum(map(entry_bytes, recorded.made)),
                "alpha": run.alpha,
                "tokens_equal_share": _equal_share([text], [run]),
                "time_s": run.wall_time,
                "note": f"request {place + 1}: {known} of {input_ids.shape[1]} prompt tokens not prefilled; prefill "
                f"{run.prefill_time * 1e3:.1f} ms against {plain.prefill_time * 1e3:.1f} ms",
            }
        )
    return rows
