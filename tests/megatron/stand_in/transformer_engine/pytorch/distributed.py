import contextlib
from typing import Any


class CudaRNGStatesTracker:
    pass


def activation_recompute_forward(*args: Any, **kwargs: Any) -> Any:
    return contextlib.nullcontext()


def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args)
