"""Code that came with a checkpoint or a model folder runs only where the command line names its fingerprint. The folder
itself cannot say that it is trusted: whoever wrote the code wrote the rest of it too."""

from __future__ import annotations

import shlex
from pathlib import Path

from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.ir.own_code import OwnCode


def require_trust(code: OwnCode | None, folder: Path, given: str | None) -> None:
    """folder: that of the files. given: --trust-code. Raises Refusal: SW2014."""
    if code is None or given == code.fingerprint:
        return
    look = f"cd {shlex.quote(str(folder))} && less {shlex.join(name for name, _ in code.files)}"  # names are theirs too
    message = (
        f"the model in {str(folder)!r} runs on Python code that came with it"
        if given is None
        else f"--trust-code is not the fingerprint of the Python code in {str(folder)!r}"
    )
    raise Refusal(
        Diagnostic(
            code="SW2014",
            message=message,
            help=f"Nothing was run. Read the files first: `{look}`.\n"
            "If you trust them, name them by the SHA-256 over their names and contents:\n"
            f"--trust-code {code.fingerprint}",
        )
    )
