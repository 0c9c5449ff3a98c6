"""Where the suite runs: no home, no display, one core, another locale, odd folders, a checkout that stays as it is."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import write_run

from specdec import results, run

ROOT = Path(__file__).parents[1]
BARE = {  # a service's environment: no home, no display, an ASCII locale that Python is not allowed to widen
    "PATH": os.environ["PATH"],
    "HOME": "/proc/nowhere",
    "LC_ALL": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    **{name: value for name, value in os.environ.items() if name.startswith("OPENBLAS")},
}


@pytest.fixture
def odd_folder(tmp_path) -> Path:
    return tmp_path / "Läufe mit 'Leerzeichen' 数"


def checkout() -> dict[Path, int]:
    """Return every file of the checkout that a run could touch, with the time of its last change."""
    left_out = {".git", "__pycache__", ".pytest_cache", ".hypothesis", ".ruff_cache"}
    files = [path for path in ROOT.rglob("*") if not left_out & set(path.relative_to(ROOT).parts)]
    return {path: path.stat().st_mtime_ns for path in files if path.is_file()}


def script(name: str, *flags, prefix=(), **more) -> subprocess.CompletedProcess:
    """Run a script in the bare environment, from a folder that nothing can be written to."""
    command = [*prefix, sys.executable, str(ROOT / name), *map(str, flags)]
    return subprocess.run(command, env=BARE | more, cwd="/proc", capture_output=True)


def test_phase_two_runs_without_home_display_or_a_wide_locale_into_odd_folders(odd_folder):
    write_run(odd_folder / "results")
    before = checkout()
    flags = ["--results-dir", odd_folder / "results", "--plots-dir", odd_folder / "plots", "--trials", "50"]
    done = script("analysis_deep.py", *flags)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert len(list((odd_folder / "plots").glob("*.png"))) == 4
    assert run.read_manifest(odd_folder / "results", "phase2")["status"] == "complete"
    assert checkout() == before


def test_a_message_about_an_odd_folder_is_one_line_in_any_locale(odd_folder):
    done = script("analysis_deep.py", "--results-dir", odd_folder, "--plots-dir", odd_folder)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"manifest_phase1.json is missing" in done.stderr


def test_phases_one_and_three_run_there_too_on_one_core_and_write_utf8(odd_folder, pair_folders):
    models = {}
    for folder in pair_folders:
        models[folder.name] = odd_folder / f"{folder.name} ü"
        shutil.copytree(folder, models[folder.name])
    prompt = {"prompt": "mine", "category": "own", "text": "größer als 数 \u2028 \U0001f600"}
    (odd_folder / "prompts ö.jsonl").write_text(json.dumps(prompt, ensure_ascii=False) + "\n", encoding="utf-8")
    flags = ["--draft", models["draft"], "--target", models["target"], "--prompt-file", odd_folder / "prompts ö.jsonl"]
    flags += ["--gammas", "2", "--max-new-tokens", "6", "--engines", "fast", "--results-dir", odd_folder / "r"]
    flags += ["--plots-dir", odd_folder / "p"]
    one_core = ("taskset", "-c", "0") if shutil.which("taskset") else ()
    before = checkout()
    done = script("speculative_decoding.py", *flags, "--repeats", "1", prefix=one_core)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    done = script("phase3_profiling.py", *flags, "--sections", "2,3", "--temperatures", "0,1", prefix=one_core)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert checkout() == before
    for path in (odd_folder / "r").glob("*.*"):
        path.read_text(encoding="utf-8")
    manifest = run.read_manifest(odd_folder / "r", "phase1")
    assert manifest["pair"]["draft"]["name"] == "draft ü"
    assert results.read_table(odd_folder / "r", results.RUNS).matches_baseline.all()


def opened_as_text(path: Path) -> list[ast.Call]:
    """Return the calls in a file that open, read or write text."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    opening = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "open"]
    whole = [call for call in calls if getattr(call.func, "attr", "") in ("read_text", "write_text")]
    return whole + [call for call in opening if not any("b" in ast.unparse(mode) for mode in call.args[1:2])]


def test_every_file_that_the_suite_opens_as_text_names_its_encoding():
    seen = 0
    for path in [*ROOT.glob("*.py"), *(ROOT / "specdec").rglob("*.py")]:
        for call in opened_as_text(path):
            seen += 1
            assert "encoding" in [word.arg for word in call.keywords], f"{path.name}: {ast.unparse(call)}"
    assert seen > 10
