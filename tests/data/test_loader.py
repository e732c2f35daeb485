"""Data order: complete, reproducible, and resumable at any position on any number of ranks."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from itertools import islice

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from fp8_suite.core.errors import UserError
from fp8_suite.core.packages import ROOT
from fp8_suite.data import loader as loader_module
from fp8_suite.data import order
from fp8_suite.data.build import open_split
from fp8_suite.data.chat import Encoder
from fp8_suite.data.samples import count_labels
from fp8_suite.data.settings import DataConfig
from fp8_suite.data.tokenizer import CHATML, load_tokenizer

from tests.children import running
from tests.data.conftest import json_lines

ROWS = 90
MODES = {
    "packed": {},
    "padded": {"packing": False},
    "workers": {"num_workers": 2},
    "streamed": {"streaming": True},
    "streamed, worker": {"streaming": True, "num_workers": 1},
}
mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
streaming = pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with prompt/answer rows of very different lengths, and 20 rows in a second split."""
    path = tmp_path_factory.mktemp("data") / "rows"
    path.mkdir()
    rng = np.random.default_rng(0)
    for split, count in (("train", ROWS), ("test", 20)):
        lengths = rng.integers(1, 70, count).tolist()
        rows = [{"prompt": f"{split} {i}", "completion": "so " * n} for i, n in enumerate(lengths)]
        (path / f"{split}.jsonl").write_bytes(json_lines(*rows))
    return path


