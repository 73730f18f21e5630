"""Experts shared out over ranks.

`dispatch`: a token's way to the ranks that hold its experts, and back. `spread`: a model's experts
cut to this rank's. `balance`: the loss that keeps its routers from preferring a few.
"""
