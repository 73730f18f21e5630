"""Convert batch sizes, lengths, the number of steps, the optimizer and the scheduler."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import get_args

from shardwright.engines.megatron.low_precision_recipes import LOW_PRECISION_RECIPES
from shardwright.lint.ds_config_training_rules import (
    ACCUMULATION_STEPS_KEY,
    MICRO_BATCH_SIZE_KEY,
    TRAIN_BATCH_SIZE_KEY,
)
from shardwright.migrate.muon_settings import deepspeed_muon, megatron_muon
from shardwright.migrate.recipe_draft import (
    ImportSources,
    as_count,
    as_number,
    as_switch,
    as_text,
)
from shardwright.recipe.learning_rate_schedules import SCHEDULES, UNPLANNED_SCHEDULES
from shardwright.recipe.literal_types import ExpertDispatcher
from shardwright.recipe.optimizer_keys import OPTIMIZER_KEYS
from shardwright.utils.json_values import JsonObject, JsonValue

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
    *("model_max_length", "cutoff_len", "sequence_len", "max_len"),
)
_STEPS = "gradient_accumulation_steps"
_GLOBAL_BATCH_ARGUMENTS = ("global_batch_size",)
# Recipe axis -> names of its ranks: ds_config's, Accelerate's and the programs'.
_AXES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tensor": (
        ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"),
        (
            *("tensor_parallel_size", "tensor_model_parallel_size", "megatron_lm_tp_degree"),
            *("parallelism_config_tp_size", "tp_size"),
        ),
    ),
    "pipeline": (
        (),
        ("pipeline_parallel_size", "pipeline_model_parallel_size", "megatron_lm_pp_degree"),
    ),
    "context": (
        ("sequence_parallel_size",),
        (
            *("sequence_parallel_size", "context_parallel_size", "ulysses_sequence_parallel_size"),
            *("parallelism_config_sp_size", "parallelism_config_cp_size", "cp_size"),
        ),
    ),
    "expert": (
        ("expert_parallel.autoep_size",),
        ("expert_parallel_size", "expert_model_parallel_size"),
    ),
}
_MEGATRON_WORDS = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_DATA_AXES = (
    "parallelism_config_dp_replicate_size",
    "parallelism_config_dp_shard_size",
    "dp_shard_size",
    "dp_replicate_size",
)


def target(s: ImportSources) -> None:
    """Set the engine where the run is Megatron's."""
    kind = s.word(as_text, "distributed_type")
    if s.program is not None and s.program.target:
        s.draft.put("target", s.program.target, f"the command is {s.program.name}'s")
    elif kind is not None and kind[1].upper() == "MEGATRON_LM":
        s.draft.put("target", "megatron", f"{kind[0]}: {kind[1]}", kind[0])
    else:
        own = next((s.settings[name] for name in _MEGATRON_WORDS if name in s.settings), None)
        if own is not None:
            s.draft.put("target", "megatron", f"{own.written} is Megatron-Core's", own.written)


def parallel(s: ImportSources) -> None:
    """Pin the degrees that the run has."""
    for axis, (keys, words) in _AXES.items():
        _degree(s, axis, keys, words)
    for name in _DATA_AXES:
        found = s.word(as_count, name)
        if found is not None:
            s.draft.take(found[0], "parallelism.data")
    if s.draft.values.get("target") == "megatron":
        _megatron_degrees(s)
    if not s.has("pipeline"):
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


def _degree(s: ImportSources, axis: str, keys: tuple[str, ...], words: tuple[str, ...]) -> None:
    """Pin one axis. Several words multiply: Accelerate's sp_size and cp_size."""
    key = f"parallelism.{axis}"
    named = next((name for name in keys if s.integer(name)), "")
    if named:
        s.draft.put(key, max(1, s.integer(named) or 1), named)
        return
    given = [name for name in words if s.setting(name) is not None]
    counts = [(found, name) for name in given if (found := s.word(as_count, name)) is not None]
    if len(counts) < len(given):
        s.ask_unread(key, *(n for n in given if all(n != name for _, name in counts)))
        return
    if counts:
        degree = 1
        for (_, count), _name in counts:
            degree *= count
        sources = [found[0] for found, _ in counts]
        s.draft.put(key, degree, " x ".join(sources), *sources)
    elif axis in ("tensor", "pipeline") and s.hidden and s.draft.values.get("target") == "megatron":
        s.draft.ask(key, f"ranks of this axis; {s.hidden}")
    elif axis in ("tensor", "pipeline"):
        s.draft.put(key, 1)


