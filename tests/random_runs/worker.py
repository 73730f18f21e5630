"""Under the `deepspeed` launcher: random runs of one engine and world size, each compared with a
plain loop.

SHARDWRIGHT_RANDOM_OUT names the folder for results, SHARDWRIGHT_RANDOM_SEEDS the seeds. A rank that
fails ends its launch, since others may wait for it in a collective; the next launch goes on behind
that seed.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import distributed as dist

from tests.parity.reference import add_reference_lora
from tests.random_runs import plain
from tests.random_runs.draw import ADAPTED_MIXTURES, SAVED, STEPS, TEXT_IDS, Case, draw

SECONDS = 90
"""That a collective may take: the other ranks wait for rank 0's compile and its plain loop."""
OUT = Path(os.environ.get("SHARDWRIGHT_RANDOM_OUT", "."))


def tokens_of(case: Case, r: random.Random, rows: int) -> np.ndarray:
    """(rows, S) ids; one in six is a special id of the configuration, the first id or the last
    one."""
    vocabulary = case.config.get("vocab_size") or 260
    composite = any(isinstance(v, dict) and "model_type" in v for v in case.config.values())
    placeholders = composite or any(
        name.endswith(("_token_id", "_token_index")) and isinstance(v, int) and v >= TEXT_IDS
        for name, v in case.config.items()
    )
    last = TEXT_IDS if placeholders else vocabulary
    special = [case.config.get(n) for n in ("pad_token_id", "bos_token_id", "eos_token_id")]
    ids = [0, last - 1, *(n for n in special if isinstance(n, int) and n < last)]
    length = case.recipe["training"]["sequence_length"]
    return np.array(
        [
            [r.choice(ids) if r.random() < 1 / 6 else r.randrange(last) for _ in range(length)]
            for _ in range(rows)
        ],
        dtype=np.int32,
    )


def text_of(r: random.Random, most: int) -> str:
    return "".join(chr(r.randrange(32, 127)) for _ in range(r.randrange(1, most)))


def write_part(case: Case, r: random.Random, folder: Path, part: dict[str, Any], rows: int) -> None:
    kind, length = part["kind"], case.recipe["training"]["sequence_length"]
    if kind == "tokens":
        np.save(folder / part["path"], tokens_of(case, r, rows))
        return
    if kind == "text":
        (folder / "data").mkdir(exist_ok=True)
        for number in range(rows * 3):
            (folder / "data" / f"{number:04d}.txt").write_text(text_of(r, length))
        return
    lines: list[dict[str, str | list[dict[str, str]]]] = []
    for _ in range(rows * 4):
        if kind == "jsonl":
            lines.append({"text": text_of(r, length)})
            continue
        talk = []
        for role in ["system"] * r.randrange(2) + ["user", "assistant"] * r.randrange(1, 3):
            talk.append({"role": role, "content": text_of(r, 2 + length // 4)})
        lines.append({"messages": talk})
    (folder / part["path"]).write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_inputs(case: Case, folder: Path) -> None:
    """The model's weights, the data and the recipes; by rank 0."""
    r = random.Random(f"data {case.seed}")
    folder.mkdir(parents=True)
    initial(case).save_pretrained(folder / "weights")
    transformers.AutoConfig.for_model(**case.config).save_pretrained(folder / "weights")
    rows = (STEPS + 1) * case.recipe["training"]["global_batch_size"]
    data = case.recipe["data"]
    for part in data.get("mixture", [data]):
        write_part(case, r, folder, part, rows)
    np.save(folder / "held-out.npy", tokens_of(case, r, r.randrange(1, 6)))
    document = {**case.recipe, "model": {**case.recipe["model"], "source": "./weights"}}
    (folder / "recipe.yaml").write_text(json.dumps(document, indent=1))
    if case.second is not None:
        (folder / "second.yaml").write_text(
            json.dumps({**document, "parallelism": case.second}, indent=1)
        )


def initial(case: Case) -> Any:
    from tests.zoo.configs import randomize

    torch.manual_seed(case.seed)
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(case.config)))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, case.seed)
    return model


