"""A valid, completed document -> Recipe. The schema has already said that every type is right, hence the casts."""

from __future__ import annotations

import os
from typing import cast

from shardwright.diagnostics import Source
from shardwright.ir.json_value import JsonObject, JsonValue
from shardwright.ir.lora import LoraSection
from shardwright.ir.recipe import (
    AssumeSection,
    CheckpointSection,
    ClusterSection,
    DataSection,
    InlineGpu,
    KubernetesSection,
    LaunchSection,
    ModelSection,
    OptimizerSection,
    ParallelismSection,
    Recipe,
    SchedulerSection,
    SlurmContainer,
    SlurmSection,
    TrackingSection,
    TrainingSection,
    ValidationSection,
    WandbSection,
)
from shardwright.recipe.paths import absolute, absolute_data_path, is_folder
from shardwright.recipe.slurm import words

Text = dict[str, str]
# These hold token ids already.
_WITHOUT_TOKENIZER = ("tokens", "megatron", "synthetic")


def decide(document: JsonObject) -> JsonObject:
    """Settles the `auto` values that depend on another key of the recipe: starting weights and tokenizers."""
    decided = dict(document)
    model = dict(cast(JsonObject, document["model"]))
    if model["weights"] == "auto":
        model["weights"] = "random" if model["source"] is None else "pretrained"
    decided["model"] = model
    for section in ("data", "validation"):
        if decided.get(section) is not None:
            decided[section] = _with_tokenizer(cast(JsonObject, decided[section]), cast("str | None", model["source"]))
    decided.pop("extends", None)  # merged
    return decided


def _with_tokenizer(data: JsonObject, source: str | None) -> JsonObject:
    if "mixture" in data:
        parts = cast("list[JsonObject]", data["mixture"])
        return {**data, "mixture": [_with_tokenizer(part, source) for part in parts]}
    if data.get("tokenizer") != "auto":
        return data
    return {**data, "tokenizer": None if data.get("kind") in _WITHOUT_TOKENIZER else source or "byte"}


def build(document: JsonObject, directory: str, source: Source) -> Recipe:
    """directory: absolute folder of the recipe file."""

    def path(value: JsonValue) -> str | None:
        return None if value is None else absolute(str(value), directory)

    model, cluster = _section(document, "model"), _section(document, "cluster")
    launch, checkpoint, assume = (_section(document, key) for key in ("launch", "checkpoint", "assume"))
    return Recipe(
        version=cast(int, document["version"]),
        name=cast(str, document["name"]),
        target=cast(str, document["target"]),
        model=ModelSection(
            source=_folder_or_name(model["source"], directory),
            config=cast("JsonObject | None", model["config"]),
            revision=cast(str, model["revision"]),
            weights=cast(str, model["weights"]),
            attention=cast(str, model["attention"]),
            loss=cast(str, model["loss"]),
            trust_remote_code=_folder_or_name(model["trust_remote_code"], directory),
        ),
        cluster=ClusterSection(
            nodes=_integer(cluster["nodes"]),
            gpus_per_node=cast(int, cluster["gpus_per_node"]),
            gpu=_gpu(cluster["gpu"]),
            intra_node_gbytes_per_second=_number(cluster["intra_node_gbytes_per_second"]),
            inter_node_gbits_per_second=_number(cluster["inter_node_gbits_per_second"]),
            host_memory_gib=_number(cluster["host_memory_gib"]),
            shared_filesystem=cast(bool, cluster["shared_filesystem"]),
            price_per_gpu_hour=_number(cluster["price_per_gpu_hour"]),
        ),
        training=_training(_section(document, "training")),
        data=_data(cast("JsonObject | None", document["data"]), directory),
        validation=_validation(cast("JsonObject | None", document["validation"]), directory),
        parallelism=_parallelism(_section(document, "parallelism")),
        objective=cast(str, document["objective"]),
        assume=AssumeSection(
            kernels=cast(str, assume["kernels"]),
            mfu=_number(assume["mfu"]),
            ignore_memory=cast(bool, assume["ignore_memory"]),
        ),
        launch=LaunchSection(
            launcher=cast(str, launch["launcher"]),
            hostfile=path(launch["hostfile"]),
            master_addr=_choice(launch["master_addr"]),
            master_port=_integer(launch["master_port"]),
            env=cast(Text, launch["env"]),
            env_from=tuple(cast("list[str]", launch["env_from"])),
            setup_script=path(launch["setup_script"]),
            slurm=_slurm(cast("JsonObject | None", launch["slurm"])),
            kubernetes=_kubernetes(cast("JsonObject | None", launch["kubernetes"])),
        ),
        checkpoint=CheckpointSection(
            directory=cast(str, checkpoint["directory"]),
            every_steps=_integer(checkpoint["every_steps"]),
            keep=_integer(checkpoint["keep"]),
            upload_to=cast("str | None", checkpoint["upload_to"]),
        ),
        tracking=_tracking(_section(document, "tracking")),
        lora=_lora(cast("JsonObject | None", document["lora"])),
        extra=_section(document, "extra"),
        directory=directory,
        document=document,
        source=source,
    )