def _megatron_degrees(s: ImportSources) -> None:
    """Convert the keys that only Megatron-Core's layouts have."""
    flag = s.word(as_switch, "sequence_parallel", "megatron_lm_sequence_parallelism")
    if flag is not None:
        s.draft.put("parallelism.sequence_parallel", flag[1], flag[0])
    else:
        s.ask_unread(
            "parallelism.sequence_parallel", "sequence_parallel", "megatron_lm_sequence_parallelism"
        )
    s.settle("parallelism.expert_tensor", as_count, "expert_tensor_parallel_size")
    _expert_exchange(s)
    stages = s.draft.values.get("parallelism.pipeline")
    layers = s.word(as_count, "num_layers")
    for name in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"):
        found = s.word(as_count, name)
        if found is None:
            s.ask_unread("parallelism.virtual_stages", name)
        elif name.startswith("num_virtual"):
            s.draft.put("parallelism.virtual_stages", found[1], found[0])
        elif (
            layers is not None and isinstance(stages, int) and layers[1] % (stages * found[1]) == 0
        ):
            count = layers[1] // stages // found[1]
            s.draft.put("parallelism.virtual_stages", count, found[0])
        else:
            s.ask_unread("parallelism.virtual_stages", name)


_DISPATCHER = "parallelism.expert_dispatcher"
_DISPATCHER_NAMES = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend")


def _expert_exchange(s: ImportSources) -> None:
    """Convert Megatron-Core's token dispatcher, whose flex type has a backend, by default DeepEP,
    and the overlap of its exchange with another micro-batch's computation."""
    if s.setting("overlap_moe_expert_parallel_comm") is not None:
        s.settle("parallelism.expert_overlap", as_switch, "overlap_moe_expert_parallel_comm")
    kind, backend = (s.word(as_text, name) for name in _DISPATCHER_NAMES)
    enabled = s.word(as_switch, "moe_enable_deepep")
    if kind is None:  # Megatron-Core ignores a backend without the type flex
        s.ask_unread(_DISPATCHER, "moe_token_dispatcher_type")
        return
    name = kind[1]
    if name == "flex":
        if backend is None and s.ask_unread(_DISPATCHER, "moe_flex_dispatcher_backend"):
            s.draft.take(kind[0], _DISPATCHER)
            return
        name = "deepep" if backend is None or (enabled and enabled[1]) else backend[1]
    dtype = s.word(as_text, "moe_router_dtype")
    if name != "deepep" or dtype is None or dtype[1] != "fp32":  # the lowering of deepep writes it
        dtype = None
    sources = [found[0] for found in (kind, backend, enabled, dtype) if found is not None]
    if name in get_args(ExpertDispatcher):
        s.draft.put(_DISPATCHER, name, " ".join(sources), *sources)
        return
    why = f"a recipe's expert_dispatcher has no {name}: tokens are exchanged by alltoall"
    for source, value in (found for found in (kind, backend) if found is not None):
        s.draft.leave("parallelism", source, value, why)


def _data_ranks(s: ImportSources) -> int | None:
    """Return the ranks that train sequences of their own; None where a degree is not known."""
    ranks = s.world_size
    for axis in ("tensor", "pipeline", "context"):
        degree = s.draft.values.get(f"parallelism.{axis}", 1)
        if not isinstance(degree, int) or ranks is None:
            return None
        ranks = ranks // degree
    return ranks or None


def _accumulation(s: ImportSources) -> tuple[int | None, str]:
    """Return the steps of accumulation and why they are not known."""
    steps = s.integer(ACCUMULATION_STEPS_KEY)
    names = ("megatron_lm_num_micro_batches", _STEPS)
    typed = s.word(as_count, *names)
    if steps is None and typed is not None:
        steps = typed[1]
    settings = [table[n] for table in (s.settings, s.options) for n in names if n in table]
    for source in (*s.there(ACCUMULATION_STEPS_KEY), *(found.written for found in settings)):
        s.draft.take(source, BATCH)
    read = {count for found in settings if (count := found.read(as_count)) is not None}
    if s.integer(ACCUMULATION_STEPS_KEY) is None and len(read) > 1:
        return None, " and ".join(found.told() for found in settings)
    present = settings[0] if settings else None
    if steps is not None:
        return steps, ""
    if present is not None:
        return None, present.told()
    if s.program is not None:
        default = as_count(s.program.defaults.get(_STEPS))
        return default, s.program.unknown_defaults.get(_STEPS, "")
    return None, ""


