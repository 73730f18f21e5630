import contextlib
from collections.abc import Iterator
from typing import Any

recipes: list[Any] = []
"""The recipes of the contexts that are open, the innermost last: linears compute in them."""


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return bool(recipes)


@contextlib.contextmanager
def fp8_autocast(*, enabled: bool, fp8_recipe: Any, fp8_group: object) -> Iterator[None]:
    assert enabled
    recipes.append(fp8_recipe)
    yield
    recipes.pop()


fp8_model_init = fp8_autocast
