"""Convert batch sizes, lengths, the number of steps, the optimizer and the scheduler."""

from __future__ import annotations

from shardwright.lint.ds_config_training_rules import (
    ACCUMULATION_STEPS_KEY,
    MICRO_BATCH_SIZE_KEY,
    TRAIN_BATCH_SIZE_KEY,
)
from shardwright.migrate.recipe_draft import (
    TRAINER_DEFAULT,
    ImportSources,
    as_count,
    as_number,
    as_text,
)
from shardwright.utils.json_values import JsonValue

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
    """Pin the degrees that the file runs with."""
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
    """Convert the batch sizes: train_batch_size = micro-batch x accumulation x data ranks.

    Two of them determine the third.
    """
    data = None
    tensor, pipeline = (s.draft.values[f"parallelism.{axis}"] for axis in ("tensor", "pipeline"))
    if s.world_size and isinstance(tensor, int) and isinstance(pipeline, int):
        data = s.world_size // (tensor * pipeline) or None
    train, steps = s.integer(TRAIN_BATCH_SIZE_KEY), s.integer(ACCUMULATION_STEPS_KEY)
    typed = s.word(as_count, ACCUMULATION_STEPS_KEY)
    steps = (
        steps or (typed[1] if typed else None) or (1 if s.is_trainer and s.has_command else None)
    )
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
    if train:
        s.draft.put(BATCH, train, TRAIN_BATCH_SIZE_KEY)
    elif micro and data:
        origin = f"{micro} sequences x {steps or 1} steps of accumulation x {data} data ranks"
        s.draft.put(BATCH, micro * (steps or 1) * data, origin, *s.there(TRAIN_BATCH_SIZE_KEY))
    else:
        known = f"{micro or 'micro-batch'} x {steps or 'accumulation'} x the number of data ranks"
        s.unanswered(BATCH, TRAIN_BATCH_SIZE_KEY, f"sequences of an optimizer step: {known}")
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


def length(s: ImportSources) -> None:
    if s.settle("training.sequence_length", as_count, *_SEQUENCE_LENGTH_ARGUMENTS) is None:
        s.draft.ask(
            "training.sequence_length", "tokens of a sequence, as the script cuts or pads them"
        )


def duration(s: ImportSources) -> None:
    """Convert max_steps, else epochs, else the scheduler's steps."""
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


# Optimizer, schedule and clipping.


SECTION = "training.optimizer"
_ADAM = frozenset({"adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam"})
_TRAINER_ADAM_NAMES = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw")
# parameter -> (word, DeepSpeed's default and the Trainer's)
_NUMBERS: dict[str, tuple[str, float]] = {
    "eps": ("adam_epsilon", 1e-8),
    "weight_decay": ("weight_decay", 0.0),
}
BETAS = (0.9, 0.999)
TRAINER_LEARNING_RATE = 5e-5
# Parameters of Adam's that choose an implementation, or say what is so anyway.
_IMPLEMENTATION = frozenset(
    {
        "torch_adam",
        "adam_w_mode",
        "bias_correction",
        "set_grad_none",
        "fused",
        "foreach",
        "capturable",
    }
)


