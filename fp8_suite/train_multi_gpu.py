"""Train a causal language model in FP8 or BF16 on many devices and nodes; start it with torchrun.

The settings are those of train_fp8.py; --sharding_mode chooses how the model is sharded.
"""

import os
import time

STARTED = time.perf_counter()


def join_torchrun(cfg):
    from fp8_suite.training.parallel import ranks

    if ranks.under_torchrun():
        return ranks.join(cfg.sharding.timeout_minutes)
    ranks.refuse_several(
        f"the launcher has not set all of {', '.join(ranks.TORCHRUN)}",
        "torchrun, or docs/slurm.sbatch under Slurm",
    )
    print("not started by torchrun: running on one device", flush=True)
    return ranks.one_device()


def main():
    from fp8_suite.core.packages import start_command

    start_command()
    from fp8_suite.core.signals import stop_with_parent

    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
        stop_with_parent()
    from fp8_suite.training.launch import launch

    launch(__doc__, start=join_torchrun, started=STARTED)


if __name__ == "__main__":
    main()
