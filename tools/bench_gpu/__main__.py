"""`make bench-gpu`: a piece of at most so many minutes; again goes on where it ended. Writes
benchmarks/gpu.json."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tools.bench_gpu.gpu_bench import bench, summary
from tools.bench_gpu.gpu_bench_cases import LAYOUTS, gpu_called

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-gpu", description=__doc__)
    parser.add_argument(
        "only",
        nargs="*",
        metavar="LAYOUT",
        help="only these; see tools/bench_gpu/gpu_bench_cases.py",
    )
    parser.add_argument(
        "--gpu", help="its name in the catalogue, where torch's name of it is not enough; or cpu"
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="of this piece (9); begun layouts are ended"
    )
    parser.add_argument("-o", dest="file", type=Path, default=FILE)
    given = parser.parse_args(arguments)
    if unknown := set(given.only) - set(LAYOUTS):
        parser.error(
            f"no such layout: {', '.join(sorted(unknown))}. There are: {', '.join(LAYOUTS)}"
        )
    device = "cpu" if given.gpu == "cpu" else device_name()
    if device is None:
        print("there is no GPU here: --gpu cpu runs tiny copies, to try the bench itself")
        return 1
    try:
        gpu = given.gpu or gpu_called(device)
    except ValueError as error:
        parser.error(str(error))
    left = bench(
        given.file,
        gpu,
        device,
        given.minutes * 60,
        lambda text: print(text, flush=True),
        given.only,
    )
    if given.file.exists():
        print(json.dumps(summary(given.file)))
    print(
        f"{len(left)} left ({', '.join(left)}): run it again" if left else f"all done: {given.file}"
    )
    return 0


def device_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


if __name__ == "__main__":
    raise SystemExit(main())
