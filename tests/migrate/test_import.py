"""`import`: every key of a file is carried or commented, and what is carried means the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.migrate.config_import import ImportedRecipe, convert_config
from shardwright.migrate.deepspeed_engine_keys import documented_key
from shardwright.migrate.recipe_draft import draft_yaml
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_schema import FILL_IN
from tests.conftest import SMALL_RECIPE
from tests.lint.test_rules import BAD, GOOD

COMMAND = (
    "NCCL_DEBUG=INFO HF_TOKEN=hf_secret deepspeed --num_nodes 1 --num_gpus 2 train.py --deepspeed "
    "ds.json --model_name_or_path org/model --per_device_train_batch_size 4 "
    "--gradient_accumulation_steps 2 --learning_rate 2e-5 --weight_decay 0.1 --adam_beta2 0.95 "
    "--num_train_epochs 2 --lr_scheduler_type cosine --warmup_ratio 0.03 --bf16 True "
    "--gradient_checkpointing --max_seq_length 64 --max_grad_norm 0.5 --seed 7 --save_steps 50 "
    "--save_total_limit 2 --report_to tensorboard wandb --dataset_name org/data --output_dir out "
    "--hub_token hf_another"
)


def imported(
    path: Path | str, launch: str | None = None, model: str | None = None
) -> ImportedRecipe:
    return convert_config(str(path), launch, model, str(Path(path).parent))


def text_of(found: ImportedRecipe) -> str:
    return draft_yaml(found.draft, found.name, [])


def settings(section: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key with a value of its own."""
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from settings(value, (*path, key))
        else:
            yield (*path, key)


def unaccounted(found: ImportedRecipe) -> list[str]:
    """Keys of the file that are neither carried nor commented, themselves or by a section of
    theirs."""
    assert found.document is not None
    known = {*found.draft.carried, *found.draft.left}
    paths = settings(dict(found.document.config))
    prefixes = {
        ".".join(p): {".".join(q[:n]) for q in (p, documented_key(p)) for n in range(1, len(p) + 1)}
        for p in paths
    }
    return [dotted for dotted, own in prefixes.items() if not own & known]


def to_fill_in(text: str, *others: str) -> set[str]:
    """others: codes that may be told beside them."""
    with pytest.raises(Refusal) as refusal:
        load_recipe(Path("-"), (), stdin_text=text)
    found = [d for d in refusal.value.diagnostics if d.code not in others]
    assert {d.code for d in found} == {"SW1108"}, found
    return {".".join(map(str, d.key or ())) for d in found}


@pytest.mark.parametrize("launch", [None, COMMAND], ids=["alone", "launched"])
@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_every_key_is_carried_or_commented(path: Path, launch: str | None) -> None:
    found = imported(path, launch)
    assert unaccounted(found) == []
    text = text_of(found)
    comments = " ".join(line.partition("#")[2].strip() for line in text.splitlines() if "#" in line)
    for key in found.draft.left:
        assert key in comments, f"{key} has no comment"
    assert not found.draft.carried.keys() & found.draft.left.keys()
    # Not every file goes with two GPUs: a batch or a tensor group that does not divide is told.
    others = () if launch is None else ("SW1203", "SW1204")
    assert to_fill_in(text, *others) == found.draft.fill.keys()
    assert "hf_secret" not in text and "hf_another" not in text


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_a_file_with_faults_gives_a_recipe_or_a_refusal(path: Path) -> None:
    """What lint finds wrong with a key stands behind it, and its value is not taken."""
    try:
        found = imported(path)
    except Refusal as refusal:
        assert all(d.code.startswith("SW40") for d in refusal.diagnostics)
        return
    assert unaccounted(found) == []
    to_fill_in(text_of(found))


