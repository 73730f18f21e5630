"""Compares a profiled step (a torch profiler trace, a CUDA memory snapshot) with a plan, line by
line, and corrects the cost model with it."""
