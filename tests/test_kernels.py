"""Packed linear layers multiply as the stock ones do and give their weights back bit for bit."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from conftest import make_model
from torch import nn

from specdec.engine import kernels
from specdec.engine.decoding import autoregressive_generate, speculative_generate
from specdec.engine.engines import get_engine
from specdec.engine.kernels import MAX_ROWS, PackedLinear, describe_kernels, use_packed_linears

ONE_FOR_ONE = tuple(range(1, MAX_ROWS + 1))


@pytest.fixture
def always_packed(monkeypatch):
    """Pack every layer, whatever is faster for such small ones; one and two rows are computed as four."""
    monkeypatch.setattr(kernels, "_plan", lambda layers: (4, 4, *ONE_FOR_ONE[2:]))


@pytest.fixture
def model() -> nn.Module:
    return make_model(layers=2, hidden=64, seed=5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 9, 40])
@torch.inference_mode()
def test_a_packed_layer_multiplies_like_the_stock_one(rows, bias):
    torch.manual_seed(rows)
    linear = nn.Linear(48, 32, bias=bias)
    x = torch.randn(1, rows, 48)
    packed = PackedLinear(linear, (4, 4, *ONE_FOR_ONE[2:]), keep_weight=True)
    assert packed(x).shape == (1, rows, 32)
    assert torch.allclose(packed(x), linear(x), atol=1e-5)
    assert torch.allclose(packed(x.expand(3, rows, 48)), linear(x.expand(3, rows, 48)), atol=1e-5)


@torch.inference_mode()
def test_filled_up_rows_change_no_row_that_was_asked_for():
    torch.manual_seed(0)
    linear = nn.Linear(48, 32)
    x = torch.randn(1, 1, 48)
    filled, plain = (PackedLinear(linear, rows, keep_weight=True) for rows in ((4,), (1,)))
    assert torch.allclose(filled(x), plain(x), atol=1e-6)


def test_packing_keeps_one_copy_of_each_weight_and_unpacking_restores_it_bit_for_bit(model, always_packed):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights = [weakref.ref(weight) for name, weight in model.named_parameters() if "proj.weight" in name]
    use_packed_linears(model, True)
    assert describe_kernels(model) == "15 of 15 linear layers packed"  # 7 in each of two layers, and the head
    gc.collect()
    assert len(weights) == 14
    assert not any(weight() is not None for weight in weights), "a second copy of these weights is held"
    assert model.get_input_embeddings().weight is not None, "the embedding is read by token, not multiplied"
    use_packed_linears(model, False)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight, "still tied"


def test_both_engines_use_their_own_kernels_in_any_order_and_give_the_same_tokens(model, always_packed, prompt):
    draft = make_model(layers=1, hidden=32, seed=1)
    expected = autoregressive_generate(model, prompt, 32).tokens
    for engine in ("fast", "published", "fast"):
        assert speculative_generate(draft, model, prompt, 32, 3, engine=engine).tokens == expected
        packed = [isinstance(each.lm_head, PackedLinear) for each in (draft, model)]
        assert packed == [engine == "fast"] * 2
    assert autoregressive_generate(model, prompt, 32, engine="published").tokens == expected


def test_a_kernel_that_this_torch_lacks_leaves_the_model_as_it_is(model, monkeypatch, prompt):
    def fail(*args):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(kernels, "_product", fail)
    expected = autoregressive_generate(model, prompt, 8).tokens
    assert autoregressive_generate(model, prompt, 8, engine="fast").tokens == expected
    assert describe_kernels(model) == "0 of 15 linear layers packed"


def test_a_kernel_that_multiplies_wrongly_is_not_used(model, monkeypatch):
    product = kernels._product
    monkeypatch.setattr(kernels, "_product", lambda *args: product(*args) * 1.01)
    use_packed_linears(model, True)
    assert describe_kernels(model) == "0 of 15 linear layers packed"


def test_a_slower_kernel_is_not_used(model, monkeypatch):
    monkeypatch.setattr(kernels, "_fastest", lambda layers, x: 2.0 if isinstance(layers[0], PackedLinear) else 1.0)
    use_packed_linears(model, True)
    assert describe_kernels(model) == "0 of 15 linear layers packed"


def test_more_rows_are_computed_only_where_that_is_clearly_faster():
    assert kernels._rows_to_compute([10, 12, 8, 7, 7.2, 9]) == (4, 4, 4, 4, 5, 6)
    assert kernels._rows_to_compute([10, 9.5, 9.4]) == (1, 2, 3)


def test_preparing_twice_measures_once(model, monkeypatch):
    shapes = {tuple(layer.weight.shape) for layer in model.modules() if isinstance(layer, nn.Linear)}
    calls = []
    plan = kernels._plan
    monkeypatch.setattr(kernels, "_plan", lambda layers: calls.append(len(layers)) or plan(layers))
    for name in ("fast", "published", "fast", "fast"):
        get_engine(name).prepare(model)
    assert len(calls) == len(shapes)
