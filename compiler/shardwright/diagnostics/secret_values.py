"""Find secrets in values and texts, and mask them: tokens, passwords and keys in variables, and
credentials in URLs."""

from __future__ import annotations

import functools
import re

MASK = "***"
"""Stands for a secret in messages."""
_NAME_END = (
    "TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY(?:_ID)?|SECRET_KEY|PRIVATE_KEY|STORAGE_KEY"
    "|ACCOUNT_KEY|CONNECTION_STRING"
)
_SECRET_NAME = re.compile(rf"(?:{_NAME_END})$", re.IGNORECASE)
# Environment variables only: `pad_token: x` is no secret.
_ASSIGNMENT = re.compile(
    rf"(?<![A-Za-z0-9_])((?:[A-Z0-9_]*(?:{_NAME_END}))[\"']?\s*[:=]\s*)"
    r"(\"(?:[^\"\\]|\\.)*\"?|'[^']*'?|[^\s\"']\S*)"
)
_URL_PASSWORD = re.compile(r"(?<=://)([^/@\s:\"']*:[^/@\s\"']+)(?=@)")
_URL_PARAMETER = re.compile(
    r"(?<=[?&;])((?:sig|signature|x-amz-signature|x-amz-security-token|x-amz-credential|token"
    r"|access_token|secret|password|api_?key|account_key|key)=)([^&;#\s\"']+)",
    re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    """Tell whether a variable of this name holds a secret: HF_TOKEN, WANDB_API_KEY, AWS's keys."""
    return _SECRET_NAME.search(name) is not None


def url_credentials(url: str) -> tuple[str, ...]:
    """Return the secret parts of a URL: `user:password` in front of the host, with the password
    alone, and signatures or tokens among the parameters."""
    pairs = _URL_PASSWORD.findall(url)
    passwords = [pair.partition(":")[2] for pair in pairs]
    return (*pairs, *passwords, *(value for _, value in _URL_PARAMETER.findall(url)))


def without_credentials(text: str) -> str:
    """Mask the credentials of every URL in a text."""
    return _URL_PARAMETER.sub(rf"\g<1>{MASK}", _URL_PASSWORD.sub(MASK, text))


@functools.lru_cache(maxsize=8)
def masked_line(line: str) -> str:
    """Return a line of a file with its secrets as asterisks; no column moves.

    Searched once for all findings of a line: a recipe may be one line of megabytes.
    """
    line = _ASSIGNMENT.sub(lambda found: found[1] + _asterisks(found[2]), line)
    line = _URL_PASSWORD.sub(lambda found: "*" * len(found[1]), line)
    return _URL_PARAMETER.sub(lambda found: found[1] + "*" * len(found[2]), line)


def _asterisks(value: str) -> str:
    """Cover a value, but not its quotes and the signs behind it."""
    return re.sub(r"[^\s\"'{}\[\],]", "*", value)
