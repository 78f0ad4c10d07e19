"""A format reward for the real-model run of docs/grpo.md, written as any user would write one: a function in a file."""

import re


def answer_line(prompts, completions, **columns) -> list[float]:  # noqa: ARG001
    """1 where the completion is one line of text that ends in a number, 0.5 where only its last line does, else 0."""
    scores = []
    for text in completions:
        lines = text.strip().split("\n")
        ends_in_number = re.search(r"\d[\d,]*(\.\d+)?\.?$", lines[-1].strip()) is not None
        scores.append((1.0 if len(lines) == 1 else 0.5) if ends_in_number else 0.0)
    return scores
