"""How often results come from the device to the host: once a step, whatever gamma is."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.engine.decoding import speculative_generate
from specdec.engine.drafting import ModelDraft
from specdec.engine.engines import get_engine

SCALAR_READS = {  # inference mode shows the first two whole
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten._local_scalar_dense.default,
}
TO_HOST = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}


class Reads(TorchDispatchMode):
    """Counts scalars read by item(), bool(), int() and the like."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation in SCALAR_READS
        return operation(*args, **(kwargs or {}))


class Lists(TorchFunctionMode):
    """Counts whole tensors read; on a CPU these reach no dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in TO_HOST
        return function(*args, **(kwargs or {}))


def transfers(draft, target, prompt, gamma: int, **options) -> tuple[int, int]:
    """Return the transfers of a run and its steps."""
    with Reads() as reads, Lists() as lists:
        generation = speculative_generate(draft, target, prompt, 24, gamma, engine="fast", **options)
    request = 1  # the prompt's ids become the request's text
    return reads.count + lists.count - request, len(generation.accepted)


@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_transfer_a_step_and_one_for_the_prefill(draft, target, prompt, gamma, temperature):
    for model in (draft, target):  # packing is measured at first use, outside the loop
        speculative_generate(model, model, prompt, 2, 1, engine="fast")
    options = {"temperature": temperature, "generator": torch.Generator().manual_seed(0)} if temperature else {}
    count, steps = transfers(draft, target, prompt, gamma, **options)
    assert count == steps + 1


def test_a_draft_that_looks_at_each_token_is_noticed(draft, target, prompt):
    class Peeking(ModelDraft):
        def propose(self, text, count):
            proposal = yield from super().propose(text, count)
            assert all(token.item() >= 0 for token in proposal.tokens)
            return proposal

    count, steps = transfers(Peeking(draft, get_engine("fast")), target, prompt, 4)
    assert count > steps + 4
