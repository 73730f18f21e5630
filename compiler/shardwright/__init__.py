"""Shardwright: a configuration compiler for DeepSpeed."""

__version__ = "0.1.0"
