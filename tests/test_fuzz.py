"""Whatever bytes a file or a command line holds, a reader gives a value or one clear refusal, and nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from synthetic import Synthetic, write_run

import analysis_deep
import phase3_profiling
import speculative_decoding
from specdec import cli, evidence, prompts, results, run
from specdec.errors import InputError

fuzz = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
few = settings(fuzz, max_examples=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 3), st.binary(max_size=4)), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """The folder of a small made-up Phase 1 run."""
    folder = tmp_path_factory.mktemp("sound")
    write_run(folder, Synthetic(alphas={"code_python": 0.7}, gammas=(2,), repeats=2, new_tokens=6))
    return folder


def value_or_refusal(read, *expected: type):
    """Return what ``read`` gives, of a type expected, or None where it refuses."""
    try:
        value = read()
    except InputError:
        return None
    assert isinstance(value, expected)
    return value


def edited(data: bytes, edits) -> bytes:
    """Return ``data`` with pieces cut out and others put in."""
    for place, cut, new in edits:
        place %= len(data) + 1
        data = data[:place] + new + data[place + cut :]
    return data


# --- Tables ----------------------------------------------------------------------------------------------------------


@fuzz
@given(data=st.binary(max_size=200))
@example(data=b"prompt,position\n\x00,1\n")
@example(data=b"\xef\xbb\xbf" + b"prompt\n")
@example(data=b'"' * 9 + b"\n")
def test_any_bytes_are_a_table_or_refused(tmp_path, data):
    (tmp_path / results.TRACE.file).write_bytes(data)
    value_or_refusal(lambda: results.read_table(tmp_path, results.TRACE), pd.DataFrame)


@fuzz
@given(edits=EDITS, table=st.sampled_from([results.RUNS, results.TRACE, results.SUMMARIES["fast"]]))
def test_a_table_with_any_damage_is_read_or_refused(sound, tmp_path, edits, table):
    (tmp_path / table.file).write_bytes(edited((sound / table.file).read_bytes(), edits))
    rows = value_or_refusal(lambda: results.read_table(tmp_path, table), pd.DataFrame)
    if rows is not None:
        assert list(rows) == list(table.columns)
        numbers = [name for name, kind in table.columns.items() if kind == "number"]
        assert not np.isinf(rows[numbers].to_numpy(dtype=float)).any()


CELLS = {
    "text": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=6),
    "integer": st.none() | st.integers(-(2**62), 2**62),
    "number": st.none() | st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.none() | st.booleans(),
}


@fuzz
@given(st.data())
def test_whatever_is_written_comes_back(tmp_path, data):
    table = results.TRACE
    rows = data.draw(st.lists(st.fixed_dictionaries({name: CELLS[kind] for name, kind in table.columns.items()})))
    results.write_table(tmp_path, table, pd.DataFrame(rows, columns=list(table.columns), dtype=object))
    back = results.read_table(tmp_path, table)
    assert len(back) == len(rows)
    for (_, there), row in zip(back.iterrows(), rows):
        for name, kind in table.columns.items():
            if row[name] is None:
                assert pd.isna(there[name])
            elif kind == "number":
                assert there[name] == pytest.approx(row[name], rel=1e-6)
            else:
                assert there[name] == row[name]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, np.float32("inf"), np.float64("-inf"), None, pd.NA])
def test_what_is_no_number_is_an_empty_cell(value):
    assert results.format_cell(value) == ""


@few
@given(edits=EDITS, table=st.sampled_from([results.RUNS, results.TRACE, results.SUMMARIES["published"]]))
def test_a_run_with_a_damaged_table_is_analysed_or_refused(sound, tmp_path, edits, table):
    for path in sound.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / table.file).write_bytes(edited((sound / table.file).read_bytes(), edits))
    value_or_refusal(lambda: evidence.read_run(tmp_path, allow_mixed=True), evidence.Evidence)


# --- Manifests -------------------------------------------------------------------------------------------------------


@fuzz
@given(data=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
@example(data=b"[" * 100_000)
@example(data=b'{"format": 2}')
@example(data=b'{"format": "new"}')
def test_any_bytes_are_a_manifest_or_refused(tmp_path, data):
    (tmp_path / "manifest_phase1.json").write_bytes(data)
    value_or_refusal(lambda: run.read_manifest(tmp_path, "phase1"), dict)


def places_in(value, path=()):
    """Yield the path to every part of a JSON value."""
    yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from places_in(inner, (*path, name))


@fuzz
@given(data=st.data(), new=JSON)
def test_a_manifest_with_any_part_replaced_is_understood_or_refused(sound, tmp_path, data, new):
    manifest = json.loads((sound / "manifest_phase1.json").read_text())
    *path, last = data.draw(st.sampled_from(sorted(places_in(manifest))[1:]))
    inner = manifest
    for name in path:
        inner = inner[name]
    inner[last] = new
    for source in sound.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / "manifest_phase1.json").write_text(json.dumps(manifest))
    value_or_refusal(lambda: evidence.read_run(tmp_path, allow_mixed=True), evidence.Evidence)
    entries = {"pair": {}, "constants": {"gammas": (1, 2)}, "versions": {}}
    value_or_refusal(lambda: run.open_run(tmp_path, "phase1", [], entries, resume=True), run.Manifest)


# --- Prompt files and flags ------------------------------------------------------------------------------------------

ENTRY = st.fixed_dictionaries({name: JSON | st.just("name") for name in ("prompt", "category", "text")})


@fuzz
@given(data=st.binary(max_size=60) | (JSON | ENTRY).map(lambda value: json.dumps(value).encode()))
@example(data=b'{"prompt": "a", "category": "b", "text": "\\ud800"}')
def test_any_bytes_are_a_prompt_file_or_refused(tmp_path, data):
    (tmp_path / "prompts.jsonl").write_bytes(data)
    found = value_or_refusal(lambda: prompts.select_prompts((), str(tmp_path / "prompts.jsonl")), list)
    for prompt in found or ():
        assert prompt.text.encode()


SCRIPTS = [speculative_decoding, analysis_deep, phase3_profiling]
WORDS = st.sampled_from(
    ["", "0", "-1", "1,2", "nan", "inf", "1e400", "a=1", "=", ",", "auto", "tiny", "--", "٣", "1_0"]
)


@settings(fuzz, max_examples=400)
@given(data=st.data(), script=st.sampled_from(SCRIPTS))
def test_any_words_are_flags_or_refused(data, script):
    flags = st.sampled_from(["--" + name.lower().replace("_", "-") for name in script.FLAGS] + ["--quick"])
    words = data.draw(st.lists(flags | WORDS | st.text(max_size=6), max_size=6))
    words = [word for word in words if not word.startswith("-h") and not word.startswith("--h")]
    args = value_or_refusal(
        lambda: cli.parse(words, "", script.FLAGS, vars(script), script.QUICK), cli.argparse.Namespace
    )
    if args is not None:
        assert args.gammas
        assert all(isinstance(gamma, int) and 0 <= gamma <= 64 for gamma in args.gammas)
        assert len(set(args.gammas)) == len(args.gammas)
        assert 0 <= args.seed <= cli.MAX_SEED
