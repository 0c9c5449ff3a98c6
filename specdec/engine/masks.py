"""What a token attends to where a model's own causal mask does not say it: trees, and rows of different length."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def is_chain(parents: Sequence[int]) -> bool:
    """Whether each node continues the one before it."""
    return list(parents) == list(range(-1, len(parents) - 1))


def additive_mask(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what is added to attention scores so that nothing is seen where ``hidden`` is true, in its shape.

    Additive, since a boolean mask is right under one attention implementation of transformers and wrong under another.
    """
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, torch.finfo(dtype).min)


def tree_mask(
    parents: Sequence[int], length: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a tree's nodes attend to, and their depths from 0.

    ``parents``: n of them, as :meth:`~specdec.engine.forward.CachedModel.feed` takes them. The mask, (1, 1, n,
    length + n), is added to the attention scores: a node sees the ``length`` tokens before the tree, its ancestors and
    itself. Depths: (n,).
    """
    depths: list[int] = []
    sees = torch.zeros(len(parents), length + len(parents), dtype=torch.bool)
    sees[:, :length] = True
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        if parent >= 0:
            sees[node, length:] = sees[parent, length:]
        sees[node, length + node] = True
    return additive_mask(~sees, dtype)[None, None].to(device), torch.tensor(depths, device=device)
