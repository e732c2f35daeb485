"""Composition root: builds everything in order, trains, exports, sums up; it alone sees the others."""

from __future__ import annotations

import gc
import logging
import math
import os
import platform
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import te_models
from data import build_loaders
from data.chat import load_tokenizer, turn_end
from te_models import fused_norm, fused_residual, fused_swiglu, packed_attention, rotation
from te_models.hugging_face import PLAIN_HEADS
from training import (
    flash_attention,
    fp8_stats,
    loss_fp8,
    metrics,
    optim,
    precision,
    precision_map,
    profiling,
    ranks,
    scaling_state,
    te_runtime,
    torchao_fp8,
)
from training.auto_mode import Memory, choose_mode, refuse_small_host
from training.checkpoint import Checkpoints, resolve_resume
from training.config import TORCHAO_RECIPES, Config, parse_config
from training.coverage import coverage
from training.durable_files import write_json
from training.export import export_hf
from training.generate import answer, generation_config, reads_back
from training.outcome import EXIT_FAILED, EXIT_INTERRUPTED, end, lasting_output
from training.packages import code_digest, version
from training.run_folder import (
    check_resume,
    global_batch,
    keep_wall_time,
    open_run_folder,
    take_wall_time,
    train_losses,
    write_config,
)
from training.sharding import STRATEGIES
from training.signals import caught
from training.state import restore_run, save_run
from training.trackers import Progress as Display
from training.trackers import Tracker, build_tracker, describe_environment, follows_a_finished_run
from training.trainer import Hooks, Meter, Progress, Trainer
from training.watchdog import DATA_SECONDS, Watchdog

FOLDER_SECONDS = 5.0  # for a network file system to show what another node wrote
KEEP_SECONDS = 30.0  # at least, between two log lines that wait for the wall time to be on disk
CALIBRATION_PASSES = 2  # the second starts from the first one's scales, so that nothing underflows on the way


@lasting_output()
def main(
    argv: list[str], *, description: str, start: Callable[[Config], torch.device], started: float = 0.0
) -> int:
    """Parse, run, and turn errors a user can act on into one line. Returns the exit code.

    `start` joins the job's other ranks, if there are any, and returns this one's device. `started` is
    time.perf_counter() at the command's start, from which the first step's time is told.
    """
    watchdog = run = None
    try:
        cfg = parse_config(argv, prog=Path(sys.argv[0]).name, description=description)
        device = start(cfg)
        watchdog = Watchdog(cfg.sharding.timeout_minutes)
        run = Run(cfg, device, watchdog, started or time.perf_counter())
        code = run.run()
        watchdog.rest()
        first = ranks.rank() == 0
        ranks.leave(watchdog.close)
        if code == 0 and first:  # the other GPUs are free by now
            run.signals.close()
            run.answer_prompts()
        return code
    except (Exception, KeyboardInterrupt) as error:
        return end(error, watchdog, run.give_up if run is not None else lambda: None)
    finally:
        if run is not None:
            run.signals.close()


def say(text: str) -> None:
    if ranks.rank() == 0:
        print(text, flush=True)


