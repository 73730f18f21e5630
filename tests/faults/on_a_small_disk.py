"""on_a_small_disk.py AT BYTES MORE_BYTES COMMAND...: runs it twice with a disk of BYTES at AT, then
of MORE_BYTES. Its last line says how each ended, and what AT held between them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.faults.disks import enlarge, small_disk


def main() -> None:
    at, size, more, command = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    small_disk(at, size)
    first = subprocess.run(command).returncode
    between = sorted(path.name for path in at.iterdir())
    enlarge(at, more)
    second = subprocess.run(command).returncode
    print(json.dumps({"first": first, "between": between, "second": second}))


if __name__ == "__main__":
    main()
