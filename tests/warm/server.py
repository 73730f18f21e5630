"""Imports what ranks and commands import, then forks one process for each that asks
(path/sitecustomize.py).

A child takes over the asker's command, environment, folder and open files. When the asker dies, so
does its child with its process group; when the tests end, the server's stdin closes and all end.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from typing import Any

IMPORTS = (
    "torch",
    "torch.distributed",
    "torch.utils.checkpoint",
    "transformers",
    "transformers.modeling_utils",
    "transformers.masking_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "deepspeed",
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.zero.stage3",
    "peft",
    "shardwright.cli.main",
    "shardwright.cli.checkpoint_commands",
    "shardwright.compile.recipe_compiler",
    "shardwright.engines.deepspeed.deepspeed_runtime",
    "shardwright.engines.deepspeed.deepspeed_trainers",
    "shardwright.engines.deepspeed.deepspeed_trainers",
    "shardwright.checkpoint.huggingface_export",
    "shardwright.models.graph_builder",
    "shardwright.train.training_worker",
)


def main(address: str) -> None:
    """Returns only in a child, when its command has ended."""
    for name in IMPORTS:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread does not survive a fork"
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        request = serve(listener)
    run(**request)


def serve(listener: socket.socket) -> dict[str, Any]:
    """Until the tests end, in the server. In a child: what it was asked for."""
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ, None)
    selector.register(listener, selectors.EVENT_READ, None)
    children: dict[int, socket.socket] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                for pid in children:
                    kill(pid)
                os._exit(0)
            elif key.fileobj is listener:
                connection, _address = listener.accept()
                try:
                    request, files = received(connection)
                except (OSError, ValueError):  # the asker is gone
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    for other in (listener, connection, *children.values()):
                        other.close()
                    for process in [
                        key.fd
                        for key in selector.get_map().values()
                        if isinstance(key.fileobj, int)
                    ]:
                        os.close(process)
                    selector.close()
                    take_files(request.pop("files"), files)
                    return request
                for fd in files:
                    os.close(fd)
                with contextlib.suppress(OSError):  # else it is read as gone
                    connection.sendall(pid.to_bytes(8, "big"))
                children[pid] = connection
                selector.register(connection, selectors.EVENT_READ, pid)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            elif isinstance(key.fileobj, int):
                _, status = os.waitpid(key.data, 0)
                selector.unregister(key.fileobj)
                os.close(key.fileobj)
                connection = children.pop(key.data)
                if connection.fileno() >= 0:
                    answer(selector, connection, status)
            else:
                # The asker is gone: it says nothing more after its request.
                kill(key.data)
                selector.unregister(key.fileobj)
                children[key.data].close()


def received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, files, _, _ = socket.recv_fds(connection, 8, 64)
    length, content = int.from_bytes(head, "big"), b""
    while len(content) < length:
        part = connection.recv(length - len(content))
        if not part:
            raise ValueError("half a request")
        content += part
    return json.loads(content), files


def answer(selector: selectors.BaseSelector, connection: socket.socket, status: int) -> None:
    selector.unregister(connection)
    with contextlib.suppress(OSError):
        connection.sendall(status.to_bytes(8, "big"))
    connection.close()


def kill(pid: int) -> None:
    """The child and its group: what it started there has lost its parent, and dies likewise."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def take_files(numbers: list[int], files: list[int]) -> None:
    """Each file under the asker's number for it."""
    high = [os.dup2(fd, 200 + place) for place, fd in enumerate(files)]
    for fd in files:
        os.close(fd)
    for number, fd in zip(numbers, high, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def open_streams(unbuffered: bool) -> None:
    """The server's own have kept what kind of file was behind them."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)), line_buffering=unbuffered
    )
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)),
        errors="backslashreplace",
        line_buffering=True,
    )


def run(command: list[str], folder: str, environment: dict[str, str], parent: int) -> None:
    """Run the command as `python ...` would."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.getppid = lambda: parent
    sys.orig_argv[:] = command
    words = command[1:]
    flags = set()
    while words[0].startswith("-") and words[0] != "-m":
        flags.add(words.pop(0))
    open_streams(unbuffered="-u" in flags)
    sys.path[:0] = [
        entry
        for entry in environment.get("PYTHONPATH", "").split(os.pathsep)
        if entry not in sys.path
    ]
    import huggingface_hub.constants
    import torch

    huggingface_hub.constants.HF_HUB_OFFLINE = environment.get("HF_HUB_OFFLINE") == "1"
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    if words[0] == "-m":
        if "-P" not in flags:
            sys.path.insert(0, folder)
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        if "-P" not in flags:
            sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, which the interpreter put there
    main(sys.argv[1])
