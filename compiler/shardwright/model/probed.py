"""The compile-time probe: the model's own type and switches, tiny, run plain and in isolated pieces."""

from __future__ import annotations

import functools
import json

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shardwright.diagnostics import Diagnostic, KeyPath, Refusal
from shardwright.hf.probe import NotCuttable, Probed, probe
from shardwright.hf.shrink import VOCABULARY, shrink

TOKENS = (2, 24)
"""Batch and sequence of the probe."""


def probe_config(config: PretrainedConfig, attention: str, key: KeyPath) -> Probed:
    """Error: SW2016, this structure cannot be proved to come apart."""
    text = json.dumps(shrink(config.to_dict()), sort_keys=True, default=str)
    found = _probe(config.model_type, text, None if attention == "auto" else attention)
    if isinstance(found, str):
        raise Refusal(uncuttable(config, found, key))
    return found


def uncuttable(config: PretrainedConfig, why: str, key: KeyPath) -> Diagnostic:
    return Diagnostic(
        code="SW2016",
        message=f"model_type {config.model_type!r} cannot be split into layers: {why}",
        help="A tiny copy of the model must give the same bits in one piece and in isolated pieces; this one does not, "
        "and nothing is guessed. Use a model of another type.",
        key=key,
    )


@functools.lru_cache(maxsize=256)
def _probe(model_type: str, text: str, attention: str | None) -> Probed | str:
    """The reason as text where there is no cut, so that it is cached too."""
    state = torch.get_rng_state()
    try:
        config = CONFIG_MAPPING[model_type].from_dict(json.loads(text))
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # no bias all zero, no norm weight all one
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return probe(model, torch.randint(3, VOCABULARY - 10, TOKENS))
    except NotCuttable as reason:
        return str(reason)
    except Exception as error:  # whatever a type's own code raises at this size
        lines = str(error).strip().splitlines() or [""]
        return f"its tiny copy does not run ({type(error).__name__}: {lines[-1][:200]})"
    finally:
        torch.set_rng_state(state)
