"""Rules over an arguments file of Megatron-LM's pretrain_gpt.py."""
