"""benchmarks.saves: every kind of save is measured beside training, recorded and reported."""

import json
import shlex
from itertools import accumulate

import pytest
from fp8_suite.benchmarks.records import add
from fp8_suite.benchmarks.records.table import read_texts
from fp8_suite.benchmarks.saves.main import main
from fp8_suite.benchmarks.saves.measure import Interval, compare

FLAGS = "--model_name tiny-llama --max_seq_length 32 --batch_size 1 --num_workers 0 --num_proc 1"


def test_every_kind_is_measured_and_recorded(tmp_path, capsys):
    folder, table = tmp_path / "tiny", tmp_path / "records.jsonl.gz"
    assert main(shlex.split(f"{FLAGS} --steps 4 --repeats 1 --output_dir {folder}")) == 0
    record = json.loads((folder / "record.json").read_text())
    background, sync, torchs = record["saves"]
    assert [row["saves"] for row in record["saves"]] == ["async", "sync", "torch"]
    assert [sync["GB"], torchs["GB"]] == pytest.approx([background["GB"]] * 2, rel=0.1)
    assert sync["host waits, s"] >= sync["s to publish"] * 0.9, "it ends before the next step"
    assert record["disk_bytes_per_second"]["buffered"] > 0 and record["environment"]["versions"]["torch"]
    assert not [path for path in folder.iterdir() if path.is_dir()], "no checkpoint is left"
    assert add.main([str(folder), "--study", "saves", "--table", str(table)]) == 0
    assert record["text"] in capsys.readouterr().out and "| torch " in record["text"]
    assert read_texts("saves", table) == {"tiny": record["text"]}


def test_time_is_compared_with_the_steps_around():
    def interval(*seconds, **save):
        return Interval(0.0, list(accumulate(seconds)), **save)

    undisturbed = [interval(*[1.0] * 6)] * 2
    slower = interval(2.0, 1.1, 1.1, 1.1, 1.0, 1.0, 1.0, published=5.5, blocked=0.5, size=11e9)
    row = compare([interval(9.0, *[1.0] * 6), slower], undisturbed, {"direct": 4e9})
    expected = {"s added": 1.3, "s added, first": 8.0, "steps beside a save": 0.1, "GB/s": 2.0}
    expected |= {"of direct": 0.5, "host waits, s": 0.5}
    assert {name: row[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--output_dir"),
        ("--output_dir out --steps 3", "--steps 3"),
        ("--output_dir out --async_save", "--async_save"),
    ],
)
def test_bad_settings_are_refused(flags, message, capsys):
    assert main(shlex.split(flags)) == 2
    assert message in capsys.readouterr().err
