"""Train a causal language model in FP8 or BF16 on one device. `--help` lists every setting."""

import sys
import time

STARTED = time.perf_counter()


def single_device():
    import torch

    from training.sharding import SingleDevice

    return SingleDevice(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):  # answers before torch is imported
        from training.config import parse_config

        parse_config(["--help"], prog="train_fp8.py", description=__doc__)
    from training.run import main

    sys.exit(main(sys.argv[1:], description=__doc__, strategy=single_device, started=STARTED))