class Run:
    """One training run. Building decides and refuses; `run` trains and returns the exit code.

    From its loop on, signals end no rank alone, until whoever runs it has left the job and closes `signals`.
    """

    def __init__(self, cfg: Config, device: torch.device, watchdog: Watchdog, started: float):
        self.cfg, self.device, self.watchdog, self.started = cfg, device, watchdog, started
        self.signals, self.tracker = ExitStack(), Tracker()
        set_determinism(cfg.optim.deterministic, cfg.optim.seed)
        if ranks.rank() > 0:  # every rank reads the same rows and would say the same of them
            logging.getLogger("data").setLevel(logging.ERROR)
        watchdog.starting("comparing settings")
        ranks.agree("the settings", cfg.to_dict())
        if ranks.world_size() > 1:  # it reads every file of the suite
            ranks.agree("the software", software())
        watchdog.together("deciding what runs", self._decide)
        ranks.agree("what can run", self.precision.in_short())
        ranks.agree("the model's files", self.model_files)
        watchdog.starting("choosing kernels")
        self._choose_kernels()
        watchdog.starting("planning memory")
        self._plan_memory()
        self.folder = watchdog.on_first("opening the run folder", self._open_folder)
        self._see_folder()
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints",
            keep_last=cfg.checkpoint.keep_last,
            beat=lambda: watchdog.beat("saving", counts=False),  # ranks write different numbers of files
        )
        self.resume, self.meta = watchdog.on_first("looking for a checkpoint", self._find_checkpoint)
        watchdog.together("loading the data", self._load_data, DATA_SECONDS)
        self._agree_on_data()
        self.finished = self._is_finished()
        if not self.finished:
            ranks.on_first(lambda: write_config(cfg, self.folder))
            watchdog.starting("building the model")
            self._build_model()

    def _decide(self) -> None:
        """Precision, model and optimizer, before any weight is read."""
        cfg = self.cfg
        self.precision = precision.resolve_precision(cfg)
        if self.precision.te_backend == "native" and (said := te_runtime.point_te_at_torchs_cudnn()):
            say(said)
        self.torchao = self.precision.effective in TORCHAO_RECIPES
        torchao_fp8.silence_import()  # transformers loads it, too, wherever it is installed
        if self.torchao:
            torchao_fp8.require_torchao()
        self.plan = te_models.plan_model(
            cfg.model.model_name,
            init=cfg.model.init,
            use_te=cfg.model.use_te,
            cache_dir=cfg.model.weights_cache_dir,
            trust_remote_code=cfg.model.trust_remote_code,
        )
        self.model_files = te_models.identity(self.plan) if ranks.world_size() > 1 else {}
        self.precision = precision_map.resolve(cfg, self.precision, self.plan.config.get_text_config())
        for reason in filter(None, [self.precision.fallback_reason, *self.precision.map_fallbacks.values()]):
            rule = "!" * 100
            say(f"{rule}\nWARNING: {reason}\nRUNNING INSTEAD: {precision.STANDARD_RECIPE} scaling\n{rule}")
        self.shape = metrics.ModelShape.from_hf_config(self.plan.config)
        if self.shape is None:
            say(f"TFLOP/s and MFU are left out: FLOPs of model type {self.plan.family} are not known")
        elif cfg.model.use_te:
            by_layer = precision_map if self.precision.by_module else precision
            by_layer.check_sizes(self.precision, self.plan.name, gemm_sizes(self.shape))
            precision.check_fp8_attention(cfg, self.precision, self.shape.head_dim)
        precision.check_settings(cfg, self.precision)
        if said := precision.unread(cfg, self.precision):
            say(f"WARNING: {said}")
        if cfg.precision.fp8_lm_head:
            text = self.plan.config.get_text_config()
            sizes = {"hidden size": text.hidden_size, "vocabulary": text.vocab_size}
            plain = cfg.model.use_te or self.plan.family in PLAIN_HEADS
            precision.check_lm_head(cfg, self.precision, sizes, plain=plain)
        if cfg.precision.master_weights == "none":
            say(optim.MASTER_NONE_WARNING)

    def _choose_kernels(self) -> None:
        """Kernels that are tried before they are taken, by all ranks or by none."""
        native = self.precision.te_backend == "native"
        taken, wrong = zip(*ranks.together(self._try_flash_attention), strict=True)
        self.flash_attention = all(taken)
        if said := next(filter(None, wrong), None):
            say(f"WARNING: FlashAttention 4 is not used: {said}")
        if native:
            flash_attention.tell_te(take=self.flash_attention)
        elif self.flash_attention:
            packed_attention.use_flash_attention_4()
        self.one_pass_rotation = native and not self.cfg.precision.fp8_attention
        if self.one_pass_rotation:
            heads = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
            otherwise = "queries, keys and values are not split and rotated in one pass"
            self.one_pass_rotation = _right(lambda: rotation.why_not(*heads), otherwise)
        self.residuals_in_norms = native and self.cfg.model.fused_residuals
        if self.residuals_in_norms:
            width = self.shape.hidden_size
            otherwise = "gradients of residual connections are added separately"
            self.residuals_in_norms = _right(lambda: fused_residual.why_not(width), otherwise)
        if native:
            fused_residual.use(self.residuals_in_norms)
        if native and "delayed" in self.precision.in_use:
            fused_swiglu.use(_right(fused_swiglu.why_not, "SwiGLU is not fused with its casts"))
            width = self.shape.hidden_size
            otherwise = "norms are not fused with their casts"
            gains = width not in fused_norm.TUNED_IN_TE
            fused_norm.use(gains and _right(lambda: fused_norm.why_not(width), otherwise))
        fp8_head = self.cfg.precision.fp8_lm_head and self.device.type == "cuda"
        if fp8_head and (said := _wrong_somewhere(loss_fp8.why_not)):
            raise RuntimeError(f"--fp8_lm_head: on this machine {said}; drop it")

    def _try_flash_attention(self) -> tuple[bool, str | None]:
        """Whether FlashAttention 4 can run attention, and what is wrong with one that is installed."""
        cfg, shape, backend = self.cfg, self.shape, self.precision.te_backend
        packed_attention.use_torch()
        if backend == "emulated" or (backend == "native" and flash_attention.chosen_by_user()):
            return False, None
        wanted = cfg.model.flash_attention and not cfg.precision.fp8_attention  # which is cuDNN's alone
        if not wanted or shape is None or cfg.precision.mixed_precision == "fp32":
            return False, None
        if reason := flash_attention.why_not(shape.head_dim):
            return False, reason if flash_attention.load_failed() else None
        sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim
        if backend == "native":
            how = {"packed": cfg.data.packing, "deterministic": cfg.optim.deterministic}
            wrong = flash_attention.wrong_in_te(*sizes, **how)
        else:
            packed_attention.use_flash_attention_4()
            wrong = flash_attention.wrong(packed_attention.attend_packed, *sizes)
            packed_attention.use_torch()
        return wrong is None, wrong

    def _plan_memory(self) -> None:
        """How weights and optimizer state are kept and spread, the same on every rank."""
        gpu = None
        if self.device.type == "cuda":
            gpu = min(ranks.gather(torch.cuda.get_device_properties(self.device).total_memory))
        self.mode = ranks.on_first(lambda: self._choose_mode(gpu))
        self.strategy = STRATEGIES[self.mode](self.device, self.cfg)
        if self.strategy.steps_on_cpu:
            say(f"the optimizer steps on the CPU: {ranks.use_cores()} threads a rank")
        ranks.together(lambda: fp8_stats.check(self.cfg, self.precision, compiles=self._compiles()))
        ranks.together(lambda: profiling.check(self.cfg.log.profile_steps, self.device))
        self.optimizer_plan = self._plan_optimizer(self.strategy.master_home)
        if self.strategy.steps_on_cpu:
            ranks.together(self._check_host_memory)
        if said := optim.moment_warning(self.optimizer_plan, self.cfg.optim.adam_beta2):
            say(said)

    def _check_host_memory(self) -> None:
        state, saves = self.optimizer_plan.state_bytes, self.cfg.checkpoint.save_checkpoints
        each = self.strategy.host_bytes(state, saves=saves)
        refuse_small_host(te_models.count_parameters(self.plan), self.mode, each)

    def _plan_optimizer(self, master_home: str) -> optim.OptimizerPlan:
        on_gpu = self.device.type == "cuda"
        return optim.plan_optimizer(self.cfg.precision, on_gpu=on_gpu, master_home=master_home)

    def _choose_mode(self, gpu: int | None) -> str:
        """`gpu`: bytes of the smallest GPU's memory."""
        cfg, mode = self.cfg, self.cfg.sharding.mode
        if not dist.is_initialized():
            if mode != "auto":
                say(f"--sharding_mode {mode}: one device, nothing to shard; torchrun train_multi_gpu.py does")
            return "single"
        if mode != "auto":
            return mode
        memory = None
        if gpu is not None:
            accumulating = cfg.optim.gradient_accumulation_steps > 1
            memory = Memory(
                te_models.count_parameters(self.plan),
                weights=4 if cfg.precision.mixed_precision == "fp32" else 2,
                state=self._plan_optimizer("device").state_bytes,
                accumulated=(4 if cfg.sharding.grad_reduce_dtype == "fp32" else 2) * accumulating,
                gpu=gpu,
            )
        _, local_size = ranks.local_rank_and_size()
        mode, why = choose_mode(memory, world_size=ranks.world_size(), local_size=local_size)
        say(f"--sharding_mode auto: {mode} ({why})")
        return mode

    def _open_folder(self) -> Path:
        folder, self.lock = open_run_folder(self.cfg, self.plan.short_name, self.precision.effective)
        return folder

    def _see_folder(self) -> None:
        """ValueError where a rank does not see rank 0's folder, but none or another of the same name."""

        def leave() -> str:
            name = f".seen.{uuid.uuid4().hex}"
            (self.folder / name).touch()
            return name

        mark = self.folder / ranks.on_first(leave)

        def look() -> None:
            deadline = time.monotonic() + FOLDER_SECONDS
            while not mark.exists():
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"--output_dir {self.folder}: on {platform.node()} it is not the first rank's; every "
                        "node must reach the same one, so choose a folder on a shared file system, by its "
                        "whole path"
                    )
                time.sleep(0.1)

        try:
            ranks.together(look)
        finally:
            if ranks.rank() == 0:
                mark.unlink()

    def _find_checkpoint(self) -> tuple[Path | None, dict]:
        """The checkpoint to go on from, and its meta; from here on the folder is this run's."""
        resume = resolve_resume(self.cfg.checkpoint.resume, self.checkpoints)
        meta = self.checkpoints.read_meta(resume) if resume else {}
        if resume:
            precision_map.check_resume(meta, self.precision)
            notice = check_resume(meta, self.cfg, self.precision.effective, resume, ranks.world_size())
            if notice:
                say(notice)
        if not (self.folder / "summary.json").exists():  # else it may be finished, and stay as it is
            write_config(self.cfg, self.folder)
        return resume, meta

    def _load_data(self) -> None:
        cfg = self.cfg
        self.tokenizer = self._load_tokenizer()
        config = self.plan.config.get_text_config()
        self.loaders = build_loaders(
            cfg.data,
            self.tokenizer,
            batch_size=cfg.optim.batch_size,
            eval_batch_size=cfg.optim.eval_batch_size or cfg.optim.batch_size,
            seed=cfg.optim.seed,
            pad_multiple=self.precision.token_multiple,
            vocab_size=config.vocab_size,
            max_positions=getattr(config, "max_position_embeddings", None),
            rank=ranks.rank(),
            world_size=ranks.world_size(),
            pin_memory=self.device.type == "cuda",
            trust_remote_code=cfg.model.trust_remote_code,
        )
        for line in self.loaders.report.lines():
            say(line)
        for line in self.loaders.eval_report.lines() if self.loaders.eval_report else ():
            say(f"evaluation: {line}")
        self.total_steps = count_steps(cfg, self._per_epoch())

    def _logged(self) -> None:
        self._count_wall_time(keep=False)
        if self.cfg.data.streaming:  # of which the ranks have compared the first window alone
            train = self.loaders.train
            ranks.agree("places in the stream", {"epoch": train.epoch, "row and sequence": train.position})

    def _agree_on_data(self) -> None:
        held = self.loaders.eval
        evaluation = None if held is None else [held.identity["samples"], held.micro_batches_per_epoch]
        ranks.agree("the data", self.loaders.train.identity | {"evaluation": evaluation})

    def _load_tokenizer(self) -> Any:
        cfg, plan = self.cfg, self.plan
        default = "demo" if plan.name in te_models.LOCAL_PRESETS else plan.name
        tokenizer = load_tokenizer(
            cfg.model.tokenizer_name or default,
            family=plan.family,
            trust_remote_code=cfg.model.trust_remote_code,
            cache_dir=cfg.model.weights_cache_dir,
        )
        if plan.weights is None:  # a model without weights of its own speaks this tokenizer's special tokens
            plan.config.bos_token_id = tokenizer.bos_token_id
            plan.config.eos_token_id = tokenizer.eos_token_id
            plan.config.pad_token_id = tokenizer.pad_token_id
        return tokenizer

    def _build_model(self) -> None:
        cfg = self.cfg
        multiple = self.precision.token_multiple
        plan, strategy = self.optimizer_plan, self.strategy
        compute = torch.float32 if cfg.precision.mixed_precision == "fp32" else torch.bfloat16
        dtypes = {"parameter_dtype": plan.parameter_dtype, "compute_dtype": compute}
        # FP8 weights are gathered as they are, if there is anything to gather.
        fp8_gather = cfg.sharding.fp8_all_gather and strategy.shards_weights
        fp8_weights = fp8_gather and not self.torchao  # torchao quantises just before it gathers
        if fp8_weights:
            plan = self.optimizer_plan = replace(plan, kind="te_fused_adam")
        self.fp8_stats = fp8_stats.Fp8Stats(cfg, self.precision, self.folder)
        self.model = te_models.build_model(
            self.plan,
            te_backend=self.precision.te_backend,
            dtype=plan.parameter_dtype,
            device=self.device,
            shard=(lambda model: strategy.shard(model, **dtypes)) if strategy.shards_weights else None,
            parameter_device=torch.device("cpu") if strategy.master_home == "cpu" else self.device,
            seed=cfg.optim.seed,
            packed=cfg.data.packing,
            max_positions=-(-cfg.data.max_seq_length // multiple) * multiple,
            gradient_checkpointing=cfg.model.gradient_checkpointing,
            reentrant=strategy.reentrant,
            compile_layers=self._compiles(),
            weight_recipe=self.precision.recipe if fp8_weights else None,
            compute_dtype=compute,
            convert=(lambda model: self._convert(model, fp8_gather)) if self.torchao else None,
            cache_fp8_weights=self._caches_fp8_weights(),
            fuse_gradient_sums=strategy.adds_in_gemms(plan.kind),
            one_pass_rotation=self.one_pass_rotation,
            residuals_in_norms=self.residuals_in_norms,
        )
        self.watchdog.starting("building the optimizer")  # a rank that still reads weights is behind
        precision_map.apply(self.model, self.precision, fp8_attention=cfg.precision.fp8_attention)
        self.model.fp8_lm_head = cfg.precision.fp8_lm_head
        self.fp8_stats.attach(self.model)
        strategy.settle(self.model)
        shards = self.model.quantize_weights() if fp8_weights else {}
        millions = sum(p.numel() for p in self.model.parameters()) / 1e6
        optimizer = optim.build_optimizer(self.model, cfg.optim, plan)
        if fp8_weights:
            optim.set_masters(optimizer, self.model, shards)
        elif fp8_gather:
            torchao_fp8.refresh_scales_after_steps(self.model, optimizer)
        # The bare model is what is saved and exported; the loop calls the wrapped one.
        self.wrapped, self.optimizer = strategy.wrap(self.model, optimizer)
        ranks.be_patient()
        self.autocast = precision.build_autocast(
            self.precision, device=self.device, parameter_dtype=strategy.compute_dtype(**dtypes)
        )
        layers = {"native": "Transformer Engine", "emulated": "emulated Transformer Engine"}.get(
            self.precision.te_backend, "Hugging Face"
        )
        where = str(self.device)
        if strategy.world_size > 1:
            nodes = f" on {strategy.num_nodes} nodes" if strategy.num_nodes > 1 else ""
            where = f"{strategy.world_size} x {self.device.type}{nodes}, {strategy.mode}"
            torch.manual_seed(cfg.optim.seed + strategy.rank)  # dropout, if any, differs between ranks
        say(f"{self.plan.name}: {millions:,.1f} M parameters, {layers} layers, on {where}")
        say(f"precision {self.precision.describe()}; {plan.describe()}")

    def _caches_fp8_weights(self) -> bool:
        """Whether a step's first micro-batch casts weights for all; recomputation casts them anyway."""
        wanted = self.cfg.precision.fp8_weight_cache and not self.cfg.model.gradient_checkpointing
        wanted = wanted and not self.cfg.sharding.fp8_all_gather  # whose weights are in FP8 as they are
        return wanted and self.precision.fp8 and self.strategy.accumulates and self.strategy.whole_in_a_step

    def _convert(self, model: te_models.HFCausalLM, fp8_gather: bool) -> None:
        """Give a Hugging Face model's linear layers the FP8 recipes that the settings ask for."""
        names = torchao_fp8.linear_names(model)
        recipes = precision_map.assign(self.cfg, names, len(model.blocks))
        torchao_fp8.convert(
            model,
            recipes.get,
            emulated=self.precision.emulated,
            all_gather=fp8_gather,
            fp32_scales=self.cfg.precision.fp8_fp32_scales,
        )

    def _compiles(self) -> bool:
        """Hugging Face layers are compiled on a GPU, where it pays, unless the user says otherwise.

        Under DeepSpeed, whose hooks on every module would cut each layer's graph in pieces, only if asked.
        """
        if self.cfg.model.use_te or self.cfg.model.compile is not None:
            return bool(self.cfg.model.compile)
        return self.device.type == "cuda" and self.strategy.master_home != "zero"

    def _is_finished(self) -> bool:
        """Whether the checkpoint is the end of a run that was summed up; nothing need be built to tell."""
        if not self.resume:
            return False
        self.loaders.train.load_state_dict(self.meta["loader"])  # how much data is left
        done = self.meta["progress"]["step"]
        self.total_steps = self._steps_of_a_resumed_run(done)
        if self.total_steps != (saved := self.meta["total_steps"]):
            say(f"the learning rate follows {self.total_steps:,} steps from here on, until now {saved:,}")
        return done >= self.total_steps and ranks.on_first((self.folder / "summary.json").exists)

    def run(self) -> int:
        if self.finished:
            self._unlock()
            say("this run is finished; raise --max_steps or --num_epochs to go on")
            say(f"run folder: {self.folder}")
            return 0
        # Everything is restored before the tracker opens: it cuts the log at the step that goes on.
        progress, self.scaling = Progress(), {}
        if self.resume:
            self.watchdog.starting("restoring the checkpoint")
            progress, self.scaling = restore_run(
                self.checkpoints,
                self.resume,
                self.meta,
                self.cfg,
                model=self.model,
                optimizer=self.optimizer,
                strategy=self.strategy,
                loader=self.loaders.train,
            )
            say(f"resumed from {self.resume} at step {progress.step}")
        resume_step = progress.step if self.resume else None
        if not follows_a_finished_run(self.folder, resume_step):
            take_wall_time(self.folder, progress)
        count, total = self.cfg.log.profile_steps, self.total_steps
        profiled = ranks.together(lambda: profiling.profiled_steps(count, done=progress.step, total=total))[0]
        self.profiler = profiling.StepProfiler(self.folder, profiled)
        self.environment = describe_environment() | self.precision.as_dict()
        self.environment |= {
            "optimizer": self.optimizer_plan.describe(),
            "sharding_mode": self.strategy.mode,
            "world_size": self.strategy.world_size,
            "nodes": self.strategy.num_nodes,
            "hosts": sorted(set(ranks.gather(platform.node()))),
            "data": {
                "train": self.loaders.report.as_dict(),
                "eval": self.loaders.eval_report.as_dict() if self.loaders.eval_report else None,
            },
        }
        self._write_environment()
        self.watchdog.starting("opening the logs")
        self.tracker = build_tracker(
            self.cfg.log,
            self.folder,
            config=self.cfg.to_dict() | self.precision.as_dict(),
            tags=self._tags(),
            resume_step=resume_step,
            enabled=self.strategy.rank == 0,
        )
        self.counted, self.kept = self.started, -math.inf
        self.display = Display(self.total_steps, progress.step, enabled=self.strategy.rank == 0)
        self.trainer = self._build_trainer(progress)
        self.signals.enter_context(caught())
        try:
            finished = self.trainer.fit()
            self.display.close()
            if finished and self.total_steps and self.cfg.checkpoint.export:
                self._export()
            if finished:
                self.tracker.summary(self._summary())
            code = 0 if finished else EXIT_INTERRUPTED
        finally:
            self.display.close()
            self.fp8_stats.close()
            self.profiler.close()
            gc.unfreeze()  # a process that makes another run must be able to let go of this one
        self.watchdog.rest()  # uploads have a limit of their own
        self.tracker.finish(code)
        self._unlock()
        if code == EXIT_INTERRUPTED and not self.cfg.checkpoint.save_checkpoints:
            code = EXIT_FAILED
            say("nothing was saved (--no_save_checkpoints): the same command would do these steps again")
        elif code == EXIT_INTERRUPTED:
            say(f"to go on: the same command with --output_dir {self.folder}")
        say(f"run folder: {self.folder}")
        return code

    def give_up(self) -> None:
        """Close what `run` has left open because of an error, within seconds."""
        self.tracker.give_up(EXIT_FAILED)
        self._unlock()

    def _steps_of_a_resumed_run(self, done: int) -> int:
        """As the settings say, unless the global batch changes now, or did at an earlier resume."""
        old, saved = self.meta["config"], self.meta["total_steps"]
        if global_batch(old, self.meta["world_size"]) == self._global_batch():
            then = replace(self.cfg.optim, max_steps=old["max_steps"], num_epochs=old["num_epochs"])
            if saved == count_steps(replace(self.cfg, optim=then), self._per_epoch()):
                return self.total_steps
            if then == self.cfg.optim:
                return saved
        return steps_left(self.cfg, self.loaders.train, done)

    def _per_epoch(self) -> int | None:
        return self.loaders.train.micro_batches_per_epoch

    def _unlock(self) -> None:
        if self.strategy.rank == 0:
            self.lock.release()

    def _write_environment(self) -> None:
        if self.strategy.rank == 0:
            write_json(self.folder / "env.json", self.environment)

    def _global_batch(self) -> int:
        return global_batch(self.cfg.to_dict(), self.strategy.world_size)

    def _tags(self) -> list[str]:
        layers = "te" if self.cfg.model.use_te else "hf"
        mode = [self.strategy.mode] if self.strategy.world_size > 1 else []
        emulated = ["emulated"] if self.precision.emulated else []
        return [self.plan.short_name, self.precision.effective, layers, *emulated, *mode]

    def _build_trainer(self, progress: Progress) -> Trainer:
        return Trainer(
            self.cfg,
            model=self.wrapped,
            optimizer=self.optimizer,
            strategy=self.strategy,
            autocast=self.autocast,
            learning_rate=lambda step: optim.learning_rate(step, self.cfg.optim, self.total_steps),
            total_steps=self.total_steps,
            loaders=self.loaders,
            tracker=self.tracker,
            display=self.display,
            meter=Meter(self.shape, self.strategy.world_size, self._peaks(), self.precision.emulated),
            hooks=Hooks(
                prepare=self._prepare,
                before_step=self._before_step,
                after_step=self._after_step,
                after_first_step=self._after_first_step,
                on_skipped=lambda: scaling_state.scrub_scaling(self.model),
                logged=self._logged,
                evaluating=lambda: scaling_state.frozen_scaling(self.model),
                save=self._save,
                beat=self.watchdog.beat,
            ),
            progress=progress,
        )

    def _peaks(self) -> dict[str, float | None]:
        name = self.environment.get("gpu_name")
        peaks = {p: metrics.peak_tflops(name, p) if name else None for p in ("bf16", "fp8")}
        if name and not peaks["bf16"]:
            say(f"no peak rate is known for {name}: MFU is left out")
        return peaks

    def _prepare(self, batch: Any) -> None:
        """Give delayed scaling its first scales; why the loss is a sum: `scaling_state.scale_gradients`.

        On a resume these passes make TE allocate its state, which the checkpoint's then overwrites.
        """
        if "delayed" not in self.precision.in_use:
            return
        devices = [self.device] if self.device.type == "cuda" else []
        # Attention kernels draw from the generator even without dropout; the run must not notice.
        with torch.random.fork_rng(devices):
            for _ in range(CALIBRATION_PASSES):
                with torch.enable_grad(), self.strategy.accumulating(self.wrapped, first=True, last=True):
                    with self.autocast():
                        loss, _ = self.wrapped(**batch.inputs)
                    self.strategy.backward(self.wrapped, loss)
                self.strategy.discard(self.wrapped, self.optimizer)
        # Ranks share their scales, so they must share the factor; each rank's loss is divided by the mean.
        tokens = self.strategy.sum(torch.tensor(float(batch.label_tokens), device=self.device)).item()
        step_tokens = tokens / self.strategy.world_size * self.cfg.optim.gradient_accumulation_steps
        scaling_state.scale_gradients(self.model, 1 / max(1, step_tokens))
        scaling_state.restore_scaling(self.model, self.scaling)

    def _before_step(self, step: int) -> None:
        self.fp8_stats.before_step(step)
        steps = self.profiler.steps
        if step in steps:
            self.trainer.meter.disturbed = True
            if step == steps[0] and self.strategy.rank == 0:
                self.profiler.start()

    def _after_step(self, step: int) -> None:
        if found := self.fp8_stats.after_step(step, self.strategy):
            self.tracker.log(step, found)
        if step in self.profiler.steps[-1:]:
            self.display.message("\n".join(ranks.on_first(self.profiler.finish)))
            self.trainer.restart_clock()

    def _after_first_step(self) -> None:
        found = coverage(self.model, self.precision)
        backend = te_runtime.attention_backend() if self.cfg.model.use_te else self.model.attention
        self.environment |= {
            "coverage": found.as_dict(),
            "attention_backend": backend,
            "flash_attention": self._flash_attention_version(),
            "seconds_to_first_step": round(time.perf_counter() - self.started, 2),
        }
        self._write_environment()
        self.display.message("\n".join(found.lines()))
        head = any(row.precision.startswith("fp8") for row in found.rows if "lm_head" in row.modules)
        if self.precision.fp8 and found.fp8_modules == head:
            raise RuntimeError(
                "--mixed_precision fp8: no module ran in FP8 in the first step; report it with env.json"
            )
        if backend == "unfused":
            self.display.message(
                te_runtime.unfused_warning(
                    deterministic=self.cfg.optim.deterministic, flash_attention=self.flash_attention
                )
            )
        tune_garbage_collection()

    def _flash_attention_version(self) -> str | None:
        """That of the FlashAttention which ran, or None."""
        if self.precision.te_backend == "native":
            return te_runtime.flash_attention_version()
        packed = self.flash_attention and self.model.own_attention is None
        return flash_attention.installed() if packed else None

    def _save(self, step: int, eval_loss: float | None) -> None:
        if not self.cfg.checkpoint.save_checkpoints:
            return
        self._count_wall_time()
        save_run(
            self.checkpoints,
            self.cfg,
            self.precision,
            model=self.model,
            optimizer=self.optimizer,
            strategy=self.strategy,
            loader=self.loaders.train,
            progress=self.trainer.progress,
            total_steps=self.total_steps,
            eval_loss=eval_loss,
            # Without a step or an evaluation since the resume TE has no state yet.
            scaling=scaling_state.scaling_state(self.model) or self.scaling,
        )

    def _count_wall_time(self, *, keep: bool = True) -> None:
        """Up to now; GPUs and nodes may be others after a resume, so their hours add up here too.

        The run folder keeps it for the next start: at once if told to `keep` it, else every KEEP_SECONDS.
        """
        progress, now = self.trainer.progress, time.perf_counter()
        seconds, self.counted = now - self.counted, now
        progress.wall_seconds += seconds
        progress.gpu_seconds += seconds * self._gpus()
        progress.node_seconds += seconds * self.strategy.num_nodes
        if self.strategy.rank == 0 and (keep or now - self.kept > KEEP_SECONDS):
            self.kept = now
            keep_wall_time(self.folder, progress)

    def _gpus(self) -> int:
        return self.strategy.world_size if self.device.type == "cuda" else 0

    def _export(self) -> None:
        self.watchdog.beat("exporting")
        self.strategy.settle(self.model)
        tensors = te_models.export_tensors(self.model, self._gather)
        say(f"exported to {ranks.on_first_of(tensors, self._write_export)}")

    def answer_prompts(self) -> None:
        """Answer --generate_samples evaluation prompts with the exported model; on one rank."""
        prompts = self.loaders.eval_prompts[: self.cfg.checkpoint.generate_samples]
        if prompts and (self.folder / "export").exists():
            trusted = {"trust_remote_code": self.plan.trust_remote_code}
            text = answer(self.folder / "export", prompts, self.device, **trusted)
            (self.folder / "samples.txt").write_text(text, encoding="utf-8")
            say(f"\nsamples from the exported model:\n\n{text}")

    def _gather(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Whole weights for the export: from FP32 masters where the weights are in FP8."""
        self.watchdog.beat("exporting")
        masters = [optim.master_of(self.optimizer, parameter) for parameter in parameters]
        exact = [p if m is None else m for p, m in zip(parameters, masters, strict=True)]
        return self.strategy.gather(exact)

    def _write_export(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Path:
        folder = export_hf(
            self.folder / "export",
            tensors,
            config=self.plan.config,
            tokenizer=self.tokenizer,
            generation_config=generation_config(
                self.plan,
                self.tokenizer,
                turn_end=turn_end(self.tokenizer),
                own_tokenizer=self.cfg.model.tokenizer_name is None,
            ),
            trust_remote_code=self.plan.trust_remote_code,
            code_folder=self.plan.weights,
        )
        if not reads_back(folder, self.tokenizer, trust_remote_code=self.plan.trust_remote_code):
            say(
                f"WARNING: transformers reads the tokenizer in {folder} as another than the model was "
                f"trained with; load {self.tokenizer.name_or_path} instead"
            )
        return folder

    def _summary(self) -> dict[str, Any]:
        """The values of summary.json: counts and losses over all starts of the run, rates of the last one."""
        self._count_wall_time()
        progress, losses = self.trainer.progress, ranks.on_first(lambda: train_losses(self.folder))
        tail = losses[-max(1, len(losses) // 10) :]
        gpus = self._gpus()
        peak = torch.tensor(torch.cuda.max_memory_allocated(self.device) / 1e9 if gpus else 0.0)
        return {
            "model_name": self.cfg.model.model_name,
            "mixed_precision": self.cfg.precision.mixed_precision,
            "use_te": self.cfg.model.use_te,
            **self.precision.as_dict(),
            "steps": progress.step,
            "skipped_steps": progress.skipped_steps,
            "tokens": progress.real_tokens,
            "label_tokens": progress.label_tokens,
            "train_loss": losses[-1] if losses else None,
            "train_loss_tail_mean": sum(tail) / len(tail) if losses else None,
            **self.trainer.results(),
            "best_eval_loss": progress.best_eval_loss,
            "runtime_seconds": progress.wall_seconds,
            "train_seconds": progress.train_seconds,
            "peak_memory_gb": self.strategy.max(peak).item() if gpus else None,
            "num_layers": getattr(self.plan.config.get_text_config(), "num_hidden_layers", None),
            "gpu_name": self.environment.get("gpu_name"),
            "gpus": gpus,
            "world_size": self.strategy.world_size,
            "sharding_mode": self.strategy.mode,
            "nodes": self.strategy.num_nodes,
            "gpu_hours": progress.gpu_seconds / 3600,
            "node_hours": progress.node_seconds / 3600,
            "seconds_to_first_step": self.environment.get("seconds_to_first_step"),
        }


def _wrong_somewhere(why_not: Callable[[], str | None]) -> str | None:
    """What the first rank to find something wrong with kernels says of them; None if all may take them."""
    return next(filter(None, ranks.together(why_not)), None)


def _right(why_not: Callable[[], str | None], otherwise: str) -> bool:
    """Whether all ranks may take the kernels; if not, it is said what is done `otherwise`, and why."""
    if said := _wrong_somewhere(why_not):
        say(f"WARNING: {otherwise}: {said}")
    return said is None


def set_determinism(deterministic: bool, seed: int) -> None:
    """Seed every generator; before the first CUDA call, since TE and cuBLAS read their switches once."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, hides nothing here


def tune_garbage_collection() -> None:
    """Python's full collections stall launches for tens of milliseconds: freeze what outlives every step."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


def gemm_sizes(shape: metrics.ModelShape) -> dict[str, int]:
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "query width": shape.num_heads * shape.head_dim,
        "key/value width": shape.num_kv_heads * shape.head_dim,
    }


def count_steps(cfg: Config, micro_batches: int | None) -> int:
    if cfg.optim.max_steps is not None:
        return cfg.optim.max_steps
    assert micro_batches is not None  # Config refuses streaming without --max_steps
    return cfg.optim.num_epochs * -(-micro_batches // cfg.optim.gradient_accumulation_steps)


def steps_left(cfg: Config, loader: Any, done: int) -> int:
    """All steps of a run that goes on after `done` with another global batch: the data's rest decides."""
    per_epoch = loader.micro_batches_per_epoch
    if cfg.optim.max_steps is not None or per_epoch is None:
        return count_steps(cfg, per_epoch)
    accumulation = cfg.optim.gradient_accumulation_steps
    epochs_after = max(0, cfg.optim.num_epochs - loader.epoch - 1)
    here = loader.micro_batches_left() if loader.epoch < cfg.optim.num_epochs else 0
    return done + -(-here // accumulation) + epochs_after * -(-per_epoch // accumulation)


def software() -> dict[str, str | None]:
    """What all ranks of a job must share: versions, and the code of this suite."""
    shared = ("torch", "triton", "transformers", "transformer_engine", "torchao", "deepspeed", "datasets")
    versions = {name: version(name) for name in (*shared, "flash-attn-4", "numpy")}
    return versions | {"the suite's code": code_digest()}
