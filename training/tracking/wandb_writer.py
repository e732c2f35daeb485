"""W&B runs that survive restarts and never hold a training run up."""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tqdm import tqdm

from core.files import replace_file
from core.redact import redacted
from training.tracking.settings import LogConfig

SERVER_SECONDS = 10.0  # for the server's first response
INIT_SECONDS = 120.0  # for `wandb.init`, which retries for hours if the server fails after its first response
UPLOAD_SECONDS = 300.0  # for uploads at the end of a run; the rest stays on disk for `wandb sync`


class WandbWriter:
    """A W&B run. Its id is kept in the run folder (wandb_id.txt), so a resumed run continues it."""

    def __init__(
        self, cfg: LogConfig, run_folder: Path, config: dict[str, Any], tags: list[str], *, new: bool
    ) -> None:
        run_id, resumed = wandb_id(run_folder, new=new)
        own_tags = [tag.strip() for tag in (cfg.wandb_tags or "").split(",") if tag.strip()]
        self._run = start_wandb(
            cfg,
            run_folder,
            name=cfg.wandb_run_name or run_folder.resolve().name,
            id=run_id,
            resume="allow" if resumed else None,
            tags=[*own_tags, *tags],
            config=redacted(config),
        )
        # Steps repeat after a resume, and W&B drops values logged again at its own step.
        self._run.define_metric("train/step")
        self._run.define_metric("*", step_metric="train/step")

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        self._run.log({"train/step": step, **metrics})

    def summary(self, values: dict[str, Any]) -> None:
        self._run.summary.update(values)

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


def wandb_id(folder: Path, *, new: bool = False, name: str = "wandb_id.txt") -> tuple[str, bool]:
    """Return the id of the W&B run that belongs to `folder`, and True if it had one; `new` replaces it."""
    file = folder / name
    if file.exists() and not new:
        return file.read_text().strip(), True
    run_id = secrets.token_hex(4)
    replace_file(file, f"{run_id}\n".encode())
    return run_id, False


def start_wandb(cfg: LogConfig, folder: Path, **options: Any) -> Any:
    """Start a W&B run that writes into `folder`; `options` are those of `wandb.init`. Raises any error.

    It is offline, with a warning, if no server answers. The terminal's output and the command line, which may
    contain tokens, are not uploaded.
    """
    import requests  # wandb's own HTTP library, so proxies and certificates are the same
    import wandb

    settings, mode = wandb.setup().settings, cfg.wandb_mode
    if (mode or settings.mode) == "online":
        try:  # the API, since a front page may be up while the API is not
            query = {"query": "{__typename}"}
            reply = requests.post(f"{settings.base_url}/graphql", json=query, timeout=SERVER_SECONDS)
            problem = f"is out of order (HTTP {reply.status_code})" if reply.status_code >= 500 else None
        except requests.RequestException as error:
            problem = f"does not answer ({type(error).__name__})"
        if problem:
            mode, where = "offline", f"logging offline to {folder / 'wandb'}, `wandb sync` uploads it"
            tqdm.write(f"WARNING: W&B: {settings.base_url} {problem}; {where}", file=sys.stderr)
    limits = {"finish_timeout": UPLOAD_SECONDS, "finish_timeout_raises": True}
    options |= {"project": cfg.wandb_project, "group": cfg.wandb_group, "mode": mode, "dir": str(folder)}
    options["settings"] = wandb.Settings(console="off", x_disable_meta=True, **limits)
    return call_with_timeout(INIT_SECONDS, lambda: wandb.init(**options))


def call_with_timeout(seconds: float, function: Callable[[], Any]) -> Any:
    """Call a function in a daemon thread; TimeoutError after `seconds`, leaving the thread behind."""
    outcome: Future[Any] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return outcome.result(seconds)
