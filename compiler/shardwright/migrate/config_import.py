"""Convert what a training is started with (a file of any kind, a command) into a recipe draft."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.diagnostics import Refusal, found
from shardwright.lint.ds_config_document import Document, parse_ds_config, read_ds_config_text
from shardwright.lint.ds_config_linter import lint, linted_ds_config
from shardwright.lint.lint_rule import dotted
from shardwright.migrate import (
    deepspeed_engine_keys,
    launcher_keys,
    trainer_arguments,
    training_keys,
)
from shardwright.migrate.accelerate_config import add_accelerate_config
from shardwright.migrate.file_kinds import add_file, read_settings_file
from shardwright.migrate.launch_command import LaunchCommand, read_command
from shardwright.migrate.recipe_draft import (
    ImportSources,
    RecipeDraft,
    Setting,
    as_number,
    as_text,
    redacted,
)
from shardwright.migrate.run_files import RunFiles
from shardwright.migrate.training_programs import (
    OTHER_TASKS,
    PAIR_LOSSES,
    PAIR_SETTINGS,
    PROGRAMS,
    SETTINGS_OF_OTHER_TASKS,
    UNKNOWN_SCRIPT,
    TrainingProgram,
    other_task,
    program_of_script,
    program_of_words,
)
from shardwright.utils.json_values import JsonObject, JsonValue
from shardwright.utils.shell_script import resolved_text

# What lint says of a key that stands for nothing here: its value is not taken.
_UNUSABLE_KEY_CODES = frozenset(
    {"SW4111", "SW4112", "SW4113", "SW4114", "SW4115", "SW4116", "SW4117", "SW4118", "SW4121"}
)
_SETTINGS_FILES = (".yaml", ".yml", ".json")
# Names of configurations that programs bring along -> (ZeRO stage, offload of both states).
_SHORTHANDS = {
    f"zero{stage}{suffix}": (stage, bool(suffix))
    for stage in (0, 1, 2, 3)
    for suffix in ("", "_offload")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRecipe:
    """Hold an imported recipe; document: None without a ds_config file. files: that were read."""

    draft: RecipeDraft
    name: str
    document: Document | None
    files: tuple[str, ...]


def convert_config(
    path: str | None, launch: str | None, model: str | None, folder: str
) -> ImportedRecipe:
    """Convert what a training is started with.

    path: a file of a kind that file_kinds lists, or a checkpoint folder; "-" for standard input;
        None where the launch command names it, or there is none
    folder: absolute, of the recipe

    Raises Refusal with SW1451, SW1452, SW1455, SW1456, SW6220, or SW4001 to SW4009.
    """
    run = RunFiles(command=None if launch is None else read_command(launch))
    if path is not None:
        add_file(path, run)
    command = run.command or LaunchCommand()
    _add_command(run, command)
    _add_ds_config(run)
    document = run.document
    config: JsonObject = {}
    faulty: dict[str, str] = {}
    draft = RecipeDraft()
    is_trainer = run.program is not None and run.program.defaults_of == "the Trainer"
    if document is not None:
        subject = linted_ds_config(document)
        is_trainer |= subject.audience == "trainer"
        faulty = {
            dotted(f.key): f.message
            for f in lint(document, subject)
            if f.code in _UNUSABLE_KEY_CODES
        }
        config = without_faulty_keys(document.config, faulty, ())
    sources = ImportSources(
        draft=draft,
        config=config,
        command=command,
        is_trainer=is_trainer,
        settings=run.settings,
        options=run.options,
        program=run.program,
        faulty=faulty,
        has_document=document is not None,
        unread=run.unread,
        checkpoint=run.checkpoint,
        read_files=frozenset(run.used),
    )
    _refuse_other_trainings(sources)
    _convert(sources, model, folder)
    if document is not None:
        deepspeed_engine_keys.convert_extra_keys(
            replace(sources, config=document.config), faulty
        )  # the whole file, for the comments
    for section, key, value, why in run.left:
        draft.leave(section, key, value, why)
    for other in command.others:
        draft.note("launch", f"not read, a second command that trains: {other}")
    launcher_keys.rest(sources)
    trainer_arguments.rest(sources)
    name = path or (run.files[0] if run.files else None)
    stem = os.path.splitext(os.path.basename((name or "imported").rstrip("/")))[0]
    files = tuple(dict.fromkeys([*run.files, *([document.name] if document is not None else [])]))
    return ImportedRecipe(
        draft=draft, name=trainer_arguments.name_of(sources, stem), document=document, files=files
    )


def _convert(sources: ImportSources, model: str | None, folder: str) -> None:
    training_keys.target(sources)
    trainer_arguments.model(sources, model)
    launcher_keys.cluster(sources, folder)
    training_keys.parallel(sources)
    training_keys.length(sources)
    training_keys.batch(sources)
    training_keys.duration(sources)
    deepspeed_engine_keys.precision(sources)
    training_keys.low_precision(sources)
    training_keys.optimizer(sources)
    trainer_arguments.kwargs(sources)
    training_keys.scheduler(sources)
    training_keys.clipping(sources)
    trainer_arguments.data(sources)
    deepspeed_engine_keys.zero(sources)
    deepspeed_engine_keys.recomputation(sources)
    deepspeed_engine_keys.monitors(sources)
    trainer_arguments.optional(sources)


def _add_command(run: RunFiles, command: LaunchCommand) -> None:
    """Add the words of the command, and the files that they name."""
    for name, value in command.options.items():
        run.options[name] = Setting(written=f"--{name}", values=(value,) if value else ())
    named = run.options.get("config_file")
    packaged = command.words.get("accelerate_config", ())  # TRL's own, or a file
    if packaged:
        written = Setting(written="--accelerate_config", values=packaged)
        if not packaged[0].endswith(_SETTINGS_FILES):
            _add_packaged_config(run, written)
        else:
            named = written
    if named is not None and (config := _named_file(run, named, "distributed_type")) is not None:
        add_accelerate_config(read_settings_file(config, f"{named.written} {named.text}"), run)
    program = program_of_script(command.script) if command.script else None
    words = {
        name: Setting(written=f"--{name}", values=values) for name, values in command.words.items()
    }
    settings_file = words.get("config")
    positional = next((word for word in command.rest if word.endswith(_SETTINGS_FILES)), None)
    if settings_file is None and positional is not None:
        settings_file = Setting(written=command.script, values=(positional,))
    if settings_file is not None and settings_file.text.endswith(_SETTINGS_FILES):
        config = _named_file(run, settings_file, "training")
        if config is not None:
            file = read_settings_file(config, f"{settings_file.written} {settings_file.text}")
            run.add_settings(file)
            run.used.add(settings_file.text)
            from_file = next(
                (p for p in PROGRAMS if any(keys <= file.keys for keys in p.keys)), None
            )
            program = program or from_file
    if program is None and run.program is None and (command.script or command.launcher):
        program = program_of_words(frozenset(words))
    run.program = program or run.program
    if command.hidden and run.program is not None:
        run.program = _without_known_defaults(run.program, " ".join(command.hidden))
    run.settings |= words
    run.settings = canonical_settings(run.settings, run.program)


def _without_known_defaults(program: TrainingProgram, hidden: str) -> TrainingProgram:
    """Return the program where words that only the shell knows may say any setting."""
    names = program.defaults.keys() | program.unknown_defaults.keys()
    reason = f"the command has {hidden}, and only the shell knows these words"
    return replace(program, defaults={}, unknown_defaults=dict.fromkeys(sorted(names), reason))


def _add_packaged_config(run: RunFiles, named: Setting) -> None:
    """Add what the name of one of TRL's configurations says: zero1, zero2, zero3."""
    if named.text in _SHORTHANDS:
        stage = str(_SHORTHANDS[named.text][0])
        run.options["zero_stage"] = replace(named, values=(stage,), told_as=named.text)
    else:
        run.unread["distributed_type"] = named.told()


