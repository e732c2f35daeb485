"""The report as one HTML file that needs nothing else: inline SVG, a style sheet, no script, no network.

Whatever comes from a run folder passes `text` on its way into the page.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.records.runs import LOSSES, RunRecord, labels, provenance, settings, short_labels
from benchmarks.report import figures, tables
from benchmarks.report.fp8_heatmap import draw_casts, last_casts
from benchmarks.report.gaps import comparison, ends_finite, other_settings, tail_gap, tail_noise
from benchmarks.report.page_style import STYLE
from benchmarks.report.tables import Rows
from benchmarks.report.verdict import Verdict, as_text

DASH_LENGTHS = {"-": "", "--": "6 3", "-.": "6 3 1 3", ":": "2 2"}
MOST_COLUMNS = 6  # runs side by side; more are one below the other
MOST_SETTINGS = 12  # runs of one table of settings; more fit no sheet of paper


def text(value: Any) -> str:
    """Any value as text of a page."""
    if value is None:
        return "-"
    return escape(f"{value:g}" if isinstance(value, float) else str(value), quote=True)


def page(runs: list[RunRecord], reference: RunRecord, verdict: Verdict | None = None) -> str:
    """The whole file; of a comparison its verdict comes first."""
    with matplotlib.rc_context(figures.PAGE):
        bodies = {"Verdict": _verdict(verdict)} if verdict else {}
        bodies |= {
            "Runs": _runs(runs),
            "Losses": _losses(runs),
            "Gap to the reference": _gap(runs, reference, verdict.baselines if verdict else {}),
            "Loss statistics": _statistics(runs),
            "Throughput, MFU and memory": _scaling(runs),
            "Precision coverage": _coverage(runs),
            "FP8 statistics": _casts(runs),
            "Hours": _hours(runs),
            "Settings": _settings(runs, reference),
        }
    links = " ".join(f'<a href="#{_id(title)}">{text(title)}</a>' for title in bodies)
    sections = "\n".join(
        f'<section id="{_id(title)}">\n<h2>{text(title)}</h2>\n{body}\n</section>'
        for title, body in bodies.items()
    )
    title = f"Training report: {short_labels(runs)[0] if len(runs) == 1 else f'{len(runs)} runs'}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
        f"<header>\n<h1>{text(title)}</h1>\n{_emulated_note(runs)}<nav>{links}</nav>\n</header>\n"
        f"<main>\n{sections}\n</main>\n</body>\n</html>\n"
    )


def _id(title: str) -> str:
    return title.lower().replace(",", "").replace(" ", "-")


def _emulated_note(runs: list[RunRecord]) -> str:
    names = ", ".join(label for label, run in zip(short_labels(runs), runs, strict=True) if run.emulated)
    if not names:
        return ""
    return note(f"Emulated: {names}. Losses are real; speed says nothing about any GPU and is not shown.")


def note(sentence: str) -> str:
    return f'<p class="note">{text(sentence)}</p>\n'


def table(head: Iterable[str], rows: Iterable[Iterable[str]], *, kind: str = "numbers") -> str:
    """A table that scrolls sideways by itself; `head` and `rows` hold markup, each row's first a heading."""
    lines = ["".join(f'<th scope="col">{cell}</th>' for cell in head)]
    for first, *cells in rows:
        lines.append(f'<th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in cells))
    body = "\n".join(f"<tr>{line}</tr>" for line in lines[1:])
    top = f"<thead><tr>{lines[0]}</tr></thead>"
    return (
        f'<div class="wide" tabindex="0"><table class="{kind}">{top}<tbody>\n{body}\n</tbody></table></div>\n'
    )


def _names(runs: list[RunRecord]) -> list[str]:
    return [_name(i, run, label) for i, (run, label) in enumerate(zip(runs, short_labels(runs), strict=True))]


def by_run(runs: list[RunRecord], rows: Rows) -> str:
    """A table of `rows`: few runs stand side by side, many below each other."""
    names = _names(runs)
    if len(runs) <= MOST_COLUMNS:
        return table(["", *names], [[text(what), *_texts(cells)] for what, cells in rows.items()])
    lines = zip(names, *map(_texts, rows.values()), strict=True)
    return table(["", *map(text, rows)], lines)


def _texts(cells: list[str]) -> list[str]:
    return [text(cell) for cell in cells]


def _name(number: int, run: RunRecord, label: str) -> str:
    tags = {"emulated": run.emulated, "unfinished": run.summary is None}
    told = "".join(f' <span class="tag">{tag}</span>' for tag, applies in tags.items() if applies)
    return f"{_swatch(number)} {text(label)}{told}"


def _swatch(number: int) -> str:
    style = figures.style(number)
    color = f"var(--run{style['color'][1:]})"
    dashes = DASH_LENGTHS[style["linestyle"]]
    return (
        '<svg class="swatch" viewBox="0 0 24 8" aria-hidden="true">'
        f'<line x1="0" y1="4" x2="24" y2="4" style="stroke: {color}" stroke-dasharray="{dashes}"/></svg>'
    )


def _key(entries: Iterable[tuple[int, str]]) -> str:
    items = "".join(f"<li>{_swatch(number)} {text(label)}</li>" for number, label in entries)
    return f'<ul class="key">{items}</ul>\n'


def _figure(svg: str, caption: str, kind: str = "") -> str:
    return (
        f'<figure class="{kind}"><div class="wide" role="img" aria-label="{text(caption)}">{svg}</div>'
        f"<figcaption>{text(caption)}</figcaption></figure>\n"
    )


def _verdict(verdict: Verdict) -> str:
    head, rows = as_text(verdict.rows)
    listed = "".join(f"<li>{text(told)}</li>" for told in verdict.notes)
    made = table(["", *map(text, head[1:])], map(_texts, rows))
    return f'{made}{note(verdict.limit)}<ul class="notes">{listed}</ul>'


def _runs(runs: list[RunRecord]) -> str:
    where = "".join(
        f"<li><b>{text(label)}</b>{'' if run.summary is not None else ' (unfinished)'}: "
        f"{text(provenance(run))}</li>"
        for label, run in zip(labels(runs), runs, strict=True)
    )
    return f'{by_run(runs, tables.shown(tables.RUNS, runs))}<ul class="origins">{where}</ul>'


def _losses(runs: list[RunRecord]) -> str:
    logged = [i for i, run in enumerate(runs) if run.series("train/loss") or run.series("eval/loss")]
    if not logged:
        return note("No run logged a loss.")
    names = short_labels(runs)
    scales = {"linear": False, "log": True}
    inputs = "".join(
        f'<input type="radio" name="scale" id="scale-{name}"{"" if log else " checked"}>'
        f'<label for="scale-{name}">{name}</label>'
        for name, log in scales.items()
    )
    drawn = "".join(
        _figure(
            figures.to_svg(figures.draw_losses(runs, log=log, legend=False), f"loss-{name}"),
            f"Loss on a {name} scale. Pale: as logged; strong: training, moving mean over about 5 % of the "
            "values; markers alone: evaluation.",
            f"big scale-{name}",
        )
        for name, log in scales.items()
    )
    return f'<div class="scales">{inputs}\n{_key((i, names[i]) for i in logged)}{drawn}</div>'


def _gap(runs: list[RunRecord], reference: RunRecord, baselines: dict[Path, RunRecord | None]) -> str:
    names = dict(zip((id(run) for run in runs), short_labels(runs), strict=True))
    against = comparison(runs, reference, baselines)
    out = note(f"Reference: {names[id(reference)]}.")
    if against.pairs:
        caption = "Smoothed training loss against that of the run named below. "
        caption += (
            "The first tenth of the steps, and spikes far beyond all other gaps, may leave the picture."
        )
        noise = tail_noise(against.family)
        if noise is not None:
            seeds = ", ".join(names[id(run)] for run in against.family)
            width = f"their means of the last 10 % lie {noise:.3%} apart"
            out += note(f"Noise band: spread of {len(against.family)} seeds ({seeds}); {width}.")
        else:
            out += note("No noise band: it takes the reference's settings with another seed, or several.")
        svg = figures.to_svg(figures.draw_gap(runs, against, legend=False), "gap")
        numbers = {id(run): number for number, run in enumerate(runs)}
        marked = _names(runs)
        drawn = [(numbers[id(run)], run, baseline) for run, baseline in against.pairs]
        out += _key((number, names[id(run)]) for number, run, _ in drawn) + _figure(svg, caption, "big")
        head = [
            "",
            "against",
            "gap of the mean of the last 10 % of common steps",
            "other settings than precision that differ",
        ]
        rows = [
            [marked[number], *_texts([names[id(baseline)], *_gap_and_settings(run, baseline)])]
            for number, run, baseline in drawn
        ]
        out += table(head, rows)
    elif not against.left_out:
        out += note("No other run to compare.")
    if against.left_out:
        why = "".join(note(f"{label}: {reason}.") for label, reason in against.left_out.items())
        out += f"<details><summary>Not compared ({len(against.left_out)})</summary>{why}</details>"
    return out


def _statistics(runs: list[RunRecord]) -> str:
    out = ""
    for title, metric in LOSSES.items():
        out += f"<h3>{text(title.capitalize())} loss</h3>\n"
        if any(metric in record for run in runs for record in run.records):
            out += by_run(runs, tables.shown(tables.statistics(metric), runs))
        else:
            out += note("No run logged one.")
    return out + note("Over all finite values logged; the standard deviation is the population's.")


def _scaling(runs: list[RunRecord]) -> str:
    out = ""
    for number, axis in enumerate(figures.AXES):
        lines = figures.scaling(runs, axis)
        drawn = {
            rate: figures.draw_scaling(lines, axis, rate, legend=False) for rate in figures.RATES if lines
        }
        panels = [
            _figure(figures.to_svg(figure, f"rate{number}-{i}"), f"{rate} by {axis}")
            for i, (rate, figure) in enumerate(drawn.items())
            if figure
        ]
        if panels:
            out += f"<h3>By {text(axis)}</h3>\n{_key(enumerate(lines))}"
            out += f'<div class="panels">{"".join(panels)}</div>\n'
        else:
            out += note(f"By {axis}: no two native GPU runs of the same work differ in it.")
    return out


def _coverage(runs: list[RunRecord]) -> str:
    kinds = figures.precisions(runs)
    # The runs' colours, less that of the unquantised rest.
    colors = {kind: f"var(--run{i % len(figures.PALETTE)})" for i, kind in enumerate(kinds)}
    colors |= dict.fromkeys(("bf16", "fp32"), "var(--soft)")
    bars = []
    for label, run in zip(short_labels(runs), runs, strict=True):
        shares = run.covered
        parts = "".join(
            f'<span style="width: {100 * share:.2f}%; background: {colors[kind]}"></span>'
            for kind, share in shares.items()
        )
        told = ", ".join(
            f'<i class="dot" style="background: {colors[kind]}"></i>{text(kind)} {share:.1%}'
            for kind, share in shares.items()
        )
        bars.append(
            f'<div class="coverage"><p><b>{text(label)}</b>: {told or "not recorded"}</p>'
            f'<div class="bar" aria-hidden="true">{parts}</div></div>\n'
        )
    return note("Share of a step's GEMM FLOPs by the precision they ran in.") + "".join(bars)


def _casts(runs: list[RunRecord]) -> str:
    out = ""
    for number, (run, label) in enumerate(zip(runs, short_labels(runs), strict=True)):
        if casts := last_casts(run.records):
            step, statistics = casts
            panels = "".join(
                _figure(
                    figures.to_svg(draw_casts("", step, {name: values}), f"fp8-{number}-{i}"), name, "cast"
                )
                for i, (name, values) in enumerate(statistics.items())
            )
            out += f'<h3>{text(label)}, step {step:,}</h3>\n<div class="panels">{panels}</div>'
    return out or note("No run logged FP8 statistics (--fp8_stats_interval).")


def _hours(runs: list[RunRecord]) -> str:
    return by_run(runs, tables.shown(tables.HOURS, runs)) + note("Of all starts of a run together.")


def _gap_and_settings(run: RunRecord, baseline: RunRecord) -> list[str]:
    gap = tail_gap(run, baseline)
    told = "none: no step in common, or a loss of 0 there" if gap is None else f"{gap:+.3%}"
    if not ends_finite(run):
        told = "none: it does not end finite"
    elif not ends_finite(baseline):
        told = "none: that run does not end finite"
    return [told, ", ".join(other_settings(run, baseline)) or "none"]


def _settings(runs: list[RunRecord], reference: RunRecord) -> str:
    found = [settings(run) for run in runs]
    base = settings(reference)
    names = list(dict.fromkeys(name for values in found for name in values))
    differing = [name for name in names if any(values.get(name) != found[0].get(name) for values in found)]
    out, heads = note("Marked: other than the reference's.") if differing else "", _names(runs)
    for start in range(0, len(runs) if differing else 0, MOST_SETTINGS):
        part = slice(start, start + MOST_SETTINGS)
        rows = [
            [text(name), *(_marked(values.get(name), base.get(name)) for values in found[part])]
            for name in differing
        ]
        out += table(["", *heads[part]], rows, kind="words")
    same = [[text(name), text(found[0].get(name))] for name in names if name not in differing]
    title = "Settings that all runs share" if len(runs) > 1 else "All settings"
    inner = table(["", "value"], same, kind="words")
    state = "" if differing else " open"
    return f"{out}<details{state}><summary>{title} ({len(same)})</summary>{inner}</details>"


def _marked(value: Any, base: Any) -> str:
    return text(value) if value == base else f"<mark>{text(value)}</mark>"
