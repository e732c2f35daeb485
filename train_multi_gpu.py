"""Train a causal language model in FP8 or BF16 on many devices and nodes; start it with torchrun."""

from fp8_suite.train_multi_gpu import main

if __name__ == "__main__":
    main()
