"""Several questions to the proof's process in one: reads JSON, [[what is planted, config, plan or
null]...], and prints an answer a line. Those with a plan come last: from there on nothing has
memory."""

from __future__ import annotations

import json
import sys
import warnings

from shardwright.engines.megatron.cpu import run_on_cpu

warnings.simplefilter("ignore")
run_on_cpu()

from shardwright.engines.megatron import families, prove
from shardwright.engines.megatron.pieces import grouped

PLANTED = {
    "swapped keys and values": grouped(*(f"self_attn.{p}_proj.weight" for p in "qvk")),
    "": families.FAMILIES["llama"].layer["self_attention.linear_qkv.weight"],
}

if __name__ == "__main__":
    for planted, config, plan in json.loads(sys.stdin.read()):
        layer = families.FAMILIES["llama"].layer
        layer["self_attention.linear_qkv.weight"] = PLANTED[planted]  # type: ignore[index]
        try:
            found = prove._numbers(config) if plan is None else prove._ranks(config, plan)
        except families.Unsupported as error:
            found = {"unsupported": str(error)}
        print(json.dumps(found), flush=True)
