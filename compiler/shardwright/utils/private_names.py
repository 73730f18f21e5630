"""List the private and undocumented names of other packages that this project patches, calls or
reads, and find those that the installed versions lack.

A name is looked up in the source of its module, so nothing is imported. A test compares the table
with this project's sources.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwright.diagnostics import Diagnostic, found
from shardwright.utils.installation import installed_version

Purpose = Literal[
    "every model",
    "a vision-language model",
    "context parallelism",
    "every run under DeepSpeed",
    "a pipeline under DeepSpeed",
    "every run under Megatron-Core",
    "Megatron-Core on a CPU",
    "low precision",
    "LoRA",
]
"""What of a plan needs a name; a message's words."""


@dataclass(frozen=True, slots=True)
class PrivateNames:
    """List names of one module. A method or attribute has its class before it; without names the
    module alone is needed."""

    purpose: Purpose
    module: str
    names: tuple[str, ...] = ()


PRIVATE_NAMES = (
    PrivateNames(
        "context parallelism",
        "transformers.masking_utils",
        (
            "_preprocess_mask_arguments",
            "find_packed_sequence_indices",
            "remap_positions_for_packed_sequence",
        ),
    ),
    PrivateNames(
        "every model",
        "transformers.modeling_utils",
        (
            "AttentionInterface.get_interface",
            "PreTrainedModel._check_and_adjust_attn_implementation",
            "PreTrainedModel._init_weights",
            "PreTrainedModel._keys_to_ignore_on_load_unexpected",
            "PreTrainedModel._keys_to_ignore_on_save",
            "PreTrainedModel._supports_flash_attn",
            "PreTrainedModel._supports_sdpa",
            "remove_tied_weights_from_state_dict",
        ),
    ),
    PrivateNames(
        "every model",
        "transformers.configuration_utils",
        ("PreTrainedConfig._attn_implementation",),
    ),
    PrivateNames(
        "every model",
        "transformers.generation.configuration_utils",
        ("GenerationConfig._get_default_generation_params",),
    ),
    PrivateNames("every model", "transformers.masking_utils", ("_preprocess_mask_arguments",)),
    PrivateNames(
        "every model",
        "transformers.modeling_flash_attention_utils",
        (
            "_flash_fn",
            "_flash_varlen_fn",
            "_flash_with_kvcache_fn",
            "_is_packed_sequence",
            "_lazy_imports",
            "_loaded_implementation",
            "_pad_fn",
            "_pad_input",
            "_process_flash_kwargs_fn",
            "_process_with_kvcache_kwargs_fn",
            "_unpad_fn",
            "_unpad_input",
        ),
    ),
    PrivateNames("every model", "transformers.integrations.flash_attention", ("get_target_dtype",)),
    PrivateNames("every model", "transformers.integrations.moe", ("_can_use_grouped_mm",)),
    PrivateNames("every model", "transformers.pytorch_utils", ("Conv1D",)),
    PrivateNames(
        "every model", "transformers.conversion_mapping", ("get_model_conversion_mapping",)
    ),
    PrivateNames(
        "every model",
        "transformers.core_model_loading",
        (
            "WeightConverter",
            "WeightRenaming",
            "dot_natural_key",
            "rename_source_key",
            "revert_weight_conversion",
        ),
    ),
    PrivateNames("every model", "transformers.quantizers.auto", ("AutoHfQuantizer",)),
    PrivateNames("every model", "transformers.quantizers.base", ("HfQuantizer",)),
    PrivateNames(
        "every model", "transformers.dynamic_module_utils", ("get_relative_import_files",)
    ),
    PrivateNames(
        "every model",
        "transformers.models.auto.configuration_auto",
        ("CONFIG_MAPPING", "CONFIG_MAPPING_NAMES"),
    ),
    PrivateNames(
        "every model",
        "transformers.models.auto.modeling_auto",
        (
            "MODEL_FOR_CAUSAL_LM_MAPPING",
            "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
            "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
            "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
            "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
            "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
            "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING",
        ),
    ),
    PrivateNames(
        "a vision-language model",
        "transformers.models.auto.image_processing_auto",
        ("IMAGE_PROCESSOR_MAPPING_NAMES",),
    ),
    PrivateNames(
        "a vision-language model",
        "transformers.models.auto.processing_auto",
        ("PROCESSOR_MAPPING_NAMES",),
    ),
    PrivateNames(
        "a vision-language model",
        "transformers.processing_utils",
        ("ProcessorMixin._merge_kwargs", "ProcessorMixin._process_images"),
    ),
    PrivateNames("every model", "torch._subclasses.fake_tensor", ("FakeTensor", "FakeTensorMode")),
    PrivateNames(
        "every model",
        "torch.utils._pytree",
        ("tree_leaves", "tree_leaves_with_path", "tree_map", "tree_map_only"),
    ),
    PrivateNames("every model", "torch.distributed.distributed_c10d", ("_world",)),
    PrivateNames(
        "every run under DeepSpeed",
        "deepspeed.runtime.bf16_optimizer",
        (
            "BF16_Optimizer.backward_prologue",
            "BF16_Optimizer.get_grads_for_norm",
            "BF16_Optimizer.update_hp_grads",
            "get_global_norm_of_tensors",
            "get_norm_with_moe_layers",
        ),
    ),
    PrivateNames(
        "every run under DeepSpeed",
        "deepspeed.runtime.pipe.dualpipev",
        ("DualPipeVEngine._INSTRUCTION_MAP", "DualPipeVModule"),
    ),
    PrivateNames(
        "every run under DeepSpeed",
        "deepspeed.runtime.pipe.engine",
        ("PipelineEngine._INSTRUCTION_MAP", "PipelineEngine._exec_reduce_tied_grads"),
    ),
    PrivateNames(
        "every run under DeepSpeed", "deepspeed.runtime.pipe.schedule", ("ReduceTiedGrads",)
    ),
    PrivateNames(
        "every run under DeepSpeed",
        "deepspeed.runtime.pipe.topology",
        ("PipeModelDataParallelTopology", "PipelineParallelGrid"),
    ),
    PrivateNames(
        "a pipeline under DeepSpeed",
        "deepspeed.runtime.pipe.module",
        (
            "PipelineModule._index_tied_modules",
            "PipelineModule._local_start",
            "PipelineModule._local_stop",
            "PipelineModule._partition_layers",
            "PipelineModule._set_bounds",
            "PipelineModule._synchronize_tied_weights",
            "PipelineModule._topo",
        ),
    ),
    PrivateNames(
        "every run under DeepSpeed", "deepspeed.runtime.utils", ("is_model_parallel_parameter",)
    ),
    PrivateNames(
        "every run under DeepSpeed", "deepspeed.runtime.zero.partition_parameters", ("Init",)
    ),
    PrivateNames(
        "every run under DeepSpeed",
        "deepspeed.runtime.zero.partitioned_param_coordinator",
        (
            "PartitionedParameterCoordinator.__params_to_release",
            "PartitionedParameterCoordinator._invalidate_trace",
        ),
    ),
    PrivateNames(
        "every run under DeepSpeed",
        "deepspeed.runtime.zero.stage3",
        (
            "DeepSpeedZeroOptimizer_Stage3._autoep_expert_parallel_group",
            "DeepSpeedZeroOptimizer_Stage3._get_param_partition_rank",
            "DeepSpeedZeroOptimizer_Stage3._grad_norm_counts_every_rank",
        ),
    ),
    PrivateNames(
        "every run under DeepSpeed",
        "deepspeed.runtime.zero.stage_1_and_2",
        ("DeepSpeedZeroOptimizer",),
    ),
    PrivateNames(
        "every run under DeepSpeed", "deepspeed.utils.mixed_precision_linkage", ("_hp_mapping",)
    ),
    PrivateNames(
        "every run under DeepSpeed", "deepspeed.module_inject.auto_ep_layer", ("AutoEPMoELayer",)
    ),
    PrivateNames("every run under DeepSpeed", "deepspeed.moe.utils", ("is_moe_param",)),
    PrivateNames(
        "every run under DeepSpeed",
        "deepspeed.utils.groups",
        (
            "_EXPERT_DATA_PARALLEL_GROUP",
            "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
            "_EXPERT_PARALLEL_GROUP",
            "_EXPERT_PARALLEL_GROUP_RANKS",
            "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
            "_get_max_expert_parallel_group",
        ),
    ),
    PrivateNames(
        "every run under DeepSpeed", "deepspeed.utils.bwc", ("bwc_tensor_model_parallel_rank",)
    ),
    PrivateNames(
        "LoRA",
        "peft.utils.transformers_weight_conversion",
        ("convert_peft_config_for_transformers",),
    ),
    PrivateNames(
        "low precision", "torchao.float8.float8_linear", ("matmul_with_hp_or_float8_args",)
    ),
    PrivateNames(
        "every run under Megatron-Core",
        "megatron.core.extensions.transformer_engine",
        ("HAVE_TE", "TENorm"),
    ),
    PrivateNames(
        "every run under Megatron-Core", "megatron.core.fp8_utils", ("is_first_last_bf16_layer",)
    ),
    PrivateNames(
        "every run under Megatron-Core",
        "megatron.core.models.gpt.gpt_layer_specs",
        ("get_gpt_layer_local_spec", "get_gpt_layer_with_transformer_engine_spec"),
    ),
    PrivateNames(
        "every run under Megatron-Core",
        "megatron.core.optimizer",
        ("HybridDeviceOptimizer", "OptimizerConfig", "get_megatron_optimizer"),
    ),
    PrivateNames(
        "every run under Megatron-Core",
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
        ("HybridDeviceOptimizer._init_sub_optimizers",),
    ),
    PrivateNames(
        "every run under Megatron-Core",
        "megatron.core.optimizer.distrib_optimizer",
        (
            "DistributedOptimizer._copy_main_params_to_model_params",
            "DistributedOptimizer._get_model_param_range_map",
        ),
    ),
    PrivateNames(
        "every run under Megatron-Core",
        "megatron.core.optimizer.optimizer",
        ("Float16OptimizerWithFloat16Params",),
    ),
    PrivateNames(
        "every run under Megatron-Core", "megatron.core.optimizer.optimizer_config", ("ParamKey",)
    ),
    PrivateNames(
        "every run under Megatron-Core",
        "megatron.core.tensor_parallel.mappings",
        ("gather_from_sequence_parallel_region",),
    ),
    PrivateNames(
        "every run under Megatron-Core",
        "megatron.core.tensor_parallel.random",
        ("CheckpointWithoutOutput.__init__", "model_parallel_cuda_manual_seed"),
    ),
    PrivateNames("every run under Megatron-Core", "megatron.core.transformer.moe.moe_utils"),
    PrivateNames("every run under Megatron-Core", "megatron.core.transformer.moe.fused_a2a"),
    PrivateNames("every run under Megatron-Core", "megatron.core.transformer.moe.token_dispatcher"),
    PrivateNames(
        "every run under Megatron-Core",
        "megatron.core.transformer.multi_latent_attention",
        ("MLASelfAttention",),
    ),
    PrivateNames(
        "every run under Megatron-Core", "megatron.core.transformer.enums", ("LayerType",)
    ),
    PrivateNames(
        "every run under Megatron-Core", "megatron.core.transformer.identity_op", ("IdentityOp",)
    ),
    PrivateNames(
        "every run under Megatron-Core",
        "megatron.core.transformer.module",
        ("Float16Module", "MegatronModule"),
    ),
    PrivateNames(
        "every run under Megatron-Core", "megatron.core.transformer.spec_utils", ("ModuleSpec",)
    ),
    PrivateNames(
        "every run under Megatron-Core",
        "megatron.core.transformer.transformer_block",
        ("TransformerBlockSubmodules", "get_num_layers_to_build"),
    ),
    PrivateNames(
        "every run under Megatron-Core",
        "megatron.core.transformer.transformer_config",
        ("MLATransformerConfig", "TransformerConfig"),
    ),
    PrivateNames(
        "every run under Megatron-Core",
        "megatron.core.transformer.transformer_layer",
        ("TransformerLayer", "TransformerLayerSubmodules"),
    ),
    PrivateNames(
        "every run under Megatron-Core",
        "megatron.core.transformer.utils",
        ("is_layer_window_attention",),
    ),
    PrivateNames("Megatron-Core on a CPU", "torch.cuda", ("_lazy_call", "_lazy_init")),
    PrivateNames("Megatron-Core on a CPU", "torch.autograd", ("_engine_run_backward",)),
)

