"""Stage 7: a Plan becomes files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace

from shardwright.engines.deepspeed.accelerate import (
    CONFIG,
    PLAIN,
    TRAINER,
    has_accelerate,
    plain_config,
    trainer_config,
)
from shardwright.engines.deepspeed.ds_config import checked, ds_config
from shardwright.ir.json_value import JsonValue
from shardwright.ir.model_graph import ModelGraph
from shardwright.ir.recipe import Recipe
from shardwright.launchers.lower import SCRIPTS, launch_files, render
from shardwright.plan.build import DS_CONFIG, MODEL_DIRECTORY, PLAN_FILE, TOKENIZER_DIRECTORY
from shardwright.plan.graph_file import GRAPH_FILE, graph_to_json
from shardwright.plan.plan import Plan
from shardwright.plan.serialize import plan_to_json

MARKER = ".shardwright"
MARKER_TEXT = b"This folder was written by shardwright compile, which may replace its files.\n"
EXECUTABLE_FILES = SCRIPTS


def lower(plan: Plan, recipe: Recipe, graph: ModelGraph) -> dict[str, bytes]:
    """Path relative to the compiled folder -> content, without plan.json (`sealed`). Depends on nothing but its
    arguments and the templates."""
    return {
        MARKER: MARKER_TEXT,
        DS_CONFIG: json_bytes(checked(ds_config(plan))),
        "recipe.resolved.json": json_bytes(recipe.document),
        plan.model.config_file: json_bytes(graph.config),
        GRAPH_FILE: graph_to_json(graph).encode("utf-8"),
        **launch_files(plan),
        **_accelerate(plan),
    }


def sealed(plan: Plan, files: Mapping[str, bytes]) -> tuple[Plan, dict[str, bytes]]:
    """The plan with the digests of what a run reads as data, and the files with plan.json. Scripts may be edited, a
    model's own code has digests of its own, and the rest is for readers."""
    own = {f"{MODEL_DIRECTORY}/{name}" for name, _ in (plan.model.own_code.files if plan.model.own_code else ())}
    read = [name for name in files if name == DS_CONFIG or name.split("/")[0] in (MODEL_DIRECTORY, TOKENIZER_DIRECTORY)]
    digests = {name: hashlib.sha256(files[name]).hexdigest() for name in sorted(set(read) - own)}
    plan = replace(plan, digests=digests)
    return plan, {**files, PLAN_FILE: plan_to_json(plan).encode("utf-8")}


def _accelerate(plan: Plan) -> dict[str, bytes]:
    if not has_accelerate(plan):
        return {}
    return {
        CONFIG: render("accelerate/config.yaml.j2", plan, CONFIG).encode("utf-8"),
        PLAIN: json_bytes(plain_config(plan)),
        TRAINER: json_bytes(trainer_config(plan)),
    }


def json_bytes(value: JsonValue) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")
