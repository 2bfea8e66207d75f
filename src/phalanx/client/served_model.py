"""The model of a server, and the key that it requires."""

import os
from pathlib import Path
from typing import Any

from phalanx.client.connection import Connection, RequestFailed, ServerAddress
from phalanx.client.protocols import ServedModel
from phalanx.errors import ConfigError, NetworkError

_KEY_VARIABLE = "PHALANX_API_KEY"
_MOST_KEY = 4096  # characters


def read_api_key(path: str | None) -> str | None:
    """The key in a file, else in the environment; None if there is neither."""
    if path is None:
        found, where = os.environ.get(_KEY_VARIABLE, ""), _KEY_VARIABLE
    else:
        where = f"--api-key-file {path}"
        try:
            with Path(path).open(encoding="utf-8") as file:
                found = file.read(_MOST_KEY + 1)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "is not text"
            raise ConfigError(f"{where}: {why}") from None
        if not found.strip():
            raise ConfigError(f"{where}: is empty; write the key into it")
    key = found.strip()
    if len(key) > _MOST_KEY or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{where}: a key is one line of printable ASCII characters")
    return key or None


def find_model(address: ServerAddress, *, name: str | None, timeout_s: float) -> ServedModel:
    """The model that a server reports; raises NetworkError or ConfigError.

    name: that of the model, where the server is another one, which does not say.
    """
    with Connection(address, timeout_s=timeout_s) as connection:
        try:
            reply = connection.get("/model")
            found: Any = reply.read_json() if reply.status == 200 else {}
        except RequestFailed as failure:
            way_out = "check --url"
            if "refused" in str(failure):
                way_out = f"is the server running? phalanx serve RUN --port {address.port}"
            raise NetworkError(f"{failure}; {way_out}") from None
    if reply.status in (401, 403):
        given = "another" if address.api_key else "an"
        raise ConfigError(
            f"{address.url}: the server requires {given} API key; give it with --api-key-file FILE "
            f"or in {_KEY_VARIABLE} ({reply.error})"
        )
    if reply.status == 200 and isinstance(found, dict) and "name" in found:
        _refuse_other_name(address, name, str(found["name"]))
        return ServedModel(
            str(found["name"]),
            tuple(map(str, found.get("classes", ()))),
            str(found.get("weights", "")),
        )
    if reply.status >= 500:
        raise NetworkError(f"{address.url}: HTTP {reply.status}: {reply.error}")
    if name is None:
        raise ConfigError(
            f"{address.url}: the server does not say which model it has (HTTP {reply.status}); "
            "give its name with --name"
        )
    return ServedModel(name)


def _refuse_other_name(address: ServerAddress, wanted: str | None, found: str) -> None:
    if wanted is not None and wanted != found:
        raise ConfigError(f"--name {wanted}: {address.url} serves {found}; leave the option out")
