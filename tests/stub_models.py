"""Models of a handful of tokens whose distributions are known, and fast enough for 100,000 runs."""

from __future__ import annotations

from types import SimpleNamespace

import torch


class MarkovModel(torch.nn.Module):
    """A language model whose next token depends on the newest one only: its logits are a table's row."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.table = logits  # (vocab, vocab)
        self.config = SimpleNamespace(vocab_size=len(logits), num_hidden_layers=1, max_position_embeddings=64)

    def forward(self, token_ids, mask, positions, cache, use_cache, logits_to_keep):
        """Return the logits of the last rows and keep the cache's count of tokens, as a transformers model does."""
        layer, tokens = cache.layers[0], token_ids.shape[1]
        if hasattr(layer, "length"):  # a preallocated layer, of which only the count is read back
            layer.length += tokens
        else:
            states = token_ids.new_zeros(1, 1, tokens, 1)
            layer.update(states, states)
        return SimpleNamespace(logits=self.table[token_ids[:, -logits_to_keep:]])
