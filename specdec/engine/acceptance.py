"""What a draft's tokens are worth to a target along a given text: agreement, and acceptance at any temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.engine.decoding import Generation
from specdec.engine.engines import get_engine
from specdec.engine.pair import Pair
from specdec.engine.verification import distribution


@dataclass(frozen=True)
class PairLogits:
    """Both models' float32 logits at each token of one text, (tokens, vocab) each, given all tokens before it."""

    draft: torch.Tensor
    target: torch.Tensor

    def match(self, temperature: float) -> torch.Tensor:
        """Return per token the chance that a draft token drawn at ``temperature`` is the target's choice, (tokens,).

        This is q_T(argmax p): what the study's acceptance by exact match measures.
        """
        greedy = self.target.argmax(-1)
        if temperature == 0:
            return (self.draft.argmax(-1) == greedy).float()
        return distribution(self.draft, temperature).gather(-1, greedy.unsqueeze(-1)).squeeze(-1)

    def overlap(self, temperature: float) -> torch.Tensor:
        """Return per token sum(min(p, q)), the chance that rejection sampling accepts, (tokens,)."""
        if temperature == 0:
            return self.match(0)
        return torch.minimum(distribution(self.draft, temperature), distribution(self.target, temperature)).sum(-1)


@torch.inference_mode()
def pair_logits(pair: Pair, input_ids: torch.Tensor, tokens: Sequence[int], engine: str = "published") -> PairLogits:
    """Return both models' logits along ``tokens`` after the prompt: one teacher-forced pass of each, on the CPU."""
    return PairLogits(*(_teacher_forced(model, input_ids, tokens, engine) for model in (pair.draft, pair.target)))


def _teacher_forced(
    model: torch.nn.Module, input_ids: torch.Tensor, tokens: Sequence[int], engine: str
) -> torch.Tensor:
    text = torch.cat([input_ids[0], torch.tensor(tokens[:-1], dtype=torch.long)]).to(model.device)
    cached = get_engine(engine).open(model, text.numel())
    return cached.feed(text, logits_to_keep=len(tokens)).float().cpu()


def trace_agreement(
    pair: Pair, input_ids: torch.Tensor, tokens: Sequence[int], engine: str = "published"
) -> list[dict]:
    """Compare the draft's greedy choice with ``tokens``, the target's greedy text, at every position.

    Since greedy speculation commits exactly this text, the rows predict what any gamma or schedule accepts. Returns the
    rows of ``agreement_trace.csv`` without the prompt's name; ``top2_gap`` is the target's best logit minus its second.
    """
    logits = pair_logits(pair, input_ids, tokens, engine)
    best = logits.target.topk(2).values  # (tokens, 2)
    columns = zip(logits.draft.argmax(-1).tolist(), tokens, (best[:, 0] - best[:, 1]).tolist(), strict=True)
    return [
        {"position": position, "draft_token": draft, "target_token": target, "agrees": draft == target, "top2_gap": gap}
        for position, (draft, target, gap) in enumerate(columns)
    ]


def tried_positions(generation: Generation) -> tuple[list[int], list[bool]]:
    """Return the places among the new tokens at which a proposed token was tried, and whether it was accepted."""
    places, accepted = [], []
    start = 1  # the first token is the prefill's
    for proposed, taken in zip(generation.proposed, generation.accepted, strict=True):
        tried = min(taken + 1, proposed)
        places += range(start, start + tried)
        accepted += [place < taken for place in range(tried)]
        start += taken + 1
    return places, accepted
