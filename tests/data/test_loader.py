"""The order of the data: complete, repeatable, resumable anywhere and on any number of ranks."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import threading
from collections import Counter
from itertools import islice
from pathlib import Path
from textwrap import dedent

import numpy as np
import pyarrow as pa
import pytest
import torch

import data.loader
import data.samples
from data.build import BatchShape, build_loaders, open_split
from data.chat import Encoder, load_tokenizer
from data.samples import count_labels
from data.settings import DataConfig

ROOT = Path(__file__).resolve().parents[2]
ROWS = 90
MODES = {
    "packed": {},
    "padded": {"packing": False},
    "workers": {"num_workers": 2},
    "streamed": {"streaming": True},
    "streamed, worker": {"streaming": True, "num_workers": 1},
}
mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("demo", family="llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prompt/answer rows of very different lengths, 20 of them in a second split."""
    path = tmp_path_factory.mktemp("data") / "rows"
    path.mkdir()
    rng = np.random.default_rng(0)
    for split, count in (("train", ROWS), ("test", 20)):
        rows = [
            {"prompt": f"{split} {i}", "completion": "so " * int(rng.integers(1, 70))} for i in range(count)
        ]
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def build(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(data.loader, "WINDOW", 25)  # several windows in ROWS

    def build(
        *,
        batch_size=2,
        rank=0,
        world_size=1,
        seed=3,
        pad_multiple=16,
        vocab_size=2048,
        per_step=1,
        **settings,
    ):
        defaults = {
            "dataset_name": str(folder),
            "split_name": "train",
            "system_prompt": "",
            "max_seq_length": 128,
            "eval_samples": 0,
            "num_workers": 0,
            "num_proc": 1,
            "data_cache_dir": str(folder.parent / "cache"),
        }
        return build_loaders(
            DataConfig(**{**defaults, **settings}),
            tokenizer,
            BatchShape(
                batch_size=batch_size,
                eval_batch_size=batch_size,
                pad_multiple=pad_multiple,
                micro_batches_per_step=per_step,
                rank=rank,
                world_size=world_size,
            ),
            seed=seed,
            vocab_size=vocab_size,
            max_positions=2048,
        )

    return build


def content(batch):
    """All of a batch, comparable."""
    inputs = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in batch.inputs.items()}
    return inputs, batch.sample_ids, batch.label_tokens, batch.real_tokens, batch.padded_tokens


def ids(batches):
    return [i for batch in batches for i in batch.sample_ids]


@mode
def test_an_epoch_holds_every_sample_once(build, mode):
    loader = build(**mode).train
    epochs = [list(loader) for _ in range(2)]
    for epoch in epochs:
        assert Counter(ids(epoch)) == Counter(range(ROWS))
    assert ids(epochs[0]) != ids(epochs[1]) and ids(epochs[0]) != sorted(ids(epochs[0]))
    assert loader.epoch == 2
    if not mode.get("streaming"):
        assert loader.micro_batches_per_epoch == len(epochs[0])
    else:
        assert loader.micro_batches_per_epoch is None


