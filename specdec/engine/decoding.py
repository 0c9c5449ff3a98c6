"""The decoding loop: propose, score, verify, commit, sync.

``speculative_generate`` runs it with a draft; ``autoregressive_generate`` is the same loop with a draft that proposes
nothing, so that a speedup compares like with like.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from specdec import theory
from specdec.engine import timing
from specdec.engine.batching import SharedCaches, run_together
from specdec.engine.drafting import Draft, as_draft
from specdec.engine.engines import Engine, get_engine
from specdec.engine.forward import (
    CachedModel,
    NonFiniteLogitsError,
    Pass,
    Passes,
    model_name,
    run_alone,
    usable_vocab,
)
from specdec.engine.request import Request
from specdec.engine.verification import Proposal, Verdict, choose_rule
from specdec.errors import InputError
from specdec.schedules import FixedGamma, Schedule, as_schedule, rejections


@dataclass
class Generation:
    """What one call generated, and what each of its steps (target forwards after the prefill) did.

    ``tokens``: new token ids. ``wall_time`` (s) includes the prefill of both models, ``prefill_time`` (s) is that
    part. ``proposed`` and ``accepted``: tokens per step. ``step_seconds``: per step the seconds of each phase, empty
    without a clock. New tokens = 1 + accepted + steps.
    """

    tokens: list[int] = field(default_factory=list)
    wall_time: float = 0.0
    prefill_time: float = 0.0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    step_seconds: list[dict[str, float]] = field(default_factory=list)

    @property
    def rejections(self) -> int:
        """Steps in which a proposed token was rejected."""
        return rejections(self.proposed, self.accepted)

    @property
    def acceptance_rates_per_step(self) -> list[float]:
        """Accepted / proposed of each step that proposed anything."""
        return [a / p for a, p in zip(self.accepted, self.proposed, strict=True) if p]

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / proposed over all steps (the study's alpha); None if nothing was proposed."""
        return theory.acceptance_rate(self.proposed, self.accepted)

    @property
    def alpha(self) -> float | None:
        """Accepted / (accepted + rejections): Leviathan's per-token alpha; None if nothing was tried."""
        return theory.alpha_estimate(self.proposed, self.accepted)

    @property
    def tokens_per_step(self) -> float | None:
        """(Accepted + steps) / steps; None without a step."""
        steps = len(self.accepted)
        return (sum(self.accepted) + steps) / steps if steps else None

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds of each phase over all steps; empty without a clock."""
        names = {name for step in self.step_seconds for name in step}
        return {name: sum(step.get(name, 0.0) for step in self.step_seconds) for name in sorted(names)}


def autoregressive_generate(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    *,
    engine: str | Engine = "published",
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    eos_token_id: int | Collection[int] | None = None,
    clock: timing.PhaseClock | None = None,
) -> Generation:
    """Generate token by token with a KV cache: the baseline.

    It is :func:`speculative_generate` at gamma 0; arguments and errors are the same.
    """
    return speculative_generate(
        Draft(),
        model,
        input_ids,
        max_new_tokens,
        0,
        engine=engine,
        temperature=temperature,
        generator=generator,
        eos_token_id=eos_token_id,
        clock=clock,
    )


def speculative_generate(
    draft: torch.nn.Module | Draft,
    target: torch.nn.Module,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    gamma: int | Schedule,
    *,
    engine: str | Engine = "published",
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    eos_token_id: int | Collection[int] | None = None,
    clock: timing.PhaseClock | None = None,
) -> Generation:
    """Generate the target's own tokens with a draft proposing up to ``gamma`` of them per step (Leviathan et al. 2023).

    ``draft``: a model or any :class:`~specdec.engine.drafting.Draft`. ``input_ids``: (1, n) LongTensor, n >= 1.
    ``max_new_tokens`` >= 0 is exact unless an ``eos_token_id`` comes first, after which the output ends. ``gamma``: an
    int >= 0 or a schedule. ``engine``: ``published`` or ``fast``, which packs the models' linear layers in place; to
    copy or save a model afterwards, restore it by ``get_engine("published").prepare(model)``. ``clock`` splits each
    step into phases.

    At ``temperature`` 0 the tokens are the target's greedy ones; above, they are drawn with ``generator`` by rejection
    sampling (Chen et al. 2023) and have the distribution of sampling from the target alone.

    Raises InputError (a ValueError) for arguments outside these and where prompt and new tokens exceed a model's
    ``max_position_embeddings``; NonFiniteLogitsError where a model gives NaN or infinity.
    """
    schedule = as_schedule(gamma)
    parts = get_engine(engine)
    models = [target] if hasattr(draft, "propose") else [target, draft]
    check_request(models, input_ids, max_new_tokens)
    request = Request(input_ids, max_new_tokens, choose_rule(temperature, generator), eos_token_id)
    vocab = min(usable_vocab(model) for model in models)
    draft = Draft() if schedule == FixedGamma(0) else as_draft(draft, parts)
    cached = parts.open(target, request.capacity + draft.extra_tokens, vocab)
    return run_alone(_decode(draft, cached, schedule, request, clock or timing.NoClock()))


def speculative_generate_batch(
    draft: torch.nn.Module | Draft,
    target: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    max_new_tokens: int,
    gamma: int | Schedule | Sequence[int | Schedule],
    *,
    temperature: float = 0.0,
    generators: Sequence[torch.Generator] | None = None,
    eos_token_id: int | Collection[int] | None = None,
) -> list[Generation]:
    """Generate for several prompts at once with engine ``fast``; each gets the tokens of its own single run.

    ``inputs``: one (1, n) LongTensor per request, of any lengths. ``gamma``: one for all, or one per request.
    ``generators``: one per request where ``temperature`` > 0. Forwards of different requests for the same model run as
    one; a request that is finished leaves the batch. ``wall_time`` of each is from the common start to its own end.
    Other arguments and errors are those of :func:`speculative_generate`.
    """
    schedules = [as_schedule(each) for each in (gamma if isinstance(gamma, Sequence) else [gamma] * len(inputs))]
    generators = generators or [None] * len(inputs)
    if not len(inputs) == len(schedules) == len(generators):
        raise InputError(f"{len(inputs)} prompts need as many gammas ({len(schedules)}) and generators")
    models = [target] if hasattr(draft, "propose") else [target, draft]
    vocab = min(usable_vocab(model) for model in models)
    requests = []
    for input_ids, generator in zip(inputs, generators, strict=True):
        check_request(models, input_ids, max_new_tokens)
        requests.append(Request(input_ids, max_new_tokens, choose_rule(temperature, generator), eos_token_id))
    room = max((request.capacity for request in requests), default=0) + getattr(draft, "extra_tokens", 0)
    parts = replace(get_engine("fast"), new_cache=SharedCaches(len(requests), room))
    prototype = as_draft(draft, parts)
    if getattr(prototype, "model", None) is target:  # a batch tells the draft's forwards from the target's by the model
        prototype = copy.copy(prototype)
        prototype.model = copy.copy(target)
    works = [
        _decode(
            Draft() if schedule == FixedGamma(0) else prototype.for_request(),
            parts.open(target, room, vocab),
            schedule,
            request,
            timing.NoClock(),
        )
        for request, schedule in zip(requests, schedules, strict=True)
    ]
    return run_together(works, target)


def warm_up_tokens(gamma: int, new_tokens: int) -> int:
    """Return how many new tokens take a prefill and one full step, of a run that asks for ``new_tokens``."""
    return min(gamma + 2, new_tokens)


def check_request(models: list[torch.nn.Module], input_ids: torch.Tensor, max_new_tokens: int) -> None:
    """Raise InputError for a request that can't be run as asked, naming the value and what is allowed."""
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1:
        raise InputError(f"input_ids must have the shape (1, n) with n >= 1, got {tuple(input_ids.shape)}")
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens must be >= 0, got {max_new_tokens}")
    prompt_tokens = input_ids.shape[1]
    for model in models:
        limit = getattr(model.config, "max_position_embeddings", None)
        if limit is not None and prompt_tokens + max_new_tokens > limit:
            raise InputError(
                f"{prompt_tokens} prompt tokens + {max_new_tokens} new tokens exceed the {limit} positions of "
                f"{model_name(model)}; ask for fewer new tokens or shorten the prompt"
            )


