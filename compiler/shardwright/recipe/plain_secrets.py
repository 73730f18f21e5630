"""Find the secrets that a recipe holds in plain text: values of `launch.env`, variables of a pod
patch, and credentials in `checkpoint.upload_to`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from shardwright.diagnostics import Diagnostic, KeyPath, found
from shardwright.diagnostics.secret_values import (
    MASK,
    is_secret_name,
    url_credentials,
    without_credentials,
)
from shardwright.recipe.recipe_types import CheckpointSection, LaunchSection, Recipe
from shardwright.utils.json_values import JsonObject, JsonValue

ENV: KeyPath = ("launch", "env")
POD_PATCH: KeyPath = ("launch", "kubernetes", "pod_patch")
UPLOAD_TO: KeyPath = ("checkpoint", "upload_to")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSecret:
    """Holds a secret and the key of the recipe that it stands at. name: of its variable, or of the
    key."""

    key: KeyPath
    name: str
    value: str


def plain_secrets(
    env: Mapping[str, str], pod_patch: JsonObject, upload_to: str | None
) -> tuple[PlainSecret, ...]:
    """Return every secret. A variable that only names another one (`$HF_TOKEN`) holds none."""
    found = []
    for key, name, value in (
        *(((*ENV, name), name, value) for name, value in env.items()),
        *_pod_variables(pod_patch, POD_PATCH),
    ):
        if is_secret_name(name) and value and not value.startswith("$"):
            found.append(PlainSecret(key=key, name=name, value=value))
        else:
            found += [PlainSecret(key=key, name=name, value=v) for v in url_credentials(value)]
    return (
        *found,
        *(
            PlainSecret(key=UPLOAD_TO, name="upload_to", value=value)
            for value in url_credentials(upload_to or "")
        ),
    )


def secrets_of_document(document: JsonObject) -> tuple[PlainSecret, ...]:
    """Return the secrets of a recipe with every default filled in."""
    launch = cast(JsonObject, document["launch"])
    kubernetes = cast("JsonObject | None", launch["kubernetes"]) or {}
    checkpoint = cast(JsonObject, document["checkpoint"])
    return plain_secrets(
        cast("Mapping[str, str]", launch["env"]),
        cast(JsonObject, kubernetes.get("pod_patch", {})),
        cast("str | None", checkpoint["upload_to"]),
    )


def secrets_of_plan(
    launch: LaunchSection, checkpoint: CheckpointSection
) -> tuple[PlainSecret, ...]:
    """Return the secrets of a plan's sections."""
    patch = {} if launch.kubernetes is None else launch.kubernetes.pod_patch
    return plain_secrets(dict(launch.env), patch, checkpoint.upload_to)


def _pod_variables(value: JsonValue, key: KeyPath) -> Iterator[tuple[KeyPath, str, str]]:
    """Yield (key, name, value) of the variables that a pod patch sets."""
    items = (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for place, below in cast("Iterable[tuple[str | int, JsonValue]]", items):
        if place == "env" and isinstance(below, list):
            for index, variable in enumerate(below):
                if isinstance(variable, Mapping) and isinstance(variable.get("value"), str):
                    where = (*key, "env", index, "value")
                    yield where, str(variable.get("name")), str(variable["value"])
        else:
            yield from _pod_variables(below, (*key, place))


def plain_secret_warnings(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """Warn of each secret in plain text once: SW5210 for a variable, SW5211 for upload_to."""
    warnings = {}
    for secret in secrets_of_document(recipe.document):
        if secret.key == UPLOAD_TO:
            url = without_credentials(recipe.checkpoint.upload_to or "")
            message = f"checkpoint.upload_to holds credentials in plain text: {url}"
            help = (
                "Remove them from the URL, and set them in the environment (launch.env_from names "
                "the variables), as for the storage's own tools. Files of the compiled folder that "
                "hold them are readable by you alone."
            )
        else:
            where = ".".join(map(str, secret.key))
            message = f"{where} holds the secret {secret.name} in plain text"
            help = (
                f"Remove it, write `env_from: [{secret.name}]` under `launch`, and set "
                f"{secret.name} where the run is started. Files of the compiled folder that hold "
                "it are readable by you alone."
            )
        code = "SW5211" if secret.key == UPLOAD_TO else "SW5210"
        warnings[secret.key] = found(code, secret.key, message, help, severity="warning")
    return tuple(warnings.values())


def mask_secrets(value: JsonValue, secrets: Iterable[PlainSecret]) -> JsonValue:
    """Return a copy of a JSON value in which each secret is masked."""
    if isinstance(value, str):
        for secret in sorted(secrets, key=lambda secret: -len(secret.value)):
            value = value.replace(secret.value, MASK)
        return value
    if isinstance(value, Mapping):
        return {key: mask_secrets(below, secrets) for key, below in value.items()}
    return [mask_secrets(each, secrets) for each in value] if isinstance(value, list) else value


def holds_secret(content: bytes, secrets: Iterable[PlainSecret]) -> bool:
    """Tell whether a file holds a secret, as plain text, in JSON or quoted for a shell."""
    return any(
        form.encode("utf-8") in content
        for secret in secrets
        for form in (
            secret.value,
            json.dumps(secret.value, ensure_ascii=False)[1:-1],
            shlex.quote(secret.value),
        )
    )
