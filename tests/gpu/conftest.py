import pytest
import torch
from fp8_suite.training.library import build
from fp8_suite.training.precision.te_runtime import why_not_te


@pytest.fixture(autouse=True)
def needs_gpu_and_te(request):
    if reason := why_not_te():
        pytest.skip(reason)
    torch.manual_seed(0)
    forget_choices()


def forget_choices() -> None:
    """Forget the attention and the adapters' modules that earlier tests chose for their process.

    A model of `training.library` chooses both until the next one is built. TE keeps its last choice of
    attention for layers of equal shapes, whatever the environment says by then.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    build.ATTENTION.close()
    build.PEFT.close()
    _attention_backends["attention_params"] = None


@pytest.fixture
def needs_hopper(needs_gpu_and_te):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs have TE's kernels")