@pytest.fixture
def make(folder, build, monkeypatch):
    """Function that builds loaders from the folder, with one cache for all tests."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder.parent / "cache")
    monkeypatch.setattr(order, "WINDOW", 25)  # several windows in ROWS
    defaults = {"dataset_name": str(folder), "split_name": "train", "max_seq_length": 128}
    defaults |= {"batch_size": 2, "pad_multiple": 16}
    return lambda **settings: build(**defaults | settings)


def content(batch):
    """Return the content of a batch in a comparable form."""
    inputs = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in batch.inputs.items()}
    return inputs, batch.sample_ids, batch.label_tokens, batch.real_tokens, batch.padded_tokens


def ids(batches):
    return [i for batch in batches for i in batch.sample_ids]


@mode
def test_epochs_have_every_sample_once_and_resume_at_any_position(make, mode):
    uninterrupted = make(**mode).train
    epochs, states, ends = [], [uninterrupted.state_dict()], []
    for _ in range(2):
        epochs.append([])
        for batch in uninterrupted:
            epochs[-1].append(content(batch))
            states.append(json.loads(json.dumps(uninterrupted.state_dict())))
        ends.append(uninterrupted.state_dict())
    first, second = ([i for _, samples, *_ in epoch for i in samples] for epoch in epochs)
    assert Counter(first) == Counter(second) == Counter(range(ROWS))
    assert first != second and first != sorted(first) and uninterrupted.state.epoch == 2
    streamed = mode.get("streaming")
    assert uninterrupted.micro_batches_per_epoch == (None if streamed else len(epochs[0]))
    batches = [*epochs[0], *epochs[1]]
    positions = (len(epochs[0]), *range(0, len(states), 1 + len(states) // 6))
    for done, state in ((len(epochs[0]), ends[0]), *((done, states[done]) for done in positions)):
        loader = make(**mode).train
        loader.load_state_dict(state)
        rest = [content(batch) for _ in range(loader.state.epoch, 2) for batch in loader]
        assert rest == batches[done:]


@mode
def test_order_is_independent_of_world_and_batch_size(make, mode):
    expected = ids(make(**mode, batch_size=1).train)
    done, state = [], None
    for world_size, batch_size, steps in ((4, 1, 2), (2, 2, 2), (1, 3, None)):
        shape = {"world_size": world_size, "batch_size": batch_size}
        loaders = [make(**mode, **shape, rank=rank).train for rank in range(world_size)]
        for loader in loaders if state else ():
            loader.load_state_dict(state)
        for share in islice(zip(*loaders, strict=True), steps):
            done += ids(share)
            state = loaders[0].state_dict()
        assert all(loader.state_dict() == loaders[0].state_dict() for loader in loaders)
    assert done == expected


@streaming
def test_every_rank_gets_a_batch_in_the_last_step(make, streaming):
    settings = {"streaming": streaming, "num_of_samples": 9, "packing": False}  # 9 bins for 4 ranks of 2
    shares = [list(make(**settings, rank=rank, world_size=4).train) for rank in range(4)]
    assert [len(share) for share in shares] == [2] * 4
    last = [share[-1] for share in shares]
    assert [len(batch.sample_ids) for batch in last] == [1, 0, 0, 0]
    assert [batch.label_tokens > 0 for batch in last] == [True, False, False, False]
    assert all(tuple(batch.inputs["input_ids"].shape) == (1, 16) for batch in last[1:])


@streaming
def test_data_smaller_than_a_micro_batch_is_refused(make, streaming):
    with pytest.raises(UserError, match="--batch_size 9: on 2 ranks a micro-batch needs 18 sequences, but"):
        make(num_of_samples=9, packing=False, batch_size=9, world_size=2, streaming=streaming)


@streaming
def test_a_step_of_more_sequences_than_there_are_is_a_warning(make, streaming, caplog):
    rows = {"num_of_samples": 9, "packing": False, "batch_size": 3, "streaming": streaming}
    make(**rows, micro_batches_per_step=3)
    assert "the data has" not in caplog.text
    make(**rows, micro_batches_per_step=4)
    assert "the data has only 9 sequences; a step should have 12" in caplog.text


@pytest.mark.parametrize("packing", [True, False])
def test_padding_multiple_changes_only_widths_and_exceeds_no_position(make, packing):
    settings = {"packing": packing, "max_seq_length": 80}
    narrow, wide = (list(make(pad_multiple=multiple, **settings).train) for multiple in (1, 96))
    assert ids(narrow) == ids(wide)
    assert {batch.inputs["input_ids"].shape[1] for batch in wide} == {96}
    assert max(int(batch.inputs["position_ids"].max()) for batch in wide) <= 79


def test_loading_does_not_change_the_global_random_state(make):
    before = torch.get_rng_state()
    list(make(num_workers=2).train)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("per_step", "ahead"), [(1, 4), (4, 4), (7, 8)])
def test_workers_prefetch_a_step_but_the_state_ignores_prefetched_batches(make, per_step, ahead):
    loader = make(num_workers=2, micro_batches_per_step=per_step, batch_size=1).train
    before, batches = set(loader_module.readers), iter(loader)
    next(batches)
    (reader,) = set(loader_module.readers) - before
    assert reader._send_idx - reader._rcvd_idx == ahead  # at least two per worker
    assert loader.state_dict()["position"] == 1


def test_evaluation_does_not_prefetch_a_training_step(make):
    loaders = make(num_workers=2, micro_batches_per_step=7, batch_size=1, eval_samples=8)
    assert (loaders.train.options["prefetch_factor"], loaders.eval.options["prefetch_factor"]) == (4, 2)


def workers():
    return {child.pid for child in multiprocessing.active_children()}


@pytest.mark.parametrize("name", ["train", "eval"])
@streaming
def test_workers_persist_across_epochs_until_one_is_abandoned(make, name, streaming):
    before = workers()
    loader = getattr(make(num_workers=2, eval_samples=8, streaming=streaming), name)
    passes = [[content(batch) for batch in loader]]
    started = workers() - before
    assert len(started) == (1 if streaming and name == "train" else 2)
    passes.append([content(batch) for batch in loader])
    assert workers() - before == started and (passes[0] == passes[1]) == (name == "eval")
    batches = iter(loader)
    next(batches)
    assert workers() - before == started
    batches.close()
    assert not workers() - before


ENDINGS = """
import gc, os, sys
gc.disable()  # until the libraries are loaded, whose objects need no collection
import torch
from fp8_suite.data.build import build_loaders
from fp8_suite.data.order import BatchLayout, BatchShape
from fp8_suite.data.settings import DataConfig
from fp8_suite.data.tokenizer import load_tokenizer

settings = {"num_workers": 2, "max_seq_length": 128, "eval_samples": 5}
cfg = DataConfig(dataset_name=sys.argv[1], split_name="train", **settings)
shape = BatchShape(batch_size=2, eval_batch_size=2, pad_multiple=16)
limits = {"vocab_size": 2048, "max_positions": 2048}
loaders = build_loaders(cfg, load_tokenizer("demo", family="llama"), shape, seed=3, **limits)
gc.freeze()
gc.enable()


