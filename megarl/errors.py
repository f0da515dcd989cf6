"""The two ways in which a command ends other than well."""


class InputError(Exception):
    """The input is wrong: the message names the place, what was expected and what to do. Exit code 2."""


class RunFailed(RuntimeError):
    """A part of a run died or could not do what it was told: an engine, a training rank. Exit code 1."""


class CheckFailed(Exception):
    """A check that the user asked for has failed. Exit code 1."""
