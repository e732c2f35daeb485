"""Fixtures: loaders over small data sets."""

import json
from dataclasses import fields

import datasets
import pytest
from fp8_suite.data.build import build_loaders
from fp8_suite.data.collate import IGNORE
from fp8_suite.data.order import BatchShape
from fp8_suite.data.settings import DataConfig
from fp8_suite.data.tokenizer import load_tokenizer

VOCABULARY = 2048
SHAPE = {field.name for field in fields(BatchShape)}


def json_lines(*rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Empty cache of prepared data."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def tokenizer():
    return load_tokenizer("demo", family="llama")


@pytest.fixture
def build(cache, tokenizer):
    """Function that builds loaders from fields of DataConfig and BatchShape."""

    def build(*, seed=3, vocab_size=VOCABULARY, evaluate_only=None, **settings):
        shape = {"batch_size": 1, "pad_multiple": 8}
        shape |= {name: settings.pop(name) for name in SHAPE & set(settings)}
        shape.setdefault("eval_batch_size", shape["batch_size"])
        cfg = {"num_workers": 0, "num_proc": 1, "eval_samples": 0}
        limits = {"evaluate_only": evaluate_only, "vocab_size": vocab_size, "max_positions": 2048}
        cfg = DataConfig(**cfg | settings)
        return build_loaders(cfg, tokenizer, BatchShape(**shape), seed=seed, **limits)

    return build


@pytest.fixture
def load(build, tmp_path):
    """Function that builds unpacked loaders from one file, or from a folder of files by name."""

    def load(contents: bytes | dict[str, bytes], name="train.jsonl", *, folder=False, **settings):
        path = tmp_path / "set"
        path.mkdir(exist_ok=True)
        files = contents if isinstance(contents, dict) else {name: contents}
        for file, content in files.items():
            (path / file).write_bytes(content)
        is_folder = folder or files is contents
        settings = {"split_name": "train", "packing": False} | settings
        return build(dataset_name=str(path if is_folder else path / name), **settings)

    return load


@pytest.fixture
def texts(tokenizer):
    """Function that decodes an unpacked epoch in row order: all tokens, and tokens with loss."""

    def texts(loaders) -> list[tuple[str, str]]:
        rows = {}
        for batch in loaders.train:
            ids, labels = batch.inputs["input_ids"][0, : batch.real_tokens], batch.inputs["labels"][0]
            answer = tokenizer.decode(labels[labels != IGNORE]).removesuffix(tokenizer.eos_token)
            rows[batch.sample_ids[0]] = tokenizer.decode(ids), answer
        return [rows[row] for row in sorted(rows)]

    return texts


@pytest.fixture
def answers(texts):
    return lambda loaders: [answer for _, answer in texts(loaders)]
