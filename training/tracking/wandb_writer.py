"""W&B runs that continue across restarts and never block training."""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fp8_suite.core.files import replace_file
from fp8_suite.core.redact import redacted
from fp8_suite.training.tracking.settings import LogConfig

# Timeouts. `wandb.init` retries for hours if the server fails after its first response. Files that are not
# uploaded at the end of a run stay on disk for `wandb sync`.
SERVER_SECONDS = 10.0
INIT_SECONDS = 120.0
UPLOAD_SECONDS = 300.0


class WandbWriter:
    """A W&B run. A resumed run continues it by its id in the run folder (wandb_id.txt)."""

    def __init__(
        self, cfg: LogConfig, run_folder: Path, config: dict[str, Any], tags: list[str], *, new: bool
    ) -> None:
        run_id, resumed = wandb_id(run_folder, new=new)
        self._run = start_wandb(
            cfg,
            run_folder,
            name=cfg.wandb_run_name or run_folder.resolve().name,
            id=run_id,
            resume="allow" if resumed else None,
            config=redacted(config),
        )
        # An argument of wandb.init would replace WANDB_TAGS.
        self._run.tags = (*(self._run.tags or ()), *tags)
        # Steps repeat after a resume, but W&B drops values for an earlier step of its own counter.
        self._run.define_metric("train/step")
        self._run.define_metric("*", step_metric="train/step")

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        self._run.log({"train/step": step, **metrics})

    def summary(self, values: dict[str, Any]) -> None:
        self._run.summary.update(values)

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


def wandb_id(folder: Path, *, new: bool = False, name: str = "wandb_id.txt") -> tuple[str, bool]:
    """Return (id of the folder's W&B run, True if it existed before). With `new`, create a new id."""
    file = folder / name
    if file.exists() and not new:
        return file.read_text().strip(), True
    run_id = secrets.token_hex(4)
    replace_file(file, f"{run_id}\n".encode())
    return run_id, False


def start_wandb(cfg: LogConfig, folder: Path, **options: Any) -> Any:
    """Start a W&B run in `folder`, with `options` of `wandb.init`. May raise any error.

    Mode, group and tags are those of WANDB_MODE, WANDB_RUN_GROUP and WANDB_TAGS.
    If the server does not respond, the run is offline, with a warning. Terminal output and command line are
    not uploaded, because they may contain tokens.
    """
    import requests  # wandb's own HTTP library, so proxies and certificates are the same
    import wandb

    settings = wandb.setup().settings
    if settings.mode == "online":
        try:  # query the API: the front page may be up while the API is down
            query = {"query": "{__typename}"}
            reply = requests.post(f"{settings.base_url}/graphql", json=query, timeout=SERVER_SECONDS)
            problem = f"fails (HTTP {reply.status_code})" if reply.status_code >= 500 else None
        except requests.RequestException as error:
            problem = f"does not respond ({type(error).__name__})"
        if problem:
            options["mode"] = "offline"
            where = f"logging offline to {folder / 'wandb'}, `wandb sync` uploads it"
            print(f"WARNING: W&B: {settings.base_url} {problem}; {where}", file=sys.stderr, flush=True)
    limits = {"finish_timeout": UPLOAD_SECONDS, "finish_timeout_raises": True}
    options |= {"project": cfg.wandb_project, "dir": str(folder)}
    options["settings"] = wandb.Settings(console="off", x_disable_meta=True, **limits)
    return call_with_timeout(INIT_SECONDS, lambda: wandb.init(**options))


def call_with_timeout(seconds: float, function: Callable[[], Any]) -> Any:
    """Call a function in a daemon thread. TimeoutError after `seconds`; the thread keeps running."""
    outcome: Future[Any] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return outcome.result(seconds)
