"""Constants become flags, and every ending has its exit code and one line."""

from __future__ import annotations

import pytest

from specdec import cli
from specdec.errors import InputError, MeasurementError

FLAGS = {
    "GAMMAS": cli.Flag(cli.several(cli.integer(0, 64)), "gammas"),
    "SHARE": cli.Flag(cli.number(0.0), "a share in %"),
    "CHAT": cli.Flag(None, "a switch"),
    "DRAFT": cli.Flag(str, "a draft"),
}
CONSTANTS = {"GAMMAS": (1, 2), "SHARE": 0.5, "CHAT": False, "DRAFT": None}


def parse(*argv, quick=None, **kwargs):
    return cli.parse(list(argv), "description", FLAGS, CONSTANTS, quick or {}, **kwargs)


def test_a_flag_overrides_quick_which_overrides_the_constant():
    assert parse().gammas == (1, 2)
    assert parse("--quick", quick={"GAMMAS": (4,)}).gammas == (4,)
    assert parse(quick={"GAMMAS": (4,)}).gammas == (1, 2)
    assert parse("--quick", "--gammas", "8, 2", quick={"GAMMAS": (4,)}).gammas == (8, 2)
    assert parse("--chat").chat is True


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--gammas", "65"], "65 is not a whole number from 0 to 64"),
        (["--gammas", ""], "the list is empty"),
        (["--share", "nan"], "'nan' is not a number >= 0"),
        (["--share", "-0.1"], "'-0.1' is not a number >= 0"),
        (["--share", "inf"], "'inf' is not a number >= 0"),
        (["--share", "0,5"], "'0,5' is not a number >= 0"),
        (["--gamma", "1"], "unrecognized arguments"),
        (["--resume"], "unrecognized arguments"),
    ],
)
def test_what_a_flag_can_not_take_is_refused_with_what_it_can(argv, message):
    with pytest.raises(InputError, match=message):
        parse(*argv)


FOLDERS = {"RESULTS_DIR": "results", "PLOTS_DIR": "plots"}
QUICK_FOLDERS = {"RESULTS_DIR": "results/quick", "PLOTS_DIR": "plots/quick"}


def folders(*argv):
    return cli.parse(list(argv), "description", cli.FOLDER_FLAGS, FOLDERS, QUICK_FOLDERS)


@pytest.mark.parametrize(
    "argv, plots, command",
    [
        ([], "plots", "python next.py"),
        (["--quick"], "plots/quick", "python next.py --quick"),
        (["--results-dir", "my runs"], "my runs/plots", "python next.py --results-dir 'my runs'"),
        (["--quick", "--results-dir", "a"], "a/plots", "python next.py --quick --results-dir a"),
        (["--results-dir", "a", "--plots-dir", "b"], "b", "python next.py --results-dir a --plots-dir b"),
    ],
)
def test_plots_follow_the_results_and_the_next_command_names_both(argv, plots, command):
    args = folders(*argv)
    assert args.plots_dir == plots
    assert cli.next_command("next.py", args) == command


def test_resume_is_a_flag_only_where_a_run_can_go_on():
    assert parse("--resume", resumable=True).resume is True
    assert parse(resumable=True).resume is False


def test_help_shows_every_default(capsys):
    with pytest.raises(SystemExit) as ending:
        parse("--help")
    assert ending.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("gammas (default: 1,2)", "a share in % (default: 0.5)", "a switch (default: off)", "(default: None)"):
        assert text in shown


def raising(error):
    def body():
        raise error

    return body


@pytest.mark.parametrize(
    "error, code",
    [
        (InputError("bad\ninput"), 2),
        (MeasurementError("bad measurement"), 1),
        (MemoryError(), 1),
        (RuntimeError("CUDA out of memory"), 1),
        (OSError(28, "No space left on device"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_ending_has_its_exit_code_and_one_line(capsys, error, code):
    assert cli.run(raising(error)) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")


def test_a_fault_of_the_program_itself_is_not_hidden():
    with pytest.raises(RuntimeError, match="a bug"):
        cli.run(raising(RuntimeError("a bug")))