def after_a_pass():
    assert list(loaders.train) and list(loaders.eval)

def in_a_pass():
    global batches
    batches = iter(loaders.train)
    next(batches)

def after_garbage_collection():
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2
    reader = [loaders.train._start()]
    next(reader[0])
    reader.append(reader)
    del reader
    gc.collect()

def with_an_error_in_a_worker():
    BatchLayout.collate = None
    list(loaders.train)


children = {}
for end in (after_a_pass, in_a_pass, after_garbage_collection, with_an_error_in_a_worker):
    if not (child := os.fork()):
        end()
        sys.exit(0)
    children[child] = end.__name__
for child, name in children.items():
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_process_exits_although_workers_ignore_sigterm(folder, tmp_path):
    arguments = [sys.executable, "-c", ENDINGS, str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path)}
    with running(arguments, cwd=ROOT, env=environment, **pipes) as process:
        output, errors = process.communicate(timeout=600)
    codes = dict(line.split() for line in output.splitlines() if len(line.split()) == 2)
    clean = dict.fromkeys(("after_a_pass", "in_a_pass", "after_garbage_collection"), "0")
    assert codes == clean | {"with_an_error_in_a_worker": "1"}, errors
    assert "'NoneType' object is not callable" in errors


def test_stream_windows_are_tokenized_once(make, monkeypatch):
    encode, encoded = Encoder.encode, []
    monkeypatch.setattr(Encoder, "encode", lambda *args: encoded.append(len(args[1])) or encode(*args))
    assert sorted(ids(make(streaming=True).train)) == list(range(ROWS))
    assert encoded == [25, 25, 25, 15]


def test_evaluation_restarts_in_row_order(make):
    loader = make(eval_split="test", eval_samples=10, packing=False, seed=8).eval
    assert ids(islice(loader, 2)) == [0, 2, 4, 6]  # every second row of 20
    assert ids(loader) == ids(loader) == list(range(0, 20, 2))
    assert loader.state.epoch == 0


@streaming
def test_held_out_rows_are_never_trained_on(make, streaming):
    loaders = make(eval_samples=7, streaming=streaming, num_of_samples=70)
    train, held = set(ids(loaders.train)), set(ids(loaders.eval))
    assert (len(held), len(train)) == (7, 70) and not train & held and train | held <= set(range(ROWS))
    assert loaders.report.rows == (25 if streaming else 70) and loaders.eval_report.rows == 7
    prompts = {prompt.split("<|end_header_id|>\n\n")[1].split("<|")[0] for prompt, _ in loaders.eval_prompts}
    assert prompts == {f"train {i}" for i in held}


def test_held_out_rows_are_at_most_a_tenth_and_depend_on_the_seed(make):
    parts = [set(ids(make(eval_samples=1000, seed=seed).eval)) for seed in (3, 3, 4)]
    assert [len(part) for part in parts] == [9, 9, 9]
    assert parts[0] == parts[1] != parts[2]


@streaming
def test_eval_split_keeps_all_rows_for_training(make, streaming):
    loaders = make(eval_split="test", eval_samples=1000, streaming=streaming)
    assert set(ids(loaders.train)) == set(range(ROWS)) and set(ids(loaders.eval)) == set(range(20))
    assert make(eval_samples=0, eval_split="test", streaming=streaming).eval is None


def evaluated(loaders):
    assert loaders.train is None and loaders.report is None
    assert loaders.eval_report.rows == len(ids(loaders.eval))
    return ids(loaders.eval)


