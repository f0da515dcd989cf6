"""The ways in which a command ends other than well."""


class InputError(Exception):
    """The input is wrong: the message names the place, what was expected and what to do, and ends as a sentence. Exit code 2."""


class RunFailed(RuntimeError):
    """A part of a run died or could not do what it was told: an engine, a training rank. Exit code 1."""


class CheckFailed(Exception):
    """A check that the user asked for has failed. Exit code 1."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the run at once; `exit_code` is what a shell reports for a program that the signal ended."""

    def __init__(self, signal: int):
        super().__init__()
        self.exit_code = 128 + signal


def sentence(text: str) -> str:
    """`text` with a full stop, unless it ends as a sentence already."""
    return text if text.endswith((".", "?")) else f"{text}."
