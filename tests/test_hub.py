"""Models and tokenizers by name: a hub that does not answer."""

import httpx
import huggingface_hub
import pytest
from huggingface_hub.utils import _http

from te_models import plan_model
from training.hub import RETRIES, refuse_silent_hub


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


def test_the_hub_is_not_asked_for_what_is_here(requests, tmp_path):
    refuse_silent_hub(str(tmp_path), "config.json", None)
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("abc")
    refuse_silent_hub("some/model", "config.json", str(tmp_path))
    assert not requests


def test_what_a_hub_answers_is_left_to_its_client(requests):
    answers = httpx.MockTransport(lambda request: httpx.Response(503))
    huggingface_hub.set_client_factory(lambda: httpx.Client(transport=answers))
    refuse_silent_hub("some/model", "config.json", None)