def batch(s: ImportSources) -> None:
    """Convert the batch sizes: train_batch_size = micro-batch x accumulation x data ranks.

    Two of them determine the third.
    """
    data = _data_ranks(s)
    train = s.integer(TRAIN_BATCH_SIZE_KEY)
    steps, unknown_steps = _accumulation(s)
    source = TRAIN_BATCH_SIZE_KEY
    typed_batch = s.word(as_count, *_GLOBAL_BATCH_ARGUMENTS)
    if train is None and typed_batch is not None:
        source, train = typed_batch
    micro = s.settle(MICRO_BATCH, as_count, *_MICRO_BATCH_ARGUMENTS, dotted=MICRO_BATCH_SIZE_KEY)
    if s.world_size is None and train and micro and steps and train % (micro * steps) == 0:
        s.world_size = train // (micro * steps)
    if micro is None and MICRO_BATCH not in s.draft.fill and train and data:
        shares = data * (steps or 1)
        if train % shares == 0:
            micro = train // shares
            s.draft.put(
                MICRO_BATCH,
                micro,
                f"{source} / {ACCUMULATION_STEPS_KEY} / {data} data ranks",
                *s.there(MICRO_BATCH_SIZE_KEY),
            )
    is_assumed = s.has_document and steps is None and not unknown_steps  # DeepSpeed's default: 1
    if train:
        s.draft.put(BATCH, train, source)
    elif s.ask_unread(BATCH, *_GLOBAL_BATCH_ARGUMENTS, dotted=TRAIN_BATCH_SIZE_KEY):
        pass
    elif micro and data and (steps or is_assumed):
        origin = f"{micro} sequences x {steps or 1} steps of accumulation x {data} data ranks"
        s.draft.put(BATCH, micro * (steps or 1) * data, origin, *s.there(TRAIN_BATCH_SIZE_KEY))
    else:
        known = (
            f"{micro or 'micro-batch'} x {steps or 'accumulation'} x "
            f"{data or 'the number of data ranks'}"
        )
        why = f"; {unknown_steps}" if unknown_steps else ""
        s.unanswered(BATCH, TRAIN_BATCH_SIZE_KEY, f"sequences of an optimizer step: {known}{why}")
    if micro is None and s.has(MICRO_BATCH_SIZE_KEY) and MICRO_BATCH not in s.draft.fill:
        s.draft.take(MICRO_BATCH_SIZE_KEY, MICRO_BATCH)
        s.draft.note("parallelism", f"{MICRO_BATCH_SIZE_KEY}: auto; left to compile")
    tensor = s.draft.values.get("parallelism.tensor")
    if isinstance(tensor, int) and tensor > 1 and train and s.has_document:
        s.draft.note(
            "training",
            (
                f"DeepSpeed counts tensor ranks as data ranks in {TRAIN_BATCH_SIZE_KEY}; "
                "here it is "
                "sequences"
            ),
        )


def length(s: ImportSources) -> None:
    what = "tokens of a sequence, as the script cuts or pads them"
    if s.settle("training.sequence_length", as_count, *_SEQUENCE_LENGTH_ARGUMENTS) is None:
        s.draft.ask("training.sequence_length", what)


_EPOCHS = ("num_train_epochs", "num_epochs", "epochs")


