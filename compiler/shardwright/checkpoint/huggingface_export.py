"""Export a checkpoint of any layout to a Hugging Face folder that from_pretrained loads; no process
group or GPU.

One decoder layer and one output shard are in memory at a time.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from shardwright.checkpoint.checkpoint_loader import CheckpointReader
from shardwright.checkpoint.checkpoint_manifest import CHECKSUMS, damages, read_checksums
from shardwright.checkpoint.checkpoint_saver import save_safetensors
from shardwright.checkpoint.model_folder_checks import check_output_folder, damaged_checkpoint
from shardwright.data.conversations import end_of_turn_id
from shardwright.data.data_sources import all_data_sections, data_sections
from shardwright.data.preferences import padding_id
from shardwright.data.tokenizers import Tokenizer, load_tokenizer
from shardwright.diagnostics import Refusal, refusal
from shardwright.models.byte_tokenizer import write_byte_tokenizer
from shardwright.models.lora_target_paths import adapter_names
from shardwright.models.model_files import TOKENIZER_PATTERNS, RemoteCode
from shardwright.models.tasks.task_registry import task_named
from shardwright.parallel.lora_adapters import (
    ADAPTER_WEIGHTS,
    is_adapter,
    merge_adapter,
    modules_to_save,
    peft_rewrites_targets,
    peft_saved_name,
    write_adapter_config,
)
from shardwright.parallel.model_loading import DTYPES, load_config
from shardwright.plan.plan import Plan, read_plan
from shardwright.recipe.recipe_types import MASKED_KINDS, TOKENIZED_KINDS
from shardwright.utils.file_io import parse_json, read_regular_file, umask

# Verified access to the model in a checkpoint, shared by `export` and `generate`.


GENERATION_CONFIG = "generation_config.json"


def open_checkpoint(checkpoint: Path, trust_code: str | None) -> Plan:
    """Verify every byte of a checkpoint, and trust its own code by its fingerprint.

    Raises SW6201 (one for each damaged file) and SW2014.
    """
    wrong = list(damages(checkpoint, contents=True))
    if not wrong:
        try:
            plan = read_plan(checkpoint)
        except (OSError, ValueError) as error:
            wrong = [f"its plan.json cannot be read ({str(error).splitlines()[0]})"]
        else:
            wrong = [
                f"{CHECKSUMS} does not name {name}"
                for name in _files_without_checksum(checkpoint, plan)
            ]
    if wrong:
        raise damaged_checkpoint(checkpoint, wrong)
    require_trust(plan.model.remote_code, (checkpoint / plan.model.config_file).parent, trust_code)
    return plan


def require_trust(code: RemoteCode | None, folder: Path, fingerprint: str | None) -> None:
    """Raise SW2014 unless the user has trusted the code; the folder cannot vouch for its own code.

    folder: holds the files.
    fingerprint: --trust-code.
    """
    if code is None or fingerprint == code.fingerprint:
        return
    # file names are untrusted too
    look = f"cd {shlex.quote(str(folder))} && less {shlex.join(name for name, _ in code.files)}"
    message = (
        f"the model in {str(folder)!r} needs Python code from that folder"
        if fingerprint is None
        else f"--trust-code is not the fingerprint of the Python code in {str(folder)!r}"
    )
    raise refusal(
        "SW2014",
        message,
        f"Nothing was run. Read the files first: `{look}`.\n"
        "If you trust them, pass the SHA-256 of their names and contents:\n"
        f"--trust-code {code.fingerprint}",
    )


def merged_parameter(plan: Plan, reader: CheckpointReader, name: str) -> torch.Tensor:
    """Return a parameter with its adapter merged, where it has one."""
    saved = reader.saved(name)
    tensor = reader.whole(name, saved.states[0])
    a, b = adapter_names(name.removesuffix(".weight"))
    if plan.lora is None or a not in reader.manifest.tensors:
        return tensor
    return merge_adapter(
        tensor,
        reader.whole(a, "fp32"),
        reader.whole(b, "fp32"),
        plan.lora,
        is_transposed=saved.transposed,
    )


def is_byte_level(plan: Plan) -> bool:
    return any(part.tokenizer == "byte" for part in all_data_sections(plan))


def tokenizer_files(checkpoint: Path) -> list[Path]:
    """Return the model's tokenizer files, then the data's; of equal names the last one counts."""
    folders = (checkpoint / "model", checkpoint / "tokenizer")
    paths = [
        path
        for folder in folders
        for pattern in TOKENIZER_PATTERNS
        for path in sorted(folder.glob(pattern))
    ]
    return [path for path in paths if path.is_file() and path.suffix != ".py"]


def _files_without_checksum(checkpoint: Path, plan: Plan) -> list[str]:
    """Return the files that are read beside the manifest's own, and have no checksum."""
    code = () if plan.model.remote_code is None else plan.model.remote_code.files
    beside = [
        checkpoint / plan.model.config_file,
        *(checkpoint / "model" / name for name, _ in code),
    ]
    generation = [path for path in (checkpoint / "model" / GENERATION_CONFIG,) if path.is_file()]
    paths = [checkpoint / "plan.json", *beside, *generation, *tokenizer_files(checkpoint)]
    sums = read_checksums(checkpoint)
    return [
        name
        for name in (path.relative_to(checkpoint).as_posix() for path in paths)
        if name not in sums
    ]


