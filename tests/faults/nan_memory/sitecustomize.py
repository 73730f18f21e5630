"""Fills memory that was never written with NaN, in every rank whose PYTHONPATH begins with this
folder: a rank that reads such memory trains NaN, instead of whatever stood there."""

import os

if "RANK" in os.environ:
    import torch

    # It turns torch.utils.deterministic.fill_uninitialized_memory on.
    torch.use_deterministic_algorithms(True, warn_only=True)