def _tracking(tracking: JsonObject) -> TrackingSection:
    wandb = cast("JsonObject | None", tracking["wandb"])
    return TrackingSection(
        tensorboard=cast(bool, tracking["tensorboard"]),
        wandb=None
        if wandb is None
        else WandbSection(
            project=cast(str, wandb["project"]),
            entity=cast("str | None", wandb["entity"]),
            name=cast("str | None", wandb["name"]),
        ),
    )


def _training(training: JsonObject) -> TrainingSection:
    optimizer, scheduler = _section(training, "optimizer"), _section(training, "scheduler")
    betas = cast("list[float]", optimizer["betas"])
    warmup_ratio, min_lr_ratio = _number(scheduler["warmup_ratio"]), _number(scheduler["min_lr_ratio"])
    warmup_steps, min_lr = _integer(scheduler["warmup_steps"]), _number(scheduler["min_lr"])
    return TrainingSection(
        sequence_length=cast(int, training["sequence_length"]),
        global_batch_size=cast(int, training["global_batch_size"]),
        steps=_integer(training["steps"]),
        tokens=_integer(training["tokens"]),
        epochs=_number(training["epochs"]),
        precision=cast(str, training["precision"]),
        gradient_accumulation_dtype=_choice(training["gradient_accumulation_dtype"]),
        optimizer=OptimizerSection(
            name=cast(str, optimizer["name"]),
            lr=cast(float, optimizer["lr"]),
            betas=(betas[0], betas[1]),
            eps=cast(float, optimizer["eps"]),
            weight_decay=cast(float, optimizer["weight_decay"]),
        ),
        scheduler=SchedulerSection(
            name=cast(str, scheduler["name"]),
            # Neither of a pair: no warm-up, and down to zero.
            warmup_steps=0 if warmup_steps is None and warmup_ratio is None else warmup_steps,
            warmup_ratio=warmup_ratio,
            min_lr=0.0 if min_lr is None and min_lr_ratio is None else min_lr,
            min_lr_ratio=min_lr_ratio,
            decay_steps=_integer(scheduler["decay_steps"]),
        ),
        gradient_clipping=cast(float, training["gradient_clipping"]),
        seed=cast(int, training["seed"]),
        days_at_most=_number(training["days_at_most"]),
        stop_after_nonfinite=cast(int, training["stop_after_nonfinite"]),
    )


def _slurm(slurm: JsonObject | None) -> SlurmSection | None:
    if slurm is None:
        return None
    return SlurmSection(
        account=cast("str | None", slurm["account"]),
        partition=cast("str | None", slurm["partition"]),
        qos=cast("str | None", slurm["qos"]),
        time=cast("str | None", slurm["time"]),
        requeue=cast(bool, slurm["requeue"]),
        signal_seconds=cast(int, slurm["signal_seconds"]),
        gres=cast("str | None", slurm["gres"]),
        cpus_per_node=_integer(slurm["cpus_per_node"]),
        exclusive=cast(bool, slurm["exclusive"]),
        mem=("0" if slurm["exclusive"] else None) if slurm["mem"] == "auto" else str(slurm["mem"]),
        exclude=cast("str | None", slurm["exclude"]),
        constraint=cast("str | None", slurm["constraint"]),
        reservation=cast("str | None", slurm["reservation"]),
        extra=words(slurm["extra"]),
        container=_container(cast("JsonObject | None", slurm["container"])),
    )


def _container(container: JsonObject | None) -> SlurmContainer | None:
    if container is None:
        return None
    mounts = cast("list[str]", container["mounts"])
    return SlurmContainer(
        image=cast(str, container["image"]),
        mounts=tuple(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts),
    )