VERIFIED_VERSIONS = {
    "transformers": ("5.23.0", "5.24.0"),
    "deepspeed": ("0.19.8",),
    "peft": ("0.19.0", "0.21.2"),
    "megatron-core": ("0.16.1", "0.19.2"),
    "torch": ("2.13.0", "2.14.1"),
    "torchao": ("0.17.0", "0.18.0"),
}
"""Distribution -> versions that have all of its names; the newest is last."""


def private_name_errors(*purposes: Purpose) -> tuple[Diagnostic, ...]:
    """Return SW1926 for the names that an installed package lacks; none for a package that is not
    installed."""
    missing: dict[tuple[str, Purpose], list[str]] = {}
    for row in PRIVATE_NAMES:
        if row.purpose in purposes and (names := _missing(row)):
            top = row.module.partition(".")[0]
            package = "megatron-core" if top == "megatron" else top
            missing.setdefault((package, row.purpose), []).extend(names)
    errors = []
    for (package, purpose), names in missing.items():
        *others, newest = VERIFIED_VERSIONS[package]
        have = f"{' and '.join([*others, newest])} {'have' if others else 'has'} the name"
        message = (
            f"{package} {installed_version(package)} has no {' and no '.join(names)}, which "
            f"{purpose} needs"
        )
        help = f"{package} {have}: pip install '{package}=={newest}', on every host."
        errors.append(found("SW1926", None, message, help))
    return tuple(errors)