def compiled(folder: Path, recipe: str, out: str) -> dict[str, Any]:
    """Rank 0 compiles and prepares the data; every rank hears {} or what was refused."""
    from shardwright.compile.compiled_folder import write_folder
    from shardwright.compile.recipe_compiler import compile_recipe
    from shardwright.data.data_preparation import prepare
    from shardwright.data.dataset import open_dataset
    from shardwright.diagnostics import Refusal
    from shardwright.parallel.context_parallel import CONTEXT_PARALLEL
    from shardwright.plan.plan import read_plan
    from shardwright.recipe.recipe_loader import load_recipe

    said: list[dict[str, Any]] = [{}]
    if dist.get_rank() == 0:
        try:
            with CONTEXT_PARALLEL.aside():
                write_folder(folder / out, compile_recipe(load_recipe(folder / recipe)).files)
            prepare(read_plan(folder / out), folder / out, limit_bytes=2**30)
            open_dataset(read_plan(folder / out), folder / out)
        except Refusal as refusal:
            d = refusal.diagnostics[0]
            said = [{"outcome": "refused", "code": d.code, "reason": d.message}]
        except Exception:
            said = [
                {
                    "outcome": "error",
                    "where": f"compile of {recipe}",
                    "error": traceback.format_exc(),
                }
            ]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def measure(case: Case, folder: Path) -> dict[str, Any]:
    if dist.get_rank() == 0:
        write_inputs(case, folder)
    said = compiled(folder, "recipe.yaml", "out")
    if said:
        return said
    second = None if case.second is None else compiled(folder, "second.yaml", "second")
    if second and second["outcome"] == "error":
        return second
    from shardwright.plan.plan import read_plan

    first = trained(case, folder / "out", range(1, STEPS + 1), None)
    resumed = None
    if second == {}:
        resumed = trained(case, folder / "second", range(SAVED + 1, STEPS + 1), folder / "out")
    found: list[dict[str, Any]] = [{}]
    if dist.get_rank() == 0:
        plan = read_plan(folder / "out")
        found = [compared(case, plan, plain_run(case, plan, folder), first, resumed, folder)]
        if second:
            found[0]["second"] = second["code"]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def trained(case: Case, out: Path, steps: range, resume: Path | None) -> dict[str, list[Any]]:
    """Losses, norms, rates and evaluations of these steps, on the engine; saved behind step SAVED
    and the last."""
    from shardwright.checkpoint.checkpoint_loader import load_checkpoint
    from shardwright.checkpoint.checkpoint_saver import save_checkpoint
    from shardwright.checkpoint.checkpoint_storage import step_name
    from shardwright.data.dataset import open_dataset
    from shardwright.engines.trainer_protocol import engine_runtime
    from shardwright.parallel.learning_rate import learning_rate
    from shardwright.parallel.micro_batches import TrainingBatches, ValidationBatches
    from shardwright.parallel.tensor_parallel_collectives import seed_dropout
    from shardwright.plan.plan import read_plan
    from shardwright.train.training_session import check_parameters

    plan = read_plan(out)
    opened = open_megatron(plan) if case.engine == "megatron" else None
    data, rank = open_dataset(plan, out), dist.get_rank()
    trainer = engine_runtime(plan).build_trainer(plan, out, resumes=resume is not None)
    check_parameters(plan, rank, trainer.parameter_shards(), trainer.transposed)
    at, batches = plan.ranks[rank].data, TrainingBatches(plan, data)
    seed_dropout(plan, rank)
    if resume is not None:
        assert load_checkpoint(plan, trainer, resume / "checkpoints" / step_name(SAVED)) == SAVED
    found: dict[str, list[Any]] = {"losses": [], "norms": [], "rates": [], "held_out": []}
    if resume is None and data.validation is not None:
        found["held_out"].append(
            [0, trainer.evaluate(ValidationBatches(plan, data.validation, at))[0]]
        )
    for step in steps:
        rate = learning_rate(plan.optimizer, plan.scheduler, STEPS, step)
        result = trainer.step(batches.micro_batches(step, at), rate)
        found["losses"].append(result.loss)
        found["norms"].append(result.grad_norm)
        found["rates"].append(rate)
        v = plan.validation
        if v is not None and data.validation and (step % v.every_steps == 0 or step == STEPS):
            found["held_out"].append(
                [step, trainer.evaluate(ValidationBatches(plan, data.validation, at))[0]]
            )
        if step in (SAVED, STEPS):
            save_checkpoint(plan, out, trainer, step)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: found[name] for name in ("losses", "norms")})
    assert all(other == everyone[0] for other in everyone), everyone
    if opened is not None:
        opened.destroy_model_parallel()
    elif hasattr(trainer.engine, "destroy"):
        trainer.engine.destroy()
    return found


