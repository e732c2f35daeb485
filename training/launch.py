"""Entry point of the training commands. Parses flags before importing torch, so that --help is fast."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, NoReturn

from fp8_suite.core.errors import UserError
from fp8_suite.core.files import require_folder
from fp8_suite.core.gpus import HOPPER, open_gpu
from fp8_suite.core.readers import UnreadableFile, read_json
from fp8_suite.core.redact import redact
from fp8_suite.data.reading.formats import named_file
from fp8_suite.te_models.kernels import flash_attention_cache
from fp8_suite.te_models.kernels.flash_attention_cache import Variant
from fp8_suite.te_models.presets import PRESETS, require_model
from fp8_suite.training.config import Config, parse_config
from fp8_suite.training.estimate.sizes import check_number_of_ranks, without_auto_sizes
from fp8_suite.training.parallel.settings import read_deepspeed_config

if TYPE_CHECKING:
    import torch


def launch(description: str, *, start: Callable[[Config], torch.device], started: float) -> NoReturn:
    """Run the command and exit the process. For `start` and `started` see `training.run.main`."""
    cfg = parse_early(description)
    allow_expandable_segments()
    Thread(target=_work_ahead, args=(None if "RANK" in os.environ else cfg,), daemon=True).start()
    # While libraries load, Ctrl-C ends the process at once: they turn a KeyboardInterrupt into other errors.
    if (interrupt := signal.getsignal(signal.SIGINT)) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # Collecting while libraries load takes a fifth of the time and frees nothing.
    # transformers imports these wherever it can, which takes a sixth of the time.
    needs_torchao = cfg is None or (cfg.precision.mixed_precision == "fp8" and not cfg.model.use_te)
    unused = ["sklearn", *([] if needs_torchao else ["torchao"])]
    hidden = [name for name in unused if sys.modules.setdefault(name, None) is None]
    from fp8_suite.training.precision.torchao_fp8 import silence_import

    silence_import()
    import transformers.modeling_utils  # noqa: F401
    from fp8_suite.training.outcome import exit_process
    from fp8_suite.training.run import main

    for name in hidden:
        del sys.modules[name]
    signal.signal(signal.SIGINT, interrupt)
    gc.freeze()
    gc.enable()
    exit_process(main(sys.argv[1:], description=description, start=start, started=started, cfg=cfg))


def allow_expandable_segments() -> None:
    """Lose less memory to fragmentation. PyTorch reads the variable when it is imported."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _work_ahead(cfg: Config | None) -> None:
    """Open the GPU and compile kernels beside the imports. The run redoes whatever fails.

    `cfg` is None under torchrun.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    capability = open_gpu(local_rank)
    if cfg and capability == HOPPER:
        # Not a preset, no config.json of a decoder, or no process can be started.
        with suppress(UnreadableFile, LookupError, TypeError, OSError):
            for variant in kernels_to_compile(cfg):
                flash_attention_cache.start_compiler(variant)


def kernels_to_compile(cfg: Config) -> list[Variant]:
    """Return the kernels of FlashAttention 4 that the run needs and that are not compiled yet."""
    name = cfg.model.model_name
    if not (cfg.model.flash_attention and find_spec("flash_attn")):
        return []
    config = PRESETS.get(name) or read_json(Path(name) / "config.json")
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or config["hidden_size"] // heads
    kernels = flash_attention_cache.variants(
        (heads, groups, size),
        native=cfg.model.use_te,
        packed=cfg.data.packing,
        deterministic=cfg.optim.deterministic,
    )
    return [variant for variant in kernels if not variant.record().exists()]


def parse_early(description: str) -> Config | None:
    """Parse the command line; exit after --help or an error.

    Returns None after an error under torchrun, where one rank reports errors for all.
    """
    argv, on_ranks = sys.argv[1:], "RANK" in os.environ
    if {"-h", "--help"} & set(argv):
        argv = ["--help"]
    try:
        cfg = parse_config(argv, prog=Path(sys.argv[0]).name, description=description)
        if not on_ranks:
            require_inputs(cfg)
            check_number_of_ranks(without_auto_sizes(cfg), 1)
        return cfg
    except UserError as error:
        if on_ranks:
            return None
        print(f"error: {redact(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)


def require_inputs(cfg: Config) -> None:
    """Raise UserError for inputs that do not exist. Imports no torch."""
    require_model(cfg.model.model_name, cfg.model.init)
    if cfg.model.tokenizer_name:
        require_folder("tokenizer_name", cfg.model.tokenizer_name)
    if cfg.data.dataset_name != "demo":
        named_file(cfg.data)
    if cfg.sharding.deepspeed_config:  # also on one device, where it is not used
        read_deepspeed_config(cfg.sharding.deepspeed_config)
