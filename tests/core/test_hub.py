"""Names of models, tokenizers and data sets: what is no name of any, and a hub that does not answer."""

import httpx
import huggingface_hub
import pytest
from huggingface_hub.utils import _http

from core.hub import RETRIES, refuse_missing_folder, refuse_silent_hub
from data.settings import DataConfig
from data.sources import detect, is_prepared
from te_models.build import plan_model
from te_models.presets import PRESETS, closest_preset


@pytest.fixture
def requests(monkeypatch) -> list[str]:
    """What is asked of a hub that is out of reach; no time is waited."""
    asked: list[str] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    huggingface_hub.set_client_factory(lambda: httpx.Client(transport=httpx.MockTransport(refuse)))
    yield asked
    huggingface_hub.set_client_factory(_http.default_client_factory)


def test_a_hub_out_of_reach_is_one_line_after_few_tries(requests, tmp_path, capfd):
    with pytest.raises(ValueError) as error:
        plan_model("some/model", init="auto", use_te=False, cache_dir=str(tmp_path))
    said = "https://huggingface.co is out of reach (Name or service not known). Give a local folder"
    assert str(error.value).startswith(f"--model_name some/model: {said}")
    assert len(requests) == 1 + RETRIES
    assert capfd.readouterr() == ("", "")


def test_a_data_set_out_of_reach_is_one_line_after_few_tries(requests, tmp_path, capfd):
    cfg = DataConfig(dataset_name="some/DataSet", data_cache_dir=str(tmp_path))
    with pytest.raises(ValueError) as error:
        detect(cfg, "train")
    said = (
        "cannot be read: https://huggingface.co is out of reach (Name or service not known); check the name"
    )
    assert str(error.value).startswith(
        f"--dataset_name some/DataSet: {said} and the network, or give a local"
    )
    assert str(error.value).endswith("or --dataset_name demo")
    assert len(requests) == 1 + RETRIES and all("/datasets/some/DataSet/" in url for url in requests)
    assert capfd.readouterr() == ("", "")
    assert not is_prepared(cfg, "some/DataSet")
    (tmp_path / "some___data_set").mkdir()  # as `datasets` calls it
    assert is_prepared(cfg, "some/DataSet")


def test_the_hub_is_not_asked_for_what_is_here(requests, tmp_path):
    refuse_silent_hub(str(tmp_path), ("config.json",), None)
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("abc")
    refuse_silent_hub("some/model", ("other.json", "config.json"), str(tmp_path))
    assert not requests


def test_what_a_hub_answers_is_left_to_its_client(requests):
    answers = httpx.MockTransport(lambda request: httpx.Response(503))
    huggingface_hub.set_client_factory(lambda: httpx.Client(transport=answers))
    refuse_silent_hub("some/model", ("config.json",), None)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("tiny-lama", "tiny-llama"),
        ("TinyLlama-", "tiny-llama"),
        ("tiny-qwen", "tiny-qwen3"),
        ("Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("gpt2", None),
        ("distilgpt2", None),
        ("someone/tiny-lama", None),
    ],
)
def test_a_preset_that_is_nearly_named(name, preset, requests, tmp_path):
    assert closest_preset(name) == preset
    if preset:
        with pytest.raises(ValueError, match=rf"{name}: there is no such .* or folder; .* mean '{preset}'\?"):
            plan_model(name, init="auto", use_te=False)
        assert not requests
    assert preset is None or preset in PRESETS


def test_a_folder_may_be_called_nearly_as_a_preset(tmp_path, monkeypatch):
    plan_model("tiny-qwen3", init="auto", use_te=False).config.save_pretrained(tmp_path / "tiny-lama")
    monkeypatch.chdir(tmp_path)
    assert plan_model("tiny-lama", init="random", use_te=False).family == "qwen3"


@pytest.mark.parametrize("name", ["/no/such/folder", "./x", "../x/y", "runs/a/export", "~nobody/x"])
def test_a_path_to_nothing_is_told_as_one(name, requests):
    with pytest.raises(ValueError, match=rf"--model_name {name}: there is no such folder; give one"):
        plan_model(name, init="auto", use_te=False)
    with pytest.raises(ValueError, match=rf"--tokenizer_name {name}: there is no such folder"):
        refuse_missing_folder("tokenizer_name", name)
    assert not requests


def test_what_may_be_a_hub_id_or_is_there_is_no_missing_folder(tmp_path):
    for name in ("demo", "gpt2", "owner/name", str(tmp_path)):
        refuse_missing_folder("tokenizer_name", name)


def test_a_run_folder_is_led_to_its_export(tmp_path):
    (tmp_path / "config.json").write_text('{"model_name": "tiny-llama"}')
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "export").mkdir()
    with pytest.raises(ValueError, match=rf"is a run folder; .* exported, {tmp_path}/export$"):
        plan_model(str(tmp_path), init="auto", use_te=False)
