"""`model.trust_remote_code`: the classes of a model that runs on Python code of its own.

The code runs only where the recipe names the model a second time, and only for a type that
transformers lacks.
"""

from __future__ import annotations

from pathlib import Path

from shardwright.diagnostics import Diagnostic, KeyPath, Refusal, found, refusal
from shardwright.models.model_files import RemoteCode
from shardwright.models.model_sources import code_folder, read_config
from shardwright.recipe.recipe_types import ModelSection
from shardwright.utils.json_values import JsonObject

_KEY: KeyPath = ("model", "source")
FINGERPRINT = "remote_code_sha256"
"""Key of the configuration that makes its hash depend on the code too."""


def load_remote_code(section: ModelSection, config: JsonObject) -> JsonObject:
    """`config` without `auto_map`, which names Python files beside the weights; their classes are
    imported where transformers does not have the type itself, and the code's fingerprint is put in
    its place.

    Errors: SW2014 not trusted, or no code to run; SW2018 the code does not load.
    """
    from shardwright.models.remote_code_import import needs_remote_code, register

    plain = {name: value for name, value in config.items() if name != "auto_map"}
    if not needs_remote_code(config):
        return plain
    folder, code = find_remote_code(section, config)
    try:
        register(folder, code)
    except Exception as error:  # whatever a stranger's module raises on import
        raise _broken(
            section, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from None
    return {**plain, FINGERPRINT: code.fingerprint}


def locate_remote_code(section: ModelSection) -> tuple[Path, RemoteCode] | None:
    """Of a model that is trusted and that has code of its own; the compiled folder takes these
    files along."""
    if section.trust_remote_code is None or section.source is None:
        return None
    from shardwright.models.remote_code_import import needs_remote_code

    config, _ = read_config(section)
    return find_remote_code(section, config) if needs_remote_code(config) else None


def find_remote_code(section: ModelSection, config: JsonObject) -> tuple[Path, RemoteCode]:
    """The folder of the code and what is in it. Runs nothing. Errors: as settle's."""
    from shardwright.models.remote_code_import import NoRemoteClasses, read_remote_code

    source = section.source or ""
    if section.trust_remote_code is None:
        raise Refusal(untrusted_code_error(source, config.get("model_type")))
    try:
        folder = (
            Path(source) if Path(source).is_absolute() else code_folder(source, section.revision)
        )
        return folder, read_remote_code(folder, config)
    except NoRemoteClasses:
        raise refusal(
            "SW2014",
            f"the code of {source!r} has no configuration and causal language model of its own",
            "auto_map in its config.json must name AutoConfig and AutoModelForCausalLM, in files "
            "beside it (code of another repository is not run).",
            _KEY,
        ) from None
    except (OSError, ValueError, SyntaxError) as error:
        raise _broken(section, " ".join(str(error).split())[:200]) from None


def untrusted_code_error(source: str, model_type: object) -> Diagnostic:
    """SW2014: the model's code would have to run."""
    name = "the folder as model.source has it" if Path(source).is_absolute() else source
    message = f"{source!r} is a {model_type!r}, which runs on Python code of its own"
    help = (
        f"Read that code first. If you trust it, say so by name: `trust_remote_code: {name}` under "
        "`model`. Or use a type that transformers has itself."
    )
    return found("SW2014", _KEY, message, help)


def _broken(section: ModelSection, cause: str) -> Refusal:
    return refusal(
        "SW2018",
        f"the code of {section.source!r} does not load: {cause}",
        "It must import with the installed transformers and packages; install what it names, or "
        "take another revision of the model.",
        _KEY,
    )
