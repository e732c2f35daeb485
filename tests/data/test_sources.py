"""Reading rows from every source and format, malformed rows, and user errors."""

import bz2
import codecs
import gzip
import hashlib
import json
import lzma
from itertools import chain

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from fp8_suite.core.errors import UserError
from fp8_suite.data.chat import Encoder
from fp8_suite.data.collate import IGNORE
from fp8_suite.data.demo import FILES, read_demo
from fp8_suite.data.reading.sources import open_path_or_hub
from fp8_suite.data.settings import DataConfig

from tests.data.conftest import VOCABULARY, json_lines

PAIR = {"problem": "What is 1 + 1?", "generated_solution": "It is 2."}
USABLE = json_lines(*[{"text": f"row {i}"} for i in range(3)])
streaming = pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
folder = pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
CELLS = ["2", "007", "2.50", "NA", "None", "yes"]
ROWS = [{"question": "What?", "answer": cell} for cell in CELLS]
TABLE = b"question,answer\n" + b"".join(f"What?,{cell}\n".encode() for cell in CELLS)
BROKEN = json_lines(*ROWS[:3]) + b"{broken\n" + json_lines(*ROWS[3:])


def test_demo_is_unchanged_and_its_splits_are_disjoint():
    train, test = (list(read_demo(split)) for split in FILES)
    assert (len(train), len(test)) == (6000, 500)
    assert len({row["problem"] for row in train + test}) == 6500
    digest = hashlib.sha256(json.dumps([test, train]).encode()).hexdigest()
    assert digest[:16] == "ae52e7bdbd6b61fa", "the tokenizer was trained on these rows"


def test_demo_is_the_default(build):
    assert build(num_of_samples=20).report.used == 20


def as_parquet(rows, tmp_path) -> bytes:
    Dataset.from_list(rows).to_parquet(tmp_path / "source.parquet")
    return (tmp_path / "source.parquet").read_bytes()


def without_rows(*columns) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({name: pa.array([], "string") for name in columns}), sink)
    return sink.getvalue().to_pybytes()


@streaming
@folder
@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("train.jsonl", BROKEN),
        ("train.jsonl", codecs.BOM_UTF8 + BROKEN),
        ("train.json", json.dumps(ROWS).encode()),
        ("train.parquet", None),
        ("train.csv", codecs.BOM_UTF8 + TABLE),
        ("train.tsv", TABLE.replace(b",", b"\t")),
        ("train.jsonl.gz", gzip.compress(BROKEN)),
        ("train.tsv.bz2", bz2.compress(TABLE.replace(b",", b"\t"))),
        ("rows [1].csv", TABLE),
        ("train.json.xz", lzma.compress(json.dumps(ROWS).encode())),
    ],
    ids=["jsonl", "BOM", "json", "parquet", "csv", "tsv", "gz", "bz2", "brackets", "xz"],
)  # fmt: skip
def test_every_format_gives_the_same_rows(load, answers, tmp_path, name, contents, folder, streaming):
    contents = as_parquet(ROWS, tmp_path) if contents is None else contents
    assert answers(load(contents, name, folder=folder, streaming=streaming)) == CELLS


@streaming
def test_a_file_name_may_have_capitals(load, answers, streaming):
    assert answers(load(BROKEN, "ROWS.JSONL", streaming=streaming)) == CELLS


@streaming
def test_parquet_files_without_rows_are_skipped(load, answers, tmp_path, streaming):
    files = {"train-0.parquet": without_rows("question", "answer")}
    files["train-1.parquet"] = as_parquet(ROWS, tmp_path)
    assert answers(load(files, streaming=streaming)) == CELLS


def test_lines_of_a_text_file_are_rows(load, answers):
    assert answers(load(codecs.BOM_UTF8 + b"one line\nanother\n", "a.txt")) == ["one line", "another"]


