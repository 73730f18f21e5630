"""Load the Python classes that a model brings, where `model.trust_remote_code` names the model.

The code runs only for a type that transformers lacks.
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
"""Key added to the configuration so that its hash depends on the code too."""


def load_remote_code(section: ModelSection, config: JsonObject) -> JsonObject:
    """Return `config` without `auto_map`; where transformers lacks the type, import and register
    its classes and add the code's fingerprint.

    Raises SW2014 (not trusted, or no code to run) and SW2018 (the code does not load).
    """
    from shardwright.models.remote_code_import import needs_remote_code, register

    own_keys = {name: value for name, value in config.items() if name != "auto_map"}
    if not needs_remote_code(config):
        return own_keys
    folder, code = find_remote_code(section, config)
    try:
        register(folder, code)
    except Exception as error:  # a model's module may raise anything on import
        raise _load_error(
            section, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from None
    return {**own_keys, FINGERPRINT: code.fingerprint}


def locate_remote_code(section: ModelSection) -> tuple[Path, RemoteCode] | None:
    """Return the folder and the files of a trusted model's code, None where it has none."""
    if section.trust_remote_code is None or section.source is None:
        return None
    from shardwright.models.remote_code_import import needs_remote_code

    config, _ = read_config(section)
    return find_remote_code(section, config) if needs_remote_code(config) else None


def find_remote_code(section: ModelSection, config: JsonObject) -> tuple[Path, RemoteCode]:
    """Return the folder of the code and its files, without running anything. Raises SW2014 and
    SW2018."""
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
            f"the code of {source!r} defines no configuration and causal language model",
            "auto_map in its config.json must name AutoConfig and AutoModelForCausalLM, in files "
            "beside it (code of another repository is not run).",
            _KEY,
        ) from None
    except (OSError, ValueError, SyntaxError) as error:
        raise _load_error(section, " ".join(str(error).split())[:200]) from None


def untrusted_code_error(source: str, model_type: object) -> Diagnostic:
    """Build SW2014: the model's code would have to run."""
    name = "the folder as model.source has it" if Path(source).is_absolute() else source
    message = f"{source!r} is a {model_type!r}, which runs on its own Python code"
    help = (
        f"Read that code first. If you trust it, set `trust_remote_code: {name}` under "
        "`model`. Or use a type that transformers has."
    )
    return found("SW2014", _KEY, message, help)


def _load_error(section: ModelSection, cause: str) -> Refusal:
    return refusal(
        "SW2018",
        f"the code of {section.source!r} cannot be imported: {cause}",
        "Install the packages that it needs, or set another model.revision.",
        _KEY,
    )
