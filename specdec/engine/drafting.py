"""Who proposes: the interface of a draft, a draft model, the target's own first layers, and earlier text."""

from __future__ import annotations

from itertools import takewhile

import torch

from specdec.engine.engines import Engine
from specdec.engine.forward import CachedModel, first_layers, model_name
from specdec.engine.kv_cache import KVCache
from specdec.engine.request import Request
from specdec.engine.verification import Proposal, Rule
from specdec.errors import InputError


class Draft:
    """Whatever can propose tokens. Only :meth:`propose` must be given; this base class proposes nothing."""

    name = "draft"
    devices: tuple[torch.device, ...] = ()  # to wait for at clock edges

    def start(self, request: Request, target: CachedModel) -> None:
        """Begin a request; called before the target's prefill. Ids from ``target.vocab`` on must not be proposed."""

    def propose(self, text: list[int], count: int) -> Proposal:
        """Propose at most ``count`` >= 0 tokens that may follow ``text``, the prompt and all committed tokens."""
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
        engine.prepare(model)  # here, where no clock runs
        self.own_rule = rule
        self.name = model_name(model)
        self.devices = (model.device,)

    def start(self, request: Request, target: CachedModel) -> None:
        self.rule = self.own_rule or request.rule
        self.cached = self.engine.open(self.model, request.capacity, target.vocab)
        self.cached.feed(request.input_ids[0].to(self.model.device))

    def propose(self, text: list[int], count: int) -> Proposal:
        self.step_start = len(text) - 1  # committed tokens without the newest
        return _continue(self.cached, self.rule, text, count)

    def sync(self, text: list[int], proposed: int) -> None:
        if self.engine.reforward and proposed:
            self.cached.cache.rollback(self.step_start)
            again = torch.tensor(text[self.step_start : -1], device=self.model.device)
            self.cached.feed(again, logits_to_keep=0)  # all rows, as a plain forward call computes them
        else:
            self.cached.cache.rollback(len(text) - 1)

    def finite(self) -> torch.Tensor:
        return self.cached.finite


class EarlyExitDraft(Draft):
    """Self-speculation: the target's first ``layers`` propose, through its own final norm and head.

    Weights are the target's, and so are the keys and values of those layers: the draft needs no prefill and no cache of
    its own. What it appends while proposing is cut off again, and the target's forward appends the same. Works on any
    model built like Qwen2; one that was not trained for it agrees with itself rarely (Elhoushi et al. 2024).
    """

    def __init__(self, layers: int) -> None:
        if layers < 1:
            raise InputError(f"an early exit needs at least one layer, got {layers}")
        self.layers = layers
        self.name = f"the target's first {layers} layers"

    def start(self, request: Request, target: CachedModel) -> None:
        self.rule = request.rule
        self.devices = (target.device,)
        shared = KVCache(target.cache.layers.layers[: self.layers])
        self.cached = CachedModel(first_layers(target.model, self.layers), shared, target.vocab)

    def propose(self, text: list[int], count: int) -> Proposal:
        proposal = _continue(self.cached, self.rule, text, count)
        self.cached.cache.rollback(len(text) - 1)
        return proposal

    def finite(self) -> torch.Tensor:
        return self.cached.finite


class PromptLookupDraft(Draft):
    """Proposes what followed the newest tokens when they stood earlier in the text (Saxena 2023); runs no model.

    The longest of the last ``longest``, ..., 1 tokens that occurs before is looked for; its latest occurrence counts.
    """

    name = "prompt lookup"

    def __init__(self, longest: int = 3) -> None:
        self.longest = longest

    def start(self, request: Request, target: CachedModel) -> None:
        self.vocab = target.vocab

    def propose(self, text: list[int], count: int) -> Proposal:
        for length in range(min(self.longest, len(text) - 1), 0, -1):
            for end in range(len(text) - 1, length - 1, -1):
                if text[end - length : end] == text[-length:]:
                    return Proposal.chain(torch.tensor(self._usable(text[end : end + count]), dtype=torch.long))
        return Proposal.nothing()

    def _usable(self, tokens: list[int]) -> list[int]:
        """Return the tokens before the first that no model may choose; a prompt may hold any id."""
        return list(takewhile(lambda token: token < self.vocab, tokens))


def _continue(cached: CachedModel, rule: Rule, text: list[int], count: int) -> Proposal:
    """Continue ``text`` by ``count`` tokens of the model's own; the first pass feeds what it has not seen."""
    pending = torch.tensor(text[cached.cache.length :], device=cached.device)
    tokens, distributions = [pending[:0]], []
    for _ in range(count):
        pending, probabilities = rule.choose(cached.feed(pending))  # (1,), (1, vocab) or None
        tokens.append(pending)
        distributions.append(probabilities)
    drawn = bool(distributions) and distributions[0] is not None
    return Proposal.chain(torch.cat(tokens), torch.cat(distributions) if drawn else None)


def as_draft(draft: torch.nn.Module | Draft, engine: Engine) -> Draft:
    """Return ``draft`` itself if it can propose, else the draft that runs it as a model."""
    return draft if hasattr(draft, "propose") else ModelDraft(draft, engine)
