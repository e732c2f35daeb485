"""benchmarks.peers with TE: its layers compute what transformers' do, and a run records its attention."""

from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from fp8_suite.benchmarks.peers import build, forward_context, main
from fp8_suite.benchmarks.records.runs import read_run
from fp8_suite.training.precision.recipes import why_not

from tests.gpu.models import DEVICE

pytestmark = pytest.mark.gpu
PRECISIONS = {"bf16": 0.999, "delayed": 0.98}  # precision -> smallest cosine similarity of a token


@pytest.mark.parametrize("precision", PRECISIONS)
def test_te_layers_compute_what_llamas_layers_do(precision):
    if precision == "delayed" and (reason := why_not(precision)):
        pytest.skip(reason)
    ids, hidden, contexts = torch.randint(2048, (2, 256), device=DEVICE), {}, forward_context(precision)
    for stack in ("torchao", "te"):
        torch.manual_seed(0)  # same weights
        arguments = Namespace(model_name="tiny-llama", max_seq_length=256, precision="bf16", stack=stack)
        model = build(arguments, DEVICE)
        for _ in range(2):  # the first pass sets the scales of the second
            with contexts():
                output = model.model(input_ids=ids, use_cache=False).last_hidden_state
        hidden[stack] = output.detach().float()
    assert F.cosine_similarity(hidden["te"], hidden["torchao"], dim=-1).min() > PRECISIONS[precision]


@pytest.mark.parametrize(("precision", "micro_batches"), [("bf16", 1), ("delayed", 1), ("delayed", 3)])
def test_te_stack_trains_and_records_its_attention(precision, micro_batches, tmp_path):
    pytest.importorskip("liger_kernel")
    if precision == "delayed" and (reason := why_not(precision)):
        pytest.skip(reason)
    flags = f"--model_name tiny-llama --stack te --precision {precision} --max_seq_length 128 --steps 7"
    flags += f" --gradient_accumulation_steps {micro_batches} --output_dir {tmp_path}"
    assert main(flags.split()) == 0
    (folder,) = tmp_path.glob(f"transformers+te-tiny-llama-{precision}-128x1*")
    run = read_run(folder)
    assert run.layers == "TE" and run.precision == precision and run.timed
    assert run.environment["attention_backend"] in ("flash", "fused")
    assert all(7 < loss < 9 for _, loss in run.series("train/loss"))  # ln 2048 = 7.6
