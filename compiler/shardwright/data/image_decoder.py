"""Decode images in separate processes while the rank trains: `python -m
shardwright.data.image_decoder` is one.

Requests on standard input and answers on standard output are pickled by this program. An image in a
file is sent by its path.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, cast

from shardwright.data.image_files import ImageSource, decode
from shardwright.diagnostics import Refusal, refusal

MOST_PROCESSES = 8


def main() -> int:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is not an answer
    while True:
        try:
            picture, max_pixels = pickle.load(sys.stdin.buffer)
        except EOFError:
            return 0
        try:
            image = decode(picture, max_pixels)
            answer: Any = image.size, image.tobytes()
        except Refusal as refused:
            answer = refused.diagnostics
        pickle.dump(answer, answers)
        answers.flush()


class ImageDecoders:
    """Decode in several processes, which start with the first image and end with this process."""

    def __init__(self, processes: int) -> None:
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="decode")
        self._own = threading.local()

    def decode(self, pictures: Sequence[ImageSource], max_pixels: int) -> list[Any]:
        """Return Pillow's RGB images in order. Raises SW6132 and SW6137."""
        return list(self._threads.map(lambda picture: self._one(picture, max_pixels), pictures))

    def _one(self, picture: ImageSource, max_pixels: int) -> Any:
        from PIL import Image

        process: subprocess.Popen[bytes] | None = getattr(self._own, "process", None)
        if process is None:
            command = [sys.executable, "-P", "-m", "shardwright.data.image_decoder"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._own.process = process
        try:
            pickle.dump((picture, max_pixels), cast(BinaryIO, process.stdin))
            cast(BinaryIO, process.stdin).flush()
            answer = pickle.load(cast(BinaryIO, process.stdout))
        except (OSError, EOFError, pickle.UnpicklingError):
            del self._own.process
            raise refusal(
                "SW6137",
                f"an image decoder process died (exit code {process.wait()}) at "
                f"{'an image in the data' if picture.path is None else repr(picture.path)}",
                "The host may have run out of memory: lower data.images.max_pixels or "
                "micro_batch_size, and resume from the last checkpoint.",
            ) from None
        if len(answer) == 2 and isinstance(answer[1], bytes):
            return Image.frombytes("RGB", *answer)
        raise Refusal(*answer)


def decoder_processes_per_rank(ranks: int) -> int:
    """Return the number of processes of one rank.

    ranks: ranks of this host, which share its cores.
    """
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // max(1, ranks)))


if __name__ == "__main__":
    raise SystemExit(main())
