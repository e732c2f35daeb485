"""Exported models: written, quantized, evaluated."""

from fp8_suite.training.precision.torchao_fp8 import silence_import

silence_import()  # transformers imports torchao wherever it is installed
