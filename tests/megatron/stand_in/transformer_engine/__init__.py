"""Stands in for Transformer Engine, in plain torch on one rank: what Megatron-Core's own layers of
it call, so that which layers are built, what their parameters are called and what they compute can
be seen without a GPU. Its parameters have the names of Transformer Engine's
(transformer_engine/pytorch/module, v2.9). It says nothing of its kernels."""

from . import common, pytorch

__version__ = "2.9.0"
__all__ = ["common", "pytorch"]
