"""Megatron-Core as an engine, on CPU ranks."""
