"""The settings of a run's recipe and configuration that identify the training.

Two runs are comparable if their configurations are equal but for entries that may differ between an FP8 run,
its BF16 baseline and their seeds: the precision, the recipe, the seed, names, times, and where files are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Raise it when `comparable` changes, and compute the stored digests again in a migration.
VERSION = "1"
MAX_RECIPE_NAME = 64
DEEPEST = 20


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# An entry is left out if its name has one of these words; words are split at case changes and punctuation.
LEFT_OUT_WORDS = _set("""
    precision dtype bf16 fp16 fp32 fp8 fp4 float8 bfloat16 float16 mxfp8 nvfp4 mxfp4 amp autocast recipe tf32
    shadow amax seed seeds timestamp datetime wandb mlflow tensorboard fp8scope
""")
# An entry is left out if this is its whole name, in lower case and without punctuation.
LEFT_OUT_NAMES = _set("""
    convert margin historylength name title description notes note tag tags group baseline parent relation
    resume id uuid run runid runname exp expname expid experiment experimentname job jobid jobname trial
    projectname project time date starttime startedat createdat host hostname user username port pid rank
    localrank randomstate
""")
# Entries whose value says which data or weights are read: the last component of a path counts.
SOURCE_WORDS = _set("""
    data dataset datasets corpus train valid validation test eval tokenizer vocab model pretrained
""")
PRECISION_VALUES = _set("""
    bf16 fp16 fp32 fp8 tf32 mxfp8 nvfp4 mxfp4 bfloat16 float16 float32 float8 half float e4m3 e5m2 hybrid
    bf16-mixed 16-mixed bf16-true 32-true transformer-engine
""")
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])")
_PATH = re.compile(r"(?:[/~]|\.{1,2}/|[A-Za-z]:[\\/]|[a-z0-9]+://)\S*")
_TIME = re.compile(r"\d{4}-\d\d-\d\d(?:[T _-]\d\d[:_-]?\d\d.*)?")


def recipe_name(recipe: Mapping[str, Any]) -> str:
    """The name of a recipe, such as DelayedScaling; `shadow:` precedes that of shadow mode."""
    shadow = recipe.get("shadow")
    if isinstance(shadow, Mapping):
        return f"shadow:{shadow.get('recipe', '')}"[:MAX_RECIPE_NAME]
    name = recipe.get("recipe", "")
    return name[:MAX_RECIPE_NAME] if isinstance(name, str) else ""


def comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a configuration that comparable runs share, flattened, by dotted name.

    Left out are precisions, recipes, seeds, names, times and paths, by the entry's name (LEFT_OUT_WORDS,
    LEFT_OUT_NAMES) or by its value. A path of data or weights (SOURCE_WORDS) counts by its last component.
    """
    return dict(_entries("", config, 0))


def config_digest(config: Mapping[str, Any]) -> str:
    """A digest that is equal for comparable runs; empty if the configuration has no comparable entry.

    Numbers count by value: 1 and 1.0 are equal.
    """
    entries = comparable(config)
    if not entries:
        return ""
    text = json.dumps(sorted(entries.items()), separators=(",", ":"))
    return f"{VERSION}:{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def _entries(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > DEEPEST:
        return
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            if not _is_left_out(str(key)):
                yield from _entries(f"{name}.{key}" if name else str(key), value[key], depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _entries(f"{name}[{index}]", item, depth + 1)
    elif (plain := _plain(name, value)) is not None:
        yield name, plain


def _is_left_out(name: str) -> bool:
    return bool(_words(name) & LEFT_OUT_WORDS) or re.sub(r"[\W_]", "", name).lower() in LEFT_OUT_NAMES


def _words(name: str) -> set[str]:
    """The words of an entry's name in lower case: `bf16_maxLRScale` has bf16, max, lr and scale."""
    return {word.lower() for word in _WORD.findall(name)}


def _plain(name: str, value: Any) -> Any:
    """A value as it is compared; None if it does not count."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int | float):
        return repr(float(value)) if abs(value) < 2**53 else str(value)
    text = str(value).strip()
    if text.lower().removeprefix("torch.") in PRECISION_VALUES or _TIME.fullmatch(text):
        return None
    if _PATH.fullmatch(text):
        last = re.split(r"[\\/]", text.rstrip("\\/"))[-1]
        return last if _words(name) & SOURCE_WORDS else None
    return text
