"""Attention masks that keep packed documents apart in models whose code hands its masks no
positions.

transformers' mask functions separate documents by the positions that they are given. gpt_oss and
opt give them none, bloom a mask of ones, which is read as "nothing is packed". The functions make
the right mask, of each layer type, once they have the positions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import masking_utils

_MAKERS = {
    name: maker
    for name, maker in vars(masking_utils).items()
    if name.startswith("create_") and "position_ids" in inspect.signature(maker).parameters
}
_modules: WeakKeyDictionary[nn.Module, list[tuple[ModuleType, str]]] = WeakKeyDictionary()


@contextmanager
def packed_document_masks(model: nn.Module, positions: torch.Tensor | None) -> Iterator[None]:
    """Give the masks that `model` makes inside the positions (B, S) of packed documents; None
    changes nothing."""
    with ExitStack() as stack:
        if positions is not None:
            for module, name in _makers_of(model):
                maker = partial(_make, getattr(module, name), positions)
                stack.enter_context(patch.object(module, name, maker))
        yield


def _makers_of(model: nn.Module) -> list[tuple[ModuleType, str]]:
    """(module of Python code, name) of each mask function that the code of the model's classes
    imports."""
    if model not in _modules:
        names = dict.fromkeys(type(each).__module__ for each in model.modules())
        modules = [sys.modules[name] for name in names if name in sys.modules]
        _modules[model] = [
            (module, name) for module in modules for name in _MAKERS if hasattr(module, name)
        ]
    return _modules[model]


def _make(maker: Callable[..., Any], positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A mask of ones that the model made itself goes: no token of a packed sequence is padding."""
    given = inspect.signature(maker).bind(*args, **kwargs)
    if given.arguments.get("position_ids") is None:
        given.arguments["position_ids"] = positions
    if getattr(given.arguments.get("attention_mask"), "ndim", 0) == 2:
        given.arguments["attention_mask"] = None
    return maker(*given.args, **given.kwargs)
