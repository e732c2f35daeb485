import pytest
import torch
from fp8_suite.training.precision.te_runtime import why_not_te


@pytest.fixture(autouse=True)
def needs_gpu_and_te(request):
    if reason := why_not_te():
        pytest.skip(reason)
    torch.manual_seed(0)


@pytest.fixture
def needs_hopper(needs_gpu_and_te):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs have TE's kernels")