def _kubernetes(kubernetes: JsonObject | None) -> KubernetesSection | None:
    if kubernetes is None:
        return None
    return KubernetesSection(
        image=cast(str, kubernetes["image"]),
        volume_claim=cast(str, kubernetes["volume_claim"]),
        directory=cast(str, kubernetes["directory"]),
        mount_path=cast(str, kubernetes["mount_path"]),
        namespace=cast("str | None", kubernetes["namespace"]),
        secret=cast("str | None", kubernetes["secret"]),
        gpu_resource=cast(str, kubernetes["gpu_resource"]),
        restarts=cast(int, kubernetes["restarts"]),
        kind=cast(str, kubernetes["kind"]),
        labels=cast(Text, kubernetes["labels"]),
        pod_patch=_section(kubernetes, "pod_patch"),
    )


def _parallelism(parallelism: JsonObject) -> ParallelismSection:
    return ParallelismSection(
        tensor=_integer(parallelism["tensor"]),
        pipeline=_integer(parallelism["pipeline"]),
        data=_integer(parallelism["data"]),
        zero_stage=_integer(parallelism["zero_stage"]),
        micro_batch_size=_integer(parallelism["micro_batch_size"]),
        activation_checkpointing=_choice(parallelism["activation_checkpointing"]),
        schedule=_choice(parallelism["schedule"]),
        offload=_choice(parallelism["offload"]),
        memory_headroom=_number(parallelism["memory_headroom"]),
        expert=_integer(parallelism["expert"]) or 1,
        context=_integer(parallelism["context"]) or 1,
        virtual_stages=_integer(parallelism["virtual_stages"]) or 1,
        sequence_parallel=parallelism["sequence_parallel"] is True,
    )


def _data(data: JsonObject | None, directory: str) -> DataSection | None:
    return None if data is None else _data_section(data, directory)


def _data_section(data: JsonObject, directory: str) -> DataSection:
    """With its paths made absolute, a mixture's parts included."""
    kind, path = cast(str, data.get("kind", "mixture")), cast("str | None", data.get("path"))
    return DataSection(
        kind=kind,
        path=None if path is None else absolute_data_path(path, directory, kind),
        tokenizer=_folder_or_name(data.get("tokenizer"), directory),
        packing=cast(bool, data.get("packing", True)),
        shuffle=cast(bool, data.get("shuffle", True)),
        field=cast(str, data.get("field", "text")),
        messages=cast(str, data.get("messages", "messages")),
        template=cast("str | None", data.get("template")),
        train_on=cast(str, data.get("train_on", "assistant")),
        weight=cast(float, data.get("weight", 1.0)),
        mixture=tuple(_data_section(part, directory) for part in cast("list[JsonObject]", data.get("mixture", ()))),
    )


def _lora(lora: JsonObject | None) -> LoraSection | None:
    if lora is None:
        return None
    names = lora["target_modules"]
    return LoraSection(
        rank=cast(int, lora["rank"]),
        alpha=cast(float, lora["alpha"]),
        dropout=cast(float, lora["dropout"]),
        target_modules=None if names == "auto" else tuple(cast("list[str]", names)),
    )


def _validation(validation: JsonObject | None, directory: str) -> ValidationSection | None:
    if validation is None:
        return None
    return ValidationSection(
        every_steps=cast(int, validation["every_steps"]),
        fraction=_number(validation["fraction"]),
        data=_data_section(validation, directory) if "kind" in validation else None,
    )


def _gpu(gpu: JsonValue) -> str | InlineGpu:
    if isinstance(gpu, str):
        return gpu
    numbers = cast(JsonObject, gpu)
    return InlineGpu(
        memory_gib=cast(float, numbers["memory_gib"]),
        hbm_gbytes_per_second=cast(float, numbers["hbm_gbytes_per_second"]),
        peak_tflops=cast("dict[str, float]", numbers["peak_tflops"]),
    )


def _folder_or_name(value: JsonValue, directory: str) -> str | None:
    if value is None:
        return None
    text = cast(str, value)
    return absolute(text, directory) if is_folder(text, directory) else text


def _section(document: JsonObject, key: str) -> JsonObject:
    return cast(JsonObject, document[key])


def _choice(value: JsonValue) -> str | None:
    return None if value in (None, "auto") else cast(str, value)


def _integer(value: JsonValue) -> int | None:
    return None if value in (None, "auto") else cast(int, value)


def _number(value: JsonValue) -> float | None:
    return None if value in (None, "auto") else cast(float, value)


def recipe_directory(name: str) -> str:
    """The folder that relative paths start from; the working folder for a recipe on standard input."""
    return os.path.dirname(os.path.abspath(name))