def duration(s: ImportSources) -> None:
    """Convert max_steps, else epochs, else the scheduler's steps."""
    total = as_count(s.get("scheduler.params.total_num_steps"))
    steps = s.word(as_count, "max_steps", "max_train_steps")
    epochs = s.word(as_number, *_EPOCHS)
    samples = s.word(as_count, "train_samples")
    length = s.draft.values.get("training.sequence_length")
    source = "scheduler.params.total_num_steps"
    is_unset = s.word(as_number, "max_steps")  # the Trainer's -1
    if steps is not None:
        s.draft.put("training.steps", steps[1], steps[0])
    elif is_unset is None and s.setting("max_steps") is not None:
        s.ask_unread("training.steps", "max_steps")
    elif epochs is not None and epochs[1] > 0:
        s.draft.put("training.epochs", epochs[1], epochs[0])
    elif s.ask_unread("training.epochs", *_EPOCHS):
        pass
    elif samples is not None and isinstance(length, int):
        s.draft.put("training.tokens", samples[1] * length, f"{samples[0]} x sequence_length")
        s.draft.take(samples[0], "training.tokens")
    elif total is not None:
        s.draft.put("training.steps", total, source)
    elif "training.steps" in s.checkpoint:
        s.draft.put("training.steps", *s.checkpoint["training.steps"])
    elif (
        s.settle("training.epochs", as_number, "num_train_epochs") is None
        and "training.epochs" not in s.draft.fill
    ):
        s.draft.ask("training.steps", "optimizer steps; or write epochs: or tokens: in its place")
    for word in ("max_steps", "num_train_epochs", "num_epochs"):
        found = s.settings.get(word)
        if found is not None:
            s.draft.leave("training", found.written, found.text, "the other one counts")
    if s.has(source) and source not in s.draft.carried:
        s.draft.take(source, "training.steps")


# Optimizer, schedule and clipping.


SECTION = "training.optimizer"
_ADAM = frozenset({"adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam"})
_TRAINER_ADAM_NAMES = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw")
_OWN_KINDS: Mapping[str, tuple[str, ...]] = {
    "lion": ("lion", "fusedlion", "deepspeedcpulion", "lion_32bit", "paged_lion_32bit"),
}
"""Maps a recipe's optimizer to the names of other programs that train exactly so."""
_TRAINER_KINDS: Mapping[str, tuple[str, ...]] = {
    **_OWN_KINDS,
    "adafactor": ("adafactor",),
    "adamw_8bit": ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"),
}
"""Likewise, of transformers' Trainer and of programs that call it."""
_TRAINER_VALUES: Mapping[str, JsonObject] = {
    "adafactor": {"scale_parameter": False, "eps": 1e-15},
}
"""Maps an optimizer to what the Trainer fixes (trainer_optimizer.py, _get_adafactor); eps is the
root of optimization.Adafactor's."""
_SMALLER_STATES = re.compile(r"(paged_)?adamw_(torch_)?(8bit|4bit|32bit|bnb_8bit)|paged_adamw")
# parameter -> (word, DeepSpeed's default)
_NUMBERS: dict[str, tuple[str, float]] = {
    "eps": ("adam_epsilon", 1e-8),
    "weight_decay": ("weight_decay", 0.0),
}
BETAS = (0.9, 0.999)
_DEFAULT_BETAS: Mapping[str, tuple[float, float]] = {"lion": (0.9, 0.99)}
"""Maps an optimizer to DeepSpeed's defaults (ops/lion/fused_lion.py)."""
_NOT_CARRIED = (
    "import carries AdamW, Muon, Lion and Adafactor alone; another optimizer has other learning "
    "rates"
)
DEEPSPEED_DEFAULT = "DeepSpeed's default"
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


def _own_kind(kind: str | None, kinds: Mapping[str, tuple[str, ...]]) -> str | None:
    """Return the recipe's optimizer, other than AdamW, that trains as another program's `kind`."""
    named = (own for own, names in kinds.items() if kind and kind.lower() in names)
    return next(named, None)


