"""Removes secrets from text and configuration before it is recorded."""

import math
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

REDACTED = "[redacted]"
MAX_TEXT = 4000
MAX_DEPTH = 8
MAX_ITEMS = 2000

_SECRET_NAME = re.compile(
    r"(?i)(token|secret|passw|pwd|api[-_.]?key|access[-_.]?key|private[-_.]?key|credential|auth\b)"
)
# Ordinary settings of language models ("max_tokens", "tokenizer") are not secrets.
_HARMLESS_NAME = re.compile(
    r"(?i)(tokens|tokeni[sz]|token_?(id|count|num|len|per|type|embed)|num_?token|author)"
)
_SECRET_VALUE = re.compile(
    r"\b(?:fp8s_|hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA)[A-Za-z0-9_\-]{8,}|(?<![\w\-])eyJ[\w\-]{8,}\.[\w\-]+\.[\w\-]+"
)
_SECRET_ENTRY = re.compile(
    r"(?i:(?:^|[_\-.\s])(?:key|pass|passphrase|auth|bearer|cookie|dsn|webhook))$|[a-z0-9]Key$"
)
"""Checked for configuration entries and options only: in program text, `key=` does not imply a secret."""
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s@]+@")
# Possessive and anchored at a word start: a text that is one long word must not take quadratic time.
_ASSIGNMENT = re.compile(r"(?<![\w.\-])([\w.\-]++)(\s*+[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&]+)")
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)


def is_secret_name(name: str) -> bool:
    """Return whether a value named `name` is probably a secret."""
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name)


def is_secret_entry(name: str, value: Any) -> bool:
    """Return whether the configuration entry `name` probably holds a secret. Numbers never do."""
    if value is None or isinstance(value, bool | int | float):
        return False
    if isinstance(value, list | tuple | set | frozenset):
        return any(is_secret_entry(name, item) for item in value)
    if isinstance(value, Mapping):
        return is_secret_name(name) and any(is_secret_entry(name, item) for item in value.values())
    return is_secret_name(name) or bool(_SECRET_ENTRY.search(name))


_concealed: set[str] = set()


def conceal(secrets: Iterable[str]) -> None:
    """Hide these arguments in the recorded command line: they were parsed into secret entries."""
    _concealed.update(secrets)


def redact(text: str) -> str:
    """Return `text` without known token formats, URL passwords, private keys and values of secret names."""
    text = _PRIVATE_KEY.sub(rf"\1 {REDACTED} \2", text)
    text = _URL_PASSWORD.sub(f"{REDACTED}@", _SECRET_VALUE.sub(REDACTED, text))
    return _ASSIGNMENT.sub(
        lambda match: match[1] + match[2] + REDACTED if is_secret_name(match[1]) else match[0], text
    )


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line with the values of options such as `--token X` and `--token=X` hidden."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        is_option = argument.startswith("-")
        name, equals, value = argument.partition("=")
        is_secret = is_secret_entry(name.lstrip("-"), value)
        if argument in _concealed or hide_next and not is_option:
            shown.append(REDACTED)
        elif equals and (value in _concealed or is_option and is_secret):
            shown.append(f"{name}={REDACTED}")
        else:
            shown.append(redact(argument))
        hide_next = is_option and not equals and is_secret
    return shown


def plain(value: Any, depth: int = 0) -> Any:
    """Return `value` as bounded JSON data: secrets are redacted, NaN and infinities become text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return redact(clean(value[:MAX_TEXT]))
    if depth < MAX_DEPTH and isinstance(value, Mapping):
        items = list(value.items())[:MAX_ITEMS]
        return {
            clean(str(k))[:200]: REDACTED if is_secret_entry(str(k), v) else plain(v, depth + 1)
            for k, v in items
        }
    if depth < MAX_DEPTH and isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth + 1) for item in list(value)[:MAX_ITEMS]]
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type) and depth < MAX_DEPTH:
        return plain({name: getattr(value, name) for name in value.__dataclass_fields__}, depth)
    return redact(clean(str(value)[:MAX_TEXT]))


def clean(text: str) -> str:
    """Return `text` without characters that PostgreSQL rejects: NUL and lone surrogates."""
    return text.replace("\x00", "").encode("utf-8", "replace").decode()


def script_command() -> str:
    """The running script or module and its arguments, as a command line for `fp8scope replay`.

    Secrets are hidden, and then have to be filled in.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    arguments = redact_arguments(sys.argv)
    if not arguments or arguments[0] in ("", "-", "-c"):
        return "SCRIPT"
    if spec is not None:
        name = str(spec.name).removesuffix(".__main__")
        arguments[:1] = ["-m", name]
    return shlex.join(arguments)
