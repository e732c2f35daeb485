"""Text from files of this machine."""

import json

from fp8_suite.benchmarks import source_text


def rows(path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_text_is_in_one_split_once(tmp_path, capsys):
    sources = tmp_path / "sources"
    sources.mkdir()
    for number in range(210):
        (sources / f"{number}.py").write_text(f"# {number % 205}\n" * 300)  # five appear twice
    (sources / "short.py").write_text("x = 1")
    (sources / "broken.md").write_bytes(b"\xff" * 5000)
    out = tmp_path / "out"
    argv = [str(out), "--megabytes", "0.1", "--folders", str(sources)]
    assert source_text.main(argv) == 0 and source_text.main(argv) == 2  # the folder exists
    train, test = (rows(out / f"{split}.jsonl") for split in ("train", "test"))
    assert len({*train, *test}) == len(train) + len(test) and 1 <= len(test) <= 2
    assert 1e5 <= sum(map(len, train)) < 1.05e5
    argv = [str(tmp_path / "larger"), "--megabytes", "0.1", "--test_megabytes", "0.02", *argv[3:]]
    assert source_text.main(argv) == 0
    larger = rows(tmp_path / "larger/test.jsonl")
    assert rows(tmp_path / "larger/train.jsonl") == train and larger[: len(test)] == test
    assert 2e4 <= sum(map(len, larger)) < 2.5e4 and not {*larger} & {*train}
    capsys.readouterr()
    assert source_text.main([str(tmp_path / "all"), "--megabytes", "9", "--folders", str(sources)]) == 1
    assert len(rows(tmp_path / "all/train.jsonl") + rows(tmp_path / "all/test.jsonl")) == 205
    assert "no more text" in capsys.readouterr().err
