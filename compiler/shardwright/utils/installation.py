"""Find the data folders: inside an installed package, or at the top of the repository in an
editable install."""

from __future__ import annotations

import glob
import importlib.util
import logging
import os
import shutil
import sys
from pathlib import Path

from shardwright.diagnostics import Diagnostic, Refusal, found

_PACKAGE = Path(__file__).resolve().parents[1]
_REPOSITORY = _PACKAGE.parent.parent


def templates_folder() -> Path:
    """The Jinja2 templates of the launch files."""
    return _folder("templates")


def recipes_folder() -> Path:
    """The ready recipes."""
    return _folder("recipes")


def _folder(name: str) -> Path:
    # pyproject.toml copies <name>/ to shardwright/_<name>/ in a wheel.
    packaged = _PACKAGE / f"_{name}"
    return packaged if packaged.is_dir() else _REPOSITORY / name


# Packages that `pip install shardwright` leaves out: what to say where one is not installed.
# Nothing of them is imported here.


EXTRAS: dict[str, str] = {
    **dict.fromkeys(("torch", "transformers", "tokenizers", "deepspeed", "fsspec"), "train"),
    "megatron": "megatron",
    "emerging_optimizers": "megatron",
    **dict.fromkeys(("PIL", "num2words"), "vision"),
    "peft": "lora",
    "torchao": "low-precision",
    **dict.fromkeys(
        ("datasets", "pyarrow", "google", "sentencepiece", "tiktoken", "zstandard"), "data"
    ),
    **dict.fromkeys(("tensorboard", "wandb"), "tracking"),
    "shtab": "completion",
}
"""Top-level module -> the extra of pyproject.toml that installs it."""


def install_command(module: str) -> str:
    """Return the command that installs a module of EXTRAS."""
    return f"pip install 'shardwright[{EXTRAS[module]}]'"


def missing_modules(purpose: str, *modules: str) -> Refusal | None:
    """Return SW1445 where modules of one extra are not installed.

    purpose: what needs them, the subject of the message.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    message = f"{purpose} needs {' and '.join(missing)}: {install_command(missing[0])}"
    help = "Without an extra, shardwright plans, checks, lints, imports, diffs, explains, reports."
    return Refusal(found("SW1445", None, message, help))


def missing_import(error: ModuleNotFoundError, purpose: str) -> Refusal | None:
    """Return SW1445 for an import that failed because an extra is not installed."""
    module = (error.name or "").partition(".")[0]
    return missing_modules(purpose, module) if module in EXTRAS else None


def missing_peft() -> Diagnostic | None:
    """LoRA trains through it."""
    message = "the run trains LoRA adapters, and peft is not installed here"
    help = f"{install_command('peft')}, on every host of the run."
    return _missing("peft", Diagnostic(code="SW6251", message=message, help=help, key=("lora",)))


def missing_torchao() -> Diagnostic | None:
    """Return an error where torchao, whose linears compute in low precision, is not installed."""
    message = "the run trains in low precision, and torchao is not installed here"
    help = f"{install_command('torchao')}, on every host of the run."
    key = ("training", "low_precision")
    return _missing("torchao", Diagnostic(code="SW6017", message=message, help=help, key=key))


def silence_torchao() -> None:
    """Silence what an import of torchao warns of: C++ kernels of other formats that do not load,
    and torch's view of its enums. transformers and peft import it where it is installed."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def missing_flash_attention() -> Diagnostic | None:
    """Return an error where flash-attn, which `attention: flash_attention_2` runs on, is not
    installed."""
    message = "the plan's attention is flash_attention_2, and flash-attn is not installed here"
    help = (
        "pip install flash-attn --no-build-isolation, on every host; or compile with "
        "`attention: sdpa`."
    )
    return _missing(
        "flash_attn",
        Diagnostic(code="SW6009", message=message, help=help, key=("model", "attention")),
    )


DEEPEP_MODULE = "deep_ep"


def missing_deepep() -> Diagnostic | None:
    """Return an error where DeepEP, which `expert_dispatcher: deepep` runs on, is not installed."""
    message = "the plan's expert_dispatcher is deepep, and deep_ep is not installed here"
    help = (
        "Install it from https://github.com/deepseek-ai/DeepEP on every host; or compile with "
        "`expert_dispatcher: alltoall`."
    )
    key = ("parallelism", "expert_dispatcher")
    return _missing(DEEPEP_MODULE, Diagnostic(code="SW6016", message=message, help=help, key=key))


def missing_compiler(*, is_cpu: bool) -> Diagnostic | None:
    """`kernels: compile` makes C++ on a CPU, and Triton on a GPU."""
    if not is_cpu:
        message = "the plan's kernels are torch.compile's, and Triton is not installed here"
        help = (
            "Install the torch that comes with it, on every host of the run; or compile with "
            "`kernels: hf`."
        )
        return _missing(
            "triton",
            Diagnostic(code="SW6013", message=message, help=help, key=("model", "kernels")),
        )
    if any(name and shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++")):
        return None
    message = "the plan's kernels are torch.compile's, and no C++ compiler is installed here"
    help = "Install g++, on every host of the run; or compile with `kernels: hf`."
    return Diagnostic(code="SW6013", message=message, help=help, key=("model", "kernels"))


def _missing(package: str, told: Diagnostic) -> Diagnostic | None:
    return None if importlib.util.find_spec(package) else told


def installed_version(name: str) -> str | None:
    """Return a distribution's version; None where it is not installed.

    The version is part of the folder's name, NAME-VERSION.dist-info. importlib.metadata takes
    longer to import than this takes to answer.
    """
    for folder in sys.path:
        for entry in glob.iglob(f"{name}-*.dist-info", root_dir=folder or os.curdir):
            return entry.removeprefix(f"{name}-").removesuffix(".dist-info")
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
