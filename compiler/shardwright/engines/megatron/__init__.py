"""Megatron-Core: tensor, pipeline and data ranks by NVIDIA's own modules and schedules."""
