"""Draws recipes that a user could write: a model, its settings, a layout, data, adapters, a second
layout to resume on.

A seed is a case. Nothing here asks what is supported: what the compiler refuses is counted by code.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.zoo.configs import RUNNABLE, tiny_config

Json = dict[str, Any]

POPULAR = (
    *(
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma2",
        "gemma3_text",
        "phi3",
        "gpt2",
        "opt",
        "bloom",
        "falcon",
    ),
    *(
        "olmo2",
        "granite",
        "starcoder2",
        "cohere2",
        "nemotron",
        "gpt_neox",
        "stablelm",
        "glm4",
        "smollm3",
    ),
)
EXPERTS = (
    *(
        "mixtral",
        "qwen3_moe",
        "qwen2_moe",
        "deepseek_v3",
        "deepseek_v2",
        "glm4_moe",
        "gpt_oss",
        "olmoe",
        "granitemoe",
    ),
    *("ernie4_5_moe", "dots1", "qwen3_next", "minimax_m2", "llama4_text"),
)
ADAPTED = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gemma2", "olmo2")
ADAPTED_MIXTURES = ("deepseek_v3", "glm4_moe", "qwen3_moe", "deepseek_v2", "dots1", "mixtral")
"""One seed in three of the theme has one of these in place of what it drew: the others stay what
they were."""
MEGATRON = (
    "llama",
    "qwen3",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "mistral",
    "qwen2",
)
BALANCED = ("mixtral", "qwen3_moe", "deepseek_v3")
DROPPED = ("gpt2", "llama", "opt", "mixtral", "gpt_neox")
THEMES: dict[str, int] = {
    "layouts": 22,
    "types": 20,
    "data": 16,
    "settings": 16,
    "experts": 16,
    "context": 14,
    "ropes": 24,
    "dropout": 16,
    "adapters": 8,
    "freeze": 6,
    "bf16": 6,
    "megatron": 14,
    "reference": 4,
}
"""Theme -> its share of the cases."""

STEPS, SAVED = 4, 2
"""Optimizer steps, and the one behind which a checkpoint is saved and resumed on a second
layout."""
TEXT_IDS = 250
"""Ids from here up stand for images in the tiny configurations of multimodal types: no text holds
them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """config: of the model. recipe: without `model.source` and data files, which the worker writes.
    second: the `parallelism` that the run is resumed on, or None. compares_training: False where
    dropout draws other numbers than one process, so that only evaluations are compared."""

    seed: int
    theme: str
    world: int
    config: Json
    recipe: Json
    second: Json | None
    compares_training: bool

    @property
    def engine(self) -> str:
        return str(self.recipe["target"])

    def words(self) -> str:
        """One line that says what was drawn."""
        p = {
            k: v
            for k, v in self.recipe["parallelism"].items()
            if v not in (1, "none", "1f1b", "tensor")
        }
        return (
            f"{self.seed} {self.theme} {self.config['model_type']} "
            f"{self.recipe['data'].get('kind', 'mixture')} {p}"
        )


def draw(seed: int) -> Case:
    r = random.Random(seed)
    theme = r.choices(list(THEMES), weights=list(THEMES.values()))[0]
    world = r.choice((1, 2, 2, 2, 4, 4)) if theme not in ("reference",) else 1
    config = _config(r, theme, seed)
    moe = _is_mixture(config)
    target = theme if theme in ("megatron", "reference") else "deepspeed"
    first = _layout(r, theme, world, target, moe)
    micro, accumulation = first.pop("micro"), first.pop("accumulation")
    batch = micro * accumulation * first["data"]
    second = None
    if theme not in ("dropout", "reference") and world > 1 and r.random() < 0.5:
        second = _second_layout(r, theme, world, target, moe, batch)
    length = (
        r.choice((24, 32, 48)) if theme == "context" else r.choice((16, 17, 23, 24, 31, 32, 40))
    )
    if first["context"] > 1 or (second or {}).get("context", 1) > 1:
        length = r.choice((16, 24, 32, 40))
    recipe: Json = {
        "version": 1,
        "name": f"random-{seed}",
        "target": target,
        "model": {"weights": "pretrained", "loss": r.choice(("auto", "auto", "full", "chunked"))},
        "cluster": {"nodes": 1, "gpus_per_node": world, "gpu": "cpu"},
        "training": _training(r, theme, length, batch),
        "data": _data(r, theme),
        "parallelism": {**first, "micro_batch_size": micro},
    }
    if theme == "settings" and r.random() < 0.3:
        recipe["model"]["attention"] = "eager"
    if theme == "adapters":
        recipe["lora"] = {"rank": r.choice((1, 2, 3, 5)), "alpha": r.choice((1, 4, 12.5))}
    if theme == "freeze":
        norm, embedding = (
            ("*ln_*", "*wte*") if config["model_type"] == "gpt2" else ("*norm*", "*embed*")
        )
        recipe["model"]["freeze"] = r.choice(
            ([embedding], [norm], ["*.0.*"], ["*.mlp.*"], [norm, embedding])
        )
    if config["model_type"] in BALANCED and theme == "experts":
        recipe["model"]["router_aux_loss"] = r.choice((0.01, 0.5))
    if theme == "dropout" or r.random() < 0.3:
        recipe["validation"] = _validation(r, recipe["data"])
    compares = theme != "dropout" or (first["tensor"], first["pipeline"], first["context"]) == (
        1,
        1,
        1,
    )
    return Case(
        seed=seed,
        theme=theme,
        world=world,
        config=config,
        recipe=recipe,
        second=second,
        compares_training=compares,
    )


