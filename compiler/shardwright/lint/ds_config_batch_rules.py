"""train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data ranks
(runtime/config.py)."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.layout.zero_hpz_key import HPZ
from shardwright.lint.lint_rule import LintedDsConfig, RuleViolation, rule

TRAIN_BATCH_SIZE_KEY, MICRO_BATCH_SIZE_KEY, ACCUMULATION_STEPS_KEY = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def data_ranks(ds_config: LintedDsConfig) -> int | None:
    """What DeepSpeed divides by: the ranks, over the sequence-parallel ones. It does not divide by
    tensor_parallel.autotp_size, nor by pipeline stages that only the module knows; so None with a
    pipeline."""
    world = ds_config.world_size
    sequence = ds_config.integer("sequence_parallel_size") or 1
    if world is None or ds_config.has_pipeline or world % sequence:
        return None
    return world // sequence


@rule("SW4201")
def no_batch_size(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if (
        ds_config.audience == "deepspeed"
        and ds_config.get(TRAIN_BATCH_SIZE_KEY) is None
        and ds_config.get(MICRO_BATCH_SIZE_KEY) is None
    ):
        yield RuleViolation(
            (),
            (
                f"neither `{TRAIN_BATCH_SIZE_KEY}` nor `{MICRO_BATCH_SIZE_KEY}` is given: "
                "DeepSpeed "
                "refuses the file"
            ),
            f"Give one of them, such as {MICRO_BATCH_SIZE_KEY}: 1.",
        )


@rule("SW4202")
def batch_size_mismatch(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    train, micro, steps = (
        ds_config.integer(key)
        for key in (TRAIN_BATCH_SIZE_KEY, MICRO_BATCH_SIZE_KEY, ACCUMULATION_STEPS_KEY)
    )
    ranks = data_ranks(ds_config)
    if not train or not micro or not steps:
        return
    if ranks is not None and train != micro * steps * ranks:
        yield RuleViolation(
            (TRAIN_BATCH_SIZE_KEY,),
            (
                f"{TRAIN_BATCH_SIZE_KEY} {train} is not {micro} x {steps} x {ranks} data ranks = "
                f"{micro * steps * ranks}"
            ),
            (
                f"Leave {ACCUMULATION_STEPS_KEY} out, and DeepSpeed works it out; or write "
                f"{micro * steps * ranks}."
            ),
        )
    elif ranks is None and train % (micro * steps):
        yield RuleViolation(
            (TRAIN_BATCH_SIZE_KEY,),
            (
                f"{TRAIN_BATCH_SIZE_KEY} {train} is no multiple of {micro} x {steps}: no number of "
                "ranks makes it up"
            ),
            f"Leave {ACCUMULATION_STEPS_KEY} out, and DeepSpeed works it out.",
        )


@rule("SW4203")
def batch_size_not_divisible(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    train = ds_config.integer(TRAIN_BATCH_SIZE_KEY)
    given = {
        key: value
        for key in (MICRO_BATCH_SIZE_KEY, ACCUMULATION_STEPS_KEY)
        if (value := ds_config.integer(key))
    }
    filled = any(
        ds_config.get(key) == "auto" for key in (MICRO_BATCH_SIZE_KEY, ACCUMULATION_STEPS_KEY)
    )
    if not train or len(given) == 2 or filled:
        return
    ranks = data_ranks(ds_config)
    per_rank = next(iter(given.values()), 1)
    if train % (per_rank * (ranks or 1)) == 0:
        return
    parts = [f"{value} of {key}" for key, value in given.items()] + (
        [f"{ranks} data ranks"] if ranks else []
    )
    yield RuleViolation(
        (TRAIN_BATCH_SIZE_KEY,),
        f"{TRAIN_BATCH_SIZE_KEY} {train} does not divide by {' x '.join(parts)}",
        (
            f"Take a multiple of {per_rank * (ranks or 1)}; DeepSpeed rounds down and then refuses "
            "the file."
        ),
    )


@rule("SW4204")
def group_size_not_divisor(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    world = ds_config.world_size
    for key in (
        ("tensor_parallel", "autotp_size"),
        ("sequence_parallel_size",),
        ("zero_optimization", HPZ),
    ):
        size = ds_config.integer(*key)
        if world is not None and size is not None and size > 1 and world % size:
            if key[-1] == HPZ and (ds_config.stage != 3 or size > world):
                continue  # a larger group is cut down to the world
            yield RuleViolation(
                key,
                f"{'.'.join(key)}: {size} does not divide the {world} ranks",
                f"Take a divisor of {world}.",
            )


@rule("SW4205")
def mesh_size_mismatch(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    data, sequence = (
        ds_config.integer("data_parallel_size"),
        ds_config.integer("sequence_parallel_size"),
    )
    if (
        ds_config.world_size is not None
        and data
        and sequence
        and data * sequence != ds_config.world_size
    ):
        yield RuleViolation(
            ("data_parallel_size",),
            (
                f"data_parallel_size {data} x sequence_parallel_size {sequence} is not "
                f"{ds_config.world_size} ranks"
            ),
            f"Their product must be the number of ranks, {ds_config.world_size}.",
        )