def _decode(
    draft: Draft, target: CachedModel, schedule: Schedule, request: Request, clock: timing.PhaseClock | timing.NoClock
) -> Passes:
    """Decode one request, yielding each forward that it needs; returns its Generation."""
    if request.max_new_tokens == 0:
        return Generation()
    devices = (*draft.devices, target.device)
    text = request.text
    clock.begin(devices)
    started = timing.now(devices)
    text.append((yield from _prefill(draft, target, request)))
    prefilled = timing.now(devices)
    while request.remaining:
        with clock.step():
            committed = len(text)
            count = min(schedule(request.history), request.remaining - 1)
            with clock.phase("draft"):
                proposal = yield from _passes(draft.propose(text, count))
            with clock.phase("target"):
                logits = yield _scoring(target, text[-1], proposal)
            with clock.phase("verify"):
                verdict = _verify(draft, target, request, proposal, logits)
                request.commit(verdict.tokens, proposal.depth)
            if request.remaining:
                with clock.phase("sync"):
                    target.cache.keep(committed, verdict.path)
                    yield from _passes(draft.sync(text, proposal.depth, verdict.path))
                assert target.cache.length == len(text) - 1, "the target's cache is the text without its newest token"
    ended = timing.now(devices)
    history = request.history
    return Generation(
        tokens=request.new_tokens,
        wall_time=ended - started,
        prefill_time=prefilled - started,
        proposed=history.proposed,
        accepted=history.accepted,
        step_seconds=list(clock.steps),
    )


