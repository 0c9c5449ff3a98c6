"""Who proposes: the interface of a draft, a draft model, the target's own first layers, and earlier text."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import takewhile

import torch

from specdec.engine.engines import Engine
from specdec.engine.forward import CachedModel, Pass, Passes, first_layers, model_name
from specdec.engine.kv_cache import KVCache
from specdec.engine.request import Request
from specdec.engine.verification import Proposal, Rule
from specdec.errors import InputError


class Draft:
    """Whatever can propose tokens. Only :meth:`propose` must be given; this base class proposes nothing.

    :meth:`start`, :meth:`propose` and :meth:`sync` may be plain methods, or generators that yield a
    :class:`~specdec.engine.forward.Pass` for each forward they need, so that several requests' forwards can be run as
    one. Each request has a draft of its own: :meth:`for_request`.
    """

    name = "draft"
    devices: tuple[torch.device, ...] = ()  # to wait for at clock edges
    extra_tokens = 0  # room that a proposal takes in a cache beyond the request's own tokens

    def for_request(self) -> Draft:
        """Return a draft like this one with a state of its own."""
        return copy.copy(self)

    def start(self, request: Request, target: CachedModel) -> Passes | None:
        """Begin a request; called before the target's prefill. Ids from ``target.vocab`` on must not be proposed."""

    def propose(self, text: list[int], count: int) -> Passes | Proposal:
        """Propose at most ``count`` >= 0 tokens in a row to follow ``text``, the prompt and all committed tokens."""
        return Proposal.nothing()

    def sync(self, text: list[int], proposed: int, path: list[int]) -> Passes | None:
        """Forget what was not accepted.

        ``text``: the committed text after a step that proposed ``proposed`` tokens in a row, accepted nodes ``path``.
        """

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

    def start(self, request: Request, target: CachedModel) -> Passes:
        self.rule = self.own_rule or request.rule
        self.cached = self.engine.open(self.model, request.capacity + self.extra_tokens, target.vocab)
        prompt = request.input_ids[0][self.cached.cache.length :]  # a cache may know its beginning already
        yield Pass(self.cached, prompt.to(self.model.device))

    def propose(self, text: list[int], count: int) -> Passes:
        self.step_start = len(text) - 1  # committed tokens without the newest
        return (yield from _continue(self.cached, self.rule, text, count))

    def sync(self, text: list[int], proposed: int, path: list[int]) -> Passes:
        if self.engine.reforward and proposed:
            self.cached.cache.rollback(self.step_start)
            again = torch.tensor(text[self.step_start : -1], device=self.model.device)
            yield Pass(self.cached, again, logits_to_keep=0)  # all rows, as a plain forward call computes them
        else:
            self.cached.cache.rollback(len(text) - 1)

    def finite(self) -> torch.Tensor:
        return self.cached.finite


class TreeDraft(ModelDraft):
    """A draft model that proposes a tree: its ``branching[0]`` likeliest next tokens, for each the next likeliest, ...

    The nodes of one depth are scored in one forward. They are chosen, not drawn, so a sampled request keeps the
    target's distribution whatever the tree holds (Miao et al. 2024; Cai et al. 2024 use the like).
    """

    def __init__(self, model: torch.nn.Module, engine: Engine, branching: Sequence[int] = (2, 2, 1)) -> None:
        super().__init__(model, engine)
        if not branching or min(branching) < 1:
            raise InputError(f"a tree needs at least one branch at every depth, got {tuple(branching)}")
        self.branching = tuple(branching)
        self.extra_tokens = tree_nodes(self.branching)

    def propose(self, text: list[int], count: int) -> Passes:
        self.step_start = len(text) - 1
        pending = torch.tensor(text[self.cached.cache.length :], device=self.cached.device)
        tokens, parents, frontier = [pending[:0]], [], [-1]
        logits = (yield Pass(self.cached, pending)) if count else None  # (1, vocab)
        for depth, branches in enumerate(self.branching[:count]):
            if depth:
                logits = yield Pass(self.cached, tokens[-1], logits_to_keep=0, parents=list(parents))
            tokens.append(logits.topk(branches).indices.flatten())  # (nodes at this depth,)
            first = len(parents)
            parents += [parent for parent in frontier for _ in range(branches)]
            frontier = list(range(first, len(parents)))
        return Proposal(torch.cat(tokens), parents)

    def sync(self, text: list[int], proposed: int, path: list[int]) -> None:
        stored = self.cached.cache.length - self.step_start - 1  # nodes; those of the last depth were not fed
        self.cached.cache.keep(self.step_start + 1, [node for node in path if node < stored])


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

    def propose(self, text: list[int], count: int) -> Passes:
        proposal = yield from _continue(self.cached, self.rule, text, count)
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


def tree_nodes(branching: Sequence[int]) -> int:
    """Return how many nodes a tree of these branches has."""
    nodes = level = 0
    for branches in branching:
        level = (level or 1) * branches
        nodes += level
    return nodes


def _continue(cached: CachedModel, rule: Rule, text: list[int], count: int) -> Passes:
    """Continue ``text`` by ``count`` tokens of the model's own; the first pass feeds what it has not seen."""
    pending = torch.tensor(text[cached.cache.length :], device=cached.device)
    tokens, distributions = [pending[:0]], []
    for _ in range(count):
        pending, probabilities = rule.choose((yield Pass(cached, pending)))  # (1,), (1, vocab) or None
        tokens.append(pending)
        distributions.append(probabilities)
    drawn = bool(distributions) and distributions[0] is not None
    return Proposal.chain(torch.cat(tokens), torch.cat(distributions) if drawn else None)


def as_draft(draft: torch.nn.Module | Draft, engine: Engine) -> Draft:
    """Return ``draft`` itself if it can propose, else the draft that runs it as a model."""
    return draft if hasattr(draft, "propose") else ModelDraft(draft, engine)
