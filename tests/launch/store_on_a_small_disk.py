"""store_on_a_small_disk.py OUT: trains the islands of a compiled folder, whose store's disk is full
at the second outer step, until all have stopped; then once more, after space was made. Its last
line says how every process ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shardwright.diloco.island_metrics import ROUNDS_FILE
from tests.faults.disks import enlarge, small_disk
from tests.launch.islands import PATIENCE, Process, listening, processes
from tests.parity.islands import ISLANDS

PAGE = 4096
DISK = 16 * PAGE


def main() -> None:
    out = Path(sys.argv[1])
    run, rounds = out / "run", out / ROUNDS_FILE
    small_disk(run, DISK)
    # A line of the record is some 120 bytes long: one fits before the next page, and there is none
    # left. What stands before them is no line of a round.
    rounds.write_text(" " * (PAGE - 200) + "\n")
    (run / "outer.secret").write_text("ab" * 32 + "\n")
    (run / "outer.secret").chmod(0o600)
    with (run / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(PAGE))
        except OSError:
            pass
    ends = []
    with processes(out.parent) as start:
        for attempt in range(2):
            if attempt:
                enlarge(run, 64 * DISK)
            store = listening(start, out)
            islands = [start("run", out, "--island", k) for k in range(ISLANDS)]
            ends.append(ended(store, islands))
            statuses = [
                json.loads((out / f"island-{k}" / "run" / "status.json").read_text())
                for k in range(ISLANDS)
            ]
            ends[-1]["statuses"] = [status["status"] for status in statuses]
            ends[-1]["said"] = [each.said for each in (store, *islands)]
            ends[-1]["record"] = rounds.read_text()
    print(json.dumps(ends))


def ended(store: Process, islands: list[Process]) -> dict[str, object]:
    return {
        "islands": [each.process.wait(PATIENCE) for each in islands],
        "store": store.process.wait(PATIENCE),
    }


if __name__ == "__main__":
    main()
