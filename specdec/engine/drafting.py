"""Who proposes: the interface of a draft, and the draft model."""

from __future__ import annotations

import torch

from specdec.engine.engines import Engine
from specdec.engine.forward import CachedModel, model_name
from specdec.engine.request import Request
from specdec.engine.verification import Proposal, Rule


class Draft:
    """Whatever can propose tokens. Only :meth:`propose` must be given; this base class proposes nothing."""

    name = "draft"
    devices: tuple[torch.device, ...] = ()  # to wait for at clock edges

    def start(self, request: Request, vocab: int) -> None:
        """Begin a request. Ids from ``vocab`` on must not be proposed."""

    def propose(self, text: list[int], count: int) -> Proposal:
        """Propose ``count`` >= 0 tokens that may follow ``text``, the prompt and all committed tokens."""
        return Proposal.nothing()

    def sync(self, text: list[int], proposed: int) -> None:
        """Forget what was not accepted. ``text`` is the committed text after a step that proposed ``proposed``."""

    def finite(self) -> torch.Tensor:
        """Whether all logits so far were finite, as a boolean scalar on any device."""
        return torch.tensor(True)


class ModelDraft(Draft):
    """A draft model that proposes its own continuation, chosen by the request's rule or by one of its own.

    Its cache never holds a token that is not committed once :meth:`sync` returns. It may lag behind the text; the
    first pass of the next proposal catches up, so that full acceptance is no special case.
    """

    def __init__(self, model: torch.nn.Module, engine: Engine, rule: Rule | None = None) -> None:
        self.model = model
        self.engine = engine
        self.own_rule = rule
        self.name = model_name(model)
        self.devices = (model.device,)

    def start(self, request: Request, vocab: int) -> None:
        self.rule = self.own_rule or request.rule
        self.cached = CachedModel(self.model, self.engine.new_cache(self.model, request.capacity), vocab)
        self.cached.feed(request.input_ids[0].to(self.model.device))

    def propose(self, text: list[int], count: int) -> Proposal:
        self.step_start = len(text) - 1  # committed tokens without the newest
        pending = torch.tensor(text[self.cached.cache.length :], device=self.model.device)
        tokens, distributions = [pending[:0]], []
        for _ in range(count):
            pending, probabilities = self.rule.choose(self.cached.feed(pending))  # (1,), (1, vocab) or None
            tokens.append(pending)
            distributions.append(probabilities)
        drawn = bool(distributions) and distributions[0] is not None
        return Proposal.chain(torch.cat(tokens), torch.cat(distributions) if drawn else None)

    def sync(self, text: list[int], proposed: int) -> None:
        if self.engine.reforward and proposed:
            self.cached.cache.rollback(self.step_start)
            again = torch.tensor(text[self.step_start : -1], device=self.model.device)
            self.cached.feed(again, logits_to_keep=0)  # all rows, as a plain forward call computes them
        else:
            self.cached.cache.rollback(len(text) - 1)

    def finite(self) -> torch.Tensor:
        return self.cached.finite


def as_draft(draft: torch.nn.Module | Draft, engine: Engine) -> Draft:
    """Return ``draft`` itself if it can propose, else the draft that runs it as a model."""
    return draft if hasattr(draft, "propose") else ModelDraft(draft, engine)
