"""Verifiers of a user, for test_verifiers.py."""

import numpy as np

from megarl.tasks.verdict import Verdict

not_a_function = 3


def by_length(response, answer, metadata, scale=1.0):
    return len(response) * scale / answer + metadata.get("bonus", 0)


def equal(response, answer, metadata):
    return response == answer


def with_verdict(response, answer, metadata):
    return Verdict("timeout", 0.0)


def raises(response, answer, metadata):
    raise KeyError("no such thing")


def returns(response, answer, metadata, what="none"):
    return {"none": None, "text": "1.0", "nan": float("nan"), "inf": float("inf"), "list": [1.0]}[what]


def numpy_reward(response, answer, metadata):
    return np.float32(0.5)


def two_arguments(response, answer):
    return 0.0
