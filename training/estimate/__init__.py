"""Predicted memory and time of training, and the choices that follow from them.

Only `choose` imports torch, so that `benchmarks.plan` shows its help and refuses wrong flags at once.
"""
