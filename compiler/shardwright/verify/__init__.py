"""`shardwright verify R`: does the layout compute what one process computes? Tried on a tiny copy,
on this machine."""