def optimizer(s: ImportSources) -> None:
    kind = as_text(s.get("optimizer.type"))
    if kind is not None and kind.lower() not in _ADAM:
        why = "AdamW is the one optimizer of a recipe; its learning rate is another one"
        s.draft.leave(SECTION, "optimizer.type", kind, why)
        for name, value in s.section("optimizer.params").items():
            s.draft.leave(SECTION, f"optimizer.params.{name}", value, f"of {kind}")
        s.draft.ask(f"{SECTION}.lr", f"the learning rate for AdamW; the file trains by {kind}")
        return
    if kind is not None:
        s.draft.put(f"{SECTION}.name", "adamw", f"optimizer.type: {kind}", "optimizer.type")
        if "adamw" not in kind.lower() and s.get("optimizer.params.adam_w_mode") is False:
            why = (
                "this is Adam with L2 regularization; a recipe has AdamW, whose weight decay is "
                "decoupled"
            )
            s.draft.leave(SECTION, "optimizer.params.adam_w_mode", False, why)
    typed = s.word(as_text, "optim")
    if typed is not None and typed[1].lower() in _TRAINER_ADAM_NAMES:
        s.draft.put(f"{SECTION}.name", "adamw", typed[0])
    elif typed is not None:
        s.draft.leave(SECTION, typed[0], typed[1], "AdamW is the one optimizer of a recipe")
    key, path = f"{SECTION}.lr", "optimizer.params.lr"
    if (
        s.settle(key, as_number, "learning_rate", "lr", dotted=path, default=TRAINER_LEARNING_RATE)
        is None
    ):
        s.unanswered(key, path, "the highest learning rate")
    _betas(s)
    for name, (word, default) in _NUMBERS.items():
        key, path = f"{SECTION}.{name}", f"optimizer.params.{name}"
        if s.settle(key, as_number, word, dotted=path, default=default) is None:
            s.draft.put(key, default, "DeepSpeed's default", *s.there(path))
    if s.draft.values[f"{SECTION}.weight_decay"] and not s.is_trainer:
        s.draft.note(
            SECTION,
            (
                "weight decay: a recipe decays parameters of two or more dimensions, DeepSpeed "
                "all of them"
            ),
        )
    for name, value in s.section("optimizer.params").items():
        implements = name in _IMPLEMENTATION
        why = (
            "an AdamW is an AdamW; compile chooses its kernels"
            if implements
            else "a recipe's AdamW has no such parameter"
        )
        s.draft.leave(SECTION, f"optimizer.params.{name}", value, why)


def _betas(s: ImportSources) -> None:
    path, given = "optimizer.params.betas", s.get("optimizer.params.betas")
    if (
        isinstance(given, list | tuple)
        and len(given) == 2
        and all(as_number(b) is not None for b in given)
    ):
        s.draft.put(f"{SECTION}.betas", list(given), path)
        return
    first, second = s.word(as_number, "adam_beta1"), s.word(as_number, "adam_beta2")
    values: list[JsonValue] = [first[1] if first else BETAS[0], second[1] if second else BETAS[1]]
    sources = tuple(found[0] for found in (first, second) if found)
    origin = " and ".join(sources) or (TRAINER_DEFAULT if s.is_trainer else "DeepSpeed's default")
    s.draft.put(f"{SECTION}.betas", values, origin, *sources, *s.there(path))


def clipping(s: ImportSources) -> None:
    key, name = "training.gradient_clipping", "gradient_clipping"
    if s.settle(key, as_number, "max_grad_norm", name, dotted=name, default=1.0) is None:
        s.draft.put(key, 1.0, "DeepSpeed's and the Trainer's default", *s.there(name))


SCHEDULE = "training.scheduler"
# The Trainer's names -> a recipe's curve.
_TRAINER_SCHEDULES: dict[str, str] = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
}
_DEEPSPEED_SCHEDULES: dict[str, str] = {
    "WarmupLR": "constant",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}
_PARAMS = "scheduler.params"


