"""Save, read, prune, copy and export checkpoints by parameter name, whatever layout wrote them."""
