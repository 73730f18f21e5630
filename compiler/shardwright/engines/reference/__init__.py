"""Run a plan in one process of plain PyTorch and transformers: the baseline of every comparison."""