def canonical_settings(
    settings: Mapping[str, Setting], program: TrainingProgram | None
) -> dict[str, Setting]:
    """Return settings under the names that are read; a value without a meaning here stays as it
    is written."""
    found: dict[str, Setting] = {}
    for name, setting in settings.items():
        alias, values = name, None
        if program is not None and name in program.aliases:
            alias, values = program.aliases[name]
        if values is not None:
            key = setting.text.lower() if setting.values else "true"
            if key in values:
                setting = replace(setting, values=(values[key],), told_as=setting.text)
        if alias in found and alias != name and found[alias].owner == setting.owner:
            continue
        found[alias] = setting
    return found


def _named_file(run: RunFiles, named: Setting, what: str) -> str | None:
    """Return the path of a file that a setting names; None, recorded as unread, where only a shell
    knows it."""
    path = resolved_text(named.text)
    if path is None:
        run.unread[what] = named.told()
        return None
    return _resolve(path, _folders(run))


def _folders(run: RunFiles) -> list[str]:
    """Return where files are looked for beside the working folder: those of the files that name
    them, and above."""
    starts = [os.path.dirname(path) or "." for path in run.files]
    starts += [] if run.script_folder is None else [run.script_folder or "."]
    return [
        os.path.join(start, *[os.pardir] * up) for start in dict.fromkeys(starts) for up in range(4)
    ]