def optimizer(s: ImportSources) -> None:
    kind = as_text(s.get("optimizer.type"))
    if kind is not None and kind.lower() == "muon":
        deepspeed_muon(s, kind)
        return
    own = _own_kind(kind, _OWN_KINDS)
    if kind is not None and own is None and kind.lower() not in _ADAM:
        s.draft.leave(SECTION, "optimizer.type", kind, _NOT_CARRIED)
        for name, value in s.section("optimizer.params").items():
            s.draft.leave(SECTION, f"optimizer.params.{name}", value, f"of {kind}")
        s.draft.ask(f"{SECTION}.lr", f"the learning rate for AdamW; the file trains by {kind}")
        return
    if kind is not None:
        name = own or "adamw"
        s.draft.put(f"{SECTION}.name", name, f"optimizer.type: {kind}", "optimizer.type")
        if (
            own is None
            and "adamw" not in kind.lower()
            and s.get("optimizer.params.adam_w_mode") is False
        ):
            why = (
                "this is Adam with L2 regularization; a recipe has AdamW, whose weight decay is "
                "decoupled"
            )
            s.draft.leave(SECTION, "optimizer.params.adam_w_mode", False, why)
    by_muon = megatron_muon(s)
    typed = None if by_muon else s.word(as_text, "optim", "optimizer")
    is_adam = typed is None or typed[1].lower() in (*_TRAINER_ADAM_NAMES, *_ADAM)
    own = own or _own_kind(typed[1] if typed is not None else None, _TRAINER_KINDS)
    if typed is not None and (is_adam or own is not None):
        s.draft.put(f"{SECTION}.name", own or "adamw", typed[0])
        if own == "adamw_8bit" and typed[1].lower() != "adamw_torch_8bit":
            why = "the Trainer's bitsandbytes has embeddings' moments in fp32, a recipe has not"
            s.draft.note(SECTION, why)
    elif typed is not None:
        s.draft.leave(SECTION, typed[0], typed[1], _NOT_CARRIED)
        if not _SMALLER_STATES.fullmatch(typed[1].lower()):
            what = f"the learning rate for AdamW; the run trains by {typed[1]}"
            s.draft.ask(f"{SECTION}.lr", what)
            for name in ("learning_rate", "lr"):
                if (found := s.setting(name)) is not None:
                    s.draft.leave(SECTION, found.written, found.text, f"of {typed[1]}")
    key, path = f"{SECTION}.lr", "optimizer.params.lr"
    if (
        not by_muon
        and key not in s.draft.fill
        and s.settle(key, as_number, "learning_rate", "lr", dotted=path) is None
    ):
        s.unanswered(key, path, "the highest learning rate")
    takes = OPTIMIZER_KEYS[own or "adamw"]
    if "betas" in takes:
        _betas(s, _DEFAULT_BETAS.get(own or "", BETAS))
    fixed = _TRAINER_VALUES.get(own or "", {})
    for name, value in fixed.items():
        s.draft.put(f"{SECTION}.{name}", value, f"{typed[0]}: {own}" if typed else f"{own}")
    for name, (word, default) in _NUMBERS.items():
        if name in fixed or (name == "eps" and name not in takes):
            if (found := s.setting(word)) is not None:
                why = f"{own} does not read it"
                s.draft.leave(SECTION, found.written, found.text, why)
            continue
        key, path = f"{SECTION}.{name}", f"optimizer.params.{name}"
        if s.has_document:
            s.settle(key, as_number, word, dotted=path, otherwise=default, origin=DEEPSPEED_DEFAULT)
        elif s.settle(key, as_number, word, dotted=path) is None:
            s.draft.ask(key, f"AdamW's {name}; no file and no word of the command says it")
    if s.has_document and not s.is_trainer and s.draft.values[f"{SECTION}.weight_decay"]:
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
            if implements and own is None
            else f"a recipe's {own or 'AdamW'} has no such parameter"
        )
        s.draft.leave(SECTION, f"optimizer.params.{name}", value, why)


def _betas(s: ImportSources, defaults: tuple[float, float]) -> None:
    key = f"{SECTION}.betas"
    path, given = "optimizer.params.betas", s.get("optimizer.params.betas")
    if (
        isinstance(given, list | tuple)
        and len(given) == 2
        and all(as_number(b) is not None for b in given)
    ):
        s.draft.put(key, list(given), path)
        return
    both = s.settings.get("adam_betas")
    if both is not None:
        numbers = [as_number(text) for text in re.split(r"[\s,()\[\]]+", both.text) if text]
        if len(numbers) == 2 and None not in numbers:
            s.draft.put(key, list(numbers), both.written, *s.there(path))
        else:
            s.ask_unread(key, "adam_betas")
        return
    values: list[JsonValue] = []
    origins: list[str] = []
    sources: list[str] = []
    told: list[str] = []
    for at, name in enumerate(("adam_beta1", "adam_beta2")):
        typed = s.word(as_number, name)
        known = as_number(s.program.defaults.get(name)) if s.program is not None else None
        if typed is not None:
            values.append(typed[1])
            sources.append(typed[0])
            origins.append(typed[0])
            told += [setting.told() for setting in (s.setting(name),) if setting is not None]
        elif s.ask_unread(key, name, dotted=path):
            return
        elif known is not None and s.program is not None:
            values.append(known)
            origins.append(f"{s.program.defaults_of}'s default")
        elif s.has_document:
            values.append(defaults[at])
            origins.append(DEEPSPEED_DEFAULT)
    if len(values) < 2:
        reasons = s.program.unknown_defaults if s.program is not None else {}
        what = reasons.get(
            "adam_beta1", "two numbers; no file and no word of the command says them"
        )
        for source in sources:
            s.draft.take(source, key)
        s.unanswered(key, path, "; ".join((what, *told)))
        return
    s.draft.put(key, values, " and ".join(dict.fromkeys(origins)), *sources, *s.there(path))


