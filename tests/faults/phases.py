"""kill -9 in each phase of a save: planted into a process that saves, at one step."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _half(path: Path) -> None:
    """Cut a file in half, as a killed writer leaves it."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


Planter = Callable[[Any, str], None]


def _before(name: str, of_step: Callable[..., bool]) -> Planter:
    """Killed as `name` of the checkpoint module is called."""

    def plant(module: Any, step: str) -> None:
        plain = getattr(module, name)

        @functools.wraps(plain)
        def planted(*args: Any, **more: Any) -> Any:
            if of_step(step, *args):
                kill()
            return plain(*args, **more)

        setattr(module, name, planted)

    return plant


def _within(name: str, of_step: Callable[..., bool], spoil: Callable[..., None]) -> Planter:
    """Killed when `name` has done half of it."""

    def plant(module: Any, step: str) -> None:
        plain = getattr(module, name)

        def planted(*args: Any, **more: Any) -> Any:
            if not of_step(step, *args):
                return plain(*args, **more)
            spoil(plain, *args)
            return kill()

        setattr(module, name, planted)

    return plant


def _in_path(position: int) -> Callable[..., bool]:
    return lambda step, *args: step in str(args[position])


def _half_written(path_of: Callable[..., Path]) -> Callable[..., None]:
    def spoil(plain: Callable[..., None], *args: Any) -> None:
        plain(*args)
        _half(path_of(*args))

    return spoil


def _half_removed(plain: Callable[..., None], path: Path) -> None:
    hidden = path.with_name(f".{path.name}.removed")
    os.rename(path, hidden)
    next(hidden.glob("rank-*")).unlink()


def _half_sent(plain: Callable[..., None], store: Any, step: Path, names: Any) -> None:
    plain(store, step, list(names)[:1])


def _half_pruned(plain: Callable[..., None], store: Any, name: str) -> None:
    store._fs.rm_file(f"{store._root}/{name}/SHA256SUMS")
    store._fs.rm_file(f"{store._root}/{name}/manifest.json")


def _always(step: str, *args: Any) -> bool:
    return True


def _store(planter: Planter) -> Planter:
    def plant(module: Any, step: str) -> None:
        planter(module.CheckpointStore, step)

    return plant


def _after_publishing(planter: Planter) -> Planter:
    """Plant the fault when the step is published."""

    def plant(module: Any, step: str) -> None:
        plain = module.publish

        def planted(partial: Path, root: Path, number: int) -> None:
            plain(partial, root, number)
            if step in partial.name:
                planter(module, step)

        module.publish = planted

    return plant


PHASES: dict[str, Planter] = {
    "writing the fragments": _within(
        "save_safetensors", _in_path(1), _half_written(lambda _, path: path)
    ),
    "writing the index": _within(
        "write_manifest", _in_path(0), _half_written(lambda at, _: at / "manifest.json")
    ),
    "writing SHA256SUMS": _within(
        "_finish", _in_path(3), _half_written(lambda *a: a[3] / "SHA256SUMS")
    ),
    "before the rename": _before("publish", _in_path(0)),
    "after the rename": _after_publishing(_before("_flush", _always)),
    "during the upload": _after_publishing(_store(_within("put", _always, _half_sent))),
    "before the copy's checksums": _after_publishing(_before("read_checksums", _always)),
    "before pruning": _after_publishing(_before("_prune", _always)),
    "during pruning": _after_publishing(_within("remove_step", _always, _half_removed)),
    "while copies are pruned": _after_publishing(_store(_within("remove", _always, _half_pruned))),
}


def plant(phase: str, step: int) -> None:
    """Kills this process in that phase of saving `step`."""
    from shardwright.checkpoint import checkpoint_saver as checkpoint

    PHASES[phase](checkpoint, f"step-{step:08d}")
