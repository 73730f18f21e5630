"""Context ranks: each holds a piece of every row. In attention they trade their tokens' heads for
their heads' tokens (arXiv 2309.14509); everything else of a model works on each token alone.

`CONTEXT` (ranks.py) is the switch. Shapes: B micro-batch, S a whole row, s context ranks, H and K
the heads of queries and of keys that this rank would hold without them, D their size.
"""
