"""Many parity cases under Megatron-Core: compiled and trained plainly first, then its ranks, forked
after one import.

SHARDWRIGHT_CASES_OUT names the folder for results, SHARDWRIGHT_CASES is JSON: name -> the case's
fields.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import transformers

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.engines.megatron import megatron_equivalence
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_loader import load_recipe
from tests.parity.harness import LENGTH, SEED, STEPS, Case, reference, write_inputs
from tests.parity.models import MODELS
from tests.parity.muon import MUON_LR, OPTIMIZER, muon_update
from tests.parity.plain_training import plain_training
from tests.parity.reference import initial_model

SECONDS = 60
MUON = "muon-"
"""Cases of this name train by Muon."""
SPLIT = 20
"""Where the second document of a packed row begins."""


def prepared(case: Case, folder: Path) -> tuple[Case, Plan, Any]:
    """Compiled, without the proof that each compile makes in a process of its own, and trained in
    one plain process."""
    tokens, by_muon = write_inputs(case, folder), folder.name.startswith(MUON)
    if by_muon:
        document = json.loads((folder / "recipe.yaml").read_text())
        document["training"]["optimizer"] = OPTIMIZER
        (folder / "recipe.yaml").write_text(json.dumps(document))
    made = compile_recipe(load_recipe(folder / "recipe.yaml"))
    for name, content in made.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return (
        case,
        made.plan,
        plain_training(case, tokens, MUON_LR, muon_update)
        if by_muon
        else reference(case, tokens, torch.float32 if case.precision == "fp32" else torch.bfloat16),
    )


def measure(case: Case, plan: Plan, wanted: Any, folder: Path) -> dict[str, float]:
    from megatron.core import parallel_state
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from torch import distributed as dist

    from shardwright.checkpoint.checkpoint_saver import check_master_weights
    from shardwright.engines.megatron.megatron_runtime import group_settings
    from shardwright.engines.megatron.megatron_trainer import build_trainer
    from shardwright.parallel.model_loading import DTYPES
    from tests.figures import training_apart

    parallel_state.initialize_model_parallel(**group_settings(plan))
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(plan.training.seed)
    at = plan.ranks[dist.get_rank()]
    with patch.object(
        HybridDeviceOptimizer,
        "_init_sub_optimizers",
        autospec=True,
        side_effect=HybridDeviceOptimizer._init_sub_optimizers,
    ) as copied:
        trainer = build_trainer(plan, folder)
    assert copied.call_count == (len(trainer.states.parts) if case.offload == "optimizer" else 0)
    check_model_class(case, trainer)
    summed_in = {p.main_grad.dtype for c in trainer.engine for p in c.parameters()}
    assert summed_in == {DTYPES[plan.training.gradient_accumulation_dtype]}, summed_in
    forwards = counted_forwards(case, trainer)
    with counted_schedule_plans() as schedule_plans:
        results = train(plan, trainer, folder)
    chunks = STEPS * case.accumulation * len(trainer.engine)
    assert len(schedule_plans) == (chunks if case.expert_overlap else 0), len(schedule_plans)
    repeats = {name: count / (STEPS * case.accumulation) for name, count in forwards.items()}
    assert bool(repeats) == isinstance(case.checkpointing, list), repeats
    assert all(count == 2 for count in repeats.values()), repeats
    check_master_weights(trainer.owned_shards())
    check_host_optimizer(case, trainer)
    if plan.muon:
        check_muon_states(plan, trainer, folder)
    held = sum(p.resident_bytes for p in trainer.parameter_shards().values())
    assert held == at.parameter_bytes, (held, at)
    half = case.precision == "bf16"
    packed = 0.0 if half else packed_apart(case, trainer, wanted, at.data)
    weights = 0.0 if half else masters_apart(plan, trainer, wanted)
    if case.expert_overlap:
        packed, weights = overlap_apart(case, plan, trainer, folder)
    parallel_state.destroy_model_parallel()
    difference = training_apart([r.loss for r in results], [r.grad_norm for r in results], wanted)
    return {**difference, "packed": packed, "weights": weights}


def check_model_class(case: Case, trainer: Any) -> None:
    """Check that HybridModel is built from 0.19 on, and GPTModel where it cannot run the layout."""
    try:
        from megatron.core.models.hybrid import hybrid_model
    except ImportError:  # 0.16
        hybrid_model = None
    recomputes_some = isinstance(case.checkpointing, dict)
    hybrid = hybrid_model is not None and not case.expert_overlap and not recomputes_some
    expected = "HybridModel" if hybrid else "GPTModel"
    for chunk in trainer.engine:
        assert expected in {type(module).__name__ for module in chunk.modules()}, expected


def check_muon_states(plan: Plan, trainer: Any, folder: Path) -> None:
    """Check that the moments are those of the plan's matrices and of AdamW's parameters, and that
    their bytes are those that the planner counts."""
    from torch import distributed as dist

    from shardwright.compile.recipe_compiler import read_problem
    from shardwright.cost.peak_memory import estimate_memory
    from shardwright.search.layout_resolution import price_planned_layout

    for f in trainer.owned_shards():
        if "value" not in f.states:
            expected = 2 if plan.muon_matrices(f.name) is not None else 3
            assert len(f.states) == expected, (f.name, list(f.states))
    moments = [
        value
        for optimizer in trainer.states.optimizers
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step" and isinstance(value, torch.Tensor)
    ]
    masters = [
        master
        for optimizer in trainer.states.optimizers
        for group in optimizer.param_groups
        for master in (group["params"] if plan.training.precision == "bf16" else ())
    ]
    held = sum(value.numel() * value.element_size() for value in (*moments, *masters))
    layout, _ = price_planned_layout(
        read_problem(load_recipe(folder / "recipe.yaml")), plan.strategy, plan.boundaries
    )
    counted = estimate_memory(layout).stages[plan.ranks[dist.get_rank()].pipeline].optimizer_bytes
    assert abs(held - counted) <= 0.02 * held, (held, counted)


def check_host_optimizer(case: Case, trainer: Any) -> None:
    """Check that, where states are in host memory, Megatron-Core's optimizer of the host updates
    every shard, and none is left to the one of the GPU."""
    for part in trainer.states.parts:
        assert hasattr(part.optimizer, "cpu_optimizers") == (case.offload == "optimizer")
        if case.offload == "optimizer":
            assert part.optimizer.gpu_optimizer is None and part.optimizer.cpu_optimizers
            masters = part.optimizer.param_to_inner_param.items()
            assert all(own is not copy and copy.dtype == torch.float32 for own, copy in masters)


@contextlib.contextmanager
def counted_schedule_plans() -> Iterator[list[object]]:
    """Counts the forward passes that run as Megatron's combined 1F1B."""
    from megatron.core.models.gpt import GPTModel

    model, found = cast(Any, GPTModel), list[object]()
    build = model.build_schedule_plan

    def counted(*arguments: Any, **more: Any) -> object:
        found.append(build(*arguments, **more))
        return found[-1]

    model.build_schedule_plan = counted
    try:
        yield found
    finally:
        model.build_schedule_plan = build


