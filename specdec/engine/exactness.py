"""Whether speculative output is the target's own, and if not, whether rounding alone can explain it.

Scoring k tokens in one forward rounds differently from scoring them one by one. Where the target's two best logits lie
closer together than that, greedy decoding may take the other one: a near tie. Anything else is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.engine.decoding import Generation
from specdec.engine.engines import get_engine


@dataclass(frozen=True)
class Mismatch:
    """The first new token at which two outputs differ.

    ``top2_gap``: the baseline's best logit minus its second there. ``logit_difference``: the largest difference
    between the two paths' logits there.
    """

    position: int
    top2_gap: float
    logit_difference: float

    @property
    def near_tie(self) -> bool:
        """Whether both logits moving by ``logit_difference`` could have swapped them."""
        return self.top2_gap <= 2 * self.logit_difference


def first_mismatch(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """Return the first place at which the sequences differ, their lengths included; None if they are equal."""
    for place, (a, b) in enumerate(zip(expected, actual)):  # noqa: B905 - the shorter one's end is a place too
        if a != b:
            return place
    return None if len(expected) == len(actual) else min(len(expected), len(actual))


def explain_mismatch(
    target: torch.nn.Module, input_ids: torch.Tensor, baseline: Generation, speculative: Generation, engine: str
) -> Mismatch | None:
    """Return where and why ``speculative`` left ``baseline``, or None if it did not.

    Runs the target twice more over the common text: token by token, and in the blocks that speculation used.
    """
    position = first_mismatch(baseline.tokens, speculative.tokens)
    if position is None:
        return None
    one_by_one = [0] * len(baseline.tokens)
    expected = _logits_at(position, one_by_one, target, input_ids, baseline.tokens, engine)
    actual = _logits_at(
        position, speculative.proposed, target, input_ids, speculative.tokens, engine, speculative.accepted
    )
    best, second = expected.topk(2).values.tolist()
    return Mismatch(position, best - second, (expected - actual).abs().max().item())


@torch.inference_mode()
def _logits_at(position, proposed, target, input_ids, tokens, engine, accepted=None) -> torch.Tensor:
    """Return the float32 logits, (vocab,), from which new token ``position`` was chosen, block sizes as given."""
    accepted = accepted or [0] * len(proposed)
    cached = get_engine(engine).open(target, input_ids.shape[1] + len(tokens) + max(proposed, default=0))
    logits = cached.feed(input_ids[0].to(target.device))[-1]
    newest = 0  # place of the newest committed token among the new ones
    for count, taken in zip(proposed, accepted, strict=True):
        if newest >= position:
            break
        block = (list(tokens[newest : newest + count + 1]) + [tokens[-1]] * count)[: count + 1]
        rows = cached.feed(torch.tensor(block, device=target.device), logits_to_keep=0)
        logits = rows[min(position - newest - 1, taken)]
        newest += taken + 1
        cached.cache.rollback(input_ids.shape[1] + newest)
    return logits.float()