LOW_PRECISION = "training.low_precision"


def low_precision(s: ImportSources) -> None:
    """Convert the format and the recipe of Megatron-LM's FP8 and FP4."""
    for number in ("fp8", "fp4"):
        values = s.word(as_text, f"{number}_format")
        if values is None:
            s.ask_unread(LOW_PRECISION, f"{number}_format")
            continue
        recipe = s.word(as_text, f"{number}_recipe")
        name = recipe[1] if recipe is not None else {"fp8": "delayed", "fp4": "nvfp4"}[number]
        found = next((n for n, row in LOW_PRECISION_RECIPES.items() if row.name == name), None)
        s.draft.take(values[0], LOW_PRECISION)
        if recipe is not None:
            s.draft.take(recipe[0], LOW_PRECISION)
        if found is None:
            shown = " ".join(recipe) if recipe is not None else f"Megatron-LM's default is {name}"
            s.draft.ask(
                LOW_PRECISION,
                f"{', '.join(LOW_PRECISION_RECIPES)} or none; the command has {' '.join(values)}, "
                f"{shown}",
            )
            continue
        s.draft.put(LOW_PRECISION, found, recipe[0] if recipe is not None else values[0])
        own = LOW_PRECISION_RECIPES[found].settings[number]
        if values[1] != own:
            s.draft.note(
                "training", f"{' '.join(values)} is not carried: compile writes {own} for {found}"
            )


def clipping(s: ImportSources) -> None:
    key, name = "training.gradient_clipping", "gradient_clipping"
    words = ("max_grad_norm", "megatron_lm_gradient_clipping", name)
    if s.has_document or s.is_deepspeed:
        origin = "DeepSpeed's and the Trainer's default"
        s.settle(key, as_number, *words, dotted=name, otherwise=1.0, origin=origin)
    elif s.settle(key, as_number, *words, dotted=name) is None:
        s.draft.ask(key, "the norm that gradients are clipped to, 0 for none")


SCHEDULE = "training.scheduler"
# The Trainer's names -> a recipe's curve.
_TRAINER_SCHEDULES: dict[str, str] = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine_warmup_with_min_lr",
    "cosine_with_restarts": "cosine_with_restarts",
    "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt",
    "inverse-square-root": "inverse_sqrt",
    "warmup_stable_decay": "warmup_stable_decay",
    "wsd": "wsd",
}
_WSD_DECAYS = {"linear": None, "cosine": "cosine", "minus_sqrt": "1-sqrt"}
"""Maps Megatron-LM's --lr-wsd-decay-style to the recipe's decay_type, None for its default."""
_CURVE_NAMES = "constant, linear, cosine or wsd"
_WITH_MIN_LR = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
_CURVES = ("lr_scheduler_type", "lr_scheduler", "lr_decay_style")
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
        why = "a recipe's curves are constant, linear, cosine, wsd"
        s.draft.leave(SCHEDULE, "scheduler.type", kind, why)
        s.draft.ask(f"{SCHEDULE}.name", f"constant, linear, cosine or wsd; the file has {kind}")
    else:
        _convert_trainer_schedule(s)
    for name in _CURVES:
        typed = s.settings.get(name)
        if kind is not None and typed is not None:
            s.draft.leave(SCHEDULE, typed.written, typed.text, "the file's own scheduler counts")
    _warmup(s, kind)
    _inverse_square_root(s)
    for name, value in s.section(_PARAMS).items():
        s.draft.leave(
            SCHEDULE,
            f"{_PARAMS}.{name}",
            value,
            f"a recipe's schedule has no such value; {kind} has",
        )


