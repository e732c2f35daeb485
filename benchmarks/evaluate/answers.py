"""Final answers in generated text: found, normalised and compared, as for GSM8K and MATH."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
NUMBER = rf"(?<![\w.)])-?(?:{INTEGER}(?:\.\d+)?|\.\d+)(?:/\d+)?"
# A number with a name before it and a unit after it: `x = 72`, `72 dollars`; not `2x`, `x^2` or `\sqrt{2}`.
ONE_NUMBER = re.compile(rf"(?:[A-Za-z][A-Za-z ]*[=:]?\s*)?({NUMBER})(?:\s*[A-Za-z]{{2,}}[A-Za-z /]*)?\.?")
# LaTeX and typography that do not change an answer.
CLEANED = (
    (r"\u2212", "-"),
    (r"\{,\}", ","),
    (r"\\?[$%\u20ac\u00a3]|\\left|\\right|\\[,;!()\[\] ]|\^\{?\\circ\}?", ""),
    (r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 "),
    (r"(?<=\d)\\[dt]?frac", r" \\frac"),  # a mixed number is not one row of digits
    (r"\\[dt]?frac\s*\{?(\d+)\}?\s*\{?(\d+)\}?", r"\1/\2"),
)


def marked_answer(text: str) -> str | None:
    r"""Return what the last closed \boxed{} holds, else what follows the last ####; None without either."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if not depth:
                return text[start:end].strip()
    lines = text.rpartition("####")[2].strip().splitlines() if "####" in text else []
    return lines[0].strip() if lines else None


def final_answer(text: str) -> str:
    """Return the answer that a generated text marks, else its last number, else what follows `answer is`."""
    if (answer := marked_answer(text)) is not None:
        return answer
    numbers = re.findall(NUMBER, cleaned(text))
    return numbers[-1] if numbers else text.rpartition("answer is")[2].strip(" :.\n")


def expected_answer(row: dict[str, Any], reference: str) -> str | None:
    """Return the answer in a row's column or, marked, in its `reference` solution; None without one."""
    columns = (row.get("expected_answer"), row.get("answer"), reference)
    text = str(next(column for column in columns if column not in (None, ""))).strip()
    return marked_answer(text) or (None if text == reference.strip() else text)


def cleaned(text: str) -> str:
    for pattern, replacement in CLEANED:
        text = re.sub(pattern, replacement, text)
    return text.strip()


def number(answer: str) -> Fraction | None:
    """Return the value of an answer that is one number, perhaps with a name or a unit."""
    found = ONE_NUMBER.fullmatch(cleaned(answer))
    try:
        return Fraction(found[1].replace(",", "")) if found else None
    except (ValueError, ZeroDivisionError):  # 1.5/2, 1/0
        return None


def same_answer(answer: str, expected: str) -> bool:
    """True for equal numbers, such as 72.0 and $72, or for texts that are equal apart from case and space."""
    if (value := number(expected)) is not None:
        return number(answer) == value
    texts = ["".join(cleaned(text).rstrip(".").casefold().split()) for text in (answer, expected)]
    return texts[0] == texts[1]