def _resolve(path: str, folders: list[str]) -> str:
    return next(
        (p for p in (path, *(os.path.join(f, path) for f in folders)) if os.path.isfile(p)), path
    )


def _add_ds_config(run: RunFiles) -> None:
    """Read the ds_config that the command or a file names."""
    if run.document is not None:
        return
    named = next(
        (
            found
            for found in (
                run.options.get("deepspeed_config_file"),
                run.settings.get("deepspeed"),
                run.settings.get("deepspeed_config"),
            )
            if found is not None and found.values
        ),
        None,
    )
    if named is None:
        return
    if named.text.lstrip().startswith("{"):
        run.document = parse_ds_config(f"<{named.written}>", named.text)
        return
    shorthand = _SHORTHANDS.get(named.text)
    if shorthand is not None:
        stage, offloads = shorthand
        own = {"zero_stage": str(stage)}
        if offloads:
            own["offload_optimizer_device"] = "cpu"
            own |= {"offload_param_device": "cpu"} if stage == 3 else {}
        for name, value in own.items():
            run.settings.setdefault(name, replace(named, values=(value,), told_as=named.text))
        return
    path = _named_file(run, named, "deepspeed")
    if path is None:
        return
    is_typed = named.written.startswith("--") and run.script_folder is None
    if not os.path.isfile(path) and not is_typed:
        run.unread["deepspeed"] = f"{named.told()}, and that file is not here"
        return
    run.document = parse_ds_config(path, read_ds_config_text(path))


def _refuse_other_trainings(s: ImportSources) -> None:
    """Raise SW1456 for what a recipe does not train: rewards, distillation, most preferences."""
    program = s.program or UNKNOWN_SCRIPT
    task, what = other_task(s.command.script), s.command.script
    for name, values in program.next_token_values.items():
        setting = s.settings.get(name)
        text = "" if setting is None else (resolved_text(setting.text) or setting.text).lower()
        if setting is not None and text not in values:
            named = OTHER_TASKS.get(text) or SETTINGS_OF_OTHER_TASKS.get(name)
            what = redacted(setting.written, setting.text) if named or not task else what
            task = named or task or "another task"
    if task is not None and (_put_pair_objective(s, program) or _put_reward_objective(s, program)):
        return
    if task is not None:
        cause = f"{program.name} trains {task}, and a recipe trains next tokens: {what}"
        help = "Import a run of pretraining or supervised fine-tuning (pt, sft), and no other."
        raise Refusal(found("SW1456", None, cause, help))
    if program.commands and not s.command.script:
        said = f"the file does not say what is trained: {program.commands} does"
        s.draft.note("training", f"{said}; this recipe trains next tokens")


def _put_pair_objective(s: ImportSources, program: TrainingProgram) -> bool:
    """Convert a training on pairs of completions; return whether a recipe has it as it is set."""
    script = s.command.script
    if not any(re.search(pattern, script) for pattern in program.pair_scripts):
        return False
    given = [name for name in program.next_token_values if name in s.settings]
    loss, beta = s.word(as_text, "loss_type"), s.word(as_number, "beta")
    objective = PAIR_LOSSES.get("sigmoid" if loss is None else loss[1])
    if objective is None or not set(given) <= PAIR_SETTINGS or ("beta" in given and beta is None):
        return False
    for key, value in objective.items():
        s.draft.put(f"training.objective.{key}", value, script if loss is None else loss[0])
    if beta is not None:
        s.draft.put("training.objective.beta", beta[1], beta[0])
    for name in given:
        s.draft.take(s.settings[name].written, "training.objective")
    return True


def _put_reward_objective(s: ImportSources, program: TrainingProgram) -> bool:
    """Convert a training of a reward model; return whether a recipe has it as it is set."""
    script, name = s.command.script, "center_rewards_coefficient"
    if not any(re.search(pattern, script) for pattern in program.reward_scripts):
        return False
    given = [each for each in program.next_token_values if each in s.settings]
    coefficient = s.word(as_number, name)
    if not set(given) <= {name} or (given and coefficient is None):
        return False
    s.draft.put("training.objective.name", "reward", script)
    if coefficient is not None:
        s.draft.put("training.objective.center_coefficient", coefficient[1], coefficient[0])
        s.draft.take(s.settings[name].written, "training.objective")
    return True


def without_faulty_keys(
    section: JsonObject, lint_messages: Mapping[str, str], path: tuple[str, ...]
) -> dict[str, JsonValue]:
    """Return the configuration without the keys that lint finds wrong."""
    found: dict[str, JsonValue] = {}
    for key, value in section.items():
        if ".".join((*path, key)) not in lint_messages:
            found[key] = (
                without_faulty_keys(value, lint_messages, (*path, key))
                if isinstance(value, Mapping)
                else value
            )
    return found
