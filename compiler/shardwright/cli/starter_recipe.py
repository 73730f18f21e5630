"""The text of a first recipe: what to fill in, with the values that a first run takes."""

from __future__ import annotations

import json
from dataclasses import dataclass

STARTER_GPUS_PER_NODE = 8
MAX_STARTER_SEQUENCE_LENGTH = 4096
CPU_SEQUENCE = 128
# A step's tokens for each GPU, so that it is busy; and at most, what models of 7 B to 400 B are
# pre-trained with (Llama 2 and 3: 4 M to 16 M).
TOKENS_PER_GPU = 2**16
MOST_TOKENS = 4 * 2**20
CPU_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class StarterSettings:
    """What the command line says. model: as the recipe shall name it. has_weights: it is a folder
    with some in it."""

    model: str
    has_weights: bool
    name: str
    gpu: str
    nodes: int
    gpus_per_node: int


def draft_yaml(settings: StarterSettings, source: str) -> str:
    """YAML with a comment for each decision. source: the model's absolute folder, or its hub id. An
    unknown GPU or model gets a recipe too, which names it: the check that follows says what is
    wrong with it."""
    from shardwright.cli.model_recipe import model_max_sequence_length
    from shardwright.cluster.gpu_catalogue import catalogue

    entry = catalogue()["gpus"].get(settings.gpu)
    peaks = entry["peak_tflops"] if entry is not None else {"bf16": 1.0}
    is_cpu = settings.gpu == "cpu"
    length = min(
        CPU_SEQUENCE if is_cpu else MAX_STARTER_SEQUENCE_LENGTH, model_max_sequence_length(source)
    )
    world = max(1, settings.nodes * settings.gpus_per_node)
    tokens = min(MOST_TOKENS, world * (CPU_TOKENS if is_cpu else TOKENS_PER_GPU))
    batch = max(1, round(tokens / length / world)) * world
    precision = "fp32" if is_cpu else "bf16" if "bf16" in peaks else "fp16"
    quote = json.dumps  # of text: JSON's form is YAML's too
    links = (
        ""
        if entry is None
        else _LINKS.format(
            intra=f"{entry['intra_node_gbytes_per_second']:g}",
            inter=f"{entry['inter_node_gbits_per_second']:g}",
        )
    )
    return _TEXT.format(
        name=settings.name,
        model=quote(settings.model),
        nodes=settings.nodes,
        gpus_per_node=settings.gpus_per_node,
        gpu=quote(settings.gpu),
        links=links,
        islands=_ISLANDS if settings.nodes > 1 else "",
        length=length,
        batch=batch,
        step_tokens=f"{batch * length:,}",
        precision=precision,
        precisions=", ".join(peaks),
        weights=_PRETRAINED if settings.has_weights else _RANDOM,
        lr=_FINE_TUNING if settings.has_weights else _FROM_SCRATCH,
    )


_PRETRAINED = (
    "pretrained # goes on from the folder's weights; `random` trains from scratch (at lr 3e-4, say)"
)
_RANDOM = "random # from scratch; `pretrained` goes on from the published weights (at lr 2e-5, say)"
# Of fine-tuning whole models of 7 B (Alpaca, and Llama 2's section 3.1); of pre-training (Llama 2,
# table 1).
_FINE_TUNING, _FROM_SCRATCH = "2e-5", "3e-4"
_LINKS = """\
  # intra_node_gbytes_per_second: {intra} # per GPU, one direction; this is the catalogue's value
  # inter_node_gbits_per_second: {inter} # per GPU; this is the catalogue's value
"""
_ISLANDS = """\
  # islands: 2 # groups of nodes with a slow link between them (docs/islands.md)
  # inter_island_gbits_per_second: 10 # of that link
"""
_TEXT = """\
# Every key with its default: `shardwright schema`. Next:
#   shardwright check FILE               is it right?
#   shardwright plan FILE                the layouts, best first; --pin ROW writes one here
#   shardwright compile FILE -o DIR      the folder that trains; shardwright run DIR
version: 1
name: {name}

model:
  source: {model}
  weights: {weights}

cluster:
  nodes: {nodes} # or auto, with training.days_at_most: the fewest that meet the deadline
  gpus_per_node: {gpus_per_node}
  gpu: {gpu}
{links}\
{islands}\
  # host_memory_gib: 1800 # of a node; lets `parallelism.offload: auto` move states there
  # price_per_gpu_hour: 2.5 # for the cost, in any currency

training:
  sequence_length: {length}
  global_batch_size: {batch} # sequences a step: {step_tokens} tokens
  steps: 1000 # or tokens: 1e12
  precision: {precision} # this GPU has {precisions}
  optimizer: {{name: adamw, lr: {lr}, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1}}
  scheduler: {{name: cosine, warmup_ratio: 0.03, min_lr_ratio: 0.1}}
  gradient_clipping: 1.0
  seed: 1234

data:
  kind: synthetic # made-up tokens, to measure with; your own, for example:
  # kind: text
  # path: corpus/*.txt # relative to this file
  # tokenizer: {model} # or byte, or a folder
  # packing: false

# parallelism: # every key is auto: the compiler chooses. A value pins it.
#   tensor: 2
#   pipeline: 4
#   zero_stage: 1

checkpoint:
  directory: checkpoints # in the compiled folder
  every_steps: 500 # or auto: by how long a save takes and how often the cluster fails
  keep: 3
"""
