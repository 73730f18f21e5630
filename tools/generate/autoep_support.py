"""Writes compiler/shardwright/lint/autoep.json: what DeepSpeed's AutoEP makes of each model type
that has experts.

Each type's tiny copy is built on the meta device and handed to DeepSpeed's own parser, with nothing
but `enabled`. found: it names layers; missed: it names none and goes on; refused: it raises.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import parse_autoep_config
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.models.mixture_of_experts import number_of_experts
from tests.zoo.configs import TYPES, tiny_config

FILE = Path(__file__).resolve().parents[2] / "compiler/shardwright/lint/autoep.json"


def measured() -> dict[str, str]:
    """Type -> found | missed | refused. Types without experts, in which it finds none, are left
    out."""
    return {kind: outcome for kind in sorted(TYPES) if (outcome := _outcome(kind))}


def _outcome(kind: str) -> str:
    """ "" where there is nothing to find, or no tiny copy."""
    try:
        config = AutoConfig.for_model(**tiny_config(kind))
    except KeyError:
        return ""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    try:
        layers = AutoEP(model, parse_autoep_config({"enabled": True, "autoep_size": 2})).ep_parser()
    except ValueError:
        return "refused"
    missed = "missed" if any(number_of_experts(module) for module in model.modules()) else ""
    return "found" if layers else missed


if __name__ == "__main__":
    FILE.write_text(json.dumps(measured(), indent=1) + "\n", encoding="utf-8")