def _is_mixture(config: Json) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any(config.get(name) for name in names)


def _config(r: random.Random, theme: str, seed: int) -> Json:
    kinds = {
        "types": RUNNABLE,
        "experts": EXPERTS,
        "adapters": ADAPTED,
        "megatron": MEGATRON,
        "dropout": DROPPED,
        "ropes": ("llama", "phi3", "qwen2", "mistral", "qwen3_moe"),
        "freeze": (
            "llama",
            "qwen2",
            "qwen3",
            "gpt2",
            "mistral",
            "gemma2",
            "olmo2",
            "mixtral",
            "deepseek_v3",
        ),
    }
    model_type = r.choice(kinds.get(theme, (*POPULAR, *EXPERTS)))
    if theme == "adapters" and seed % 3 == 0:
        model_type = ADAPTED_MIXTURES[seed // 3 % len(ADAPTED_MIXTURES)]
    config = tiny_config(model_type, seed=r.randrange(1000))
    if theme == "adapters" and seed % 3 == 0:
        config |= {
            k: v for k, v in (("first_k_dense_replace", 1), ("mlp_only_layers", [0])) if k in config
        }
    kind = config["model_type"]
    if kind in MEGATRON and theme == "megatron":
        config |= {k: v for k, v in _plain_switches(config).items() if k in config}
    if theme == "ropes":
        config |= _rope(r, kind)
    if theme == "dropout":
        for name in (
            "attention_dropout",
            "attn_pdrop",
            "resid_pdrop",
            "embd_pdrop",
            "dropout",
            "hidden_dropout",
        ):
            if name in config:
                config[name] = r.choice((0.0, 0.1, 0.3))
    if theme in ("settings", "layouts", "data", "context", "megatron", "bf16"):
        _odd_settings(r, config)
    _special_ids(r, config)
    return config


def _plain_switches(config: Json) -> Json:
    """What Megatron-Core has no word for."""
    if config["model_type"] == "gpt_oss":
        return {}
    return {
        "layer_types": ["full_attention"] * int(config.get("num_hidden_layers", 0)),
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "scale_attn_by_inverse_layer_idx": False,
    }


def _rope(r: random.Random, kind: str) -> Json:
    """Rotary tables that depend on the length, with their switch inside and outside of the
    sequences."""
    half, before = (8, r.choice((8, 16, 20, 64)))
    base: Json = {"rope_theta": 5000.0}
    tables: list[Json] = [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": before},
        {
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.05 * i for i in range(half)],
            "long_factor": [1.0 + 0.5 * i for i in range(half)],
            "original_max_position_embeddings": before,
        },
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": before,
        },
    ]
    table = r.choice(tables)
    found: Json = {"rope_parameters": {**base, **table}}
    if table["rope_type"] == "dynamic":
        found["max_position_embeddings"] = before
    if table["rope_type"] == "longrope":
        found |= {"original_max_position_embeddings": before, "max_position_embeddings": 64}
    if kind == "phi3" and table["rope_type"] != "longrope":
        found["rope_parameters"] = {**base, "rope_type": "default"}
    return found


def _odd_settings(r: random.Random, config: Json) -> None:
    if (
        "vocab_size" in config
        and r.random() < 0.5
        and not any(k.endswith("_config") for k in config)
    ):
        config["vocab_size"] = r.choice((257, 259, 263, 271))
    if "intermediate_size" in config and r.random() < 0.3:
        config["intermediate_size"] = r.choice((100, 116, 136))
    if r.random() < 0.4:
        config["tie_word_embeddings"] = r.random() < 0.5


def _special_ids(r: random.Random, config: Json) -> None:
    """Padding, begin and end anywhere in the vocabulary, where the type has them."""
    # Of RoBERTa and its like the padding id is a place in the table of positions, too.
    ids = (
        (0, 1, 2, 7)
        if any(part in config["model_type"] for part in ("roberta", "camembert", "xmod"))
        else (0, 1, 2, 7, 65, 101, 200, 249)
    )
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if name in config and r.random() < 0.5:
            config[name] = r.choice(ids)


def _split(r: random.Random, world: int, allowed: tuple[str, ...]) -> dict[str, int]:
    """The world as a product of degrees."""
    sizes = dict.fromkeys(("tensor", "pipeline", "context", "data"), 1)
    rest = world
    while rest > 1:
        sizes[r.choice(allowed)] *= 2
        rest //= 2
    return sizes


