"""Shrink a recipe and its model to a tiny copy: the same architecture and parallelism, at sizes
that one machine runs."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardwright.layout.layout import Layout
from shardwright.models.model_graph import ModelGraph
from shardwright.models.trainable_parameters import frozen_parameter_patterns
from shardwright.recipe.literal_types import LayerCheckpointing, PartialCheckpointing
from shardwright.recipe.objectives import (
    OBJECTIVE_KEYS,
    PREFERENCE_KIND,
    ObjectiveSection,
    ObjectiveTraits,
)
from shardwright.recipe.optimizer_keys import OPTIMIZER_DEFAULTS, OPTIMIZER_KEYS
from shardwright.recipe.recipe_types import LoraSection, OptimizerSection, Recipe
from shardwright.search.attention_rules import length_switches
from shardwright.utils.json_values import JsonObject, JsonValue

if TYPE_CHECKING:
    from shardwright.data.sequences import SequenceBatch
    from shardwright.verify.reference_run import Rows


STEPS, EVERY, LENGTH, SEED, WARMUP = 6, 3, 32, 11, 2
LR, BETAS, EPS, DECAY, CLIPPING = 1e-3, (0.9, 0.95), 1e-3, 0.1, 0.5
"""eps: large, as the rounding noise of a theoretically zero gradient (a key's bias) would become
full Adam steps."""
ODD_VOCABULARY, RANK = 259, 4
_ONE_LAYER = PartialCheckpointing(full=1)
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")
_VOCABULARY = "vocab_size"
MODEL, TOKENS, HELD_OUT = "model", "tokens", "held-out"
OTHER_MODEL, TEACHER_SCORES = "other-model", "teacher-scores"
"""Folders of the reference or the teacher, and of what the teacher says of the data."""
TEACHER_TOKENS = 7
"""K of the teacher's scores."""


def tiny_strategy(s: Layout) -> Layout:
    """Shrink a layout: degrees above 1 become 2, partial checkpointing recomputes one layer a
    stage.

    Micro-batches are the fewest that still accumulate and that the schedule needs. Expert ranks
    exchange tokens by alltoall without overlap: DeepEP runs on GPUs alone, and Megatron-Core
    overlaps no exchange in the copy's fp32.
    """
    pipeline, data = min(s.pipeline, 2), min(s.data, 2)
    accumulation = max(
        min(s.gradient_accumulation_steps, 2), s.pipeline_schedule.min_micro_batches(pipeline)
    )
    return dataclasses.replace(
        s,
        activation_checkpointing=tiny_checkpointing(s),
        tensor=min(s.tensor, 2),
        pipeline=pipeline,
        data=data,
        context=min(s.context, 2),
        expert=min(s.expert, 2),
        expert_dispatcher="alltoall",
        expert_overlap=False,
        micro_batch_size=min(s.micro_batch_size, 2),
        gradient_accumulation_steps=accumulation,
        hpz_partition_size=1,  # the copy has one node
    )


def tiny_checkpointing(s: Layout) -> LayerCheckpointing | PartialCheckpointing:
    """Return what the copy recomputes: one layer of each stage under partial checkpointing, and no
    moe_act, whose grouped experts run on GPUs alone."""
    if s.recompute_modules:
        return tuple(module for module in s.recompute_modules if module != "moe_act") or "none"
    return s.checkpointing if s.activation_checkpointing == s.checkpointing else _ONE_LAYER


def batch_of(s: Layout) -> int:
    return s.micro_batch_size * s.gradient_accumulation_steps * s.data


def tiny_config(
    config: JsonObject, s: Layout, sequence_length: int, *, depth: bool = True
) -> dict[str, JsonValue]:
    """Shrink a complete configuration.

    Kept: a vocabulary that tensor ranks do not divide, key/value heads that they share, and whether
        sequences exceed the rotary embeddings' switch length. depth: False keeps every layer.
    """
    from shardwright.models.tiny_config import shrink

    small: dict[str, JsonValue] = shrink(config, depth=depth)
    switches = [switch for _, switch in length_switches(config)]
    if switches and sequence_length <= min(switches):
        _switch_beyond(small, 2 * LENGTH)
    small.pop("architectures", None)
    small.pop("output_router_logits", None)  # Hugging Face's own auxiliary loss is not trained on
    _keep_uneven(config, small, s.tensor)
    for name, value in small.items():
        original = config.get(name)
        if isinstance(value, dict) and "model_type" in value and isinstance(original, dict):
            _keep_uneven(original, value, s.tensor)
    return small


def _switch_beyond(small: JsonObject, length: int) -> None:
    """Move the rotary embeddings' switch beyond `length` tokens, in place; shrink() puts it within
    the sequences."""
    assert isinstance(small, dict)
    for name, value in small.items():
        if isinstance(value, dict):
            _switch_beyond(value, length)
        elif name in ("original_max_position_embeddings", "max_position_embeddings") and isinstance(
            value, int
        ):
            small[name] = max(length, value)


def with_dropout(small: JsonObject, config: JsonObject) -> dict[str, JsonValue]:
    """Return the tiny configuration with the model's own dropout."""
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
    """Shrink the adapters, without dropout: ranks would draw different numbers."""
    if lora is None:
        return None
    modules = "auto" if lora.target_modules is None else list(lora.target_modules)
    return {
        "rank": min(lora.rank, RANK),
        "alpha": lora.alpha,
        "dropout": 0.0,
        "target_modules": modules,
    }


STANDS_IN_FOR: Mapping[str, str] = {"lion": "adamw", "adamw_8bit": "adamw"}
"""Maps an optimizer to the one that trains the tiny copy in its place.

Lion's sign turns the last bit of a gradient into a step, so two right runs may differ; a tiny
copy's weights are cut inside blocks of 8-bit moments.
"""


def _tiny_optimizer(optimizer: OptimizerSection) -> JsonObject:
    name = STANDS_IN_FOR.get(optimizer.name, optimizer.name)
    values: JsonObject = {
        "betas": list(BETAS),
        "eps": EPS,
        "momentum": optimizer.momentum,
        "ns_steps": optimizer.ns_steps,
        "adamw_lr": LR,
        # torch's Adafactor, which stands beside the ranks, always scales the rate.
        **({**OPTIMIZER_DEFAULTS[name], "lr": LR} if name == "adafactor" else {}),
    }
    taken = {key: values[key] for key in OPTIMIZER_KEYS[name]}
    return {"name": name, "lr": LR, "weight_decay": DECAY, **taken}


def held_out_rows(s: Layout) -> int:
    """Return a count of held-out sequences: more than one pipeline pass, and no multiple of the
    data ranks' share."""
    return batch_of(s) + 1


def tiny_freeze(
    graph: ModelGraph, freeze: tuple[str, ...], names: tuple[str, ...]
) -> tuple[str, ...]:
    """Return `model.freeze` of the tiny copy, whose parameters are `names`.

    Frozen layers map to the copy's layers at the same share of the depth.
    """
    stack = graph.cut.stack + "."

    def number(name: str) -> int:
        return int(name.removeprefix(stack).split(".")[0]) if name.startswith(stack) else 0

    layers = max(number(p.name) for layer in graph.layers for p in layer.parameters) + 1
    depth = max(map(number, names)) + 1
    entries = []
    for entry in frozen_parameter_patterns(graph, freeze):
        if entry.startswith(stack) and not entry.startswith(f"{stack}*"):
            rest = entry.removeprefix(stack).partition(".")[2]
            entry = f"{stack}{number(entry) * depth // layers}.{rest}"
        entries += [entry] if fnmatch.filter(names, entry) else []
    return tuple(dict.fromkeys(entries))


def tiny_objective(objective: ObjectiveSection) -> JsonObject:
    """Return `training.objective` of the tiny copy, with the same numbers and another tiny model as
    the reference or the teacher, where the recipe names one."""
    kept = {
        key: getattr(objective, key)
        for key in ("name", *OBJECTIVE_KEYS)
        if key not in ("reference", "reference_model", "teacher")
        and getattr(objective, key) is not None
    }
    if objective.reference is not None:
        kept["reference"] = f"./{OTHER_MODEL}"
    if objective.traits.reads_teacher:
        kept["teacher"] = f"./{TEACHER_SCORES}"
    return kept


def tiny_recipe(
    recipe: Recipe,
    s: Layout,
    data: JsonObject,
    held_out: JsonObject | None,
    freeze: tuple[str, ...] = (),
) -> JsonObject:
    """Return the recipe of the tiny copy, in fp32: half precision would hide a wrong sum in
    rounding.

    data, held_out: keys that name the tokens.
    freeze: the tiny copy's `model.freeze`.
    """
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
            "objective": tiny_objective(training.objective),
            "optimizer": _tiny_optimizer(training.optimizer),
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


# The tiny copy's data: random tokens, in documents where the recipe packs documents, or random
# conversations with padding.


LONGEST = 40
"""Longest document (tokens): some end within a sequence, some continue in the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Hold random tokens.

    ids: (sequences, sequence length).
    ends: ends of the documents in the stream; None without documents.
    """

    ids: npt.NDArray[np.int32]
    ends: tuple[int, ...] | None

    def write(self, path: Path) -> JsonObject:
        """Write the files, and return the recipe keys that name them.

        path: without extension.
        """
        if self.ends is None:
            np.save(path.with_suffix(".npy"), self.ids)
            return {"kind": "tokens", "path": f"{path.name}.npy", "packing": False}
        self.ids.tofile(path.with_suffix(".bin"))
        ends = np.asarray(self.ends, dtype=np.int64)
        lengths = np.diff(ends, prepend=0).astype(np.int32)
        # Megatron's index (read by data/indexed_dataset.py): a sequence is a document.
        counts = len(ends).to_bytes(8, "little") + (len(ends) + 1).to_bytes(8, "little")
        arrays = (lengths, (ends - lengths) * 4, np.arange(len(ends) + 1, dtype=np.int64))
        head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([4]) + counts
        path.with_suffix(".idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))
        return {"kind": "megatron", "path": path.name, "packing": True}

    def rows(self, first: int, stop: int) -> Rows:
        """Return sequences for a plain model: unpacked ones, or each document's part of a sequence
        alone."""
        import torch

        ids = torch.from_numpy(self.ids[first:stop].astype(np.int64))
        if self.ends is None:
            return [{"input_ids": ids, "labels": ids}]
        pieces, length = [], ids.shape[1]
        for row, tokens in enumerate(ids, first):
            cuts = [end - row * length for end in self.ends if 0 < end - row * length < length]
            pieces += [
                (row, tokens[a:b][None]) for a, b in zip([0, *cuts], [*cuts, length], strict=True)
            ]
        return [{"input_ids": piece, "labels": piece, "row": row} for row, piece in pieces]


TEMPLATE = "{% for m in messages %}{{ m['role'][0] + m['content'] + '\n' }}{% endfor %}"
"""Makes every token of a conversation a label, so its labels follow from its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Hold conversations of one message each, as bytes."""

    texts: tuple[str, ...]
    packed: bool

    def write(self, path: Path) -> JsonObject:
        """Write the files, and return the recipe keys that name them."""
        lines = [
            json.dumps({"messages": [{"role": "assistant", "content": text}]}) + "\n"
            for text in self.texts
        ]
        path.with_suffix(".jsonl").write_text("".join(lines), encoding="utf-8")
        return {
            "kind": "chat",
            "path": f"{path.name}.jsonl",
            "tokenizer": "byte",
            "template": TEMPLATE,
            "train_on": "all",
            "packing": self.packed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """Hold records of preference data: pairs, or completions with labels."""

    records: tuple[JsonObject, ...]
    packed: bool

    def write(self, path: Path) -> JsonObject:
        """Write the files, and return the recipe keys that name them."""
        lines = (json.dumps(record) + "\n" for record in self.records)
        path.with_suffix(".jsonl").write_text("".join(lines), encoding="utf-8")
        return {
            "kind": PREFERENCE_KIND,
            "path": f"{path.name}.jsonl",
            "tokenizer": "byte",
            "packing": self.packed,
        }


def separate_sequences(block: SequenceBatch, *, padded: bool) -> Rows:
    """Return each sequence, or each document of a packed one, alone.

    padded: keep padding, which some rotary embeddings depend on.
    """
    import torch

    from shardwright.models.tasks.causal_lm import IGNORE_INDEX

    rows: Rows = []
    for row, tokens in enumerate(block.tokens):
        ids = torch.from_numpy(tokens.astype(np.int64))
        labels, real = ids.clone(), len(ids) if block.lengths is None else int(block.lengths[row])
        if block.loss_mask is not None:
            labels[torch.from_numpy(~block.loss_mask[row])] = IGNORE_INDEX
        cuts = [] if block.starts is None else np.flatnonzero(block.starts[row]).tolist()
        stop = len(ids) if padded and block.starts is None else real
        edges = [0, *(cut for cut in cuts if 0 < cut < real), stop]
        for a, b in itertools.pairwise(edges):
            entry = {"input_ids": ids[None, a:b], "labels": labels[None, a:b], "row": row}
            entry |= {"real": real} if block.starts is None else {}
            if block.desirable is not None:
                entry["desirable"] = bool(block.desirable[row])
            if block.teacher is not None:
                # The token at place s is foretold at s - 1 of the labels' shifted places.
                top, log_probabilities = (
                    torch.from_numpy(x[row, a + 1 : b]) for x in block.teacher
                )
                entry["teacher"] = (top.long(), log_probabilities.double())
            rows.append(entry)
    return rows


def packs_documents(recipe: Recipe) -> bool:
    return any(part.joins_documents for _, part in recipe.dataset_sections())


def has_conversations(recipe: Recipe) -> bool:
    """Return whether sequences may end in padding: conversations are not split."""
    return any(part.kind == "chat" for _, part in recipe.dataset_sections())


def random_conversations(seed: int, rows: int, length: int, *, packed: bool) -> Conversations:
    """Return conversations for this many sequences of `length` tokens, up to a full sequence
    each."""
    random = np.random.default_rng(seed)
    shortest = length // 3 if packed else 1  # several fill a sequence, hardly ever exactly
    sizes = random.integers(shortest, length - 1, 4 * rows if packed else rows)
    return Conversations(
        texts=tuple("".join(map(chr, random.integers(32, 127, size))) for size in sizes),
        packed=packed,
    )


def random_completions(
    seed: int, examples: int, length: int, traits: ObjectiveTraits, *, packed: bool
) -> Completions:
    """Draw records for this many examples of sequences of `length` tokens. Some completions are cut
    at the end of their sequence; a reward model leaves those pairs out, and gets none. Packed, an
    example is a sequence, and a pair fills a third of it at least."""
    random = np.random.default_rng(seed)

    def text(longest: int, shortest: int = 1) -> str:
        return "".join(map(chr, random.integers(32, 127, random.integers(shortest, longest))))

    records: list[JsonObject] = []
    for _ in range(4 * examples if packed else 0):
        prompt, least = text(length // 8), length // 6
        most = length // 2 - len(prompt)
        pair = {"prompt": prompt, "chosen": text(most, least), "rejected": text(most, least)}
        records.append(pair)
    for _ in range(0 if packed else examples):
        prompt = text(length // 3)
        longest = length - len(prompt) if traits.scores_sequences else length
        if traits.reads_labels:
            label = bool(random.random() < 0.5)
            records.append({"prompt": prompt, "completion": text(longest), "label": label})
        else:
            pair = {"prompt": prompt, "chosen": text(longest), "rejected": text(longest)}
            records.append(pair)
    return Completions(records=tuple(records), packed=packed)


def random_tokens(
    seed: int,
    rows: int,
    length: int,
    vocabulary: int,
    *,
    packed: bool,
    special: tuple[int, ...] = (),
) -> Tokens:
    """Draw ids of the vocabulary, one in eight of them a special one."""
    random = np.random.default_rng(seed)
    ids = random.integers(3, vocabulary, (rows, length), dtype=np.int32)
    if special:
        ids = np.where(
            random.random(ids.shape) < 1 / 8,
            random.choice(np.array(special, dtype=np.int32), ids.shape),
            ids,
        )
    if not packed:
        return Tokens(ids=ids, ends=None)
    ends = np.cumsum(random.integers(1, LONGEST, ids.size))
    return Tokens(ids=ids, ends=(*(int(end) for end in ends if end < ids.size), ids.size))
