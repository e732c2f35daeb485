"""Names of models and tokenizers: missing folders, near misses, and folders without a model."""

import httpx
import huggingface_hub
import pytest
from fp8_suite.core.errors import UserError
from fp8_suite.core.files import require_folder
from fp8_suite.te_models.spec import find_model
from huggingface_hub.utils import _http


@pytest.fixture
def requests(monkeypatch) -> list[str]:
    """Addresses requested from a hub that is out of reach; retries do not wait."""
    addresses: list[str] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        addresses.append(str(request.url))
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    huggingface_hub.set_client_factory(lambda: httpx.Client(transport=httpx.MockTransport(refuse)))
    yield addresses
    huggingface_hub.set_client_factory(_http.default_client_factory)


def spec(name: str, **options):
    return find_model(name, **{"init": "auto", "use_te": False} | options)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("tiny-lama", "tiny-llama"),
        ("TinyLlama-", "tiny-llama"),
        ("tiny-qwen", "tiny-qwen3"),
        ("Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
    ],
)
def test_a_name_close_to_a_preset_is_answered_with_it(name, preset, requests, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=rf"--model_name {name}: .*did you mean '{preset}'\?"):
        spec(name)
    assert not requests
    spec("tiny-qwen3").config.save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert spec(name, init="random").family == "qwen3", "a folder of that name wins"


@pytest.mark.parametrize("name", ["/no/such/folder", "./x", "../x/y", "runs/a/export", "~nobody/x"])
def test_a_missing_folder_is_not_requested_from_the_hub(name, requests, tmp_path):
    with pytest.raises(UserError, match=rf"--model_name {name}: there is no such folder"):
        spec(name)
    with pytest.raises(UserError, match=rf"--tokenizer_name {name}: there is no such folder"):
        require_folder("tokenizer_name", name)
    assert not requests
    for name in ("demo", "gpt2", "owner/name", str(tmp_path)):
        require_folder("tokenizer_name", name)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("config.json", "metrics.jsonl", "export/config.json"), "is a run folder; .*/export$"),
        (("config.json", "metrics.jsonl", "export_fp8/config.json"), "is a run folder; .*/export_fp8$"),
        (("adapter_config.json",), "adapters only; give a merged model, such as RUN/export"),
        (("manifest.json",), "a checkpoint; give an export, such as RUN/export"),
    ],
)
def test_a_folder_that_is_no_model_is_answered_with_the_export(files, message, tmp_path):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=message):
        spec(str(tmp_path))
