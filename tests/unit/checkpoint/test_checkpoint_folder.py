"""The test of a checkpoint folder before the first step, by several hosts that share it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardwright.checkpoint.checkpoint_saver import write_probe

HOSTS, TIMES = 8, 2000


def test_hosts_test_one_folder_at_once(tmp_path: Path) -> None:
    """One host would remove what another one has just made, if all had one name."""
    root = tmp_path / "run" / "checkpoints"
    with ThreadPoolExecutor(HOSTS) as hosts:
        list(hosts.map(write_probe, [root] * TIMES))
    assert list(root.iterdir()) == []


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        write_probe(tmp_path / "file" / "checkpoints")