def schedule_of(s: ImportSources) -> str | None:
    """Return the recipe's name of the schedule that a setting names, None where none does."""
    typed = s.word(as_text, *_CURVES)
    return _TRAINER_SCHEDULES.get(typed[1].lower()) if typed is not None else None


def _inverse_square_root(s: ImportSources) -> None:
    """Ask for the schedule where Megatron-LM's has no warm-up: its rate is lr / sqrt(k) there,
    which no timescale gives."""
    typed = s.word(as_text, *_CURVES)
    values = s.draft.values
    warm_up = (values.get(f"{SCHEDULE}.{key}") for key in ("warmup_steps", "warmup_ratio"))
    if typed is not None and typed[1] == "inverse-square-root" and not any(warm_up):
        s.draft.ask(f"{SCHEDULE}.name", f"{_CURVE_NAMES}; the command has {' '.join(typed)}")


_WARMUP_STEPS = ("warmup_steps", "num_warmup_steps")
_WARMUP_RATIOS = ("warmup_ratio", "lr_warmup_fraction", "warmup_fraction")


def _warmup(s: ImportSources, kind: str | None) -> None:
    """Convert the warm-up. As in the Trainer steps precede a ratio, and steps below 1 are one."""
    key = f"{SCHEDULE}.warmup_steps"
    path = "" if kind is None else f"{_PARAMS}.warmup_num_steps"
    given = as_count(s.get(path)) if path else None
    sources = s.there(path)
    steps = s.word(as_number, *_WARMUP_STEPS)
    ratio = s.word(as_number, *_WARMUP_RATIOS)
    part = steps if steps is not None and steps[1] > 0 else ratio
    decay = s.word(as_count, "lr_decay_iters")
    if given is not None:
        s.draft.put(key, given, path)
    elif steps is not None and steps[1] >= 1:
        s.draft.put(key, int(steps[1]), steps[0], steps[0], *sources)
    elif part is not None and part[0] == "--lr_warmup_fraction" and decay is not None:
        s.draft.put(key, round(part[1] * decay[1]), f"{part[0]} of {decay[0]}", part[0])
    elif part is not None and 0 <= part[1] < 1:
        s.draft.put(f"{SCHEDULE}.warmup_ratio", part[1], part[0], part[0], *sources)
    elif (steps is None and s.ask_unread(key, *_WARMUP_STEPS, dotted=path)) or (
        ratio is None and s.ask_unread(f"{SCHEDULE}.warmup_ratio", *_WARMUP_RATIOS)
    ):
        pass
    elif kind in _DEEPSPEED_SCHEDULES and not sources:
        s.draft.put(key, 1000, DEEPSPEED_DEFAULT)
    elif kind is None and (reason := _unknown_warmup(s)):
        s.draft.ask(key, reason)
    else:
        s.draft.put(key, 0, "", *sources)
    for found in (steps, ratio):
        if found is not None and found[0] not in s.draft.carried:
            s.draft.leave(SCHEDULE, found[0], found[1], "the other one counts")


def warmup_steps(s: ImportSources) -> int | None:
    """Return the steps of the warm-up, 0 without one, None where they are a share or not known."""
    steps, ratio = s.word(as_number, *_WARMUP_STEPS), s.word(as_number, *_WARMUP_RATIOS)
    if steps is not None and steps[1].is_integer():
        return int(steps[1])
    there = any(name in s.settings for name in (*_WARMUP_STEPS, *_WARMUP_RATIOS))
    return None if there or ratio is not None else 0