def compiled(found: ImportedRecipe, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """ds_config.json and recipe.resolved.json of the recipe, with what was to fill in filled in and
    a tiny Llama for the model."""
    world = found.draft.values["cluster.gpus_per_node"]
    gpus = int(str(world)) if world != FILL_IN else 2
    assert found.document is not None
    micro = found.draft.values.get("parallelism.micro_batch_size", 1)
    steps = value_at(found.document.config, "gradient_accumulation_steps")
    batch = gpus * int(str(micro)) * (steps if isinstance(steps, int) else 1)
    path = folder / "recipe.yaml"
    path.write_text(text_of(found))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(SMALL_RECIPE["model"]["config"]))
    overrides = ["model.source=./model", "model.weights=random", "cluster.gpu=a100-sxm4-80gb"]
    (folder / "a.txt").write_text("text " * 1000)
    overrides += ["data.kind=text", "data.path=a.txt", "data.tokenizer=byte"]
    overrides += ["cluster.nodes=1", f"cluster.gpus_per_node={gpus}", "cluster.host_memory_gib=100"]
    for key, value in (
        ("training.sequence_length", "32"),
        ("training.optimizer.lr", "1e-3"),
        ("training.precision", "bf16"),
        ("training.global_batch_size", str(batch)),
        ("training.steps", "10000"),
    ):
        if key in found.draft.fill:
            overrides.append(f"{key}={value}")
    made = compile_recipe(load_recipe(path, overrides))
    return json.loads(made.files["ds_config.json"]), json.loads(made.files["recipe.resolved.json"])


SAME = ("zero2-offload", "zero3-bf16", "zero1-bf16", "micro-batch", "zero2-finetune", "profiled")


def value_at(document: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        document = document.get(part) if isinstance(document, dict) else None
    return document


def same_values(path: Path, folder: Path) -> int:
    """How many keys of the file stand in the compiled ds_config.json, all of them with the file's
    value; an optimizer that the trainer builds itself, in the recipe."""
    found = imported(path, COMMAND.replace("--bf16 True", "") if "trainer" in path.stem else None)
    made, recipe = compiled(found, folder)
    assert found.document is not None
    file: Any = found.document.config
    count = 0
    for dotted in found.draft.carried:
        given = value_at(file, dotted)
        if given in (None, "auto") or dotted.startswith(
            ("scheduler", "optimizer.type", "tensor", "wandb", "pipeline", "sequence_parallel")
        ):
            continue
        if dotted == "train_batch_size" and "sequence_parallel_size" in file:
            continue  # the compiled file counts ranks that share a sequence as data ranks
        if dotted.startswith("optimizer.params") and "optimizer" not in made:
            there = value_at(recipe, found.draft.carried[dotted])
        else:
            there = value_at(made, ".".join(documented_key(tuple(dotted.split(".")))))
        if dotted.endswith(".enabled") and given is False:
            there = bool(there)
        if dotted.startswith(("zero_optimization.offload", "activation")) or isinstance(
            given, dict
        ):
            continue
        assert there == given, (dotted, given, there)
        count += 1
    return count


@pytest.mark.parametrize(
    "path", [p for p in GOOD if p.stem.endswith(SAME)], ids=lambda path: path.stem
)
def test_compiled_again_the_values_are_the_files(path: Path, tmp_path: Path) -> None:
    assert same_values(path, tmp_path) >= 2


def test_the_words_of_a_launch(tmp_path: Path) -> None:
    ds = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
        },
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
    }
    (tmp_path / "ds.json").write_text(json.dumps(ds))
    draft = imported(tmp_path / "ds.json", COMMAND).draft
    wanted = {
        "model.source": "org/model",
        "cluster.nodes": 1,
        "cluster.gpus_per_node": 2,
        "training.sequence_length": 64,
        "training.global_batch_size": 4 * 2 * 2,
        "training.epochs": 2.0,
        "training.precision": "bf16",
        "training.optimizer.lr": 2e-5,
        "training.optimizer.betas": [0.9, 0.95],
        "training.optimizer.weight_decay": 0.1,
        "training.scheduler.name": "cosine",
        "training.scheduler.warmup_ratio": 0.03,
        "training.gradient_clipping": 0.5,
        "training.seed": 7,
        "parallelism.tensor": 1,
        "parallelism.pipeline": 1,
        "parallelism.zero_stage": 2,
        "parallelism.offload": "optimizer",
        "parallelism.micro_batch_size": 4,
        "parallelism.activation_checkpointing": "full",
        "checkpoint.every_steps": 50,
        "checkpoint.keep": 2,
        "tracking.tensorboard": True,
        "tracking.wandb.project": "huggingface",
        "launch.env": {"NCCL_DEBUG": "INFO"},
        "launch.env_from": ["HF_TOKEN"],
    }
    assert {key: draft.values.get(key) for key in wanted} == wanted
    assert draft.fill.keys() == {"cluster.gpu", "data.kind", "data.path"}
    assert "org/data" in draft.fill["data.kind"]


