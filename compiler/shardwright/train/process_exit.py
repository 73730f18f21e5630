"""How a rank that finished ends."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """Ends the process with this exit status, once what was registered to run at exit has run.

    Not the interpreter's own way out. A thread of gloo's may still hold the last collective's
    tensors, and dropping them needs the interpreter: where that is torn down already, the process
    dies by SIGABRT ("terminate called without an active exception"), and a launcher takes a run
    that is done for one that failed.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
