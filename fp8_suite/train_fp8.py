"""Train a causal language model in FP8 or BF16 on one device. `--help` lists every setting."""

import time

STARTED = time.perf_counter()


def one_device(cfg):
    from fp8_suite.training.parallel import ranks

    ranks.refuse_several(
        "train_fp8.py trains on one device", "torchrun --nproc_per_node=N train_multi_gpu.py"
    )
    return ranks.one_device()


def main():
    from fp8_suite.core.packages import start_command

    start_command()
    from fp8_suite.training.launch import launch

    launch(__doc__, start=one_device, started=STARTED)


if __name__ == "__main__":
    main()
