"""Checkpoints by parameter name: written, read, pruned, copied and exported, whatever layout wrote
them."""
