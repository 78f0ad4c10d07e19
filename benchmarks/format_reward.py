"""A format reward for the real-model run of docs/grpo.md, written as any user would write one: a function in a file."""

import re


def answer_line(prompts, completions, **columns) -> list[float]:  # noqa: ARG001
    """0.5 where the first line of text holds a number, and 0.5 more where that line is all and ends in the number."""
    scores = []
    for text in completions:
        lines = text.strip().split("\n")
        number = re.search(r"\d", lines[0]) is not None
        only_line = len(lines) == 1 and re.search(r"\d[\d,]*(\.\d+)?\.?$", lines[0].strip()) is not None
        scores.append(0.5 * number + 0.5 * only_line)
    return scores
