"""Nothing that a model's folder or a table holds is executed, and nothing is fetched that was not named."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
import socket
import sys
from pathlib import Path

import pandas as pd
import pytest

import analysis_deep
import speculative_decoding
from specdec import results
from specdec.engine import sources
from specdec.engine.pair import load_pair
from specdec.errors import InputError

ROOT = Path(__file__).parents[1]


def load(folder) -> None:
    load_pair(draft=str(folder), target=str(folder), device="cpu")


@pytest.fixture
def folder(tmp_path, pair_folders) -> Path:
    """A copy of a sound model, to be made dangerous."""
    copy = tmp_path / "model"
    shutil.copytree(pair_folders[0], copy)
    return copy


@pytest.fixture
def nobody_is_asked(monkeypatch):
    """Fail if a question is put to the terminal: whether to run a model's code is not left to a moment's haste."""
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("a question was asked"))


class Malicious:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.pt", "model.gguf"])
def test_a_pickle_is_not_loaded_under_any_name(tmp_path, folder, name):
    marker = tmp_path / "executed"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Malicious(marker)))
    for given in (folder, folder / name):
        with pytest.raises(InputError, match=r"can't be (loaded|read)|is not a GGUF file|neither a Hub id"):
            load(given)
    assert not marker.exists()
    pickle.loads((folder / name).read_bytes())
    assert marker.exists(), "the pickle does what it is for"


CODE = "from pathlib import Path\nPath({marker!r}).touch()\nclass Mine: pass\n"


@pytest.mark.parametrize("model_type", ["qwen2", "of_tomorrow"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_models_own_code_is_not_run(tmp_path, folder, nobody_is_asked, file, model_type):
    marker = tmp_path / "executed"
    (folder / "mine.py").write_text(CODE.format(marker=str(marker)))
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    entries = json.loads((folder / file).read_text())
    entries |= {"auto_map": dict.fromkeys(names, "mine.Mine")}
    (folder / file).write_text(json.dumps(entries))
    config = json.loads((folder / "config.json").read_text()) | {"model_type": model_type}
    (folder / "config.json").write_text(json.dumps(config))
    if model_type == "qwen2":
        load(folder)
    else:
        with pytest.raises(InputError, match="model can't be read"):
            load(folder)
    assert not marker.exists()


def test_a_hub_model_brings_weights_and_texts_only(monkeypatch, tmp_path):
    asked = []

    def snapshot(model_id, allow_patterns, local_files_only=False):
        asked.extend(allow_patterns)
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr(sources, "_check_download", lambda model_id: None)
    with pytest.raises(InputError, match="could not be downloaded"):
        sources.resolve("some/model", random_weights=False)
    assert asked
    for name in ("pytorch_model.bin", "model.pt", "model.pkl", "modeling_mine.py", "model.h5", "flax_model.msgpack"):
        assert not any(Path(name).match(pattern) for pattern in asked), name


def test_a_run_on_local_models_asks_the_network_for_nothing(pair_folders, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: asked.append(args) or [])
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: asked.append(address))
    flags = ["--draft", str(pair_folders[0]), "--target", str(pair_folders[1]), "--device", "cpu", "--quick"]
    flags += ["--engines", "fast", "--gammas", "2", "--results-dir", str(tmp_path)]
    assert speculative_decoding.main(flags) == 0
    analysis = ["--results-dir", str(tmp_path), "--plots-dir", str(tmp_path / "plots"), "--trials", "10"]
    assert analysis_deep.main(analysis) == 0
    assert asked == []


def calls_in(path: Path) -> set[str]:
    """Return the names of everything that a file calls or imports, dotted."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            names.add(ast.unparse(node.func))
            names |= {f"{ast.unparse(node.func)}({word.arg}={ast.unparse(word.value)})" for word in node.keywords}
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {getattr(node, "module", None) or alias.name for alias in node.names}
    return names


def test_no_file_of_the_suite_unpickles_evaluates_or_trusts():
    files = [*ROOT.glob("*.py"), *(ROOT / "specdec").rglob("*.py")]
    assert len(files) > 30
    for path in files:
        names = calls_in(path)
        assert not names & {"pickle", "dill", "joblib", "eval", "exec", "os.system", "marshal", "shelve"}, path.name
        assert not any("trust_remote_code=True" in name or "shell=True" in name for name in names), path.name
        if "torch.load" in names:
            assert "torch.load(weights_only=True)" in names, path.name


FORMULAS = ["=1+1", "+1", "-1", "@sum", "\tx", "\rx", "=cmd|' /C calc'!A0", "'quoted", "''", "-"]


@pytest.mark.parametrize("text", FORMULAS)
def test_text_that_a_spreadsheet_would_compute_is_written_as_text_and_comes_back(tmp_path, text):
    table = results.CLAIMS
    results.write_table(tmp_path, table, pd.DataFrame([dict.fromkeys(table.columns, text)]))
    cell = (tmp_path / table.file).read_text(encoding="utf-8").splitlines()[1].lstrip('"')
    assert cell.startswith("'")
    assert results.read_table(tmp_path, table).iloc[0].tolist() == [text] * len(table.columns)


def test_negative_numbers_and_usual_text_are_written_plainly():
    cells = [results.format_cell(value) for value in (-1.5, -3, "a-b", "prompt lookup, gamma 4", "x=1")]
    assert cells == ["-1.5", "-3", "a-b", '"prompt lookup, gamma 4"', "x=1"]


def test_no_test_above_left_a_module_of_a_models_behind():
    assert not any(name.startswith("transformers_modules") and name.endswith("mine") for name in sys.modules)