@mode
def test_resume_anywhere_is_the_uninterrupted_run(build, mode):
    whole = build(**mode).train
    batches, states = [], [whole.state_dict()]
    for _ in range(2):
        for batch in whole:
            batches.append(content(batch))
            states.append(json.loads(json.dumps(whole.state_dict())))
    for done in range(0, len(states), 1 + len(states) // 10):
        loader = build(**mode).train
        loader.load_state_dict(states[done])
        rest = [content(batch) for _ in range(loader.epoch, 2) for batch in loader]
        assert rest == batches[done:]


@mode
def test_another_world_size_goes_on_with_the_same_order(build, mode):
    whole = ids(build(**mode, batch_size=1).train)
    done, state = [], None
    for world_size, steps in ((4, 2), (2, 3), (1, None)):
        loaders = [
            build(**mode, batch_size=1, rank=r, world_size=world_size).train for r in range(world_size)
        ]
        if state:
            for loader in loaders:
                loader.load_state_dict(state)
        for share in islice(zip(*loaders, strict=True), steps):
            done += ids(share)
            state = loaders[0].state_dict()
        assert all(loader.state_dict() == loaders[0].state_dict() for loader in loaders)
    assert done == whole


@mode
def test_the_last_step_is_kept_and_every_rank_takes_part_in_it(build, mode):
    settings = {**mode, "num_of_samples": 9, "packing": False}  # 9 bins for 4 ranks of 2
    shares = [list(build(**settings, rank=r, world_size=4).train) for r in range(4)]
    assert [len(share) for share in shares] == [2] * 4
    last = [share[-1] for share in shares]
    assert [len(batch.sample_ids) for batch in last] == [1, 0, 0, 0]
    assert [batch.label_tokens > 0 for batch in last] == [True, False, False, False]
    assert all(tuple(batch.inputs["input_ids"].shape) == (1, 16) for batch in last[1:])


def test_a_rank_without_packed_sequences_gets_one_short_row(build):
    ranks = build(batch_size=1).train.micro_batches_per_epoch - 1  # one sequence is left for the second turn
    *full, last = build(batch_size=1, rank=ranks - 1, world_size=ranks).train
    assert len(full) == 1 and last.inputs["input_ids"].shape == (1, 16)
    assert last.inputs["max_seqlen"] == 128 and last.label_tokens == last.real_tokens == 0


def test_an_epoch_does_not_depend_on_those_before_it(build):
    first, second = build().train, build().train
    list(first)
    second.load_state_dict({**second.state_dict(), "epoch": 1})
    assert [content(b) for b in first] == [content(b) for b in second]


def test_the_padding_multiple_does_not_change_what_is_read(build):
    assert ids(build(pad_multiple=16).train) == ids(build(pad_multiple=96).train)
    assert {b.inputs["input_ids"].shape[1] for b in build(pad_multiple=96).train} == {192}


def test_iterating_leaves_the_global_random_state_alone(build):
    before = torch.get_rng_state()
    list(build(num_workers=2).train)
    assert torch.equal(before, torch.get_rng_state())


def test_workers_read_ahead_but_the_state_does_not(build):
    loader = build(num_workers=2).train
    batches = iter(loader)
    next(batches)
    assert loader.state_dict()["position"] == 2  # two bins: one micro-batch of two


@pytest.mark.parametrize(("per_step", "ahead"), [(1, 4), (4, 4), (7, 8)])
def test_workers_have_a_whole_step_ready(build, per_step, ahead):
    """Two workers, and two micro-batches each at least; the reader has asked for one more than it took."""
    loader = build(num_workers=2, per_step=per_step, batch_size=1).train
    before, batches = set(data.loader.READERS), iter(loader)
    next(batches)
    (reader,) = set(data.loader.READERS) - before
    assert reader._send_idx - reader._rcvd_idx == ahead


def test_later_epochs_are_packed_as_the_plan_of_a_whole_epoch(build):
    for settings in ({}, {"packing": False}):
        loader = build(**settings).train
        source = loader.source
        list(loader)
        plan = source.layout.plan(source.samples.length, (3, 1))  # seed and epoch
        assert len(plan) > 2 and ids(loader) == source.samples.row[plan.order].tolist()


def workers():
    return {child.pid for child in multiprocessing.active_children()}


@pytest.mark.parametrize("name", ["train", "eval"])
@pytest.mark.parametrize("streaming", [False, True])
def test_workers_go_on_with_the_next_pass_until_one_is_given_up(build, name, streaming):
    others = workers()
    loader = getattr(build(num_workers=2, eval_samples=8, streaming=streaming), name)
    passes = [[content(batch) for batch in loader]]
    started = workers() - others
    assert len(started) == (1 if streaming and name == "train" else 2)
    batches = iter(loader)
    passes.append([content(batch) for batch in batches])
    assert workers() - others == started
    assert (passes[0] == passes[1]) == (name == "eval")
    batches = iter(loader)
    next(batches)
    assert workers() - others == started
    batches.close()
    assert not workers() - others


def test_a_loaded_state_counts_whatever_the_workers_have_read_ahead(build):
    loader = build(num_workers=2).train
    start = loader.state_dict()
    first = [content(batch) for batch in loader]
    loader.load_state_dict(start)
    assert [content(batch) for batch in loader] == first


ENDS = {
    "after a pass": ("assert list(loaders.train) and list(loaders.eval)", 0, ""),
    "in a pass": ("batches = iter(loaders.train); next(batches)", 0, ""),
    "by an error in a worker": (
        "Samples.fetch = None; list(loaders.train)",
        1,
        "'NoneType' object is not callable",
    ),
    "after the garbage collector took them": (
        "import gc, torch; torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2; "
        "reader = [loaders.train.start()]; next(reader[0]); reader.append(reader); del reader; gc.collect()",
        0,
        "",
    ),
}


@pytest.mark.parametrize(("last", "code", "error"), ENDS.values(), ids=ENDS)
def test_a_process_whose_workers_wait_ends(folder, tmp_path, last, code, error):
    """They ignore the SIGTERM by which multiprocessing would end them, and then it would wait for ever."""
    script = f"""
        import sys
        from data.build import BatchShape, build_loaders
        from data.chat import load_tokenizer
        from data.samples import Samples
        from data.settings import DataConfig

        folder, cache = sys.argv[1:]
        settings = {{"num_workers": 2, "max_seq_length": 128, "eval_samples": 5, "data_cache_dir": cache}}
        loaders = build_loaders(
            DataConfig(dataset_name=folder, split_name="train", **settings),
            load_tokenizer("demo", family="llama"),
            BatchShape(batch_size=2, eval_batch_size=2, pad_multiple=16),
            seed=3,
            vocab_size=2048,
            max_positions=2048,
        )
        {last}
    """
    arguments = [sys.executable, "-c", dedent(script), str(folder), str(tmp_path)]
    ended = subprocess.run(arguments, cwd=ROOT, timeout=100, capture_output=True, text=True)
    assert ended.returncode == code and error in ended.stderr, ended.stderr


def test_an_item_is_made_while_the_one_before_is_used():
    second = threading.Event()

    def items():
        yield 1
        second.set()
        yield 2
        raise KeyError("the third")

    found = data.loader.ahead(items())
    assert next(found) == 1 and second.wait(timeout=30)
    assert next(found) == 2
    with pytest.raises(KeyError, match="the third"):
        next(found)
    assert list(data.loader.ahead(iter([]))) == []


def test_no_window_of_a_stream_is_tokenised_twice(build, monkeypatch):
    encode, encoded = Encoder.encode, []
    monkeypatch.setattr(Encoder, "encode", lambda *args: encoded.append(len(args[1])) or encode(*args))
    loader = build(streaming=True).train
    assert sorted(ids(loader)) == list(range(ROWS))
    assert encoded == [25, 25, 25, 15]


def test_evaluation_starts_over_and_keeps_the_order_of_the_rows(build):
    loader = build(eval_split="test", eval_samples=10, packing=False, seed=8).eval
    assert ids(islice(loader, 2)) == [0, 2, 4, 6]  # every second of the 20 rows
    assert ids(loader) == ids(loader) == list(range(0, 20, 2))
    assert loader.epoch == 0


@pytest.mark.parametrize("streaming", [False, True])
def test_the_held_out_part_is_never_trained_on(build, streaming):
    loaders = build(eval_samples=7, streaming=streaming)
    train, held = set(ids(loaders.train)), set(ids(loaders.eval))
    assert len(held) == 7 and train | held == set(range(ROWS)) and not train & held
    assert len(loaders.eval_prompts) == 7
    assert loaders.report.rows == (25 if streaming else ROWS - 7) and loaders.eval_report.rows == 7
    prompts = {f"train {i}" for i in held}
    assert {
        p.split("<|end_header_id|>\n\n")[1].split("<|eot_id|>")[0] for p, _ in loaders.eval_prompts
    } == prompts


def test_the_held_out_part_is_a_tenth_at_most_and_depends_on_the_seed(build):
    parts = [set(ids(build(eval_samples=1000, seed=seed).eval)) for seed in (3, 3, 4)]
    assert [len(part) for part in parts] == [9, 9, 9]
    assert parts[0] == parts[1] != parts[2]


def test_too_few_rows_to_hold_some_out_is_said(build, tmp_path, caplog):
    (tmp_path / "few.jsonl").write_text('{"text": "one two three"}\n' * 9)
    loaders = build(dataset_name=str(tmp_path / "few.jsonl"), eval_samples=5)
    assert loaders.eval is None and loaders.eval_report is None and "too few to hold some out" in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
def test_num_of_samples_limits_training_rows(build, streaming):
    loaders = build(num_of_samples=30, eval_samples=5, streaming=streaming)
    assert len(set(ids(loaders.train))) == 30 and len(set(ids(loaders.eval))) == 5


def test_a_stream_tells_of_rows_it_leaves_out_later(build, tmp_path, caplog):
    rows = [{"text": f"row {i}" if i != 30 else 5} for i in range(40)]  # windows of 25
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for rank, told in ((1, False), (0, True)):
        loaders = build(dataset_name=str(tmp_path / "rows.jsonl"), streaming=True, rank=rank, world_size=2)
        assert loaders.report.bad_rows == 0
        list(loaders.train)
        assert ("1 of the stream's rows from row 26 on are left out" in caplog.text) == told


def test_no_evaluation_on_request(build):
    loaders = build(eval_samples=0, eval_split="test")
    assert loaders.eval is None and loaders.eval_prompts == []


def test_eval_split_leaves_all_rows_to_training(build):
    for streaming in (False, True):
        loaders = build(eval_split="test", eval_samples=1000, streaming=streaming)
        assert set(ids(loaders.train)) == set(range(ROWS)) and set(ids(loaders.eval)) == set(range(20))


def test_train_on_prompt_puts_loss_on_all_but_the_first_token(build):
    answer, everything = (build(train_on_prompt=on, packing=False) for on in (False, True))
    assert answer.report.tokens == everything.report.tokens
    assert everything.report.label_tokens == everything.report.tokens - ROWS
    assert answer.report.label_tokens < everything.report.label_tokens
    for loaders in (answer, everything):
        batches = list(loaders.train)
        assert sum(b.label_tokens for b in batches) == loaders.report.label_tokens
        assert sum(b.real_tokens for b in batches) == loaders.report.tokens
        padded = sum(b.padded_tokens for b in batches)
        assert loaders.report.packing_efficiency == pytest.approx(loaders.report.tokens / padded)


def test_tokens_with_loss_by_hand():
    spans = pa.chunked_array([[[0, 3], [2, 5, 7, 9]], [[], [0, 1]]])
    # Token 0 has no predictor; the second document is cut after 8 tokens.
    assert count_labels(spans, np.array([3, 8, 4, 1])).tolist() == [2, 4, 0, 0]


def test_a_second_build_reads_the_cache(build, monkeypatch):
    settings = {
        "dataset_prompt_field": "prompt",
        "dataset_completion_field": "completion",
        "num_of_samples": 50,
    }
    first = ids(build(**settings).train)
    monkeypatch.setattr(Encoder, "encode", lambda *_: pytest.fail("tokenised again"))
    assert ids(build(**settings).train) == first
    for change in ({"max_seq_length": 64}, {"seed": 5}, {"packing": False}, {"train_on_prompt": True}):
        build(**settings, **change)
    with pytest.raises(pytest.fail.Exception, match="tokenised again"):
        build(**settings, system_prompt="Another prompt.")


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (lambda tokenizer: setattr(tokenizer, "chat_template", tokenizer.chat_template + "{# new #}"), {}),
        (lambda tokenizer: setattr(tokenizer, "bos_token", tokenizer.eos_token), {}),
        (lambda tokenizer: setattr(tokenizer, "eos_token", tokenizer.bos_token), {}),
        (lambda tokenizer: tokenizer.add_tokens(["zebra"]), {}),
        (lambda tokenizer: None, {"system_prompt": "Another prompt."}),
    ],
    ids=["template", "bos", "eos", "vocabulary", "system prompt"],
)
def test_what_tokens_depend_on_has_a_cache_of_its_own(folder, change, settings):
    def key(change, **settings):
        own = load_tokenizer("demo", family="llama")
        change(own)
        cache = str(folder.parent / "cache")
        split = open_split(
            DataConfig(dataset_name=str(folder), data_cache_dir=cache, **settings), "train", own, 2048
        )
        return split._cache_key(split.source.rows)

    before = key(lambda tokenizer: None)
    assert key(lambda tokenizer: None) == before and key(change, **settings) != before


