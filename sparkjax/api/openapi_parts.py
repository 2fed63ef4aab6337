"""Pieces of the OpenAPI description."""

from __future__ import annotations

from typing import Any

from .served import ServedModel

Schema = dict[str, Any]

DESCRIPTIONS = {
    400: "The request cannot be served; `param` names the field",
    401: "No API key, or an unknown one",
    403: "Not allowed from there",
    404: "No such model, or nothing with this id",
    408: "The body did not come",
    409: "Busy with another one",
    413: "The body is too large",
    415: "The body is not application/json",
    429: "Too many requests with this key; Retry-After says when",
    503: "Overloaded, shutting down, or the engine failed",
    529: "Overloaded",
}
GENERATION = (400, 401, 403, 404, 408, 413, 415, 429, 503)
"""Statuses of the routes that read a body."""
PLAIN = (401, 403, 503)
"""Those of the others."""


def operation(
    summary: str,
    request: str | None,
    response: str,
    statuses: tuple[int, ...],
    more: Schema | None = None,
    failed: str = "Error",
    error: str = "Error",
) -> Schema:
    """An operation of the description.

    Args:
      request, response: names of schemas.
      more: further forms of the response.
      failed: the schema of a 503 that has a shape of its own.
      error: the schema of all other errors.
    """
    made: Schema = {
        "summary": summary,
        "responses": {
            "200": {
                "description": "OK",
                "content": {"application/json": {"schema": ref(response)}, **(more or {})},
            },
            **{
                str(status): {
                    "description": DESCRIPTIONS[status],
                    "content": {"application/json": {"schema": _failure(status, failed, error)}},
                }
                for status in statuses
            },
        },
    }
    if request is not None:
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": ref(request)}},
        }
    return made


def _failure(status: int, failed: str, error: str) -> Schema:
    if status == 503 and failed != "Error":
        return {"anyOf": [ref(failed), ref("Error")]}
    return ref(error)


def ref(name: str) -> Schema:
    """A reference to a schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def record(fields: Schema, required: list[str], example: Any = None) -> Schema:
    """An object with these properties; others are allowed."""
    made: Schema = {"type": "object", "properties": fields, "required": required}
    return made | ({"example": example} if example is not None else {})


def nullable(schema: Schema) -> Schema:
    """The schema, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def number(low: float, high: float, default: float, description: str | None = None) -> Schema:
    """A number in a range."""
    made: Schema = {"type": "number", "minimum": low, "maximum": high, "default": default}
    return made | ({"description": description} if description else {})


def integer(low: int, high: int, default: int | None, description: str | None = None) -> Schema:
    """An integer in a range."""
    made: Schema = {"type": "integer", "minimum": low, "maximum": high}
    made |= {"default": default} if default is not None else {}
    return made | ({"description": description} if description else {})


def model(served: ServedModel) -> Schema:
    """The ids of the served model."""
    return {"enum": list(served.names)}


def token_id(served: ServedModel) -> Schema:
    """A token id."""
    return {"type": "integer", "minimum": 0, "maximum": served.vocab_size - 1}
