"""Batch sizes, lengths and the number of steps."""

from __future__ import annotations

from shardwright.lint.ds_config_batch_rules import (
    ACCUMULATION_STEPS_KEY,
    MICRO_BATCH_SIZE_KEY,
    TRAIN_BATCH_SIZE_KEY,
)
from shardwright.migrate.import_sources import TRAINER_DEFAULT, ImportSources, as_count, as_number

BATCH, MICRO_BATCH = "training.global_batch_size", "parallelism.micro_batch_size"
_MICRO_BATCH_ARGUMENTS = (
    "per_device_train_batch_size",
    "per_gpu_train_batch_size",
    "train_micro_batch_size_per_gpu",
)
_SEQUENCE_LENGTH_ARGUMENTS = (
    *(
        "max_seq_length",
        "max_seq_len",
        "max_length",
        "sequence_length",
        "seq_length",
        "seq_len",
        "block_size",
    ),
    *("model_max_length", "cutoff_len", "sequence_len"),
)
TRAINER_MICRO_BATCH_SIZE, TRAINER_EPOCHS = 8, 3.0


def parallel(s: ImportSources) -> None:
    """The degrees: what the file runs today is pinned."""
    named = next(
        (n for n in ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size") if s.integer(n)),
        "",
    )
    s.draft.put("parallelism.tensor", max(1, (s.integer(named) if named else None) or 1), named)
    if not s.has("pipeline"):
        s.draft.put("parallelism.pipeline", 1)
        return
    stages = s.integer("pipeline.stages")
    if stages:
        s.draft.put("parallelism.pipeline", stages, "pipeline.stages")
    else:
        s.draft.put("parallelism.pipeline", "auto")
        s.draft.note(
            "parallelism",
            "pipeline: the script's num_stages, which no file says; auto lets compile choose",
        )


def batch(s: ImportSources) -> None:
    """train_batch_size = micro-batch x accumulation x data ranks; what two of them say of the third
    is used."""
    data = _data_ranks(s)
    train, steps = s.integer(TRAIN_BATCH_SIZE_KEY), s.integer(ACCUMULATION_STEPS_KEY)
    typed = s.word(as_count, ACCUMULATION_STEPS_KEY)
    steps = (
        steps or (typed[1] if typed else None) or (1 if s.is_trainer and s.has_command else None)
    )
    micro = _micro_batch_size(s, train, steps, data)
    _global_batch_size(s, train, micro, steps, data)
    for source in (*s.there(ACCUMULATION_STEPS_KEY), *((typed[0],) if typed else ())):
        s.draft.take(source, BATCH)
    if micro is None and s.has(MICRO_BATCH_SIZE_KEY):
        s.draft.take(MICRO_BATCH_SIZE_KEY, MICRO_BATCH)
        s.draft.note("parallelism", f"{MICRO_BATCH_SIZE_KEY}: auto; left to compile")
    tensor = s.draft.values["parallelism.tensor"]
    if isinstance(tensor, int) and tensor > 1 and train:
        s.draft.note(
            "training",
            (
                f"DeepSpeed counts tensor ranks as data ranks in {TRAIN_BATCH_SIZE_KEY}; "
                "here it is "
                "sequences"
            ),
        )


def _data_ranks(s: ImportSources) -> int | None:
    tensor, pipeline = (s.draft.values[f"parallelism.{axis}"] for axis in ("tensor", "pipeline"))
    if not s.world_size or not isinstance(tensor, int) or not isinstance(pipeline, int):
        return None
    return s.world_size // (tensor * pipeline) or None


def _micro_batch_size(
    s: ImportSources, train: int | None, steps: int | None, data: int | None
) -> int | None:
    """The micro-batch: said, or what the others leave. Where the others say the world size, it is
    noted."""
    micro = s.settle(
        MICRO_BATCH,
        as_count,
        *_MICRO_BATCH_ARGUMENTS,
        dotted=MICRO_BATCH_SIZE_KEY,
        default=TRAINER_MICRO_BATCH_SIZE,
    )
    if s.world_size is None and train and micro and steps and train % (micro * steps) == 0:
        s.world_size = train // (micro * steps)
    if micro is None and train and data and train % (data * (steps or 1)) == 0:
        micro = train // (data * (steps or 1))
        s.draft.put(
            MICRO_BATCH,
            micro,
            f"{TRAIN_BATCH_SIZE_KEY} / {ACCUMULATION_STEPS_KEY} / {data} data ranks",
            *s.there(MICRO_BATCH_SIZE_KEY),
        )
    return micro


def _global_batch_size(
    s: ImportSources, train: int | None, micro: int | None, steps: int | None, data: int | None
) -> None:
    if train:
        s.draft.put(BATCH, train, TRAIN_BATCH_SIZE_KEY)
    elif micro and data:
        origin = f"{micro} sequences x {steps or 1} steps of accumulation x {data} data ranks"
        s.draft.put(BATCH, micro * (steps or 1) * data, origin, *s.there(TRAIN_BATCH_SIZE_KEY))
    else:
        known = f"{micro or 'micro-batch'} x {steps or 'accumulation'} x the number of data ranks"
        s.unanswered(BATCH, TRAIN_BATCH_SIZE_KEY, f"sequences of an optimizer step: {known}")


def length(s: ImportSources) -> None:
    if s.settle("training.sequence_length", as_count, *_SEQUENCE_LENGTH_ARGUMENTS) is None:
        s.draft.ask(
            "training.sequence_length", "tokens of a sequence, as the script cuts or pads them"
        )


def duration(s: ImportSources) -> None:
    """max_steps, else epochs, else what the scheduler counts."""
    total = as_count(s.get("scheduler.params.total_num_steps"))
    steps = s.word(as_count, "max_steps", "max_train_steps")
    epochs = s.word(as_number, "num_train_epochs", "num_epochs", "epochs")
    source = "scheduler.params.total_num_steps"
    if steps is not None:
        s.draft.put("training.steps", steps[1], steps[0])
    elif epochs is not None and epochs[1] > 0:
        s.draft.put("training.epochs", epochs[1], epochs[0])
    elif total is not None:
        s.draft.put("training.steps", total, source)
    elif s.is_trainer and s.has_command:
        s.draft.put("training.epochs", TRAINER_EPOCHS, TRAINER_DEFAULT)
    else:
        s.draft.ask("training.steps", "optimizer steps; or write epochs: or tokens: in its place")
    for word in ("max_steps", "num_train_epochs"):
        if word in s.command.words and f"--{word}" not in s.draft.carried:
            s.draft.leave(
                "training", f"--{word}", " ".join(s.command.words[word]), "the other one counts"
            )
    if s.has(source) and source not in s.draft.carried:
        s.draft.take(source, "training.steps")
