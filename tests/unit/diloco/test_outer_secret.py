"""run/outer.secret: whole or not there, readable by its owner alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardwright.diagnostics import Refusal
from shardwright.diloco.outer_store_channel import SECRET_FILE, distribute_secret, read_secret


@pytest.mark.parametrize("at", ["store", "island"])
def test_a_full_disk_leaves_no_part_of_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The next start, once there is space, makes or copies it."""
    island = tmp_path / "island-0"
    island.mkdir()
    full = tmp_path if at == "store" else island
    fsync = os.fsync

    def no_space(file: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{file}")).parent == full / "run":
            os.ftruncate(file, 0)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(Refusal) as told:
            distribute_secret(tmp_path, [island])
    assert told.value.diagnostics[0].code == "SW6322"
    assert str(full / SECRET_FILE) in told.value.diagnostics[0].message
    assert list((full / "run").iterdir()) == []
    secret = distribute_secret(tmp_path, [island])
    assert secret == read_secret(tmp_path) == read_secret(island) and len(secret) == 64
    assert (island / SECRET_FILE).stat().st_mode & 0o777 == 0o600
