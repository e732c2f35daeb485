"""The HTML report: well formed, self-contained, whole, and deaf to what run folders try to say in HTML."""

import json
import re
from html.parser import HTMLParser

from benchmarks.report.figures import POINTS, draw_losses, draw_scaling, scaling, thin
from benchmarks.report.html import page
from benchmarks.report.main import main, read_all, read_run, write_figures
from tests.benchmarks.test_report import ENVIRONMENT, SUMMARY, write_run

VOID = {"meta", "input", "br", "hr", "img", "link"}
SECTIONS = [
    "runs",
    "losses",
    "gap-to-the-reference",
    "loss-statistics",
    "throughput-mfu-and-memory",
    "precision-coverage",
    "fp8-statistics",
    "hours",
    "settings",
]
COVERAGE = {
    "rows": [
        {"modules": "layers.*.proj", "count": 2, "precision": "fp8 delayed", "gemm_share": 0.75},
        {"modules": "layers.*.attention", "count": 2, "precision": "bf16", "gemm_share": 0.0},
        {"modules": "lm_head", "count": 1, "precision": "bf16", "gemm_share": 0.25},
    ]
}
NASTY = '<script src="http://evil/x.js"></script> & "$\\frac{" \' </style>'


class Page(HTMLParser):
    """Checks nesting while it reads; gathers ids, what refers to what, tags and text."""

    def __init__(self, source):
        super().__init__()
        self.open, self.ids, self.references, self.tags, self.texts = [], [], [], [], []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            elif name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster"):
                self.references.append(value)
            elif name == "for":
                self.references.append(f"#{value}")
            assert not name.startswith("on")
            self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open[-1:] == ["style"]:
            self.references += re.findall(r"url\(([^)]*)\)|@import", data)


def checked(path):
    """The parsed page, after every check that any report has to pass."""
    found = Page(path.read_text(encoding="utf-8"))
    assert len(found.ids) == len(set(found.ids))
    for reference in found.references:
        assert reference.startswith("data:image/png;base64,") or reference.removeprefix("#") in found.ids
    assert not {"script", "link", "iframe", "img", "object"} & set(found.tags)
    assert [name for name in found.ids if name in SECTIONS] == SECTIONS
    return found


def report(tmp_path, *folders, reference=None):
    """The checked page of some runs, without the PNGs beside it."""
    out = tmp_path / "report"
    out.mkdir(exist_ok=True)
    (out / "report.html").write_text(page(*read_all(list(folders), reference)), encoding="utf-8")
    return checked(out / "report.html")


def whole_run(folder, *, losses=(3.0, 2.5, 2.0), emulated=False, statistics=True, **settings):
    """A finished run with coverage and, unless told otherwise, FP8 statistics of its last step."""
    summary = SUMMARY | {"runtime_seconds": 5400.0, "nodes": 1, "node_hours": 1.5, "gpu_hours": 3.0}
    summary |= {"emulated": True} if emulated else {}
    environment = ENVIRONMENT | {"coverage": COVERAGE, "emulated": emulated}
    folder = write_run(folder, losses=losses, summary=summary, environment=environment, **settings)
    if not statistics:
        return folder
    casts = {f"fp8/layers.{i}.proj/weight/{name}": 0.5 for i in range(2) for name in ("underflow", "amax")}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 30, "time": 0.0, **casts}) + "\n")
    return folder


def section(tmp_path, name):
    source = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    return re.search(rf'<section id="{name}">(.*?)</section>', source, re.DOTALL)[1]


def rows_of(markup):
    """{heading: cells} of a section's tables."""
    rows = {}
    for row in re.findall(r"<tr>(.*?)</tr>", markup):
        heading, *cells = (
            re.sub(r"<(?!/?mark).*?>", "", cell).strip() for cell in re.findall(r"<t[hd].*?</t[hd]>", row)
        )
        rows[heading] = cells
    return rows


def test_a_report_of_two_runs_has_every_figure_and_number(tmp_path):
    folders = [
        whole_run(tmp_path / "one", seed=1),
        whole_run(tmp_path / "two", seed=2, losses=(3.0, 2.5, 2.5)),
    ]
    found = report(tmp_path, *folders)
    assert found.tags.count("figure") == 2 + 1 + 2 * 2  # losses twice, gap, two statistics of two runs
    training = rows_of(section(tmp_path, "loss-statistics").split("Validation")[0])
    assert training["maximum"] == ["3.0000", "3.0000"] and training["minimum"] == ["2.0000", "2.5000"]
    assert training["mean"] == ["2.5000", "2.6667"] and training["final"] == ["2.0000", "2.5000"]
    assert training["standard deviation"] == ["0.4082", "0.2357"]  # sqrt(1/6), sqrt(1/18)
    hours = rows_of(section(tmp_path, "hours"))
    assert hours["runtime, hours"] == ["1.500"] * 2 and hours["GPU-hours"] == ["3.000"] * 2
    assert (
        hours["nodes"] == ["1", "1"] and hours["GPUs"] == ["2", "2"] and hours["node-hours"] == ["1.500"] * 2
    )
    settings = section(tmp_path, "settings").split("<details")
    assert rows_of(settings[0])["seed"] == ["1", "<mark>2</mark>"]
    assert rows_of(settings[1])["max_seq_length"] == ["1024"]
    assert "fp8 delayed 75.0%" in section(tmp_path, "precision-coverage")
    assert "width: 75.00%" in section(tmp_path, "precision-coverage")
    assert "lie 25.000% apart" in section(tmp_path, "gap-to-the-reference")


