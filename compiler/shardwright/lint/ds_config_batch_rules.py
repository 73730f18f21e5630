"""train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data ranks
(runtime/config.py)."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.layout.zero_hpz_key import HPZ
from shardwright.lint.lint_rule import Fault, LintedConfig, rule

TRAIN, MICRO, STEPS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def data_ranks(subject: LintedConfig) -> int | None:
    """What DeepSpeed divides by: the ranks, over the sequence-parallel ones. It does not divide by
    tensor_parallel.autotp_size, nor by pipeline stages that only the module knows; so None with a
    pipeline."""
    world = subject.world_size
    sequence = subject.integer("sequence_parallel_size") or 1
    if world is None or subject.has_pipeline or world % sequence:
        return None
    return world // sequence


@rule("SW4201")
def no_batch_size(subject: LintedConfig) -> Iterator[Fault]:
    if (
        subject.audience == "deepspeed"
        and subject.get(TRAIN) is None
        and subject.get(MICRO) is None
    ):
        yield Fault(
            (),
            f"neither `{TRAIN}` nor `{MICRO}` is given: DeepSpeed refuses the file",
            f"Give one of them, such as {MICRO}: 1.",
        )


@rule("SW4202")
def contradiction(subject: LintedConfig) -> Iterator[Fault]:
    train, micro, steps = (subject.integer(key) for key in (TRAIN, MICRO, STEPS))
    ranks = data_ranks(subject)
    if not train or not micro or not steps:
        return
    if ranks is not None and train != micro * steps * ranks:
        yield Fault(
            (TRAIN,),
            (
                f"{TRAIN} {train} is not {micro} x {steps} x {ranks} data ranks = "
                f"{micro * steps * ranks}"
            ),
            f"Leave {STEPS} out, and DeepSpeed works it out; or write {micro * steps * ranks}.",
        )
    elif ranks is None and train % (micro * steps):
        yield Fault(
            (TRAIN,),
            f"{TRAIN} {train} is no multiple of {micro} x {steps}: no number of ranks makes it up",
            f"Leave {STEPS} out, and DeepSpeed works it out.",
        )


@rule("SW4203")
def does_not_divide(subject: LintedConfig) -> Iterator[Fault]:
    train = subject.integer(TRAIN)
    given = {key: value for key in (MICRO, STEPS) if (value := subject.integer(key))}
    filled = any(subject.get(key) == "auto" for key in (MICRO, STEPS))
    if not train or len(given) == 2 or filled:
        return
    ranks = data_ranks(subject)
    per_rank = next(iter(given.values()), 1)
    if train % (per_rank * (ranks or 1)) == 0:
        return
    parts = [f"{value} of {key}" for key, value in given.items()] + (
        [f"{ranks} data ranks"] if ranks else []
    )
    yield Fault(
        (TRAIN,),
        f"{TRAIN} {train} does not divide by {' x '.join(parts)}",
        (
            f"Take a multiple of {per_rank * (ranks or 1)}; DeepSpeed rounds down and then refuses "
            "the file."
        ),
    )


@rule("SW4204")
def groups_do_not_divide(subject: LintedConfig) -> Iterator[Fault]:
    world = subject.world_size
    for key in (
        ("tensor_parallel", "autotp_size"),
        ("sequence_parallel_size",),
        ("zero_optimization", HPZ),
    ):
        size = subject.integer(*key)
        if world is not None and size is not None and size > 1 and world % size:
            if key[-1] == HPZ and (subject.stage != 3 or size > world):
                continue  # a larger group is cut down to the world
            yield Fault(
                key,
                f"{'.'.join(key)}: {size} does not divide the {world} ranks",
                f"Take a divisor of {world}.",
            )


@rule("SW4205")
def mesh(subject: LintedConfig) -> Iterator[Fault]:
    data, sequence = (
        subject.integer("data_parallel_size"),
        subject.integer("sequence_parallel_size"),
    )
    if (
        subject.world_size is not None
        and data
        and sequence
        and data * sequence != subject.world_size
    ):
        yield Fault(
            ("data_parallel_size",),
            (
                f"data_parallel_size {data} x sequence_parallel_size {sequence} is not "
                f"{subject.world_size} ranks"
            ),
            f"Their product must be the number of ranks, {subject.world_size}.",
        )
