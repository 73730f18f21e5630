"""The tiny copy: the same architecture and the same kinds of parallelism, sizes and degrees that
one machine runs."""

from __future__ import annotations

import dataclasses
import fnmatch

from shardwright.layout.layout import Layout
from shardwright.models.frozen_parameters import frozen_parameter_patterns
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.literal_types import PartialCheckpointing
from shardwright.recipe.recipe_types import LoraSection, Recipe
from shardwright.search.attention_rules import length_switches
from shardwright.utils.json_types import JsonObject, JsonValue

STEPS, EVERY, LENGTH, SEED, WARMUP = 6, 3, 32, 11, 2
LR, BETAS, EPS, DECAY, CLIPPING = 1e-3, (0.9, 0.95), 1e-3, 0.1, 0.5
"""eps: a gradient that is zero in theory (a key's bias) is rounding noise, which Adam with a small
one turns into steps of the learning rate."""
ODD_VOCABULARY, RANK = 259, 4
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")
_VOCABULARY = "vocab_size"
MODEL, TOKENS, HELD_OUT = "model", "tokens", "held-out"


def tiny_strategy(s: Layout) -> Layout:
    """Degrees above 1 become 2; the fewest micro-batches that still accumulate, and that the
    schedule needs; of some layers that are recomputed in each stage, one."""
    pipeline, data = min(s.pipeline, 2), min(s.data, 2)
    accumulation = min(s.gradient_accumulation_steps, 2)
    if s.schedule == "dualpipev":
        accumulation = 2 * pipeline
    checkpointing = s.activation_checkpointing
    return dataclasses.replace(
        s,
        activation_checkpointing=PartialCheckpointing(full=1)
        if checkpointing != s.checkpointing
        else checkpointing,
        tensor=min(s.tensor, 2),
        pipeline=pipeline,
        data=data,
        context=min(s.context, 2),
        expert=min(s.expert, 2),
        micro_batch_size=min(s.micro_batch_size, 2),
        gradient_accumulation_steps=accumulation,
        hpz_partition_size=1,  # the copy has one node
    )


def batch_of(s: Layout) -> int:
    return s.micro_batch_size * s.gradient_accumulation_steps * s.data


def tiny_config(
    config: JsonObject, s: Layout, sequence_length: int, *, depth: bool = True
) -> dict[str, JsonValue]:
    """config: the model's own, complete. What tensor ranks must do apart from sizes is kept: a
    vocabulary that they do not divide, key/value heads that they share. So is the side of the
    length at which rotary embeddings change that the recipe's sequences lie on. depth False keeps
    every layer."""
    from shardwright.models.tiny_config import shrink

    small: dict[str, JsonValue] = shrink(config, depth=depth)
    switches = [switch for _, switch in length_switches(config)]
    if switches and sequence_length <= min(switches):
        _switch_beyond(small, 2 * LENGTH)
    small.pop("architectures", None)
    small.pop(
        "output_router_logits", None
    )  # Hugging Face's own balance loss, which is not trained on
    _keep_uneven(config, small, s.tensor)
    for name, value in small.items():
        whole = config.get(name)
        if isinstance(value, dict) and "model_type" in value and isinstance(whole, dict):
            _keep_uneven(whole, value, s.tensor)
    return small


def _switch_beyond(small: JsonObject, length: int) -> None:
    """Lets the rotary embeddings of the tiny configuration change beyond `length` tokens, in place.
    shrink() has it within the sequences."""
    assert isinstance(small, dict)
    for name, value in small.items():
        if isinstance(value, dict):
            _switch_beyond(value, length)
        elif name in ("original_max_position_embeddings", "max_position_embeddings") and isinstance(
            value, int
        ):
            small[name] = max(length, value)


def with_dropout(small: JsonObject, config: JsonObject) -> dict[str, JsonValue]:
    """small: the tiny configuration, without dropout. With that of `config`, the model's own."""
    made: dict[str, JsonValue] = dict(small)
    for name, value in config.items():
        inside = made.get(name)
        if isinstance(value, dict) and isinstance(inside, dict):
            made[name] = with_dropout(inside, value)
        elif (
            name in made and isinstance(value, float) and "drop" in name and "layerdrop" not in name
        ):
            made[name] = value
    return made


