"""Faster implementations of plain PyTorch ops for training on a CPU; all of them are optional."""