def test_the_reference_can_be_named_and_joins_the_runs(tmp_path):
    one, two = (
        whole_run(tmp_path / "one", seed=1),
        whole_run(tmp_path / "two", seed=2, losses=(3.0, 2.5, 2.5)),
    )
    report(tmp_path, one, reference=two)
    gap = section(tmp_path, "gap-to-the-reference")
    assert "Reference: two." in gap and rows_of(gap)["one"] == ["two", "-20.000%", "seed"]
    assert rows_of(section(tmp_path, "settings").split("<details")[0])["seed"] == ["<mark>1</mark>", "2"]
    report(tmp_path, two, one, reference=two)
    assert rows_of(section(tmp_path, "settings").split("<details")[0])["seed"] == ["2", "<mark>1</mark>"]


def test_a_run_without_an_end_says_so_in_every_table(tmp_path):
    folders = [whole_run(tmp_path / "done"), whole_run(tmp_path / "stopped")]
    (folders[1] / "summary.json").unlink()
    (folders[1] / "wall_time.json").write_text('{"gpu_seconds": 1800.0}')
    report(tmp_path, *folders)
    assert 'stopped <span class="tag">unfinished</span>' in section(tmp_path, "runs")
    assert rows_of(section(tmp_path, "hours"))["GPU-hours"] == ["3.000", "0.500"]


def test_settings_of_many_runs_are_several_tables(tmp_path):
    folders = [whole_run(tmp_path / f"{i:02}", seed=i, statistics=False) for i in range(13)]
    report(tmp_path, *folders)
    differing = section(tmp_path, "settings").split("<details")[0]
    assert [rows_of(part)["seed"][-1] for part in differing.split("<table")[1:]] == [
        "<mark>11</mark>",
        "<mark>12</mark>",
    ]


def test_many_runs_stand_below_each_other(tmp_path):
    folders = [whole_run(tmp_path / f"run{i}", seed=i, statistics=False) for i in range(8)]
    report(tmp_path, *folders)
    assert rows_of(section(tmp_path, "hours"))["run7"] == ["1.500", "1", "2", "1.500", "3.000"]


def test_a_run_that_logged_nothing_has_every_section(tmp_path):
    write_run(tmp_path / "empty")
    report(tmp_path, tmp_path / "empty")
    assert "No run logged a loss" in section(tmp_path, "losses")
    assert "not recorded" in section(tmp_path, "precision-coverage")


def test_what_comes_from_a_run_folder_stays_text(tmp_path):
    name = "a <b>$x_{ & \"c' $"
    folders = [
        whole_run(tmp_path / name, model_name=NASTY, dataset_name=NASTY),
        whole_run(tmp_path / "_plain"),
    ]
    for folder in folders:
        written = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(written | {"model_name": NASTY}))
        environment = json.loads((folder / "env.json").read_text())
        environment["coverage"]["rows"][0]["precision"] = NASTY
        environment["versions"]["torch"] = NASTY
        (folder / "env.json").write_text(json.dumps(environment))
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 40, f"fp8/layers.0.{NASTY}/weight/amax": 1.0}) + "\n")
    found = report(tmp_path, *folders)
    assert sum(NASTY in text for text in found.texts) >= 5
    assert any(name in text for text in found.texts)


def test_emulated_runs_say_so_and_show_no_throughput(tmp_path):
    folders = [
        whole_run(tmp_path / f"{n}", emulated=True, statistics=False, max_seq_length=n) for n in (512, 1024)
    ]
    found = report(tmp_path, *folders)
    assert any(text.startswith("Emulated: 512, 1024.") for text in found.texts)
    assert found.texts.count("emulated") >= 2
    assert "14,376" not in "".join(found.texts) and "74.8%" not in "".join(found.texts)
    assert "<figure" not in section(tmp_path, "throughput-mfu-and-memory")


