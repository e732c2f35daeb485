"""Report on the data of a split."""

from __future__ import annotations

from dataclasses import dataclass

from fp8_suite.core.errors import counted
from fp8_suite.data.order import Stored, Stream
from fp8_suite.data.reading.rows import DROPPED, USED, Status
from fp8_suite.data.samples import Selection, Split

MAX_DROPPED = 0.05  # share of dropped rows above which they are a warning


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Counts of one split's rows and tokens; for a stream, counts of its first window.

    rows == used + empty + overlong_dropped + without_label + bad_rows. Blank lines are not rows.
    """

    rows: int
    used: int
    empty: int
    overlong_dropped: int
    overlong_truncated: int  # included in `used`
    without_label: int  # no token to predict: no assistant turn after a prompt, or a single token
    bad_rows: int  # not text, not UTF-8, not JSON, unknown role or weight, refused by the template
    tokens: int
    label_tokens: int
    sequences: int  # packed sequences in the first epoch; samples if not packing
    packing_efficiency: float  # tokens / (tokens + padding), 0 to 1
    columns: str  # columns and system prompt in use, and columns not used
    tokenizer: str
    left_out: dict[str, int]  # part of an answer that the chat template leaves out -> number of rows
    fingerprint: str  # hash of the samples in order, the same on every machine
    first_bad_row: str | None  # number, starting at 1, and the reason
    streaming: bool

    def lines(self) -> list[str]:
        """Return lines to print: rows used, columns, rows dropped and cut, parts left out.

        Above MAX_DROPPED of the rows, the line on dropped rows is a warning.
        """
        scope = " in the stream's first window" if self.streaming else ""
        share = self.label_tokens / max(self.tokens, 1)
        used = (
            f"{self.used:,} of {counted(self.rows, 'row')}{scope}: {self.tokens:,} tokens ({share:.1%} with "
            f"loss) in {counted(self.sequences, 'sequence')}, {self.packing_efficiency:.1%} full"
        )
        lines = [used, f"columns: {self.columns}", *self._dropped(scope)]
        if self.overlong_truncated:
            lines.append(f"cut to --max_seq_length: {counted(self.overlong_truncated, 'row')}")
        if parts := [f"{part} in {counted(rows, 'row')}" for part, rows in self.left_out.items()]:
            template = f"the chat template of {self.tokenizer}"
            lines.append(f"WARNING: {template} leaves out of answers{scope}: {'; '.join(parts)}")
        return lines

    def _dropped(self, scope: str) -> list[str]:
        dropped = self.rows - self.used
        reasons = {
            "over --max_seq_length": self.overlong_dropped,
            "empty": self.empty,
            "without a token to predict": self.without_label,
            f"malformed (first: {self.first_bad_row})": self.bad_rows,
        }
        shown = "; ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
        if dropped > MAX_DROPPED * self.rows:
            share = f"{dropped:,} of {counted(self.rows, 'row')}{scope} dropped ({dropped / self.rows:.1%})"
            return [f"WARNING: {share}: {shown}"]
        return [f"rows dropped: {shown}"] if shown else []


def report_on(split: Split, selection: Selection, source: Stored | Stream) -> DataReport:
    """Return the report on the selected rows of a split; `source` holds their samples."""
    counts = selection.counts
    tokens = int(selection.samples.length.sum())
    return DataReport(
        rows=int(counts[[*USED, *DROPPED]].sum()),
        used=int(counts[[*USED]].sum()),
        empty=int(counts[Status.EMPTY]),
        overlong_dropped=int(counts[Status.OVERLONG]),
        overlong_truncated=int(counts[Status.TRUNCATED]),
        without_label=int(counts[Status.WITHOUT_LABEL]),
        bad_rows=int(counts[Status.BAD]),
        tokens=tokens,
        label_tokens=selection.label_tokens,
        sequences=source.num_bins,
        packing_efficiency=tokens / max(source.padded_tokens, 1),
        columns=split.source.columns.shown,
        tokenizer=split.encoder.tokenizer.name_or_path,
        left_out=selection.left_out,
        fingerprint=selection.fingerprint,
        first_bad_row=split.describe_first_bad(selection),
        streaming=isinstance(source, Stream),
    )