def open_megatron(plan: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from shardwright.engines.megatron.megatron_runtime import group_settings

    parallel_state.initialize_model_parallel(**group_settings(plan))
    model_parallel_cuda_manual_seed(plan.training.seed)
    return parallel_state


def plain_run(case: Case, plan: Any, folder: Path) -> plain.Plain:
    from shardwright.data.dataset import open_dataset
    from shardwright.parallel.context_parallel import CONTEXT_PARALLEL

    data = open_dataset(plan, folder / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "weights", dtype=torch.float32
    )
    if case.config["model_type"] == "youtu":  # from_pretrained empties the padding id's row
        model.load_state_dict(load_file(folder / "weights" / "model.safetensors"), strict=False)
    if "lora" in case.recipe:
        model = with_adapters(model, case)
    held_out = (
        None if data.validation is None else data.validation.read(np.arange(len(data.validation)))
    )
    begin = (lambda m: draw_in_turns(m, case)) if case.theme == "dropout" else (lambda m: None)
    with CONTEXT_PARALLEL.aside():
        return plain.train(
            case, model, lambda step: data.train.read(data.order.indices(step)), held_out, begin
        )


def with_adapters(model: Any, case: Case) -> Any:
    from peft import LoraConfig, get_peft_model

    lora, seed = case.recipe["lora"], case.recipe["training"]["seed"]
    if (
        case.config["model_type"] in ADAPTED_MIXTURES
    ):  # whose dense and shared experts peft leaves out
        add_reference_lora(
            model, "model.layers", None, rank=lora["rank"], alpha=lora["alpha"], seed=seed
        )
        return model
    torch.manual_seed(seed)
    config = LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        target_modules="all-linear",
        fan_in_fan_out=case.config["model_type"] == "gpt2",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def draw_in_turns(model: torch.nn.Module, case: Case) -> None:
    """Each data rank draws dropout from a stream of its own; here the micro-batches of all ranks
    follow each other."""
    ranks, states, count = case.recipe["parallelism"]["data"], [], itertools.count()
    for rank in range(ranks):
        torch.manual_seed(case.recipe["training"]["seed"] + 1 + rank)
        states.append(torch.get_rng_state())
    at = 0

    def before(module: torch.nn.Module, *_: object) -> None:
        nonlocal at
        if module.training:
            at = next(count) % ranks
            torch.set_rng_state(states[at])

    def behind(module: torch.nn.Module, *_: object) -> None:
        if module.training:
            states[at] = torch.get_rng_state()

    model.register_forward_pre_hook(before)
    model.register_forward_hook(behind)


def compared(
    case: Case,
    plan: Any,
    wanted: plain.Plain,
    first: dict[str, list[Any]],
    resumed: dict[str, list[Any]] | None,
    folder: Path,
) -> dict[str, Any]:
    """The largest differences. Raises nothing: the test judges them, and NaN counts as infinite."""
    from shardwright.checkpoint.checkpoint_storage import step_name
    from shardwright.utils.numeric_difference import max_series_diff

    found: dict[str, Any] = {
        "outcome": "ran",
        "rate": max_series_diff(first["rates"], wanted.learning_rates),
    }
    if case.compares_training:
        found["loss"] = max_series_diff(first["losses"], wanted.losses)
        found["norm"] = max_series_diff(first["norms"], wanted.grad_norms, relative=True)
    if first["held_out"]:
        got, plainly = dict(first["held_out"]), wanted.held_out
        assert set(got) == set(plainly), (got, plainly)
        if not case.compares_training:  # of the weights that came of it, then
            plainly = {0: plainly[0], STEPS: evaluated_saved(case, plan, folder)}
        found["held_out"] = max_series_diff(
            [got[k] for k in sorted(plainly)], [plainly[k] for k in sorted(plainly)]
        )
    full = (
        "lora" not in case.recipe
    )  # adapters have other names in a checkpoint than in peft's model
    if case.compares_training and case.recipe["training"]["precision"] == "fp32" and full:
        found["weights"] = weights_off(folder / "out" / "checkpoints" / step_name(STEPS), wanted)
    if resumed is not None:
        found["loss_resumed"] = max_series_diff(resumed["losses"], wanted.losses[SAVED:])
        found["norm_resumed"] = max_series_diff(
            resumed["norms"], wanted.grad_norms[SAVED:], relative=True
        )
        if full:
            found["weights_resumed"] = weights_off(
                folder / "second" / "checkpoints" / step_name(STEPS), wanted
            )
    return found


def evaluated_saved(case: Case, plan: Any, folder: Path) -> float:
    """The validation loss of the last checkpoint's weights, under Hugging Face's model in one
    process."""
    from shardwright.checkpoint.checkpoint_loader import CheckpointReader
    from shardwright.checkpoint.checkpoint_storage import step_name
    from shardwright.data.dataset import open_dataset

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "weights", dtype=torch.float32
    )
    with (
        CheckpointReader(folder / "out" / "checkpoints" / step_name(STEPS)) as reader,
        torch.no_grad(),
    ):
        for name, p in model.named_parameters():
            p.copy_(reader.whole(name, "fp32" if "fp32" in reader.saved(name).states else "value"))
        rows = open_dataset(plan, folder / "out").validation
        assert rows is not None
        block = rows.read(np.arange(len(rows)))
        total, count = plain.summed_loss(model.eval(), plain.alone(block))
    return float(total) / count


