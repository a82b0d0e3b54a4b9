"""docs/specification/layout.schema.json: the manifest of a rank's layout, and vectors, as JSON Schema."""

from __future__ import annotations

from typing import Any

import msgspec
from docs.specification.described import classes_in, described

from kvferry.applications.plan.vector import Vector, in_lines
from kvferry.layout import RankLayout
from kvferry.layout.component import BYTES_PER_ELEMENT
from kvferry.protocol.wire.versions import PROTOCOL_VERSION

IDENTITY = f"urn:kvferry:layout:{PROTOCOL_VERSION}"


def schema() -> dict[str, Any]:
    """Makes the schema: of a manifest at its root, of a vector in its definitions."""
    _, definitions = msgspec.json.schema_components([RankLayout, Vector], ref_template="#/$defs/{name}")
    for name, of in classes_in(RankLayout, Vector).items():
        _describe(definitions[name], of)
    definitions["Component"]["properties"]["dtype"]["enum"] = list(BYTES_PER_ELEMENT)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": IDENTITY,
        "title": f"The layout of a rank, as in Welcome and Attach of protocol version {PROTOCOL_VERSION}",
        "$ref": "#/$defs/RankLayout",
        "$defs": definitions,
    }


def _describe(definition: dict[str, Any], of: type) -> None:
    """Puts what a docstring says of each field beside the field."""
    says = described(of)
    definition["description"] = " ".join([says.text, *(f"Refused {each}" for each in says.refused)])
    if not issubclass(of, msgspec.Struct):
        return
    for number, name in enumerate(of.__struct_fields__):
        of_field = definition["properties"][name] if "properties" in definition else definition["prefixItems"][number]
        if "prefixItems" in definition:
            of_field["title"] = name
        if name in says.fields:
            of_field["description"] = says.fields[name]


def text() -> str:
    """Writes it."""
    return in_lines(schema()) + "\n"