def scheduler(s: ImportSources) -> None:
    kind = as_text(s.get("scheduler.type"))
    if kind in _DEEPSPEED_SCHEDULES:
        s.draft.put(
            f"{SCHEDULE}.name",
            _DEEPSPEED_SCHEDULES[str(kind)],
            f"scheduler.type: {kind}",
            "scheduler.type",
        )
        _convert_deepspeed_schedule(s, str(kind))
    elif kind is not None:
        s.draft.leave(
            SCHEDULE, "scheduler.type", kind, "a recipe's curves are constant, linear, cosine, wsd"
        )
        s.draft.put(f"{SCHEDULE}.name", "constant")
    else:
        _convert_trainer_schedule(s)
    typed = s.command.words.get("lr_scheduler_type")
    if kind is not None and typed:
        s.draft.leave(
            SCHEDULE, "--lr_scheduler_type", " ".join(typed), "the file's own scheduler counts"
        )
    # As in the Trainer steps precede a ratio, and steps below 1 are a ratio.
    path = "" if kind is None else f"{_PARAMS}.warmup_num_steps"
    given = as_count(s.get(path)) if path else None
    sources = s.there(path)
    steps = s.word(as_number, "warmup_steps", "num_warmup_steps")
    ratio = s.word(as_number, "warmup_ratio")
    part = steps if steps is not None and steps[1] > 0 else ratio
    if given is not None:
        s.draft.put(f"{SCHEDULE}.warmup_steps", given, path)
    elif steps is not None and steps[1] >= 1:
        s.draft.put(f"{SCHEDULE}.warmup_steps", int(steps[1]), steps[0], steps[0], *sources)
    elif part is not None and 0 <= part[1] < 1:
        s.draft.put(f"{SCHEDULE}.warmup_ratio", part[1], part[0], part[0], *sources)
    elif kind in _DEEPSPEED_SCHEDULES and not sources:
        s.draft.put(f"{SCHEDULE}.warmup_steps", 1000, "DeepSpeed's default")
    else:
        s.draft.put(f"{SCHEDULE}.warmup_steps", 0, "", *sources)
    for found in (steps, ratio):
        if found is not None and found[0] not in s.draft.carried:
            s.draft.leave(SCHEDULE, found[0], found[1], "the other one counts")
    for name, value in s.section(_PARAMS).items():
        s.draft.leave(
            SCHEDULE,
            f"{_PARAMS}.{name}",
            value,
            f"a recipe's schedule has no such value; {kind} has",
        )


def _convert_deepspeed_schedule(s: ImportSources, kind: str) -> None:
    top = f"{_PARAMS}.warmup_max_lr"
    rate = as_number(s.get(top))
    if rate is not None and rate > 0:
        before = s.draft.values.get(f"{SECTION}.lr")
        if isinstance(before, float) and before != rate:
            s.draft.note(
                SECTION,
                (
                    f"optimizer.params.lr was {before:g}; the scheduler sets warmup_max_lr in "
                    "its place"
                ),
            )
        s.draft.fill.pop(f"{SECTION}.lr", None)
        s.draft.put(f"{SECTION}.lr", rate, top)
    elif s.has(top):
        s.draft.take(top, f"{SECTION}.lr")
    least = f"{_PARAMS}.warmup_min_lr"
    if s.has(least) and not s.number(least):
        s.draft.take(least, SCHEDULE)  # 0, or what the Trainer makes 0
    if kind == "WarmupCosineLR":
        ratio = s.number(f"{_PARAMS}.cos_min_ratio")
        source = f"{_PARAMS}.cos_min_ratio" if ratio is not None else "WarmupCosineLR's default"
        s.draft.put(f"{SCHEDULE}.min_lr_ratio", 0.0001 if ratio is None else ratio, source)
    curve = f"{_PARAMS}.warmup_type"
    if s.get(curve) == "linear":
        s.draft.take(curve, SCHEDULE)
    elif kind != "WarmupCosineLR" or s.has(curve):
        s.draft.note(
            SCHEDULE,
            "warm-up: DeepSpeed's default curve is a logarithm, a recipe's is a straight line",
        )
        if s.has(curve):
            s.draft.leave(SCHEDULE, curve, s.get(curve), "a recipe warms up along a straight line")


def _convert_trainer_schedule(s: ImportSources) -> None:
    typed = s.word(as_text, "lr_scheduler_type")
    name = typed[1].lower() if typed is not None else "linear" if s.is_trainer else "constant"
    if typed is not None and name in _TRAINER_SCHEDULES:
        s.draft.put(f"{SCHEDULE}.name", _TRAINER_SCHEDULES[name], typed[0])
    elif typed is not None:
        s.draft.leave(
            SCHEDULE, typed[0], typed[1], "a recipe's curves are constant, linear, cosine, wsd"
        )
        s.draft.put(f"{SCHEDULE}.name", "constant")
    elif s.is_trainer:
        s.draft.put(f"{SCHEDULE}.name", "linear", TRAINER_DEFAULT)
    else:
        s.draft.put(f"{SCHEDULE}.name", "constant", "no scheduler in the file: the rate stays")
