"""JSON values that are valid under a schema of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

Schema = Mapping[str, Any]
Values = st.SearchStrategy[Any]
# Longer ones take time and find nothing.
MAX_LENGTH = 12


class Bodies:
    """Strategies for schemas of an OpenAPI document: the parts of JSON Schema that it uses."""

    def __init__(self, document: Schema) -> None:
        self._document = document

    def of(self, schema: Schema) -> Values:
        if "$ref" in schema:
            part: Any = self._document
            for name in schema["$ref"].removeprefix("#/").split("/"):
                part = part[name]
            return self.of(part)
        if "allOf" in schema and len(schema["allOf"]) == 1:
            return self.of(schema["allOf"][0])
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return st.one_of([self.of(each) for each in schema[name]])
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        return self._of_type(schema)

    def _of_type(self, schema: Schema) -> Values:
        match schema.get("type"):
            case "object":
                return self._object(schema)
            case "array":
                least = schema.get("minItems", 0)
                most = min(schema.get("maxItems", MAX_LENGTH), least + MAX_LENGTH)
                unique = repr if schema.get("uniqueItems") else None
                return st.lists(self.of(schema["items"]), min_size=least, max_size=most, unique_by=unique)
            case "string":
                return self._string(schema)
            case "integer":
                return st.integers(schema.get("minimum", -(2**63)), schema.get("maximum", 2**63 - 1))
            case "number":
                return st.floats(
                    schema.get("exclusiveMinimum", schema.get("minimum")), schema.get("maximum"),
                    allow_nan=False, allow_infinity=False, exclude_min="exclusiveMinimum" in schema,
                )  # fmt: skip
            case "boolean":
                return st.booleans()
            case "null":
                return st.none()
        raise NotImplementedError(f"no values for {schema}")

    def _object(self, schema: Schema) -> Values:
        properties = schema.get("properties")
        if properties is None:
            inner = schema.get("additionalProperties", True)
            values = self.of(inner) if isinstance(inner, Mapping) else _ANYTHING
            names = schema.get("propertyNames")
            return st.dictionaries(
                self.of({"type": "string", **names}) if names else _TEXT, values, max_size=3
            )
        needed = set(schema.get("required", ()))
        strategies = {name: self.of(each) for name, each in properties.items()}
        return st.fixed_dictionaries(
            {name: each for name, each in strategies.items() if name in needed},
            optional={name: each for name, each in strategies.items() if name not in needed},
        )

    def _string(self, schema: Schema) -> Values:
        if schema.get("format") == "uuid":
            return st.uuids(version=4).map(str)
        if schema.get("format") == "date-time":
            # docs/wire.md: a clock outside of these years is wrong.
            return st.datetimes(datetime(2000, 1, 2), datetime(2199, 1, 1), timezones=st.just(UTC)).map(
                datetime.isoformat
            )
        least, most = schema.get("minLength", 0), schema.get("maxLength", MAX_LENGTH)
        pattern = schema.get("pattern")
        if pattern is None:
            characters = st.characters(codec="utf-8")
            return st.text(characters, min_size=least, max_size=min(most, least + MAX_LENGTH))
        return st.from_regex(pattern, fullmatch=True).filter(lambda text: least <= len(text) <= most)


# Of objects without a description: no text of them may have the character NUL.
_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | _TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXT, inner, max_size=2),
    max_leaves=4,
)
