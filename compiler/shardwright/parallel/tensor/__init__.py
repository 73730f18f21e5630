"""Tensor parallelism: the plan's map, applied to the Hugging Face model. One mechanism for both
engines.

`split.split_module` slices a module's parameters as the map says and makes the module communicate
by its style. Every tensor that enters or leaves a parallel region does so in `regions`.
"""