@pytest.mark.parametrize(
    ("launch", "nodes", "gpus"),
    [
        ("deepspeed --num_gpus=8 train.py", 1, 8),
        ("deepspeed --num_nodes 2 --num_gpus 8 train.py", 2, 8),
        ("deepspeed --include localhost:0,1,2 train.py", 1, 3),
        ("deepspeed --include a:0,1@b:4,5 --master_port=29501 train.py", 2, 2),
        ("deepspeed -H hosts train.py", 2, 8),
        ("deepspeed --hostfile hosts --exclude b train.py", 1, 8),
        ("deepspeed --hostfile hosts --include b:0,1 train.py", 1, 2),
        ("torchrun --nnodes 4 --nproc-per-node 8 --rdzv_backend c10d train.py", 4, 8),
        ("python3.11 -m torch.distributed.run --nproc_per_node=4 train.py", 1, 4),
        ("accelerate launch --num_machines 2 --num_processes 16 train.py", 2, 8),
        ("accelerate launch --config_file acc.yaml train.py", 2, 4),
        ("CUDA_VISIBLE_DEVICES=0,3 deepspeed train.py", 1, 2),
        ("python train.py", 1, 1),
        ("deepspeed train.py", None, None),
    ],
)
def test_where_a_command_runs(
    launch: str,
    nodes: int | None,
    gpus: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("a slots=8\nb slots=8 # the second\n")
    Path("acc.yaml").write_text(
        "num_machines: 2\nnum_processes: 8\ndeepspeed_config: {zero_stage: 3}\n"
    )
    Path("ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}'
    )
    values = imported("ds.json", launch).draft.values
    assert values["training.precision"] == "fp32"
    assert (values["cluster.nodes"], values["cluster.gpus_per_node"]) == (
        nodes or FILL_IN,
        gpus or FILL_IN,
    )
    batch = 6 * nodes * gpus if nodes and gpus else FILL_IN
    assert values["training.global_batch_size"] == batch
    assert values["parallelism.zero_stage"] == (3 if "acc.yaml" in launch else 0)


def test_accelerate_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own file has no ds_config beside it, or names one."""
    monkeypatch.chdir(tmp_path)
    section = {
        "zero_stage": 3,
        "offload_param_device": "cpu",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 2.0,
    }
    Path("acc.yaml").write_text(
        json.dumps(
            {
                "mixed_precision": "bf16",
                "num_machines": 1,
                "num_processes": 8,
                "deepspeed_config": section,
            }
        )
    )
    draft = convert_config(
        None, "accelerate launch --config_file acc.yaml train.py --learning_rate 1e-4", None, "."
    ).draft
    wanted = {
        "parallelism.zero_stage": 3,
        "parallelism.offload": "parameters",
        "training.gradient_clipping": 2.0,
        "training.precision": "bf16",
        "training.optimizer.lr": 1e-4,
    }
    assert {key: draft.values.get(key) for key in wanted} == wanted
    Path("ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 1}}'
    )
    Path("acc.yaml").write_text(
        "num_processes: 8\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    )
    draft = convert_config(
        None, "accelerate launch --config_file acc.yaml train.py", None, "."
    ).draft
    assert (
        draft.values["parallelism.micro_batch_size"],
        draft.values["parallelism.zero_stage"],
    ) == (3, 1)


def test_schedulers(tmp_path: Path) -> None:
    def scheduled(section: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "scheduler": section}))
        return imported(tmp_path / "ds.json").draft.values

    params = {"warmup_num_steps": 100, "warmup_max_lr": 3e-4, "warmup_type": "linear"}
    found = scheduled({"type": "WarmupLR", "params": params})
    assert found["training.scheduler.name"] == "constant" and found["training.optimizer.lr"] == 3e-4
    assert found["training.scheduler.warmup_steps"] == 100 and found["training.steps"] == FILL_IN
    found = scheduled({"type": "WarmupDecayLR", "params": {**params, "total_num_steps": 1000}})
    assert found["training.scheduler.name"] == "linear" and found["training.steps"] == 1000
    found = scheduled(
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 500, "cos_min_ratio": 0.1}}
    )
    assert (
        found["training.scheduler.name"] == "cosine"
        and found["training.scheduler.min_lr_ratio"] == 0.1
    )
    assert found["training.scheduler.warmup_steps"] == 1000


_TRAINER = "python train.py --deepspeed ds.json --max_steps 100 --learning_rate 1e-3 --warmup_steps"
_MEGATRON = "torchrun pretrain_gpt.py --tensor-model-parallel-size 1 --train-iters 100 --lr 1e-3"


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (f"{_TRAINER} 5 --lr_scheduler_type cosine_with_restarts", {}),
        (
            f"{_TRAINER} 5 --lr_scheduler_type cosine_with_restarts "
            """--lr_scheduler_kwargs '{"num_cycles": 3}'""",
            {"num_cycles": 3},
        ),
        (f"{_TRAINER} 5 --lr_scheduler_type polynomial", {}),
        (
            f"{_TRAINER} 5 --lr_scheduler_type polynomial "
            """--lr_scheduler_kwargs '{"power": 2.0, "lr_end": 0}'""",
            {"power": 2.0, "lr_end": 0},
        ),
        (
            f"{_TRAINER} 5 --lr_scheduler_type inverse_sqrt "
            """--lr_scheduler_kwargs '{"timescale": 40}'""",
            {"timescale": 40},
        ),
        (
            f"{_TRAINER} 5 --lr_scheduler_type cosine_warmup_with_min_lr "
            """--lr_scheduler_kwargs '{"min_lr_rate": 0.1, "warmup_lr_rate": 0.2}'""",
            {"min_lr_ratio": 0.1, "warmup_lr_rate": 0.2},
        ),
        (
            f"{_TRAINER} 5 --lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs "
            """'{"num_decay_steps": 10, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}'""",
            {"decay_steps": 10, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
        ),
        (
            f"{_TRAINER} 5 --lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs "
            """'{"num_decay_steps": 10, "num_stable_steps": 85}'""",
            {"decay_steps": 10},
        ),
        (
            f"{_TRAINER} 5 --lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs "
            """'{"num_decay_steps": 10, "num_stable_steps": 50}'""",
            {"decay_steps": FILL_IN},
        ),
        (f"{_TRAINER} 5 --lr_scheduler_type cosine_warmup_with_min_lr", {"min_lr_ratio": FILL_IN}),
        (f"{_TRAINER} 5 --lr_scheduler_type greedy", {"name": FILL_IN}),
        (f"{_TRAINER} 5 --lr_scheduler_type reduce_lr_on_plateau", {"name": FILL_IN}),
        (
            f"{_MEGATRON} --lr-decay-style inverse-square-root --lr-warmup-iters 5",
            {"name": "inverse_sqrt"},
        ),
        (f"{_MEGATRON} --lr-decay-style inverse-square-root", {"name": FILL_IN, "warmup_steps": 0}),
        *(
            (
                f"{_MEGATRON} --lr-decay-style WSD --lr-warmup-iters 5 --lr-wsd-decay-iters 10 "
                f"--lr-wsd-decay-style {style}",
                {"name": "wsd", "decay_steps": 10, **wanted},
            )
            for style, wanted in {
                "linear": {},
                "cosine": {"decay_type": "cosine"},
                "minus_sqrt": {"decay_type": "1-sqrt"},
                "exponential": {"decay_type": FILL_IN},
            }.items()
        ),
    ],
)
def test_schedules_by_transformers_and_megatrons_names(
    command: str, wanted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1}))
    found = convert_config(None, command, None, ".")
    values = found.draft.values
    name = command.partition("--lr_scheduler_type ")[2].partition(" ")[0]
    prefix = "training.scheduler."
    got = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
    assert got == {"name": name, "warmup_steps": 5, **wanted}
    assert {f"{prefix}{k}" for k, v in wanted.items() if v == FILL_IN} == {
        key for key in to_fill_in(text_of(found), "SW1203", "SW1204") if key.startswith(prefix)
    }


@pytest.mark.parametrize(
    ("options", "wanted", "note"),
    [
        ("--fp8-format hybrid --fp8-recipe tensorwise", "fp8_tensorwise", ""),
        ("--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather", "fp8_blockwise", ""),
        ("--fp8-format hybrid --fp8-recipe blockwise", "fp8_blockwise", "compile writes e4m3"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "mxfp8", ""),
        ("--fp4-format e2m1", "nvfp4", ""),
        ("--fp4-format e2m1 --fp4-recipe nvfp4 --first-last-layers-bf16", "nvfp4", ""),
        ("--fp8-format hybrid", FILL_IN, ""),
        ("--fp8-format hybrid --fp8-recipe delayed", FILL_IN, ""),
        ("--fp8-format $FORMAT", FILL_IN, ""),
        ("--bf16", None, ""),
    ],
)
def test_low_precision_by_megatrons_names(
    options: str, wanted: str | None, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = convert_config(None, f"{_MEGATRON} {options}", None, ".")
    assert found.draft.values.get("training.low_precision") == wanted
    text = text_of(found)
    assert ("training.low_precision" in to_fill_in(text, "SW1203", "SW1204")) == (wanted == FILL_IN)
    assert note in text
    asked = found.draft.fill.get("training.low_precision", "")
    assert ("delayed" in asked) == (wanted == FILL_IN and "$" not in options)
    kept = [name for name in found.draft.left if name.endswith(("param_gather", "layers_bf16"))]
    assert len(kept) == options.count("gather") + options.count("first-last")


def test_what_is_nested_deeper_than_a_recipe_may_be_is_commented(tmp_path: Path) -> None:
    """A ds_config may be deeper: such a value would make a recipe that nothing reads."""
    for levels in (30, 46, 47, 60):
        value = "[" * levels + "]" * levels
        (tmp_path / "ds.json").write_text(
            f'{{"train_batch_size": 8, "comms_logger": {{"prof_ops": {value}}}}}'
        )
        found = imported(tmp_path / "ds.json")
        assert unaccounted(found) == []
        assert to_fill_in(text_of(found)) == found.draft.fill.keys()
        assert ("comms_logger.prof_ops" in found.draft.left) == (levels > 44)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes one new file, and says exactly what is to be filled in; `check` then names the same
    keys."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(GOOD[0].read_text())
    assert main(["import", "ds.json", "--model", "Qwen/Qwen3-8B", "-o", "recipe.yaml"]) == 0
    told = capsys.readouterr().err
    asked = [line.split()[0] for line in told.splitlines() if line.startswith("  ")]
    assert "model.source" not in asked and "next: shardwright check recipe.yaml" in told
    assert main(["check", "recipe.yaml"]) == 1
    err = capsys.readouterr().err
    assert err.count("error[") == err.count("error[SW1108]") == len(asked)
    assert all(f"error[SW1108]: {key} " in err for key in asked)
    assert main(["import", "ds.json", "-o", "recipe.yaml"]) == 1
    assert "error[SW1453]" in capsys.readouterr().err
    assert main(["import", "ds.json"]) == 0
    assert capsys.readouterr().out.startswith("# Made by")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["none.json"], "SW4001"),
        ([".", "--launch", "deepspeed train.py"], "SW4002"),
        (["pipe"], "SW4001"),
        (["list.json"], "SW4007"),
        (["deep.json"], "SW4009"),
        (["ds.json", "--launch", "'"], "SW1451"),
        (["ds.json", "--launch", ""], "SW1451"),
        (["ds.json", "--launch", "rm -rf /"], "SW1451"),
        (["ds.json", "--launch", "A=1"], "SW1451"),
        (["--launch", "accelerate launch --config_file none.yaml t.py"], "SW1452"),
        (["--launch", "accelerate launch --config_file list.json t.py"], "SW1452"),
        (["--launch", "accelerate launch --config_file deep.json t.py"], "SW1452"),
        (["--launch", "deepspeed t.py --deepspeed none.json"], "SW4001"),
        (["ds.json", "-o", "none/recipe.yaml"], "SW1453"),
    ],
)
def test_bad_input_is_refused(
    arguments: list[str],
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import os

    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("ds.json").write_text('{"train_batch_size": 8}')
    Path("list.json").write_text("[1]")
    Path("deep.json").write_text('{"a": ' + "[" * 100_000)
    assert main(["import", *arguments]) == 1
    captured = capsys.readouterr()
    assert f"error[{code}]" in captured.err and captured.out == ""


@pytest.mark.prove
def test_every_good_file_that_compiles_has_the_files_values(tmp_path: Path) -> None:
    refused = []
    for path in GOOD:
        (tmp_path / path.stem).mkdir()
        try:
            same_values(path, tmp_path / path.stem)
        except Refusal as refusal:
            refused.append((path.stem, [d.code for d in refusal.diagnostics]))
    assert len(refused) < 12, refused


_OPTIMIZED = (
    "deepspeed train.py --deepspeed ds.json --model_name_or_path org/model --max_steps 10 "
    "--per_device_train_batch_size 1 --max_seq_length 64 --learning_rate 3e-5 --weight_decay 0.2 "
    "--adam_beta2 0.98"
)


@pytest.mark.parametrize(
    ("optim", "wanted"),
    [
        ("lion_32bit", {"name": "lion", "betas": [0.9, 0.98]}),
        ("paged_lion_32bit", {"name": "lion", "betas": [0.9, 0.98]}),
        ("adamw_bnb_8bit", {"name": "adamw_8bit", "betas": [0.9, 0.98], "eps": 1e-8}),
        ("adamw_torch_8bit", {"name": "adamw_8bit", "betas": [0.9, 0.98], "eps": 1e-8}),
        ("adafactor", {"name": "adafactor", "scale_parameter": False, "eps": 1e-15}),
        ("adamw_torch", {"name": "adamw", "betas": [0.9, 0.98], "eps": 1e-8}),
    ],
)
def test_optimizers_by_transformers_names(
    optim: str, wanted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1}))
    found = convert_config(None, f"{_OPTIMIZED} --optim {optim} --adam_epsilon 1e-8", None, ".")
    prefix = "training.optimizer."
    values = {k: v for k, v in found.draft.values.items() if k.startswith(prefix)}
    got = {k.removeprefix(prefix): v for k, v in values.items()}
    assert got == {"lr": 3e-5, "weight_decay": 0.2, **wanted}
    assert "SW1226" not in {d.code for d in _told(text_of(found))}


def test_deepspeeds_lion(tmp_path: Path) -> None:
    section = {"type": "Lion", "params": {"lr": 1e-4, "weight_decay": 0.3}}
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 1, "optimizer": section})
    )
    values = imported(tmp_path / "ds.json").draft.values
    wanted = {"name": "lion", "lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.3}
    assert {f"training.optimizer.{k}": v for k, v in wanted.items()}.items() <= values.items()
    assert "training.optimizer.eps" not in values


def _told(text: str) -> tuple[Diagnostic, ...]:
    try:
        load_recipe(Path("-"), (), stdin_text=text)
    except Refusal as refusal:
        return refusal.diagnostics
    return ()
