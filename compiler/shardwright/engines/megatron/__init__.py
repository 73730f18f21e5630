"""Megatron-LM: its runs are estimated, not started."""