def test_processes_tokenise_as_one_does_and_inherit_the_tokenizer(build, monkeypatch, tmp_path):
    def unpicklable(_):
        raise TypeError("the encoder was pickled")

    alone = [content(batch) for batch in build(num_proc=1).train]
    monkeypatch.setattr(Encoder, "__reduce__", unpicklable)
    several = build(num_proc=3, data_cache_dir=str(tmp_path))
    assert len(list(tmp_path.rglob("cache-*_of_00003.arrow"))) == 3
    assert [content(batch) for batch in several.train] == alone


def test_processes_that_are_not_forked_are_sent_the_encoder(monkeypatch):
    monkeypatch.setattr(data.samples, "get_start_method", lambda: "spawn")
    encoder = object()
    with data.samples.inheritable(encoder) as function:
        assert function is encoder


def test_a_token_past_the_vocabulary(build):
    for streaming in (False, True):
        with pytest.raises(
            ValueError, match=r"--tokenizer_name .*past the vocabulary of --model_name \(300 tokens\)"
        ):
            build(vocab_size=300, streaming=streaming)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"split_name": "test"}, "--split_name"),
        ({"num_of_samples": 40}, "--num_of_samples"),
        ({"dataset_text_field": "completion"}, r"--dataset_\*_field"),
        ({"system_prompt": "Be brief."}, "--system_prompt"),
        ({"max_seq_length": 256}, r"--max_seq_length \(128, now 256\)"),
        ({"packing": False}, r"--packing \(True, now False\)"),
        ({"seed": 4}, r"--seed \(3, now 4\)"),
        ({"streaming": True}, r"--streaming \(False, now True\)"),
    ],
)
def test_a_state_of_other_data_is_refused(build, change, flag):
    state = build().train.state_dict()
    with pytest.raises(ValueError, match=f"changed .*{flag}.*--resume none and another --output_dir$"):
        build(**change).train.load_state_dict(state)


def test_another_batch_size_may_resume(build):
    whole = ids(build(batch_size=1).train)
    loader = build(batch_size=2).train
    done = ids(islice(loader, 3))
    other = build(batch_size=3).train
    other.load_state_dict(loader.state_dict())
    assert done + ids(other) == whole


def test_a_reader_ahead_hands_on_items_and_errors_and_lets_go_of_one_that_is_stuck():
    def items():
        yield 1
        yield 2
        raise OSError("gone")

    found = data.loader.ahead(items())
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(OSError, match="gone"):
        next(found)
    assert list(data.loader.ahead(iter([3, 4]))) == [3, 4]

    stuck = threading.Event()

    def hung():
        yield 5
        stuck.wait()

    found = data.loader.ahead(hung())
    assert next(found) == 5
    found.close()  # while the next one is waited for
    stuck.set()
