"""JSON and YAML files as people and programs write them: read, or refused in one line."""

import json
import pickle

import pytest
from fp8_suite.benchmarks.plan.inputs import read_model
from fp8_suite.core.errors import UserError
from fp8_suite.core.readers import UnreadableFile, read_json, read_record, read_yaml
from fp8_suite.te_models.spec import find_model
from fp8_suite.training.config import load_config_file
from fp8_suite.training.parallel.settings import read_deepspeed_config

DAMAGED = {  # content -> word of the reason
    "nested": (b"[" * 100_000, "not valid JSON: maximum recursion"),
    "cut": (b'{"a": ', "not valid"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    "Latin-1": ('{"a": "\u00e9"}'.encode("latin-1"), "not UTF-8"),
    "empty": (b" \n", "empty"),
    "list": (b"[1]", "must hold an object"),
}
BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize("case", DAMAGED)
def test_the_reason_for_a_damaged_file_is_one_line(case, tmp_path):
    content, reason = DAMAGED[case]
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UnreadableFile, match=reason) as refused:
        read_json(tmp_path / "x.json")
    assert "\n" not in str(refused.value) and str(tmp_path) not in refused.value.reason
    assert pickle.loads(pickle.dumps(refused.value)).reason == refused.value.reason, "sent between ranks"
    assert read_record(tmp_path / "x.json") == {}


@pytest.mark.parametrize("case", ["nested", "UTF-16", "cut", "list"])
@pytest.mark.parametrize(
    ("name", "read", "flag"),
    [
        ("run.yaml", lambda path: load_config_file(str(path)), "config"),
        ("zero.json", lambda path: read_deepspeed_config(str(path)), "deepspeed_config"),
        ("config.json", lambda path: read_model(str(path.parent)), "model_name"),
        ("config.json", lambda path: find_model(str(path.parent), init="auto", use_te=False), "model_name"),
    ],
)
def test_every_file_that_a_user_names_is_refused_by_its_flag(name, read, flag, case, tmp_path):
    (tmp_path / name).write_bytes(DAMAGED[case][0])
    with pytest.raises(UserError) as refused:
        read(tmp_path / name)
    assert refused.value.flags == {flag} and "\n" not in str(refused.value)


def test_a_byte_order_mark_is_skipped(tmp_path):
    for name, read in (("x.json", read_json), ("x.yaml", read_yaml)):
        (tmp_path / name).write_bytes(BOM + b'{"a": 1}')
        assert read(tmp_path / name) == {"a": 1}
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 512}
    (tmp_path / "config.json").write_bytes(BOM + json.dumps(config).encode())
    assert read_model(str(tmp_path)).family is read_model("tiny-llama").family
