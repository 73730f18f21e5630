"""Read what a half-finished run's checkpoint says without opening a pickle.

The Trainer's trainer_state.json is JSON; DeepSpeed's names of files tell the ranks, the precision
and the ZeRO stage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from shardwright.diagnostics import Refusal, found
from shardwright.migrate.run_files import FileContent, RunFiles
from shardwright.recipe.foreign_checkpoints import foreign_checkpoint_error, identify_checkpoint
from shardwright.utils.file_io import read_regular_text_file
from shardwright.utils.json_values import JsonObject, JsonValue

_MOST_STATE_BYTES = 64 * 1024 * 1024
_OPTIMIZER_FILE = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_STEP = re.compile(r"(?:checkpoint-|global_step)(\d+)")


def is_checkpoint(file: FileContent) -> bool:
    return file.folder is not None and (
        identify_checkpoint(file.folder) is not None or _newest(file.folder) is not None
    )


def add_checkpoint(file: FileContent, run: RunFiles) -> None:
    """Add the model, the ranks and the steps. Raises Refusal with SW6220 where a checkpoint holds
    neither weights that start a run nor a state that can be read."""
    assert file.folder is not None
    folder = _newest(file.folder) or file.folder
    run.files.append(str(folder))
    state = _trainer_state(folder)
    found_here = dict(_of_trainer(state)) | dict(_of_deepspeed(folder))
    if not found_here and not (folder / "config.json").is_file():
        error = foreign_checkpoint_error(folder)
        raise Refusal(
            error
            or found("SW1455", None, f"{folder} is no checkpoint", "Give a checkpoint's folder.")
        )
    run.checkpoint |= found_here
    has_weights = any(folder.glob("model*.safetensors"))
    if has_weights and (folder / "config.json").is_file():
        run.checkpoint["model.source"] = (_as_source(folder), "the checkpoint's weights")
    else:
        error = foreign_checkpoint_error(folder)
        how = "" if error is None or error.help is None else f": {error.help}"
        run.unread["model.source"] = f"the checkpoint holds no model folder{how}".replace("\n", " ")
    why = "a new optimizer starts; the checkpoint's states are pickles, which nobody opens here"
    for name in sorted(path.name for path in folder.glob("*") if path.suffix in (".pt", ".bin")):
        run.left.append(("checkpoint", name, "", why))


def _newest(folder: Path) -> Path | None:
    """Return the newest checkpoint-N below an output folder of the Trainer."""
    steps = [
        (int(match[1]), path)
        for path in folder.glob("checkpoint-*")
        if (match := _STEP.fullmatch(path.name)) and path.is_dir()
    ]
    return max(steps)[1] if steps else None


def _as_source(folder: Path) -> str:
    text = str(folder)
    return text if text.startswith((".", "/")) else f"./{text}"


def _trainer_state(folder: Path) -> JsonObject:
    try:
        text = read_regular_text_file(str(folder / "trainer_state.json"), _MOST_STATE_BYTES)
        state = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def _of_trainer(state: JsonObject) -> Iterator[tuple[str, tuple[JsonValue, str]]]:
    for key, name in (
        ("training.steps", "max_steps"),
        ("checkpoint.every_steps", "save_steps"),
        ("parallelism.micro_batch_size", "train_batch_size"),
    ):
        value = state.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield key, (value, f"trainer_state.json: {name}")


def _of_deepspeed(folder: Path) -> Iterator[tuple[str, tuple[JsonValue, str]]]:
    """Yield what the names of the optimizer's files say."""
    matches = [
        match
        for pattern in ("*_optim_states.pt", "*/*_optim_states.pt")
        for path in sorted(folder.glob(pattern))
        if (match := _OPTIMIZER_FILE.fullmatch(path.name))
    ]
    if not matches:
        return
    origin = "the names of DeepSpeed's files"
    yield "world_size", (len({(m[2], m[3]) for m in matches}), origin)
    if matches[0][1]:
        yield "training.precision", (matches[0][1].rstrip("_"), origin)
    is_stage_3 = any(folder.glob("zero_pp_rank_*_model_states.pt")) or any(
        folder.glob("*/zero_pp_rank_*_model_states.pt")
    )
    if is_stage_3:
        yield "parallelism.zero_stage", (3, origin)