def _unknown_warmup(s: ImportSources) -> str:
    """Return why the warm-up is not known where nothing says it."""
    if s.program is not None and "warmup_steps" in s.program.unknown_defaults:
        return s.program.unknown_defaults["warmup_steps"]
    if s.has_document or (s.program is not None and "warmup_steps" in s.program.defaults):
        return ""
    return "updates with a rising learning rate; no file and no word of the command says it"


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
    elif kind == "WarmupDecayLR":
        unused = "optimizer.params.lr"
        s.draft.fill.pop(f"{SECTION}.lr", None)
        s.draft.put(f"{SECTION}.lr", 0.001, "WarmupDecayLR's default without warmup_max_lr")
        if s.has(unused):
            s.draft.carried.pop(unused, None)
            s.draft.leave(SECTION, unused, s.get(unused), "WarmupDecayLR sets a rate of its own")
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
    key, what = f"{SCHEDULE}.name", _CURVE_NAMES
    typed = s.word(as_text, *_CURVES)
    program = s.program
    default = as_text(program.defaults.get("lr_scheduler_type")) if program is not None else None
    if typed is not None and (curve := schedule_of(s)) is not None:
        s.draft.put(key, curve, typed[0])
        _lowest_rate(s, curve)
        low = (f"{SCHEDULE}.min_lr", f"{SCHEDULE}.min_lr_ratio")
        if typed[1] in _WITH_MIN_LR and not any(k in s.draft.values for k in low):
            s.draft.ask(low[1], f"the lowest rate of {typed[1]}, as a share of lr")
    elif typed is not None and (why := UNPLANNED_SCHEDULES.get(typed[1].lower())):
        s.draft.ask(key, f"{what}; {' '.join(typed)} {why}, which no plan can hold")
        s.draft.take(typed[0], key)
    elif s.ask_unread(key, *_CURVES):
        s.draft.fill[key] = f"{what}; {s.draft.fill[key]}"
    elif "deepspeed" in s.unread:
        s.draft.ask(key, f"{what}; {s.unread['deepspeed']}")
    elif default is not None and program is not None:
        s.draft.put(key, default, f"{program.defaults_of}'s default")
        _lowest_rate(s, default)
    elif program is not None and "lr_scheduler_type" in program.unknown_defaults:
        s.draft.ask(key, program.unknown_defaults["lr_scheduler_type"])
    elif not s.has_document:
        s.draft.ask(key, f"{what}; no file and no word of the command says it")
    elif s.is_trainer:
        s.draft.put(key, "linear", "the Trainer's default")
    else:
        s.draft.put(key, "constant", "no scheduler in the file: the rate stays")


def _wsd_decay_style(s: ImportSources) -> None:
    """Convert the curve of Megatron-LM's decay, which is exponential without a word."""
    key, style = f"{SCHEDULE}.decay_type", s.word(as_text, "lr_wsd_decay_style")
    if style is not None and style[1] in _WSD_DECAYS:
        if (kind := _WSD_DECAYS[style[1]]) is not None:
            s.draft.put(key, kind, style[0])
        s.draft.take(style[0], key)
    elif style is not None:
        s.draft.ask(key, f"linear, cosine or 1-sqrt; the command has {' '.join(style)}")
        s.draft.take(style[0], key)
    elif "lr_decay_style" in s.settings:
        s.draft.note(
            SCHEDULE,
            "decay: exponential by Megatron-LM's default; a recipe's decay_type is linear, cosine "
            "or 1-sqrt",
        )


def _lowest_rate(s: ImportSources, curve: str) -> None:
    """Convert min_lr, and the decay's own length and curve of Megatron-LM and the Trainer."""
    if curve == "constant":
        return
    keys = SCHEDULES[curve].keys
    if "min_lr" in keys:
        if "min_lr" in s.settings:
            s.settle(f"{SCHEDULE}.min_lr", as_number, "min_lr")
        s.settle(f"{SCHEDULE}.min_lr_ratio", as_number, "cosine_min_lr_ratio", "min_lr_ratio")
    decay = s.word(as_count, "lr_wsd_decay_iters")
    if "decay_steps" in keys and decay is not None:
        s.draft.put(f"{SCHEDULE}.decay_steps", decay[1], decay[0])
    elif "decay_steps" in keys and f"{SCHEDULE}.decay_steps" not in s.draft.values:
        s.draft.ask(f"{SCHEDULE}.decay_steps", "updates of the decay at the end")
    if curve == "wsd":
        _wsd_decay_style(s)
    end = s.word(as_count, "lr_decay_iters")
    if end is not None and end[1] == s.draft.values.get("training.steps"):
        s.draft.take(end[0], SCHEDULE)
    elif end is not None:
        s.draft.leave(SCHEDULE, end[0], end[1], "a recipe's curve ends at the last step")