def weights_off(checkpoint: Path, wanted: plain.Plain) -> float:
    """Of the saved weights from the plain loop's; parameters that no loss reaches are left out:
    ZeRO decays them."""
    from shardwright.checkpoint.checkpoint_loader import CheckpointReader
    from shardwright.utils.numeric_difference import largest_difference, max_abs_diff

    off = []
    with CheckpointReader(checkpoint) as reader:
        for name, weight in wanted.weights.items():
            if name in wanted.unused or name not in reader.manifest.tensors:
                continue
            states = reader.saved(name).states
            saved = reader.whole(name, "fp32" if "fp32" in states else "value")
            off.append(max_abs_diff(saved.float(), weight))
    assert off, "no weight was compared"
    return largest_difference(off)


def begin(engine: str) -> None:
    """Collective: the process groups of the launch."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    from shardwright.models import graph_trace
    from shardwright.models.layer_trace import ModelTrace

    # What the layers cost is no matter here, and takes longer than the steps.
    def untraced(model: Any, cut: Any, attention: str) -> ModelTrace:
        layers = len(list(model.get_submodule(cut.stack).children())) + 2
        return ModelTrace(layers=("not here",) * layers, context=())

    patch.object(graph_trace, "trace_model", untraced).start()
    if engine == "megatron":
        from shardwright.engines.megatron.megatron_cpu_patches import patch_torch_for_cpu

        patch_torch_for_cpu()
        dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
        return
    deepspeed = importlib.import_module("deepspeed")
    from deepspeed import ops

    from tests.parity.engine_groups import share_groups

    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=SECONDS))
    share_groups()


def main() -> None:
    from shardwright.train.training_worker import leave

    cases = [draw(int(seed)) for seed in os.environ["SHARDWRIGHT_RANDOM_SEEDS"].split(",")]
    begin(cases[0].engine)
    rank = dist.get_rank()
    for case in cases:
        try:
            line = measure(case, OUT / "work" / str(case.seed))
        except Exception:
            line = {"outcome": "error", "where": f"rank {rank}", "error": traceback.format_exc()}
        with (OUT / f"rank-{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"seed": case.seed, **line}) + "\n")
        if line["outcome"] == "error" and line["where"].startswith("rank"):
            sys.stdout.flush()
            os._exit(1)
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()
