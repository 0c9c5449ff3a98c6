"""What the four scripts share on the command line: constants become flags, endings become exit codes.

A script states each knob once, as an upper-case constant; :func:`parse` makes the flag of the same name. Exit codes:
0, 1 a measurement failed or is invalid, 2 bad usage or input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from specdec.errors import InputError, MeasurementError

MAX_SEED = 2**32 - 1  # what every generator here takes
KEPT = "what is finished is kept, and Phases 1 and 3 go on with --resume"
EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Flag:
    """One knob: how its text is read and what it means. ``read`` None makes a switch."""

    read: Callable[[str], Any] | None
    help: str


def integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Return a reader of whole numbers from ``minimum`` to ``maximum``."""
    allowed = f"a whole number >= {minimum}" if maximum is None else f"a whole number from {minimum} to {maximum}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}") from None
        if value < minimum or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"{text} is not {allowed}")
        return value

    return read


def number(minimum: float, maximum: float | None = None) -> Callable[[str], float]:
    """Return a reader of finite numbers from ``minimum`` to ``maximum``."""
    allowed = f"a number >= {minimum:g}" if maximum is None else f"a number from {minimum:g} to {maximum:g}"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= minimum) or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
        return value

    return read


def text(given: str) -> str:
    """Read a name or path; an empty one, as of a shell variable that is not set, is refused."""
    if not given.strip():
        raise argparse.ArgumentTypeError("it is empty; give a name or leave the flag out")
    return given


def choice(*allowed: str) -> Callable[[str], str]:
    """Return a reader that takes one of the words ``allowed``."""

    def read(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown; known: {', '.join(allowed)}")
        return text

    return read


def several(read_one: Callable[[str], Any]) -> Callable[[str], tuple]:
    """Return a reader of a comma-separated list without repetitions, at least one entry."""

    def read(text: str) -> tuple:
        values = tuple(read_one(part.strip()) for part in text.split(",") if part.strip())
        if not values:
            raise argparse.ArgumentTypeError("the list is empty")
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r} names something twice")
        return values

    return read


PAIR_FLAGS = {
    "PAIR": Flag(choice("auto", "qwen2", "tiny"), "which pair: auto, qwen2 or tiny"),
    "DRAFT": Flag(text, "draft of any other pair: Hub id, folder or .gguf file (with --target)"),
    "TARGET": Flag(text, "target of any other pair: Hub id, folder or .gguf file (with --draft)"),
    "RANDOM_WEIGHTS": Flag(None, "the pair's architecture with random weights: timing only, no download"),
    "DEVICE": Flag(text, "auto, cpu, cuda, cuda:N, mps, or spread (over several GPUs)"),
    "DRAFT_DEVICE": Flag(text, "the draft's device, if it is another"),
    "DTYPE": Flag(choice("auto", "float32", "float16", "bfloat16"), "auto is float16 on CUDA, else float32"),
    "THREADS": Flag(integer(0, 1024), "CPU threads; 0 leaves it to torch"),
    "COMPILE": Flag(choice("auto", "on", "off"), "compile the fast engine's forwards; auto: where this run repays it"),
    "SEED": Flag(integer(0, MAX_SEED), "seed of random weights and of sampling"),
}
PROMPT_FLAGS = {
    "PROMPTS": Flag(several(str), "names of the prompts to run, comma-separated"),
    "PROMPT_FILE": Flag(text, "JSON lines with prompt, category and text, in place of the eight prompts"),
    "CHAT": Flag(None, "put each prompt through the tokenizer's chat template"),
    "GAMMAS": Flag(several(integer(0, 64)), "draft tokens per step, comma-separated"),
}
FOLDER_FLAGS = {
    "RESULTS_DIR": Flag(text, "folder for CSV files and manifests"),
    "PLOTS_DIR": Flag(text, "folder for plots"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def parse(
    argv: list[str] | None,
    description: str,
    flags: Mapping[str, Flag],
    constants: Mapping[str, Any],
    quick: Mapping[str, Any],
    resumable: bool = False,
) -> argparse.Namespace:
    """Return the value of each constant named in ``flags``: its flag's, else ``quick``'s under --quick, else its own.

    Plots go below a --results-dir that is given, unless --plots-dir is too.
    Raises InputError for a flag that is unknown or whose value is not allowed; --help prints and exits.
    """
    parser = _Parser(description=description, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a true small run, into folders of its own")
    for name, flag in flags.items():
        kind = {"action": "store_true"} if flag.read is None else {"type": flag.read}
        shown = f"{flag.help} (default: {_shown(constants[name])})".replace("%", "%%")
        parser.add_argument(_flag_of(name), default=None, help=shown, **kind)
    if resumable:
        parser.add_argument("--resume", action="store_true", help="go on with an interrupted run in the same folder")
    args = parser.parse_args(argv)
    if "PLOTS_DIR" in flags and args.results_dir is not None and args.plots_dir is None:
        args.plots_dir = str(Path(args.results_dir) / "plots")  # never into another run's plots
    for name in flags:
        if getattr(args, name.lower()) is None:
            setattr(args, name.lower(), quick[name] if args.quick and name in quick else constants[name])
    return args


def next_command(script: str, args: argparse.Namespace) -> str:
    """Return the command for the next script on the same folders."""
    parts = ["python", script, *(["--quick"] if args.quick else [])]
    usual = {"results", "results/quick", "results/published"}  # where scripts look by themselves
    if args.results_dir not in usual:
        parts += ["--results-dir", args.results_dir]
        if Path(args.plots_dir) != Path(args.results_dir) / "plots":
            parts += ["--plots-dir", args.plots_dir]
    return shlex.join(parts)


def _flag_of(name: str) -> str:
    return "--" + name.lower().replace("_", "-")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def run(body: Callable[[], int]) -> int:
    """Run a script's body and return its exit code; errors become one line on stderr, SIGTERM an interruption."""
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal's encoding lacks must not end a run
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        with _sigterm_interrupts():
            return body()
    except InputError as error:
        return _fail(EXIT_BAD_INPUT, str(error))
    except MeasurementError as error:
        return _fail(EXIT_FAILED, str(error))
    except OSError as error:
        return _fail(EXIT_FAILED, f"{error}; {KEPT}")
    except (MemoryError, RuntimeError) as error:  # torch reports a lack of memory as a RuntimeError
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        first = (str(error).splitlines() or ["no more is free"])[0]
        return _fail(EXIT_FAILED, f"out of memory: {first}; {KEPT}; a smaller pair or --dtype bfloat16 needs less")
    except KeyboardInterrupt:
        return _fail(EXIT_INTERRUPTED, f"interrupted; {KEPT}")


def _fail(code: int, message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return code


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: Any) -> NoReturn:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