def test_loading_options_in_the_readme_are_used(load, answers):
    options = {"config_name": "default", "data_files": "train.csv", "sep": ";"}
    options |= {"encoding": "latin-1", "skiprows": 1}
    card = f"---\nconfigs: {json.dumps([options])}\n---\n".encode()
    rows = "a line before\nquestion;answer;caf\u00e9\nWhat?;07;x\n".encode("latin-1")
    assert answers(load({"README.md": card, "train.csv": rows})) == ["07"]


@streaming
def test_data_sets_saved_to_disk_are_read(build, answers, tmp_path, streaming):
    rows, more = ([{"question": "What?", "answer": str(i)} for i in range(first, 3)] for first in (0, 1))
    settings = {"packing": False, "streaming": streaming}
    Dataset.from_list(rows).save_to_disk(tmp_path / "one")
    assert answers(build(dataset_name=str(tmp_path / "one"), split_name="train", **settings)) == list("012")
    both = DatasetDict({"sft": Dataset.from_list(rows), "held": Dataset.from_list(more)})
    both.save_to_disk(tmp_path / "both")
    splits = {"dataset_name": str(tmp_path / "both"), "split_name": "sft", "eval_split": "held"}
    loaders = build(**splits, eval_samples=9, **settings)
    assert answers(loaders) == list("012") and loaders.eval_report.rows == 2
    with pytest.raises(UserError, match=r"--split_name train: no such split.*it has sft, held"):
        build(**splits | {"split_name": "train"}, **settings)
    (tmp_path / "one" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(UserError, match=r"--dataset_name .*one: cannot be read"):
        build(dataset_name=str(tmp_path / "one"), split_name="train", **settings)


def test_only_the_files_of_the_split_are_read(load, answers, tmp_path):
    files = {"train.parquet": as_parquet([PAIR], tmp_path), "test.parquet": b"not to be read"}
    assert answers(load(files)) == ["It is 2."]


@pytest.mark.parametrize(
    ("read", "unread"),
    [
        (["a.jsonl", "b.jsonl"], ["c.csv", "d.parquet"]),
        (["train.jsonl", "test.jsonl"], ["extra.jsonl", "more/b.csv"]),
        (["a.jsonl", "b.json"], []),
    ],
)
def test_data_files_of_a_folder_that_are_not_read_are_named(tmp_path, cache, caplog, read, unread):
    folder = tmp_path / "set"
    for name in (*read, *unread, ".cache/c.jsonl", "LICENSE.txt", "dataset_infos.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"{}" if name == "dataset_infos.json" else json_lines({"text": "row"}))
    open_path_or_hub(DataConfig(dataset_name=str(folder), split_name="train"), "train")
    warning = f"WARNING: --dataset_name {folder}: 2 files not read, by format or name: {', '.join(unread)}"
    assert caplog.messages == ([warning] if unread else [])


@streaming
@pytest.mark.parametrize("first", [{"instruction": "Hi.", "output": "Hello."}, {"id": 1}])
def test_columns_are_the_union_over_the_first_lines(load, texts, first, streaming):
    row = {"instruction": "Add.", "input": "1, 2", "output": "3"}
    loaders = load(json_lines(first, *[row] * 3), streaming=streaming)
    samples = [text for text, _ in texts(loaders)]
    assert all("Add.\n\n1, 2" in text for text in samples[-3:]) and len(samples) == 3 + ("output" in first)


def test_optional_columns_are_found_in_any_row(load, texts):
    rows = [{"instruction": f"Say {i}.", "output": str(i)} for i in range(200)]
    late = {"instruction": "Add.", "input": "1, 2", "output": "3"}
    *_, (last, _) = texts(load(json_lines(*rows, late)))
    assert "Add.\n\n1, 2" in last


@streaming
def test_bad_rows_are_counted_and_the_first_is_reported(load, answers, streaming):
    contents = (
        json_lines(PAIR)
        + b'{"problem": "bad \xff\xfe bytes", "generated_solution": "x"}\n'
        + b'{"problem": "lone \\ud800 surrogate", "generated_solution": "x"}\n'
        + b'{"problem": "cut off\n\n[1, 2]\n'
        + b"[" * 100_000
        + b"\n"
        + json_lines({"problem": "p", "generated_solution": None}, {"problem": "p", "generated_solution": 5})
        + json_lines({"problem": "p", "generated_solution": " "}, {"problem": "p"})
        + json_lines({"problem": "", "generated_solution": "x"})
        + json_lines({"problem": "p", "generated_solution": "so " * 200}, PAIR)
    )
    loaders = load(contents, max_seq_length=128, streaming=streaming)
    assert answers(loaders) == ["It is 2.", "5", "It is 2."]
    report = loaders.report
    counts = (report.rows, report.used, report.bad_rows, report.empty, report.overlong_dropped)
    assert counts == (13, 3, 7, 2, 1)
    assert report.first_bad_row == "row 2: the content of the user is not UTF-8"
    used, _, dropped = report.lines()
    assert used.startswith("3 of 13 rows")
    scope = " in the stream's first window" * streaming
    reasons = f"1 over --max_seq_length; 2 empty; 7 malformed (first: {report.first_bad_row})"
    assert dropped == f"WARNING: 10 of 13 rows{scope} dropped (76.9%): {reasons}"


@streaming
def test_blank_lines_are_no_rows_but_count_in_the_number_of_a_bad_row(load, streaming):
    report = load(b"\n" + json_lines(PAIR) * 9 + b" \n{cut\n" + json_lines(PAIR), streaming=streaming).report
    assert (report.rows, report.used, report.empty) == (11, 10, 0)
    assert report.first_bad_row == "row 12: not valid JSON"
    assert len(load(USABLE, "good.jsonl", streaming=streaming).report.lines()) == 2, "without a warning"


def test_stream_logs_later_bad_rows_on_rank_0(load, caplog, monkeypatch):
    monkeypatch.setattr("fp8_suite.data.order.WINDOW", 25)
    contents = json_lines(*[{"text": f"row {i}" if i != 30 else 5} for i in range(40)])
    for rank, logged in ((1, False), (0, True)):
        loaders = load(contents, streaming=True, rank=rank, world_size=2)
        assert loaders.report.bad_rows == 0
        list(loaders.train)
        assert ("stream window starting at row 26: 1 row dropped" in caplog.text) == logged


def test_overlong_rows_are_truncated_if_requested(load, texts, tokenizer):
    rows = [
        {"prompt": "p", "completion": "so " * 200},
        {"prompt": "so " * 200, "completion": "answer"},  # truncation removes the answer
        {"prompt": "p", "completion": "q"},
    ]
    loaders = load(json_lines(*rows), overlong="truncate", max_seq_length=64)
    report = loaders.report
    assert (report.used, report.overlong_truncated, report.without_label) == (2, 1, 1)
    (text, answer), _ = texts(loaders)
    assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 64 and set(answer.split()) == {"so"}


@streaming
@pytest.mark.parametrize("packing", [False, True])
def test_long_texts_are_split_without_losing_a_token(load, tokenizer, packing, streaming):
    # Consecutive numbers make every piece unique.
    documents = [" ".join(map(str, range(100 * i, 100 * i + n))) for i, n in enumerate((3, 40, 1, 90))]
    contents = json_lines(*({"text": document} for document in documents))
    loaders = load(contents, max_seq_length=24, packing=packing, streaming=streaming)
    assert (loaders.report.used, loaders.report.overlong_dropped) == (4, 0)
    pieces = {row: [] for row in range(4)}
    for batch in loaders.train:
        ids, at = batch.inputs["input_ids"][0].tolist(), 0
        ends = batch.inputs.get("cu_seqlens", [0, batch.real_tokens])[1:]
        for row, end in zip(batch.sample_ids, ends, strict=False):
            pieces[row].append(ids[at : int(end)])
            at = int(end)
    for row, document in enumerate(documents):
        ids_of_document = tokenizer(document)["input_ids"] + [tokenizer.eos_token_id]
        starts = {}
        for piece in pieces[row]:
            [start] = [i for i in range(len(ids_of_document)) if ids_of_document[i : i + len(piece)] == piece]
            starts[start] = piece
        assert list(chain.from_iterable(starts[i] for i in sorted(starts))) == ids_of_document


@pytest.mark.parametrize("packing", [False, True])
def test_padding_with_eos_keeps_the_loss_on_real_eos(load, tokenizer, packing):
    tokenizer.pad_token = tokenizer.eos_token
    [batch] = load(json_lines({"text": "two words"}), packing=packing, max_seq_length=64).train
    labels = batch.inputs["labels"][0]
    assert labels[labels != IGNORE][-1] == tokenizer.eos_token_id
    assert batch.label_tokens == batch.real_tokens - 1
    assert set(batch.inputs["input_ids"][0, batch.real_tokens :].tolist()) == {tokenizer.eos_token_id}
    tokenizer.add_special_tokens({"pad_token": "<pad>"})  # outside the model's embedding
    [batch] = load(json_lines({"text": "two words"}), packing=packing, max_seq_length=64).train
    assert tokenizer.pad_token_id == VOCABULARY > int(batch.inputs["input_ids"].max())


NO_ROWS = "--dataset_name .*: (split train|the stream) has no rows"
ERRORS = {
    "unknown split": (USABLE, {"split_name": "dev"}, "--split_name dev: no such split.*it has train$"),
    "empty file": (b"", {"name": "a.jsonl"}, "--dataset_name .*: cannot be read: a.jsonl is empty"),
    "parquet without rows": (without_rows("text"), {"name": "a.parquet"}, NO_ROWS),
    "no usable rows": (json_lines({"text": ""}, {"text": 5}), {}, "no row .*1 empty, 1 bad: row 2: its"),
    "all overlong": (json_lines(PAIR), {"max_seq_length": 8}, r"\(1 overlong\); .* raise --max_seq_length"),
    "all truncated before the answer": (
        json_lines(PAIR),
        {"max_seq_length": 8, "overlong": "truncate"},
        r"\(1 without label\); .* raise --max_seq_length",
    ),
    "cut compressed file": (bz2.compress(USABLE)[:-9], {"name": "a.jsonl.bz2"}, "Compressed file ended"),
    "not a data file": (b"x", {"name": "a.pkl"}, r"a.pkl: not a data file.*\.jsonl"),
    "too long for the model": (USABLE, {"max_seq_length": 4096}, "--max_seq_length 4096: .* 2048 positions"),
    "no such file": (USABLE, {"dataset_name": "no/rows.jsonl"}, "no/rows.jsonl: no such file; check"),
    "a file's configuration": (USABLE, {"dataset_name": f"{__file__}:main"}, "without :CONFIGURATION"),
    "out of reach": (USABLE, {"dataset_name": "no-such-owner/set"}, "owner/set: cannot be read"),
    "evaluation on the training split": (USABLE, {"eval_split": "train"}, "train: is the training split"),
}  # fmt: skip


@streaming
@pytest.mark.parametrize(("contents", "settings", "message"), ERRORS.values(), ids=ERRORS)
def test_an_error_is_one_line(load, build, contents, settings, message, streaming, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=message) as info:
        if "dataset_name" in settings:
            build(streaming=streaming, **settings)
        load(contents, streaming=streaming, **settings)
    assert "\n" not in str(info.value) and info.value.exit_code == 2


@streaming
def test_wrong_evaluation_split_is_refused_before_tokenization(load, monkeypatch, streaming):
    monkeypatch.setattr(Encoder, "encode", lambda *_: pytest.fail("tokenized"))
    with pytest.raises(UserError, match="--eval_split dev: no such split"):
        load(USABLE, eval_split="dev", eval_samples=1, streaming=streaming)


def test_read_error_later_in_a_stream_is_reported(load):
    cut = gzip.compress(USABLE)[:-9]
    files = {"train-0.jsonl": USABLE * 400, "train-1.jsonl.gz": cut, "test.jsonl.gz": cut}
    with pytest.raises(UserError, match=r"cannot be read: Compressed file ended .* resumes it$"):
        list(load(files, streaming=True).train)
    with pytest.raises(UserError, match="cannot be read: Compressed file ended"):
        load(files, streaming=True, eval_split="test", eval_samples=2)


@pytest.fixture(params=["jsonl", "parquet"])
def configured(request, tmp_path):
    """Folder with two configurations."""
    path = tmp_path / "set"
    path.mkdir()
    card = "configs:\n"
    for name in ("main", "socratic"):
        rows = [{"question": "1?", "answer": f"{name} {i}"} for i in range(3)]
        contents = as_parquet(rows, tmp_path) if request.param == "parquet" else json_lines(*rows)
        (path / f"{name}.{request.param}").write_bytes(contents)
        card += f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}.{request.param}\n"
    (path / "README.md").write_text(f"---\n{card}---\n")
    return path


@streaming
def test_configurations_are_chosen_by_name(build, answers, configured, streaming):
    settings = {"split_name": "train", "packing": False, "streaming": streaming}
    for name in ("main", "socratic"):
        loaders = build(dataset_name=f"{configured}:{name}", **settings)
        assert answers(loaders) == [f"{name} {i}" for i in range(3)]
    for suffix in ("", ":nope"):
        with pytest.raises(UserError, match=r"'main', 'socratic'.*NAME:CONFIGURATION"):
            build(dataset_name=f"{configured}{suffix}", **settings)
    with_colon = configured.rename(configured.with_name("set:main"))  # an existing path is never split
    with pytest.raises(UserError, match=f"{with_colon}: .*'main', 'socratic'"):
        build(dataset_name=str(with_colon), **settings)


def test_warnings_on_split_held_out_rows_tools_and_turn_end(load, answers, caplog, tokenizer):
    assert answers(load(json_lines(PAIR), split_name="train_1M")) == ["It is 2."]
    assert "no such split in" in caplog.text and "using its only split, train" in caplog.text
    with pytest.raises(UserError, match="--split_name train_1M: no such split"):
        # Its only split is evaluated.
        load(json_lines(PAIR), split_name="train_1M", eval_split="train")
    assert load(USABLE * 3, "few.jsonl", eval_samples=5).eval is None
    assert "too few for a held-out set" in caplog.text
    load(json_lines(*[{**PAIR, "tools": "[]"}] * 3), "tools.jsonl")
    assert "does not render tools" in caplog.text and "where to stop" not in caplog.text
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}assistant: {% endif %}"
    load(USABLE, "texts.jsonl")
    assert "where to stop" not in caplog.text, "plain text ends with the tokenizer's own token"
    load(json_lines(*[PAIR] * 20), "pairs.jsonl", eval_samples=2)
    assert caplog.text.count("does not learn where to stop") == 1


def test_unusable_held_out_rows_disable_evaluation(load, caplog):
    rows = [{"text": f"{i} is a number. " * 4} for i in range(10)]
    without = 0
    for i in range(10):  # one of the rows is held out
        loaders = load(json_lines(*rows[:i], {"text": 5}, *rows[i + 1 :]), f"{i}.jsonl", eval_samples=1)
        without += loaders.eval is None
    assert without == 1 and caplog.text.count("all held-out rows are unusable") == 1


def test_stream_without_rows_after_the_held_out_ones_is_refused(load):
    with pytest.raises(UserError, match=r"no rows after the 5 held-out rows.*--eval_samples"):
        load(USABLE, streaming=True, eval_samples=5)