def _layout(r: random.Random, theme: str, world: int, target: str, moe: bool) -> Json:
    axes = {
        "adapters": ("data",),
        "context": ("context", "context", "data", "pipeline", "tensor"),
        "dropout": ("data", "data", "pipeline", "tensor"),
        "ropes": ("context", "context", "context", "pipeline", "data", "tensor"),
    }.get(theme, ("tensor", "pipeline", "data", "data", "context"))
    found: Json = {**_split(r, world, axes)}
    found["zero_stage"] = _zero(r, found, target)
    shards = found["data"] * found["context"]
    found["expert"] = (
        r.choice([n for n in (1, 2, 4) if shards % n == 0]) if moe and theme != "adapters" else 1
    )
    found["schedule"] = "1f1b"
    found["micro"], found["accumulation"] = r.choice((1, 1, 2, 3)), r.choice((1, 2, 3, 4))
    if target == "deepspeed" and found["pipeline"] > 1 and r.random() < 0.25:
        found["schedule"] = "dualpipev"
        found["accumulation"] = 2 * found["pipeline"] + r.choice((0, 1, 2))
    found["activation_checkpointing"] = r.choice(
        ("none", "none", "none", "selective", "full", {"full": 1})
    )
    if theme == "layouts" and target == "deepspeed" and r.random() < 0.2:
        found["offload"] = r.choice(("optimizer", "optimizer", "parameters"))
    if target == "megatron":
        found["sequence_parallel"] = found["tensor"] > 1 and r.random() < 0.5
        if found["pipeline"] > 1 and r.random() < 0.3:
            found["virtual_stages"] = 2
            found["accumulation"] = found["pipeline"] * r.choice((1, 2))
    return found


def _zero(r: random.Random, sizes: dict[str, int], target: str) -> int:
    if target == "reference":
        return 0
    if target == "megatron":
        return r.choice((0, 1))
    return r.choice((1, 1, 1, 1, 0) if sizes["pipeline"] > 1 else (1, 2, 3, 1, 2, 3, 0))


def _second_layout(
    r: random.Random, theme: str, world: int, target: str, moe: bool, batch: int
) -> Json | None:
    """Of the same global batch, or None where none was drawn."""
    for _ in range(50):
        found = _layout(r, theme, world, target, moe)
        micro, accumulation = found.pop("micro"), found.pop("accumulation")
        if micro * accumulation * found["data"] == batch:
            return {**found, "micro_batch_size": micro}
    return None


def _training(r: random.Random, theme: str, length: int, batch: int) -> Json:
    name = r.choice(("constant", "linear", "cosine", "cosine", "wsd"))
    scheduler: Json = {"name": name, "warmup_steps": r.choice((0, 1, 2))}
    if name == "wsd":
        scheduler["decay_steps"] = r.choice((1, 2))
    if name != "constant":
        scheduler["min_lr"] = r.choice((0, 1e-4))
    return {
        "sequence_length": length,
        "global_batch_size": batch,
        "steps": STEPS,
        "precision": "bf16" if theme == "bf16" else "fp32",
        "optimizer": {
            "name": "adamw",
            "lr": 1e-3,
            "betas": r.choice(([0.9, 0.95], [0.9, 0.999], [0.8, 0.9])),
            # a gradient that is nothing but rounding must not become a step of the full rate
            "eps": 1e-3,
            "weight_decay": r.choice((0, 0.1, 0.3)),
        },
        "scheduler": scheduler,
        "gradient_clipping": r.choice((0.0, 0.05, 0.5, 0.5, 1.0)),
        "seed": r.randrange(1, 10_000),
    }


TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


def _part(r: random.Random, kind: str, name: str) -> Json:
    part: Json = {"kind": kind}
    if kind == "tokens":
        return part | {"path": f"{name}.npy"}
    part |= {"tokenizer": "byte", "packing": r.random() < 0.5}
    if kind == "chat":
        part |= {"template": TEMPLATE, "train_on": r.choice(("assistant", "assistant", "all"))}
    return part | {"path": f"{name}/*.txt" if kind == "text" else f"{name}.jsonl"}


def _data(r: random.Random, theme: str) -> Json:
    kinds = ("tokens", "text", "jsonl", "chat", "chat")
    kind = (
        r.choice(kinds)
        if theme in ("data", "experts", "ropes")
        else r.choice(("tokens",) * 3 + kinds)
    )
    if theme in ("dropout", "adapters"):
        kind = "tokens"  # in a packed row one process would draw other numbers
    shuffle = r.random() < 0.5
    if theme == "data" and r.random() < 0.2:
        packing = r.random() < 0.5
        parts = [
            {**_part(r, k, f"part-{k}"), "weight": w, "packing": packing}
            for k, w in (("jsonl", 2), ("chat", 1))
        ]
        return {"mixture": parts, "shuffle": shuffle}
    return {**_part(r, kind, "data"), "shuffle": shuffle}


def _validation(r: random.Random, data: Json) -> Json:
    every = {"every_steps": r.choice((1, 3, STEPS))}
    if r.random() < 0.5 and "mixture" not in data:
        return {"fraction": r.choice((0.1, 0.25)), **every}
    return {"kind": "tokens", "path": "held-out.npy", **every}
