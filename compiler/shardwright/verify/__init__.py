"""Compare a layout with one process on a tiny copy of the model (`shardwright verify`)."""