# generation_config.json of a trained model: the model's own settings with the trained end tokens.


_MOST_BYTES = 2**20
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def special_ids(
    plan: Plan, checkpoint: Path, own: dict[str, Any]
) -> dict[str, int | list[int] | None]:
    """Return bos_token_id, eos_token_id and pad_token_id. Raises SW6121.

    A text ends, as in the training data, with the tokenizer's eos_token after documents and the
        chat template's end of turn.
    own: the model's original settings. Pretrained weights keep their own ids, after the trained
        ends. Random weights only know the tokenizer's.
    """
    ids = {key: own.get(key) for key in _IDS}
    tokenizer: Tokenizer | None = None
    ends: dict[int, None] = {}
    for part in data_sections(plan.data):
        if part.kind not in TOKENIZED_KINDS or part.tokenizer is None:
            continue
        of_part = load_tokenizer(part.tokenizer, checkpoint)
        tokenizer = tokenizer or of_part
        template = part.template or of_part.template
        # A preference may be between messages, where there is a template, or between texts.
        if part.kind != "chat":
            ends |= dict.fromkeys(of_part.end)
        if part.kind in MASKED_KINDS and template is not None:
            end = end_of_turn_id(of_part, template)
            ends |= {} if end is None else {end: None}
    if tokenizer is None:  # the data is token ids
        return ids
    trained = [end for end in ends if end < plan.model.vocabulary_size]
    if plan.model.weights_path is None:
        ids |= {"bos_token_id": tokenizer.bos, "pad_token_id": tokenizer.pad}
        trained = trained or tokenizer.end
    else:
        trained = list(dict.fromkeys([*trained, *end_ids(own.get("eos_token_id"))]))
    return ids | {"eos_token_id": trained[0] if len(trained) == 1 else trained or None}


def end_ids(ids: Any) -> list[int]:
    """Return eos_token_id as a list, whichever of its three forms it has."""
    return [
        id for id in (ids if isinstance(ids, list | tuple | set) else [ids]) if isinstance(id, int)
    ]


def write_generation_config(
    plan: Plan, model: PreTrainedModel, checkpoint: Path, folder: Path
) -> None:
    """Write the model's original file with the trained end ids; other settings are kept."""
    own = _model_generation_config(checkpoint)
    if own is None:
        # A contrastive model has none.
        if isinstance(getattr(model, "generation_config", None), GenerationConfig):
            set_special_ids(plan, model.generation_config, checkpoint)
            model.generation_config.save_pretrained(folder)
        return
    document = {
        **own,
        **{key: ids for key, ids in special_ids(plan, checkpoint, own).items() if ids is not None},
    }
    (folder / GENERATION_CONFIG).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def own_generation_config(plan: Plan, model: PreTrainedModel, checkpoint: Path) -> GenerationConfig:
    """Return the configuration that `generate` uses, with the ids of an export."""
    own = _model_generation_config(checkpoint)
    config = model.generation_config if own is None else GenerationConfig.from_dict(own)
    set_special_ids(plan, config, checkpoint)
    return config


def set_special_ids(plan: Plan, config: GenerationConfig, checkpoint: Path) -> None:
    # With the byte tokenizer every id is a byte.
    own = {} if is_byte_level(plan) else {key: getattr(config, key, None) for key in _IDS}
    for key, ids in special_ids(plan, checkpoint, own).items():
        setattr(config, key, ids)


