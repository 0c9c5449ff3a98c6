"""The two ways a script ends early; each message is one line for a person."""

from __future__ import annotations


class InputError(ValueError):
    """Something the user gave can't be used: a flag, a file, a model. Exit code 2."""


class MeasurementError(RuntimeError):
    """A measurement failed or is invalid. Exit code 1."""
