"""Several questions to the proof's process in one: reads JSON, [[what is planted, config, plan or
null]...], and prints an answer a line. Those with a plan come last: from there on nothing has
memory."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

from shardwright.engines.megatron.megatron_cpu_patches import patch_torch_for_cpu

warnings.simplefilter("ignore")
patch_torch_for_cpu()

from megatron.core.transformer.moe import token_dispatcher

from shardwright.engines.megatron import (
    megatron_equivalence_process,
    megatron_model_configs,
    megatron_weight_mapping,
)
from shardwright.engines.megatron.megatron_weight_mapping import grouped_qkv_rows

PLANTED = {
    "swapped keys and values": grouped_qkv_rows(*(f"self_attn.{p}_proj.weight" for p in "qvk")),
    "": megatron_weight_mapping.MODEL_MAPPINGS["llama"].layer["self_attention.linear_qkv.weight"],
}

flex_dispatchers: list[object] = []
dispatcher_class: Any = token_dispatcher.MoEFlexTokenDispatcher
build = dispatcher_class.__init__


def counted(self: object, *arguments: object, **more: object) -> None:
    flex_dispatchers.append(self)
    build(self, *arguments, **more)


dispatcher_class.__init__ = counted

if __name__ == "__main__":
    for planted, config, plan in json.loads(sys.stdin.read()):
        layer = megatron_weight_mapping.MODEL_MAPPINGS["llama"].layer
        layer["self_attention.linear_qkv.weight"] = PLANTED[planted]  # type: ignore[index]
        try:
            found = (
                megatron_equivalence_process._compare_tiny_copy(config)
                if plan is None
                else megatron_equivalence_process._compare_ranks(config, plan)
            )
        except megatron_model_configs.Unsupported as error:
            found = {"unsupported": str(error)}
        if flex_dispatchers:
            found["flex"] = len(flex_dispatchers)
            flex_dispatchers.clear()
        print(json.dumps(found), flush=True)
