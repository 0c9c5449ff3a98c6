"""The only place that calls a transformers model: cache argument, shared vocabulary, finite check."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.engine.compiled_steps import CompiledSteps
from specdec.engine.kv_cache import KVCache
from specdec.engine.masks import is_chain, tree_mask
from specdec.errors import InputError, MeasurementError


class NonFiniteLogitsError(MeasurementError):
    """A model gave NaN or infinite logits; its message names the model and the step."""


def usable_vocab(model: torch.nn.Module) -> int:
    """Ids that may be proposed or chosen: those the tokenizer and both models know, else the model's own width."""
    return getattr(model, "usable_vocab", model.config.vocab_size)


def model_name(model: torch.nn.Module) -> str:
    """Return what messages call ``model``: the name it was loaded under, else its class."""
    return getattr(model, "display_name", type(model).__name__)


def first_layers(model: torch.nn.Module, layers: int) -> torch.nn.Module:
    """Return a model of ``model``'s first ``layers`` that shares all its modules, for a model built like Qwen2.

    Raises InputError for more layers than it has and for a model whose layers can't be found.
    """
    inner = getattr(model, "model", None)
    if not hasattr(inner, "layers"):
        raise InputError(f"{model_name(model)} is not built like Qwen2: its layers can't be found")
    if layers > len(inner.layers):
        raise InputError(f"{model_name(model)} has {len(inner.layers)} layers, {layers} were asked for")
    lower, lower_inner = copy.copy(model), copy.copy(inner)
    lower_inner.config = copy.copy(inner.config)
    lower_inner.config.num_hidden_layers = layers
    lower.__dict__.pop("compiled_steps", None)  # they are of the whole model
    lower._modules = {**model._modules, "model": lower_inner}
    lower.display_name = f"{model_name(model)}, first {layers} layers"
    return lower


class CachedModel:
    """A causal language model with the cache of one request."""

    def __init__(self, model: torch.nn.Module, cache: KVCache, vocab: int, steps: CompiledSteps | None = None) -> None:
        self.model = model
        self.steps = steps if steps is not None and steps.vocab == vocab else None
        self.name = model_name(model)
        self.cache = cache
        self.vocab = vocab
        self.device = model.device
        self._logit_sum = torch.zeros((), device=model.device)

    def feed(
        self, token_ids: torch.Tensor, logits_to_keep: int = 1, parents: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Append ``token_ids`` ((k,) LongTensor on the model's device) to the cache.

        ``parents``: of a tree's nodes, the place of the node that each continues; -1 is the text before the tree. The
        last k nodes are ``token_ids``, those before them must lie at the cache's end. Without it, each token continues
        the one before. Returns the logits after the last ``logits_to_keep`` tokens, (logits_to_keep, vocab); 0 keeps
        all k.
        """
        if parents is None or is_chain(parents):
            return self.feed_batch(token_ids.unsqueeze(0), logits_to_keep)[0]
        new = token_ids.numel()
        before = self.cache.length - (len(parents) - new)
        mask, depths = tree_mask(parents, before, self.model.dtype, self.device)
        positions = (before + depths[-new:]).unsqueeze(0)
        ids = token_ids.unsqueeze(0)
        output = self.model(
            ids, mask[..., -new:, :], positions, self.cache.layers, use_cache=True, logits_to_keep=logits_to_keep
        )
        return self.usable(output.logits)[0]

    def feed_batch(self, token_ids: torch.Tensor, logits_to_keep: int = 1) -> torch.Tensor:
        """Append (batch, k) ids, as many to each request; returns logits, (batch, logits_to_keep or k, vocab)."""
        batch, tokens = token_ids.shape
        if self.cache.widest and tokens > self.cache.widest:
            return self._feed_in_pieces(token_ids, logits_to_keep)
        width = self.steps.width_for(self.cache, tokens) if self.steps and batch == 1 else None
        if width is not None:
            logits, self._logit_sum = self.steps.run(token_ids, width, self.cache, self._logit_sum)
            return logits[:, -logits_to_keep:]
        held = self.cache.make_room(tokens)
        mask = positions = None  # made by the model: causal, and following the cache length
        if held is not None:  # fewer entries than tokens seen
            mask, depths = tree_mask(range(-1, tokens - 1), held, self.model.dtype, self.device)
            positions = (self.cache.length + depths).unsqueeze(0)
        output = self.model(
            token_ids,
            mask,
            positions,
            self.cache.layers,  # by place: this argument's name differs between transformers versions
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )
        return self.usable(output.logits)

    def _feed_in_pieces(self, token_ids: torch.Tensor, logits_to_keep: int) -> torch.Tensor:
        pieces = [self.feed_batch(piece, 0) for piece in token_ids.split(self.cache.widest, dim=1)]
        return torch.cat(pieces, dim=1)[:, -logits_to_keep:]

    def usable(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of ids that may be chosen, (..., vocab), and take note of whether they are finite."""
        logits = logits[..., : self.vocab]
        self._logit_sum = self._logit_sum + logits.sum(dtype=torch.float32)
        return logits

    @property
    def finite(self) -> torch.Tensor:
        """Whether all logits so far were finite: a boolean scalar that is still on the device.

        The sum of all logits tells, since NaN and both infinities survive every addition.
        """
        return torch.isfinite(self._logit_sum)


@dataclass(frozen=True)
class Pass:
    """A forward that decoding asks for; arguments and answer are those of :meth:`CachedModel.feed`."""

    cached: CachedModel
    token_ids: torch.Tensor
    logits_to_keep: int = 1
    parents: Sequence[int] | None = None

    def run(self) -> torch.Tensor:
        return self.cached.feed(self.token_ids, self.logits_to_keep, self.parents)


Passes = Generator[Pass, torch.Tensor, Any]  # work that yields each forward it needs and is sent the logits


@torch.inference_mode()
def run_alone(passes: Passes) -> Any:
    """Run each forward as it is asked for; returns what the work returns."""
    logits = None
    try:
        while True:
            logits = passes.send(logits).run()
    except StopIteration as finished:
        return finished.value