def train(plan: Plan, trainer: Any, folder: Path) -> list[Any]:
    from torch import distributed as dist

    from shardwright.data.dataset import open_dataset
    from shardwright.parallel.learning_rate import learning_rate
    from shardwright.parallel.micro_batches import TrainingBatches

    batches = TrainingBatches(plan, open_dataset(plan, folder))
    data_rank = plan.ranks[dist.get_rank()].data
    return [
        trainer.step(
            batches.micro_batches(step, data_rank),
            learning_rate(plan.optimizer, plan.scheduler, STEPS, step),
        )
        for step in range(1, STEPS + 1)
    ]


def overlap_apart(case: Case, plan: Plan, trainer: Any, folder: Path) -> tuple[float, float]:
    """Return how far the evaluated loss over packed rows and the weights are from those of the
    same layout trained without overlap."""
    from torch import distributed as dist

    from shardwright.engines.megatron.megatron_trainer import build_trainer
    from shardwright.utils.numeric_difference import difference, largest_difference, max_abs_diff

    plain = dataclasses.replace(
        plan, strategy=dataclasses.replace(plan.strategy, expert_overlap=False)
    )
    other = build_trainer(plain, folder)
    train(plain, other, folder)
    rows: Any = packed_batches(case, plan.ranks[dist.get_rank()].data)
    losses = [each.evaluate(rows)[0] for each in (trainer, other)]
    owned = [[f for f in each.owned_shards() if "fp32" in f.states] for each in (trainer, other)]
    assert [f.name for f in owned[0]] == [f.name for f in owned[1]]
    return difference(*losses), largest_difference(
        max_abs_diff(f.states["fp32"], g.states["fp32"]) for f, g in zip(*owned, strict=True)
    )


MODULES = {
    "core_attn": "self_attention.core_attention",
    "layernorm": "input_layernorm",
    "mla_up_proj": "self_attention.linear_kv_up_proj",
    "mlp": "mlp.linear_fc1",
    "moe": "mlp.router",
    "shared_experts": "mlp.shared_experts",
}
"""A module of recompute_modules -> what of a layer runs once in its forward pass."""