def rated(folder, *, gpus=1, rate=100.0, emulated=False, **settings):
    summary = SUMMARY | {"gpus": gpus, "world_size": gpus, "tokens_per_second": rate, "emulated": emulated}
    return read_run(write_run(folder, summary=summary, environment=ENVIRONMENT, **settings))


def test_rates_are_drawn_against_what_runs_of_the_same_work_differ_in(tmp_path):
    runs = [
        rated(tmp_path / "long", max_seq_length=4096, rate=300.0),
        rated(tmp_path / "short", max_seq_length=2048, rate=200.0),
        rated(tmp_path / "emulated", max_seq_length=1024, emulated=True),
        rated(tmp_path / "cpu", max_seq_length=512, gpus=0),
        rated(tmp_path / "four", max_seq_length=2048, gpus=4, rate=700.0),
    ]
    by_length = scaling(runs, "sequence length")
    (line,) = by_length
    assert line.endswith("delayed (TE), 1 GPU") and [x for x, _ in by_length[line]] == [2048, 4096]
    dots, joined = draw_scaling(by_length, "sequence length", "tokens/s").axes[0].lines
    assert dots.get_xydata().tolist() == joined.get_xydata().tolist() == [[2048, 200], [4096, 300]]
    by_gpus = scaling(runs, "GPUs")
    (line,) = by_gpus
    per_gpu = draw_scaling(by_gpus, "GPUs", "tokens/s per GPU").axes[0].lines[1]
    assert per_gpu.get_xydata().tolist() == [[1, 200], [4, 175]]
    assert scaling(runs[:1], "GPUs") == {}
    other = {"max_seq_length": 2048, "gradient_accumulation_steps": 8}
    accumulating = [rated(tmp_path / f"x{gpus}", gpus=gpus, **other) for gpus in (1, 4)]
    two = scaling([*runs, *accumulating], "GPUs")
    assert [*two] == [line, f"{line}, gradient_accumulation_steps=8"]
    assert all([x for x, _ in points] == [1, 4] for points in two.values())
    out = tmp_path / "report"
    assert main([*(str(run.folder) for run in runs), "--output_dir", str(out)]) == 0
    assert checked(out / "report.html").tags.count("figure") == 8
    for word in ("tokens_per_second", "mfu", "memory"):
        for axis in ("sequence_length", "gpus"):
            assert (out / f"{word}_by_{axis}.png").read_bytes().startswith(b"\x89PNG")


def test_thinning_keeps_the_extremes_of_a_long_curve():
    series = [(i, 1.0) for i in range(100_000)]
    series[54_321], series[77_777] = (54_321, 50.0), (77_777, -50.0)
    thinned = thin(series)
    assert len(thinned) <= POINTS and thinned == sorted(thinned)
    assert (54_321, 50.0) in thinned and (77_777, -50.0) in thinned
    assert thin(series[:POINTS]) == series[:POINTS]


def test_the_same_runs_make_the_same_page(tmp_path):
    run, pages = whole_run(tmp_path / "run"), []
    for _ in range(2):
        report(tmp_path, run)
        pages.append((tmp_path / "report" / "report.html").read_bytes())
    assert pages[0] == pages[1]


def test_names_with_dollars_and_underscores_are_drawn(tmp_path):
    folders = [whole_run(tmp_path / name, statistics=False) for name in ("$x_{ ^$", "_plain")]
    figure = draw_losses([read_run(folder) for folder in folders])
    figure.savefig(tmp_path / "drawn.png")
    drawn = [label.get_text().strip() for label in figure.legends[0].get_texts()]
    assert drawn == [
        f"{name}: {what}" for name in ("$x_{ ^$", "_plain") for what in ("training, smoothed", "evaluation")
    ]
    runs, reference = read_all(folders, None)
    write_figures(runs, reference, tmp_path, {})
    assert (tmp_path / "coverage.png").exists() and (tmp_path / "gap.png").exists()


def test_a_run_that_diverged_has_no_gap(tmp_path):
    losses = [3.0, 2.5, 2.0]
    folders = [whole_run(tmp_path / "good", losses=losses), whole_run(tmp_path / "bad", losses=losses)]
    with (folders[1] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 40, "train/loss": "NaN"}) + "\n")
    report(tmp_path, *folders)
    rows = rows_of(section(tmp_path, "gap-to-the-reference"))
    assert rows["bad"][1] == "none: it does not end finite"


def test_runs_without_a_common_step_have_no_gap(tmp_path):
    losses = [3.0, 2.5, 2.0]
    folders = [whole_run(tmp_path / name, losses=losses) for name in ("good", "other")]
    path = folders[1] / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("\n".join(json.dumps(line | {"step": line["step"] + 1}) for line in lines))
    report(tmp_path, *folders)
    assert (
        rows_of(section(tmp_path, "gap-to-the-reference"))["other"][1]
        == "none: no step in common, or a loss of 0 there"
    )