@streaming
def test_evaluation_alone_reads_all_rows_of_its_split_and_no_others(make, cache, streaming, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    encoded, encode = [], Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda *args: encoded.extend(args[1]) or encode(*args))
    alone = {"streaming": streaming, "packing": False, "evaluate_only": "model"}
    assert evaluated(make(**alone, eval_samples=None)) == list(range(ROWS))
    assert evaluated(make(**alone, eval_samples=None, eval_split="test")) == list(range(20))
    assert len(encoded) == ROWS + 20
    monkeypatch.setattr("fp8_suite.data.settings.EVAL_SAMPLES", 5)  # a number given counts, also the default
    few = evaluated(make(**alone, eval_samples=5))
    assert few == (list(range(5)) if streaming else list(range(0, ROWS, ROWS // 5)))


@streaming
@pytest.mark.parametrize("eval_split", [None, "test"])
def test_a_checkpoint_is_evaluated_on_the_rows_of_its_run(make, cache, eval_split, streaming, monkeypatch):
    settings = {"streaming": streaming, "eval_samples": 6, "eval_split": eval_split, "num_of_samples": 70}
    run = make(**settings)
    encoded, encode = [], Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda *args: encoded.extend(args[1]) or encode(*args))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    alone = make(**settings, evaluate_only="checkpoint")
    assert alone.train is None and alone.eval_fingerprint == run.eval_fingerprint and len(encoded) == 6
    assert alone.eval_prompts == run.eval_prompts


@pytest.mark.parametrize("packing", [False, True])
def test_report_matches_the_content_of_an_epoch(make, packing):
    answer, everything = (make(train_on_prompt=on, packing=packing) for on in (False, True))
    assert answer.report.tokens == everything.report.tokens
    assert everything.report.label_tokens == everything.report.tokens - ROWS  # the first token is no label
    assert answer.report.label_tokens < everything.report.label_tokens
    for loaders in (answer, everything):
        batches, report = list(loaders.train), loaders.report
        assert sum(b.label_tokens for b in batches) == report.label_tokens
        assert sum(b.real_tokens for b in batches) == report.tokens
        padded = sum(b.padded_tokens for b in batches)
        assert report.packing_efficiency == pytest.approx(report.tokens / padded)


def test_label_token_count_matches_hand_computed_values():
    spans = pa.chunked_array([[[0, 3], [2, 5, 7, 9]], [[], [0, 1]]])
    # Token 0 is never a label; the second document is truncated to 8 tokens.
    assert count_labels(spans, np.array([3, 8, 4, 1])).tolist() == [2, 4, 0, 0]


def test_token_cache_is_shared_by_every_seed_length_and_layout(make, monkeypatch):
    first = ids(make(num_of_samples=50).train)
    monkeypatch.setattr(Encoder, "encode", lambda *_: pytest.fail("tokenized again"))
    assert ids(make(num_of_samples=50).train) == first
    for change in ({"max_seq_length": 64}, {"seed": 5}, {"packing": False}, {"train_on_prompt": True}):
        make(num_of_samples=50, **change)


def test_cache_key_depends_on_tokenizer_and_prompt_format(folder, cache):
    def key(words=(), *, system_prompt="One prompt.", **attributes):
        tokenizer = load_tokenizer("demo", family="llama")
        tokenizer.add_tokens(list(words))
        for name, value in attributes.items():
            setattr(tokenizer, name, value)
        cfg = DataConfig(dataset_name=str(folder), system_prompt=system_prompt)
        split = open_split(cfg, "train", tokenizer, 2048)
        return split.cache_key(split.source.rows)

    changes = [{"bos_token": "<|eot_id|>"}, {"eos_token": "<|begin_of_text|>"}, {"words": ["zebra"]}]
    changes += [{"chat_template": CHATML.text}, {"system_prompt": "Another prompt."}]
    assert key() == key() and len({key(), *(key(**change) for change in changes)}) == 6


def test_parallel_tokenization_matches_serial(make, cache, monkeypatch):
    alone = [content(batch) for batch in make(num_proc=1).train]
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    several = make(num_proc=3)
    assert len(list(cache.rglob("cache-*_of_00003.arrow"))) == 3
    assert [content(batch) for batch in several.train] == alone


@streaming
def test_token_id_outside_the_vocabulary_is_refused(make, streaming):
    with pytest.raises(UserError, match=r"--tokenizer_name .*exceeds the vocabulary of --model_name \(300 "):
        make(vocab_size=300, streaming=streaming)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"split_name": "test"}, "--split_name"),
        ({"dataset_text_field": "completion"}, "--dataset_text_field"),
        ({"system_prompt": "Be brief."}, "--system_prompt"),
        ({"packing": False}, r"--packing \(True, now False\)"),
        ({"seed": 4}, r"--seed \(3, now 4\)"),
    ],
)
def test_loader_state_of_different_data_is_refused(make, change, flag):
    state = make().train.state_dict()
    with pytest.raises(UserError, match=f"because of changes in .*{flag}.*--resume none"):
        make(**change).train.load_state_dict(state)
