"""Responses that an example itself says are right."""

from __future__ import annotations

from megarl.tasks.dataset import Example

ANSWER_IS_NO_RESPONSE = ("countdown",)
"""Verifiers whose `answer` is not what a response holds: Countdown's is the target, not the expression."""


def reference_responses(verifier: str, example: Example) -> list[str]:
    """Responses of which the verifier must accept at least one; empty where the example has none.

    They are the demonstrations, and the answer as it is and in the forms in which verifiers ask for it. A text answer may be a whole
    worked response, as ToolRL's are, or end with the answer after ####, as GSM8K's do.
    """
    responses = list(example.demonstrations)
    answer = example.answer
    if verifier in ANSWER_IS_NO_RESPONSE or isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        return responses
    final = f"{answer}".rpartition("####")[2].strip()
    return [*responses, f"{answer}", f"<answer>{final}</answer>", f"\\boxed{{{final}}}", f"```python\n{answer}\n```"]
