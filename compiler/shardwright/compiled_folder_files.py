"""Stage 7: a Plan becomes files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from shardwright.diagnostics import Diagnostic
from shardwright.engines.engine_table import engine_of, lowering_of
from shardwright.launch.launchers.launch_files import SCRIPT_NAMES, launch_files
from shardwright.models.model_graph import ModelGraph
from shardwright.models.model_graph_json import GRAPH_FILE, graph_to_json
from shardwright.plan.folder_paths import MODEL_DIRECTORY, PLAN_FILE, TOKENIZER_DIRECTORY
from shardwright.plan.plan import Plan
from shardwright.plan.plan_json import plan_to_json
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.strict_json import json_bytes

MARKER = ".shardwright"
MARKER_TEXT = b"This folder was written by shardwright compile, which may replace its files.\n"
EXECUTABLE_FILES = SCRIPT_NAMES


def compiled_files(
    plan: Plan, recipe: Recipe, graph: ModelGraph
) -> tuple[dict[str, bytes], tuple[Diagnostic, ...]]:
    """(path relative to the compiled folder -> content, without plan.json (`sealed`), warnings).
    Depends on nothing but its arguments and the templates."""
    own, warnings = lowering_of(recipe.target).files(plan, graph.config)
    files = {
        MARKER: MARKER_TEXT,
        "recipe.resolved.json": json_bytes(recipe.document),
        plan.model.config_file: json_bytes(graph.config),
        GRAPH_FILE: graph_to_json(graph).encode("utf-8"),
        **launch_files(plan),
        **own,  # also where an engine starts its ranks in a way of its own
    }
    return files, warnings


def with_file_digests(plan: Plan, files: Mapping[str, bytes]) -> tuple[Plan, dict[str, bytes]]:
    """The plan with the digests of what a run reads as data, and the files with plan.json. Scripts
    may be edited, a model's own code has digests of its own, and the rest is for readers."""
    own = {
        f"{MODEL_DIRECTORY}/{name}"
        for name, _ in (plan.model.remote_code.files if plan.model.remote_code else ())
    }
    inputs = engine_of(plan).inputs
    read = [
        name
        for name in files
        if name in inputs or name.split("/")[0] in (MODEL_DIRECTORY, TOKENIZER_DIRECTORY)
    ]
    digests = {name: hashlib.sha256(files[name]).hexdigest() for name in sorted(set(read) - own)}
    plan = replace(plan, digests=digests)
    return plan, {**files, PLAN_FILE: plan_to_json(plan).encode("utf-8")}
