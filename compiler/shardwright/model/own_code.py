"""`model.trust_remote_code`: the classes of a model that runs on Python code of its own.

The code runs only where the recipe names the model a second time, and only for a type that transformers lacks.
"""

from __future__ import annotations

from pathlib import Path

from shardwright.diagnostics import Diagnostic, KeyPath, Refusal
from shardwright.ir.json_value import JsonObject
from shardwright.ir.own_code import OwnCode
from shardwright.ir.recipe import ModelSection

_KEY: KeyPath = ("model", "source")
FINGERPRINT = "own_code_sha256"
"""Key of the configuration that makes its hash depend on the code too."""


def settle(section: ModelSection, config: JsonObject) -> JsonObject:
    """`config` without `auto_map`, which names Python files beside the weights; their classes are imported where
    transformers does not have the type itself."""
    from shardwright.hf.own_code import needs_own_code

    if needs_own_code(config):
        return adopt(section, config)
    return {name: value for name, value in config.items() if name != "auto_map"}


def adopt(section: ModelSection, config: JsonObject) -> JsonObject:
    """Imports the model's classes; returns the configuration with its code's fingerprint in place of `auto_map`.

    Errors: SW2014 not trusted, or no code to run; SW2018 the code does not load.
    """
    from shardwright.hf.own_code import register

    folder, code = find(section, config)
    try:
        register(folder, code)
    except Exception as error:  # whatever a stranger's module raises on import
        raise Refusal(_broken(section, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")) from None
    return {**{k: v for k, v in config.items() if k != "auto_map"}, FINGERPRINT: code.fingerprint}


def locate_own_code(section: ModelSection) -> tuple[Path, OwnCode] | None:
    """Of a model that is trusted and that has code of its own; the compiled folder takes these files along."""
    if section.trust_remote_code is None or section.source is None:
        return None
    from shardwright.hf.own_code import needs_own_code

    config = _config(section)
    return find(section, config) if needs_own_code(config) else None


def find(section: ModelSection, config: JsonObject) -> tuple[Path, OwnCode]:
    """The folder of the code and what is in it. Runs nothing. Errors: as adopt's."""
    from shardwright.hf.own_code import NoClasses, own_code_in

    source = section.source or ""
    if section.trust_remote_code is None:
        raise Refusal(_not_trusted(source, config))
    try:
        folder = Path(source) if Path(source).is_absolute() else _downloaded(section)
        return folder, own_code_in(folder, config)
    except NoClasses:
        raise Refusal(_no_classes(source)) from None
    except (OSError, ValueError, SyntaxError) as error:
        raise Refusal(_broken(section, " ".join(str(error).split())[:200])) from None


def _config(section: ModelSection) -> JsonObject:
    from shardwright.model.popular.hub import hub_config, read_config_file

    folder = Path(section.source or "")
    if folder.is_absolute():
        return read_config_file(folder / "config.json")
    return hub_config(str(section.source), section.revision)


def _downloaded(section: ModelSection) -> Path:
    from shardwright.model.popular.snapshot import code_folder

    return code_folder(section.source or "", section.revision)


def _not_trusted(source: str, config: JsonObject) -> Diagnostic:
    name = source if not Path(source).is_absolute() else "the folder as model.source has it"
    return Diagnostic(
        code="SW2014",
        message=f"{source!r} is a {config.get('model_type')!r}, which runs on Python code of its own",
        help="Read that code first. If you trust it, say so by name: "
        f"`trust_remote_code: {name}` under `model`. Or use a type that transformers has itself.",
        key=_KEY,
    )


def _no_classes(source: str) -> Diagnostic:
    return Diagnostic(
        code="SW2014",
        message=f"the code of {source!r} has no configuration and causal language model of its own",
        help="auto_map in its config.json must name AutoConfig and AutoModelForCausalLM, in files beside it (code of "
        "another repository is not run).",
        key=_KEY,
    )


def _broken(section: ModelSection, cause: str) -> Diagnostic:
    return Diagnostic(
        code="SW2018",
        message=f"the code of {section.source!r} does not load: {cause}",
        help="It must import with the installed transformers and packages; install what it names, or take another "
        "revision of the model.",
        key=_KEY,
    )
