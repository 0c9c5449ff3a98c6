"""Compiled forwards give the eager tokens, never compile while something is measured, and are left where they fail."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import make_model
from torch import nn
from torch._dynamo.utils import counters

from specdec.engine import compiling, kernels
from specdec.engine.compiled_steps import CompiledSteps
from specdec.engine.compiling import Wanted, compile_steps, prepare_fast_kernels
from specdec.engine.decoding import autoregressive_generate, speculative_generate
from specdec.engine.engines import get_engine

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
POSITIONS = 64


@pytest.fixture(scope="module")
def pair():
    """Two untrained models of which every forward of gamma 2 is compiled, beside their eager twins' tokens."""
    pair = SimpleNamespace(
        draft=make_model(layers=1, hidden=32, seed=1, positions=POSITIONS),
        target=make_model(layers=1, hidden=32, seed=0, positions=POSITIONS),
    )
    pair.decided = prepare_fast_kernels(pair, "on", Wanted((2,), POSITIONS, 0), lambda line: None)
    return pair


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@needs_compiler
def test_every_compiled_width_gives_the_eager_tokens_and_nothing_is_compiled_on_the_way(pair, prompt):
    assert all(of_model["compiled"] for of_model in pair.decided.values()), pair.decided
    expected = autoregressive_generate(pair.target, prompt, 40).tokens
    before = graphs()
    assert autoregressive_generate(pair.target, prompt, 40, engine="fast").tokens == expected
    for gamma in (1, 2):  # gamma 1 takes the graph of gamma 2, filled up
        generation = speculative_generate(pair.draft, pair.target, prompt, 40, gamma, engine="fast")
        assert generation.tokens == expected
    agreeing = speculative_generate(pair.target, pair.target, prompt, 40, 2, engine="fast")  # two caches of one model
    assert agreeing.tokens == expected
    assert agreeing.alpha == 1
    assert graphs() == before


@needs_compiler
def test_the_compiled_forward_runs_where_it_can(pair, prompt, monkeypatch):
    widths = []
    run = CompiledSteps.run
    monkeypatch.setattr(
        CompiledSteps, "run", lambda self, ids, width, *rest: widths.append(width) or run(self, ids, width, *rest)
    )
    generation = speculative_generate(pair.draft, pair.target, prompt, 20, 2, engine="fast")
    assert widths.count(3) >= len(generation.accepted) - 1
    assert widths.count(1) + widths.count(2) >= sum(generation.proposed)
    widths.clear()
    speculative_generate(pair.draft, pair.target, prompt, 20, 2, engine="published")
    assert not widths, "the published engine runs the stock forward"


@needs_compiler
def test_up_to_the_last_position_of_the_context(pair):
    prompt = torch.randint(1, 300, (1, POSITIONS - 6), generator=torch.Generator().manual_seed(3))
    expected = autoregressive_generate(pair.target, prompt, 6).tokens
    assert speculative_generate(pair.draft, pair.target, prompt, 6, 2, engine="fast").tokens == expected


@needs_compiler
def test_packing_again_compiles_nothing_again(pair, prompt):
    expected = speculative_generate(pair.draft, pair.target, prompt, 20, 2, engine="fast").tokens
    before = graphs()
    assert speculative_generate(pair.draft, pair.target, prompt, 20, 2, engine="published").tokens == expected
    assert speculative_generate(pair.draft, pair.target, prompt, 20, 2, engine="fast").tokens == expected
    assert graphs() == before


@needs_compiler
def test_bad_logits_are_noticed_in_a_compiled_forward(pair, prompt):
    norm = pair.target.model.norm.weight
    kept = norm.detach().clone()
    with torch.no_grad():
        norm[0] = float("nan")
    try:
        cached = get_engine("fast").open(pair.target, POSITIONS)
        with torch.inference_mode():
            cached.feed(prompt[0])
            cached.feed(prompt[0, :1])
        assert not cached.finite
    finally:
        with torch.no_grad():
            norm.copy_(kept)


def test_without_a_compiler_the_model_runs_eagerly_and_the_reason_is_given(monkeypatch, prompt):
    def no_compiler(function, **options):
        raise RuntimeError("no C++ compiler\nmore lines")

    model = make_model(layers=1, hidden=32, seed=1)
    monkeypatch.setattr(torch, "compile", no_compiler)
    assert compile_steps(model, 300, (1, 2), 40) == "torch.compile failed (RuntimeError: no C++ compiler)"
    assert len(autoregressive_generate(model, prompt, 8, engine="fast").tokens) == 8


def test_compiled_logits_that_differ_are_refused(monkeypatch, prompt):
    model = make_model(layers=1, hidden=32, seed=1)
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: lambda *args: (function(*args)[0] * 1.01, args[-1])
    )
    assert "differ from the eager ones" in compile_steps(model, 300, (1, 2), 40)
    assert not hasattr(model, "compiled_steps")


def test_more_layers_take_longer_to_compile(monkeypatch):
    monkeypatch.setattr(compiling, "_seconds_besides_products", lambda model: 0.02)
    wanted = Wanted((4,), 60, forwards=1000)
    small, large = (make_model(layers=layers, hidden=16, seed=1) for layers in (1, 8))
    assert compiling._why_not(small, "auto", wanted, graphs=2) is None
    assert "take about 50 s" in compiling._why_not(large, "auto", wanted, graphs=2)


@pytest.mark.parametrize(
    "mode, saved_ms, compiled", [("off", 100.0, False), ("auto", 100.0, True), ("auto", 1.0, False), ("on", 0.0, True)]
)
def test_auto_compiles_where_the_run_repays_it(monkeypatch, mode, saved_ms, compiled):
    model = make_model(layers=1, hidden=32, seed=1)
    monkeypatch.setattr(compiling, "_seconds_besides_products", lambda model: saved_ms / 1e3)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    pair = SimpleNamespace(draft=model, target=model)
    lines: list[str] = []
    decided = prepare_fast_kernels(pair, mode, Wanted((4,), 60, forwards=1000), lines.append)
    assert [of_model["compiled"] for of_model in decided.values()] == [compiled] * 2
    assert [of_model["outcome"].endswith(", compiled") for of_model in decided.values()] == [compiled] * 2
    assert any("5 tokens a forward" in line for line in lines) == compiled


def test_what_was_decided_before_is_taken_over_without_timing(monkeypatch):
    model = make_model(layers=1, hidden=32, seed=1)
    monkeypatch.setattr(kernels, "_plan", lambda layers: pytest.fail("timed again"))
    monkeypatch.setattr(compiling, "_seconds_besides_products", lambda model: pytest.fail("timed again"))
    shapes = {
        f"{layer.out_features} x {layer.in_features}" for layer in model.modules() if isinstance(layer, nn.Linear)
    }
    earlier = {"outcome": "", "compiled": False, "rows": dict.fromkeys(shapes) | {"32 x 32": [4, 4, 4]}}
    pair, wanted = SimpleNamespace(draft=model, target=model), Wanted((2,), POSITIONS, forwards=10**9)
    decided = prepare_fast_kernels(pair, "auto", wanted, print, {"draft": earlier, "target": earlier})
    assert [of_model["compiled"] for of_model in decided.values()] == [False, False]
    assert decided["target"]["rows"] == earlier["rows"]
    assert {tuple(layer.rows) for layer in model.modules() if isinstance(layer, kernels.PackedLinear)} == {(4, 4, 4)}
