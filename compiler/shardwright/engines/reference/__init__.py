"""One process of plain PyTorch and transformers, without DeepSpeed: what every layout is compared
with, and of use on a laptop."""
