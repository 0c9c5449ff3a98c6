"""A difference is a near tie only if rounding can explain it; everything else is a fault."""

from __future__ import annotations

import copy

import pytest
import torch

from specdec.engine.decoding import autoregressive_generate, speculative_generate
from specdec.engine.engines import get_engine
from specdec.engine.exactness import Mismatch, explain_mismatch, first_mismatch
from specdec.prompts import PROMPTS


@pytest.mark.parametrize(
    "expected, actual, place",
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 9, 3], 1), ([1, 2, 3], [1, 2], 2), ([], [4], 0), ([], [], None)],
)
def test_the_first_mismatch_counts_a_missing_end(expected, actual, place):
    assert first_mismatch(expected, actual) == place


@pytest.mark.parametrize(
    "gap, difference, near", [(0.0, 0.0, True), (0.2, 0.1, True), (0.21, 0.1, False), (1, 0, False)]
)
def test_a_near_tie_is_a_gap_of_at_most_twice_the_logits_difference(gap, difference, near):
    assert Mismatch(position=3, top2_gap=gap, logit_difference=difference).near_tie is near


@pytest.mark.parametrize("engine", ["published", "fast"])
@pytest.mark.parametrize("place", [0, 1, 5, 11, 19])
def test_a_tampered_token_is_a_fault_at_its_place(draft, target, prompt, engine, place):
    baseline = autoregressive_generate(target, prompt, 20, engine=engine)
    generation = speculative_generate(target, target, prompt, 20, 4, engine=engine)
    tampered = copy.deepcopy(generation)
    tampered.tokens[place] = (tampered.tokens[place] + 1) % 300
    assert explain_mismatch(target, prompt, baseline, generation, engine) is None
    mismatch = explain_mismatch(target, prompt, baseline, tampered, engine)
    assert mismatch.position == place
    assert mismatch.logit_difference < 1e-3, "both paths give the same logits up to rounding"
    assert not mismatch.near_tie


def test_in_bfloat16_every_mismatch_of_the_embedded_pair_is_a_near_tie(tiny_pair):
    for model in (tiny_pair.draft, tiny_pair.target):
        get_engine("published").prepare(model)  # packed layers can't be copied
    draft, target = (copy.deepcopy(model).to(torch.bfloat16) for model in (tiny_pair.draft, tiny_pair.target))
    mismatches = []
    for prompt in PROMPTS:
        input_ids = tiny_pair.tokenizer(prompt.text, return_tensors="pt").input_ids
        baseline = autoregressive_generate(target, input_ids, 40)
        generation = speculative_generate(draft, target, input_ids, 40, 4)
        mismatch = explain_mismatch(target, input_ids, baseline, generation, "published")
        mismatches += [mismatch] if mismatch else []
    assert all(mismatch.near_tie for mismatch in mismatches), mismatches
