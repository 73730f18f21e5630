"""Run what the ranks of one launch of many engines do together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from deepspeed import comm as dist
from torch import distributed

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.diagnostics.diagnostic import Diagnostic
from shardwright.parallel.context_parallel import CONTEXT_PARALLEL
from shardwright.plan.plan import Plan, load_plan
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import Recipe

T = TypeVar("T")


def share_groups() -> None:
    """One process group per set of ranks: every engine makes its own, and their threads poll."""
    made: dict[tuple[int, ...], Any] = {}
    new_group = dist.new_group

    def shared(ranks: Any) -> Any:
        key = tuple(ranks)
        if key not in made:
            made[key] = new_group(list(key))
        return made[key]

    dist.new_group = shared


def from_rank_0(make: Callable[[], T]) -> T:
    """Collective: rank 0 makes it without the engine's context ranks, and every rank gets it."""
    made: list[T | None] = [None]
    if dist.get_rank() == 0:
        with CONTEXT_PARALLEL.aside():  # the case before may have switched it on
            made[0] = make()
    distributed.broadcast_object_list(made, src=0)
    return made[0]  # type: ignore[return-value]


def compile_folder(
    folder: Path, change: Callable[[Recipe], Recipe] = lambda recipe: recipe
) -> Plan:
    """Collective: rank 0 compiles folder/recipe.yaml into the folder, and every rank reads the plan
    there, as in a run. change: what is compiled instead of the recipe. Raises the compile's Refusal
    on every rank."""

    def refused() -> tuple[Diagnostic, ...]:
        try:
            files = compile_recipe(change(load_recipe(folder / "recipe.yaml"))).files
        except Refusal as refusal:
            return refusal.diagnostics
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return ()

    if diagnostics := from_rank_0(refused):
        raise Refusal(*diagnostics)
    return load_plan(folder)