def _model_generation_config(checkpoint: Path) -> dict[str, Any] | None:
    path = checkpoint / "model" / GENERATION_CONFIG
    if not path.is_file():
        return None
    try:
        document = parse_json(read_regular_file(path, _MOST_BYTES))
    except ValueError:
        return None
    return dict(document) if isinstance(document, dict) else None


_MTP_LAYER_KEYS = re.compile(
    r"num_nextn_predict_layers|_?num_mtp_(\w*)layers|mtp_num_hidden_layers"
)
_MTP = re.compile(r"(^|[._])(mtp|nextn|eh_proj)([._]|$)")
SHARD_BYTES = 5 * 10**9


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    precision: str | None = None,
    *,
    merge: bool = False,
    trust_code: str | None = None,
) -> bool:
    """Write model weights, configs, tokenizer and chat template; of a LoRA run only peft's adapter
    folder, unless `merge`.

    precision: of the weights, None for the training's.
    trust_code: fingerprint of the checkpoint's own code.
    Returns whether only adapters were written. Raises SW2014, SW6201, SW6251, SW6253, SW6258,
    SW6401; leaves no partial folder.
    """
    plan = open_checkpoint(checkpoint, trust_code)
    check_output_folder(output)
    with torch.device("meta"):
        config = load_config(plan, checkpoint)
        model = task_named(plan.model.task).auto_class.from_config(config, trust_remote_code=False)
    dtype = DTYPES[precision or plan.training.precision]
    adapters_only = plan.lora is not None and not merge
    if adapters_only and plan.model.weights_path is None:
        raise refusal(
            "SW6253",
            (
                f"{str(checkpoint)!r} holds adapters of a model with random weights, which exists "
                "nowhere else"
            ),
            "Add --merge to write the complete model with merged adapters.",
        )
    if adapters_only and plan.lora is not None and peft_rewrites_targets(plan.lora, model):
        raise refusal(
            "SW6258",
            "peft would load these adapters into the routed experts of this "
            f"{plan.model.model_type!r}, not into the"
            " modules that were trained",
            "Add --merge to write the complete model with merged adapters.",
        )
    try:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.absolute().parent))
    except OSError as error:
        raise _cannot_write(output, error.strerror or str(error)) from None
    try:
        with CheckpointReader(checkpoint) as reader:
            if adapters_only:
                _write_adapters(plan, reader, dtype, temporary)
            else:
                _write_shards(_exported(plan, model, reader, dtype), temporary)
        if not adapters_only:
            _write_configs(plan, model, dtype, checkpoint, temporary)
        for path in tokenizer_files(checkpoint):
            shutil.copyfile(path, temporary / path.name)
        if is_byte_level(plan):
            write_byte_tokenizer(temporary)
        template = next((part.template for part in all_data_sections(plan) if part.template), None)
        if template is not None:  # the training's template, not the tokenizer's
            (temporary / "chat_template.jinja").write_text(template, encoding="utf-8")
        if output.exists():
            output.rmdir()
        os.chmod(temporary, 0o777 & ~umask())
        os.rename(temporary, output)
    except (OSError, SafetensorError) as error:
        raise _cannot_write(
            output, (error.strerror if isinstance(error, OSError) else "") or str(error)
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return adapters_only


def _write_adapters(plan: Plan, reader: CheckpointReader, dtype: torch.dtype, folder: Path) -> None:
    """Write adapter_model.safetensors and adapter_config.json in peft's format."""
    saved = modules_to_save(plan)
    names = [n for n in reader.manifest.tensors if is_adapter(n) or n.rpartition(".")[0] in saved]
    _write(
        {peft_saved_name(n): reader.whole(n, "fp32").to(dtype).contiguous() for n in names},
        folder / ADAPTER_WEIGHTS,
    )
    is_transposed = any(tensor.transposed for tensor in reader.manifest.tensors.values())
    write_adapter_config(plan, task_named(plan.model.task), folder, fan_in_fan_out=is_transposed)


def _exported(
    plan: Plan, model: PreTrainedModel, reader: CheckpointReader, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) as save_pretrained writes them: without tied aliases, converted to the
    published format."""
    wanted = dict(model.state_dict())
    for name in model._keys_to_ignore_on_save or ():
        wanted.pop(name, None)
    wanted = remove_tied_weights_from_state_dict(wanted, model)
    first = {alias: group[0] for group in plan.model.tied for alias in group}
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    # One decoder layer together: the published format may fuse its tensors.
    stack, groups = plan.model.cut.stack, dict[str, list[str]]()
    for name in wanted:
        inside = name.startswith(stack + ".")
        groups.setdefault(name[len(stack) + 1 :].split(".")[0] if inside else "", []).append(name)
    for group in groups.values():
        tensors = {}
        for name in group:
            stored = first.get(name, name)
            if name not in trained and stored not in reader.manifest.tensors:
                continue  # a buffer outside every pipeline layer: from_pretrained makes it
            tensor = merged_parameter(plan, reader, stored)
            # The ranks keep a scalar as one element.
            if (shape := tuple(wanted[name].shape) or (1,)) != (tuple(tensor.shape) or (1,)):
                raise reader.incomplete_checkpoint(
                    f"shape mismatch for {stored}: checkpoint {tuple(tensor.shape)}, model {shape}"
                )
            tensor = tensor.reshape(wanted[name].shape)
            tensors[name] = (
                tensor.to(dtype) if name in trained and tensor.is_floating_point() else tensor
            )
        yield from revert_weight_conversion(model, tensors).items()


def _write_shards(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write model.safetensors, or numbered files of about SHARD_BYTES with an index."""
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    total = size = 0
    for name, tensor in tensors:
        bytes_ = tensor.numel() * tensor.element_size()
        if held and size + bytes_ > SHARD_BYTES:
            _write(held, folder / f"{len(shards)}.safetensors")
            shards.append(list(held))
            held, size = {}, 0
        held[name] = tensor.contiguous()
        size, total = size + bytes_, total + bytes_
    _write(held, folder / f"{len(shards)}.safetensors")
    shards.append(list(held))
    if len(shards) == 1:
        os.rename(folder / "0.safetensors", folder / "model.safetensors")
        return
    files = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    for number, file in enumerate(files):
        os.rename(folder / f"{number}.safetensors", folder / file)
    where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=2) + "\n", encoding="utf-8"
    )


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors with a storage each: splitting a fused tensor leaves views."""
    save_safetensors(
        {name: t.clone() if t._base is not None else t for name, t in tensors.items()}, path
    )


def _write_configs(
    plan: Plan, model: PreTrainedModel, dtype: torch.dtype, checkpoint: Path, folder: Path
) -> None:
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if (code := plan.model.remote_code) is not None:
        # The export loads with trust_remote_code=True.
        model.config.auto_map = {
            "AutoConfig": code.config_class,
            task_named(plan.model.task).auto_class.__name__: code.model_class,
        }
        for name, _ in code.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint / "model" / name, folder / name)
    drop_missing_tensors_from_config(model)
    if plan.model.task_traits.scores_sequences:
        # transformers reads the score of the last token that is not this one.
        part = data_sections(plan.data)[0]
        padding = padding_id(load_tokenizer(str(part.tokenizer), checkpoint))
        model.config.get_text_config().pad_token_id = padding
    model.config.save_pretrained(folder)
    if not plan.model.task_traits.scores_sequences:  # it writes no text
        write_generation_config(plan, model, checkpoint, folder)


def drop_missing_tensors_from_config(model: PreTrainedModel) -> None:
    """Remove configuration keys about tensors that an export lacks: quantization and multi-token
    prediction layers."""
    names = list(model.state_dict())
    for config in {
        id(c): c for c in (model.config, model.config.get_text_config(decoder=True))
    }.values():
        for key in ("quantization_config", "compression_config"):
            if hasattr(config, key):
                delattr(config, key)
        for key, value in config.to_dict().items():
            if (
                _MTP_LAYER_KEYS.fullmatch(key)
                and isinstance(value, int)
                and not any(_MTP.search(n) for n in names)
            ):
                setattr(config, key, 0)


def _cannot_write(output: Path, why: str) -> Refusal:
    return refusal(
        "SW6401",
        f"{str(output)!r} cannot be written: {why}",
        "Name a writable folder on a disk with free space. The checkpoint is unharmed.",
    )
