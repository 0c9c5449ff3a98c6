"""Where along the target's own text the draft would have proposed the same token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.engine.forward import CachedModel, usable_vocab
from specdec.engine.kv_cache import stock_cache
from specdec.engine.pair import Pair


@torch.inference_mode()
def trace_agreement(pair: Pair, input_ids: torch.Tensor, tokens: Sequence[int]) -> list[dict]:
    """Compare the draft's greedy choice with ``tokens``, the target's greedy text, at every position.

    One teacher-forced pass of each model over prompt and text. Since greedy speculation commits exactly this text, the
    rows predict what any gamma or schedule accepts. Returns the rows of ``agreement_trace.csv`` without the prompt's
    name; ``top2_gap`` is the target's best logit minus its second.
    """
    draft_logits, target_logits = (_teacher_forced(model, input_ids, tokens) for model in (pair.draft, pair.target))
    gaps = target_logits.topk(2).values  # (tokens, 2)
    columns = zip(draft_logits.argmax(-1).tolist(), tokens, (gaps[:, 0] - gaps[:, 1]).tolist(), strict=True)
    return [
        {"position": position, "draft_token": draft, "target_token": target, "agrees": draft == target, "top2_gap": gap}
        for position, (draft, target, gap) in enumerate(columns)
    ]


def _teacher_forced(model: torch.nn.Module, input_ids: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Return the float32 logits from which each of ``tokens`` would have been chosen, (tokens, vocab)."""
    text = torch.cat([input_ids[0], torch.tensor(tokens[:-1], dtype=torch.long)]).to(model.device)
    cached = CachedModel(model, stock_cache(model, text.numel()), usable_vocab(model))
    return cached.feed(text, logits_to_keep=len(tokens)).float()