def _keep_uneven(config: JsonObject, small: dict[str, JsonValue], tensor: int) -> None:
    vocabulary = config.get(_VOCABULARY)
    if isinstance(vocabulary, int) and vocabulary % tensor:
        small[_VOCABULARY] = ODD_VOCABULARY
    for name in _KEY_VALUE_HEADS:
        heads = config.get(name)
        if isinstance(heads, int) and heads < tensor and isinstance(small.get(name), int):
            small[name] = 1


def _tiny_lora(lora: LoraSection | None) -> JsonObject | None:
    """Without dropout: ranks draw numbers of their own."""
    if lora is None:
        return None
    modules = "auto" if lora.target_modules is None else list(lora.target_modules)
    return {
        "rank": min(lora.rank, RANK),
        "alpha": lora.alpha,
        "dropout": 0.0,
        "target_modules": modules,
    }


def held_out_rows(s: Layout) -> int:
    """More than one pass of a pipeline, and no multiple of what the data ranks take at once."""
    return batch_of(s) + 1


def tiny_freeze(
    graph: ModelGraph, freeze: tuple[str, ...], names: tuple[str, ...]
) -> tuple[str, ...]:
    """Return what `model.freeze` names of the tiny copy, whose parameters are `names`. Where it
    freezes some of the layers, the copy's layers at the same share of the depth."""
    stack = graph.cut.stack + "."

    def number(name: str) -> int:
        return int(name.removeprefix(stack).split(".")[0]) if name.startswith(stack) else 0

    whole = max(number(p.name) for layer in graph.layers for p in layer.parameters) + 1
    depth = max(map(number, names)) + 1
    found = []
    for entry in frozen_parameter_patterns(graph, freeze):
        if entry.startswith(stack) and not entry.startswith(f"{stack}*"):
            rest = entry.removeprefix(stack).partition(".")[2]
            entry = f"{stack}{number(entry) * depth // whole}.{rest}"
        found += [entry] if fnmatch.filter(names, entry) else []
    return tuple(dict.fromkeys(found))


def tiny_recipe(
    recipe: Recipe,
    s: Layout,
    data: JsonObject,
    held_out: JsonObject | None,
    freeze: tuple[str, ...] = (),
) -> JsonObject:
    """The document beside the tiny model and its tokens. fp32: in half precision a wrong sum hides
    in the rounding. data, held_out: keys that name the tokens. freeze: the tiny copy's
    `model.freeze`."""
    training = recipe.training
    return {
        "version": 1,
        "name": "verify",
        "model": {
            "source": f"./{MODEL}",
            "weights": "pretrained",
            "loss": s.loss,
            "router_aux_loss": recipe.model.router_aux_loss or "off",
            **({"freeze": list(freeze)} if freeze else {}),
        },
        "cluster": {"nodes": 1, "gpus_per_node": s.world_size, "gpu": "cpu"},
        "training": {
            "sequence_length": LENGTH,
            "global_batch_size": batch_of(s),
            "steps": STEPS,
            "precision": "fp32",
            "optimizer": {
                "name": training.optimizer.name,
                "lr": LR,
                "betas": list(BETAS),
                "eps": EPS,
                "weight_decay": DECAY,
            },
            "scheduler": {"name": "cosine", "warmup_steps": WARMUP, "min_lr": 0},
            "gradient_clipping": CLIPPING if training.gradient_clipping else 0.0,
            "seed": SEED,
        },
        "data": {**data, "shuffle": False},
        "validation": None if held_out is None else {**held_out, "every_steps": EVERY},
        "parallelism": s.pins(),
        "lora": _tiny_lora(recipe.lora),
        "launch": {"env": {"OMP_NUM_THREADS": "1"}},
        "checkpoint": {"every_steps": EVERY},
    }