def _passes(result: Any) -> Passes:
    """Let a draft's method be a plain one, or a generator that asks for forwards."""
    return (yield from result) if isinstance(result, Generator) else result


def _prefill(draft: Draft, target: CachedModel, request: Request) -> Passes:
    """Feed the prompt to both models; returns the target's first token."""
    yield from _passes(draft.start(request, target))
    prompt = request.input_ids[0][target.cache.length :]  # a cache may know its beginning already
    logits = yield Pass(target, prompt.to(target.device))  # (1, vocab)
    return _verify(draft, target, request, Proposal.nothing(), logits).tokens[0]


def _scoring(target: CachedModel, newest: int, proposal: Proposal) -> Pass:
    """Return the forward over the newest token and the proposal; it gives the logits after each, (n + 1, vocab)."""
    block = torch.cat([torch.tensor([newest], device=target.device), proposal.tokens.to(target.device)])
    return Pass(target, block, logits_to_keep=0, parents=[-1] + [parent + 1 for parent in proposal.parents])


def _verify(draft: Draft, target: CachedModel, request: Request, proposal: Proposal, logits: torch.Tensor) -> Verdict:
    """Decide on the device, bring that to the host in the step's only transfer, and say what is accepted."""
    finite = torch.stack([draft.finite().to(target.device), target.finite])
    *decided, draft_finite, target_finite = torch.cat([request.rule.decide(proposal, logits), finite]).tolist()
    for model, is_finite in ((draft, draft_finite), (target, target_finite)):
        if not is_finite:
            where = f"step {len(request.history.accepted) + 1}" if request.new_tokens else "the prefill"
            raise NonFiniteLogitsError(f"{model.name} gave NaN or infinite logits in {where}; try --dtype float32")
    return request.rule.verdict(proposal, decided)
