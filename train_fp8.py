"""Train a causal language model in FP8 or BF16 on one device. `--help` lists every setting."""

from fp8_suite.train_fp8 import main

if __name__ == "__main__":
    main()
