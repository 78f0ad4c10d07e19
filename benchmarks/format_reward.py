"""A format reward for the real-model run of docs/grpo.md, written as any user would write one: a function in a file."""

import re


def answer_line(prompts, completions, **columns) -> list[float]:  # noqa: ARG001
    """How far a completion is from being one line with one number, its last word: 0, 0.25, 0.5 or 1.

    0.25 where the first line of text holds a number, 0.5 where it holds exactly one and ends in it, 1 where nothing
    follows. (Without "exactly one" a policy learns within ten steps to list numbers up to the length limit.)
    """
    scores = []
    for text in completions:
        first, _, rest = text.strip().partition("\n")
        numbers = re.findall(r"\d[\d,]*(?:\.\d+)?", first)
        one = len(numbers) == 1 and re.search(re.escape(numbers[0]) + r"\W*$", first) is not None
        scores.append(1.0 if one and not rest else 0.5 if one else 0.25 if numbers else 0.0)
    return scores