def _missing(row: PrivateNames) -> list[str]:
    """Return the module, or its names, that are missing; nothing where the sources cannot tell."""
    top, *path = row.module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.submodule_search_locations is None:
        return []
    folders = [Path(each).joinpath(*path) for each in spec.submodule_search_locations]
    files = [f for each in folders for f in (each / "__init__.py", each.with_suffix(".py"))]
    source = next((file for file in files if file.is_file()), None)
    if source is None:
        return [row.module]
    text = _source(source)
    return [
        f"{row.module}.{name}"
        for name in row.names
        if not all(_binds(text, part) for part in name.split("."))
    ]


@functools.cache
def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


_IMPORT = re.compile(r"^[ \t]*from \S+ import (?:\(([^)]*)\)|(.*))", re.MULTILINE)
_ASSIGNED = re.compile(r"[^=\n()]*=(?!=)")


def _binds(text: str, name: str) -> bool:
    """Return whether the source defines, assigns or imports the name."""
    for match in re.finditer(rf"{re.escape(name)}\b", text):
        before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        if before.strip() in ("def", "async def", "class"):
            return True
        is_target = not before.strip() or before.endswith((".", ", "))
        if is_target and _ASSIGNED.match(text, match.end()):
            return True
    return any(re.search(rf"\b{name}\b", match[1] or match[2]) for match in _IMPORT.finditer(text))
