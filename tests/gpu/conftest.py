import pytest
import torch

from training.te_runtime import why_not_te


@pytest.fixture(autouse=True)
def needs_gpu_and_te(request):
    if reason := why_not_te():
        pytest.skip(reason)
    torch.manual_seed(0)
