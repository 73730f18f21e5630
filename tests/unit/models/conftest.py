from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

# The HTTP library of the installed huggingface_hub: httpx, or httpx2 after it.
HTTP: Any = importlib.import_module(errors.HfHubHTTPError.__mro__[1].__module__)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """An empty cache and a hub without a network; the list of what the hub was asked for."""
    requests: list[str] = []

    def no_network(url: str, *args: object, **kwargs: object) -> None:
        requests.append(url)
        raise HTTP.ConnectError("no route to host")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", no_network)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_network)
    return requests