def counted_forwards(case: Case, trainer: Any) -> dict[str, int]:
    """Counts the forward passes of the case's recomputed modules, of each layer that has them."""
    from megatron.core.transformer.identity_op import IdentityOp

    counts: dict[str, int] = {}
    for chunk in trainer.engine:
        for path, module in chunk.named_modules():
            for name in case.checkpointing if isinstance(case.checkpointing, list) else ():
                layer, _, rest = path.partition("decoder.layers.")[2].partition(".")
                if layer and rest == MODULES[name] and not isinstance(module, IdentityOp):
                    counts[path] = 0

                    def count(*_: Any, path: str = path) -> None:
                        counts[path] += 1

                    module.register_forward_pre_hook(count)
    return counts


class Trained:
    """modules.weight_files.Weights of the plain process's."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def names(self) -> Any:
        return self.weights

    def read(self, name: str, range_: tuple[int, int, int] | None) -> torch.Tensor:
        return self.weights[name] if range_ is None else self.weights[name].narrow(*range_)


def masters_apart(plan: Plan, trainer: Any, wanted: Any) -> float:
    """The largest difference of an element that this rank updates from the plain process's."""
    from shardwright.parallel.weight_loader import ShardReader
    from shardwright.utils.numeric_difference import largest_difference, max_abs_diff

    weights: Any = Trained(wanted.weights)
    shards = ShardReader(plan, weights, trainer.transposed)
    return largest_difference(
        max_abs_diff(
            f.states["fp32"],
            shards.read(f.name).reshape(-1).narrow(0, f.start, f.states["fp32"].numel()),
        )
        for f in trainer.owned_shards()
        if "fp32" in f.states
    )


class Packed(list[Any]):
    """As modules.batches.ValidationBatches: two documents in each row."""

    predicted = property(lambda self: sum(m.predicted for m in self))


def packed_batches(case: Case, data_rank: int) -> Packed:
    from shardwright.models.tasks.causal_lm import IGNORE_INDEX
    from shardwright.parallel.micro_batches import MicroBatch

    draw = torch.Generator().manual_seed(data_rank)
    places = torch.cat([torch.arange(SPLIT), torch.arange(LENGTH - SPLIT)]).expand(
        case.micro, LENGTH
    )
    found = Packed()
    for _ in range(case.accumulation):
        ids = torch.randint(
            0, MODELS[case.model]["vocab_size"], (case.micro, LENGTH), generator=draw
        )
        labels = torch.where(places == 0, IGNORE_INDEX, ids)
        found.append(MicroBatch(input_ids=ids, labels=labels, position_ids=places))
    return found


def packed_apart(case: Case, trainer: Any, wanted: Any, data_rank: int) -> float:
    """Of the trained model's loss over packed rows, evaluated, from that of each document alone
    under Hugging Face."""
    from shardwright.utils.numeric_difference import difference

    model = initial_model(MODELS[case.model], SEED)
    model.load_state_dict(wanted.weights, strict=False)
    total = count = 0.0
    with torch.no_grad():
        for m in (m for rank in range(case.data) for m in packed_batches(case, rank)):
            for part in (slice(0, SPLIT), slice(SPLIT, LENGTH)):
                ids = m.input_ids[:, part]
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
                total += float(
                    torch.nn.functional.cross_entropy(
                        logits.transpose(1, 2), ids[:, 1:], reduction="sum"
                    )
                )
                count += ids[:, 1:].numel()
    loss, labels = trainer.evaluate(packed_batches(case, data_rank))
    assert labels == count, (labels, count)
    return difference(loss, total / count)


def rank_of(rank: int, world: int, cases: dict[str, Any], out: Path) -> None:
    from datetime import timedelta

    from torch import distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.use_deterministic_algorithms(True, warn_only=True)  # unwritten memory holds NaN
    store = dist.FileStore(str(out / f"store-{world}"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS)
    )
    for name, (case, plan, wanted) in cases.items():
        try:
            line: dict[str, Any] = {
                "case": name,
                **measure(case, plan, wanted, out / "work" / name),
            }
        except BaseException:
            line = {"case": name, "error": traceback.format_exc()}
        with (out / f"rank-{world}-{rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if "error" in line:
            os._exit(1)  # the other ranks may be inside a collective
    dist.barrier()
    os._exit(0)


def main() -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    megatron_equivalence.check_megatron_equivalence = lambda *asked: None
    out, worlds = Path(os.environ["SHARDWRIGHT_CASES_OUT"]), dict[int, Any]()
    for name, fields in json.loads(os.environ["SHARDWRIGHT_CASES"]).items():
        found = prepared(Case(**fields), out / "work" / name)
        worlds.setdefault(found[0].world, {})[name] = found
    from shardwright.engines.megatron.megatron_cpu_patches import patch_torch_for_cpu

    patch_torch_for_cpu()
    import shardwright.engines.megatron.megatron_trainer  # noqa: F401  forked after it

    failed = 0
    for world, cases in sorted(worlds.items()):
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                rank_of(rank, world, cases, out)
            children.append(child)
        failed += sum(os.waitpid(child, 0)[1] != 0 for child in children)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
