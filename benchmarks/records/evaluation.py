"""Results of benchmarks.evaluate, stored in evaluation.json."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp8_suite.core.files import replace_file, to_json
from fp8_suite.core.readers import read_record

FILE = "evaluation.json"


@dataclass(frozen=True)
class Result:
    """One measure of one model."""

    measure: str
    value: float
    stderr: float | None  # standard error of the value
    samples: int
    data: str  # equal for models measured on the same samples in the same way
    higher_is_better: bool = True
    note: str | None = None
    scores: str = ""  # "1" per right sample, "0" per wrong one
    model: str = ""
    export: str = ""  # name of the export in its run folder; "" for other models
    weights: str = ""

    def difference(self, first: Result) -> tuple[float, float] | None:
        """Return the difference to another model's result and its standard error, paired where possible."""
        if self is first or self.stderr is None or first.stderr is None:
            return None
        gap, error = self.value - first.value, math.hypot(self.stderr, first.stderr)
        if self.scores and self.data == first.data:
            differing = sum(a != b for a, b in zip(self.scores, first.scores, strict=True))
            error = math.sqrt((smoothed(differing, self.samples) - gap**2) / self.samples)
        return gap, error


def smoothed(count: int, samples: int) -> float:
    """Return a share for standard errors: none of 40 is no proof of none."""
    return (count + 1) / (samples + 2)


def write_results(folder: Path, results: list[Result], **record: Any) -> None:
    replace_file(folder / FILE, to_json(record | {"results": [*map(asdict, results)]}, indent=1))


def read_results(folder: Path, steps: int | None) -> list[Result]:
    """Return the results of a run after `steps`; [] without any, and if it was trained further since."""
    record = read_record(folder / FILE)
    return [Result(**row) for row in record.get("results", ())] if record.get("steps") == steps else []
