"""The gradient norm that clipping and the finite check rest on."""

import pytest
import torch

from training.sharding import global_norm


def test_the_norm_is_that_of_all_gradients_in_fp32():
    assert global_norm([torch.tensor([[3.0]]), torch.tensor([4.0])]) == 5.0
    many = torch.full((1000,), 1 / 3, dtype=torch.bfloat16)
    norm = global_norm([many])
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, many.double().norm().float(), rtol=1e-6, atol=0)


def test_a_model_without_gradients_is_named():
    with pytest.raises(RuntimeError, match="nothing of the model is trainable"):
        global_norm([])
