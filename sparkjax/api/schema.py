"""The OpenAPI description, written by hand: it says what the parsers accept."""

from __future__ import annotations

from typing import Any

import sparkjax

from . import chat, completions, options
from .admin import LONGEST
from .served import ServedModel

Schema = dict[str, Any]


def openapi(served: ServedModel) -> Schema:
    """The description of the API of one model, OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "sparkjax",
            "version": sparkjax.__version__,
            "description": f"The OpenAI API over {served.id}.",
        },
        "paths": _paths(served),
        "components": {
            "schemas": _schemas(served),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # An empty alternative: without http.api_keys no key is asked for.
        "security": [{"key": []}, {}],
    }


def _paths(served: ServedModel) -> Schema:
    event = {"type": "object", "properties": {"data": {"type": "string"}}}
    stream = {"text/event-stream": {"schema": event}}
    generation = (400, 401, 403, 404, 408, 413, 415, 429, 503)
    plain = (401, 403, 503)
    return {
        "/v1/chat/completions": {
            "post": _operation("Answer a conversation", "ChatRequest", "ChatCompletion", generation, stream)
        },
        "/v1/completions": {
            "post": _operation("Continue a text", "CompletionRequest", "Completion", generation, stream)
        },
        "/v1/models": {"get": _operation("The served model under all its ids", None, "ModelList", plain)},
        "/v1/models/{model}": {
            "get": _operation("The served model", None, "Model", (*plain, 404))
            | {"parameters": [{"name": "model", "in": "path", "required": True,
                               "schema": {"type": "string"}, "example": served.id}]}
        },
        "/tokenize": {"post": _operation("Token ids of a text or conversation", "TokenizeRequest",
                                         "Tokens", generation)},
        "/detokenize": {"post": _operation("The text of token ids", "DetokenizeRequest", "Text", generation)},
        "/health": {"get": _operation("Liveness; needs no key", None, "Status", (503,), failed="Status")
                    | {"security": [{}]}},
        "/ready": {"get": _operation("Readiness", None, "Status", plain, failed="Status")},
        "/metrics": {"get": _metrics()},
        "/admin/profile": {
            "post": _operation("Record a JAX profiler trace; from this host only", "ProfileRequest",
                               "Profile", (400, 401, 403, 408, 409, 413, 415, 429, 503))
        },
    }  # fmt: skip


def _operation(
    summary: str,
    request: str | None,
    response: str,
    statuses: tuple[int, ...],
    more: Schema | None = None,
    failed: str = "Error",
) -> Schema:
    made: Schema = {
        "summary": summary,
        "responses": {
            "200": {
                "description": "OK",
                "content": {"application/json": {"schema": _ref(response)}, **(more or {})},
            },
            **{
                str(status): {
                    "description": DESCRIPTIONS[status],
                    "content": {"application/json": {"schema": _failure(status, failed)}},
                }
                for status in statuses
            },
        },
    }
    if request is not None:
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(request)}},
        }
    return made


DESCRIPTIONS = {
    400: "The request cannot be served; `param` names the field",
    401: "No API key, or an unknown one",
    403: "Not allowed from there",
    404: "No such model",
    408: "The body did not come",
    409: "Busy with another one",
    413: "The body is too large",
    415: "The body is not application/json",
    429: "Too many requests with this key; Retry-After says when",
    503: "Overloaded, shutting down, or the engine failed",
}


def _failure(status: int, failed: str) -> Schema:
    if status == 503 and failed != "Error":
        return {"anyOf": [_ref(failed), _ref("Error")]}
    return _ref("Error")


def _metrics() -> Schema:
    error = {"application/json": {"schema": _ref("Error")}}
    return {
        "summary": "Prometheus metrics",
        "responses": {
            "200": {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}},
            **{str(s): {"description": DESCRIPTIONS[s], "content": error} for s in (401, 403, 503)},
        },
    }


def _schemas(served: ServedModel) -> Schema:
    return {
        "ChatRequest": _chat_request(served),
        "Message": _message(),
        "CompletionRequest": _completion_request(served),
        "TokenizeRequest": _tokenize_request(served),
        "DetokenizeRequest": _object(
            {"model": _nullable(_model(served)),
             "tokens": {"type": "array", "items": _token_id(served)}}, ["tokens"]
        ),
        "ProfileRequest": _object(
            {"directory": {"type": "string", "description": "absolute path on the server"},
             "seconds": _nullable({"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST})},
            ["directory"],
        ),
        **_responses(),
    }  # fmt: skip


def _common(served: ServedModel) -> Schema:
    defaults = served.defaults
    stop = {"type": "string", "minLength": 1, "maxLength": options.LONGEST_STOP}
    fields: Schema = {
        "temperature": _number(0, 2, defaults.temperature, "0 is greedy"),
        "top_p": _number(0, 1, defaults.top_p),
        "top_k": _integer(-1, options.LARGEST, defaults.top_k, "0 and -1 keep all tokens"),
        "min_p": _number(0, 1, defaults.min_p),
        "presence_penalty": _number(-2, 2, 0),
        "frequency_penalty": _number(-2, 2, 0),
        "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 100,
                               "default": defaults.repetition_penalty},
        "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1,
                 "description": "choice i uses seed + i; without it a random one"},
        "n": _integer(1, options.MOST_CHOICES, 1, "choices for each prompt"),
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": 4}]},
        "stop_token_ids": {"type": "array", "items": _token_id(served),
                           "maxItems": options.most_stop_ids(served)},
        "ignore_eos": {"type": "boolean", "default": False},
        "logit_bias": {"type": "object", "maxProperties": options.MOST_BIASES,
                       "propertyNames": {"enum": [str(i) for i in range(min(served.vocab_size, 100))]},
                       "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                       "description": "decimal token ids to biases"},
        "stream": {"type": "boolean", "default": False},
        "user": {"type": "string"},
        "safety_identifier": {"type": "string", "maxLength": 64},
        "metadata": {"type": "object", "maxProperties": 16, "propertyNames": {"maxLength": 64},
                     "additionalProperties": {"type": "string", "maxLength": 512}},
    }  # fmt: skip
    return {
        "model": _model(served),
        **{name: _nullable(field) for name, field in fields.items()},
        # Allowed with stream only, which a schema of plain fields cannot say.
        "stream_options": {
            "type": ["object", "null"],
            "properties": {name: {"type": "boolean"} for name in options.STREAM_OPTIONS},
        },
    }


def _chat_request(served: ServedModel) -> Schema:
    fields = _common(served) | {
        "messages": {"type": "array", "minItems": 1, "maxItems": chat.MOST_MESSAGES,
                     "items": _ref("Message")},
        "max_completion_tokens": _nullable(_integer(1, served.context, None, "not with max_tokens")),
        "max_tokens": _nullable(_integer(1, served.context, None, "its older name")),
        "logprobs": _nullable({"type": "boolean", "default": False}),
        "top_logprobs": _nullable(_integer(0, chat.MOST_TOP_LOGPROBS, None, "needs logprobs")),
    }  # fmt: skip
    example = {
        "model": served.id,
        "messages": [{"role": "user", "content": "Name three primary colors."}],
        "temperature": 0,
        "max_tokens": 64,
    }
    return _object(fields, ["model", "messages"], example)


def _completion_request(served: ServedModel) -> Schema:
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "items": _token_id(served), "minItems": 1, "maxItems": served.context}
    several = {"minItems": 1, "maxItems": completions.MOST_PROMPTS}
    fields = _common(served) | {
        "prompt": {"anyOf": [text, ids,
                             {"type": "array", "items": text, **several},
                             {"type": "array", "items": ids, **several}]},
        "max_tokens": _nullable(
            _integer(0, served.context, completions.DEFAULT_MAX_TOKENS, "0 with echo scores the prompt")
        ),
        "logprobs": _nullable(_integer(0, completions.MOST_LOGPROBS, None)),
        "echo": _nullable({"type": "boolean", "default": False}),
    }  # fmt: skip
    example = {"model": served.id, "prompt": "The capital of France is", "max_tokens": 8}
    return _object(fields, ["model", "prompt"], example)


def _message() -> Schema:
    def parts(*kinds: Schema) -> Schema:
        return {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"anyOf": list(kinds)}},
            ]
        }

    text = _object({"type": {"const": "text"}, "text": {"type": "string"}}, ["type", "text"])
    refusal = _object(
        {"type": {"const": "refusal"}, "refusal": {"type": "string"}}, ["type", "refusal"]
    )
    name = _nullable({"type": "string"})
    return {
        "anyOf": [
            _object({"role": {"enum": ["developer", "system", "user"]}, "content": parts(text), "name": name},
                    ["role", "content"]),
            _object({"role": {"const": "assistant"}, "content": parts(text, refusal), "name": name,
                     "refusal": name, "reasoning_content": name}, ["role", "content"]),
            _object({"role": {"const": "tool"}, "content": parts(text),
                     "tool_call_id": {"type": "string"}, "name": name},
                    ["role", "content", "tool_call_id"]),
        ]
    }  # fmt: skip


def _tokenize_request(served: ServedModel) -> Schema:
    flag = _nullable({"type": "boolean"})
    common = {"model": _nullable(_model(served)), "return_token_strs": flag}
    return {
        "anyOf": [
            _object({"prompt": {"type": "string"}, "add_special_tokens": flag} | common, ["prompt"]),
            _object(
                {"messages": {"type": "array", "minItems": 1, "items": _ref("Message")},
                 "add_generation_prompt": flag} | common,
                ["messages"],
            ),
        ]
    }  # fmt: skip


def _responses() -> Schema:
    text, count = {"type": "string"}, {"type": "integer", "minimum": 0}
    finish = {"enum": ["stop", "length"]}
    any_object: Schema = {"type": ["object", "null"]}
    usage = _object(
        {"prompt_tokens": count, "completion_tokens": count, "total_tokens": count,
         "prompt_tokens_details": _object({"cached_tokens": count}, ["cached_tokens"])},
        ["prompt_tokens", "completion_tokens", "total_tokens"],
    )  # fmt: skip

    def completion(choice: Schema) -> Schema:
        fields = {"id": text, "object": text, "created": count, "model": text,
                  "choices": {"type": "array", "items": choice}, "usage": usage}  # fmt: skip
        return _object(fields, list(fields))

    message = _object({"role": {"const": "assistant"}, "content": text}, ["role", "content"])
    chat_choice = {
        "index": count,
        "message": message,
        "logprobs": any_object,
        "finish_reason": finish,
    }
    choice = {"index": count, "text": text, "logprobs": any_object, "finish_reason": finish}
    error = {"message": text, "type": text, "param": {"type": ["string", "null"]},
             "code": {"type": ["string", "null"]}}  # fmt: skip
    model = {"id": text, "object": {"const": "model"}, "created": count, "owned_by": text,
             "max_model_len": count, "context": {"type": "object"}}  # fmt: skip
    return {
        "ChatCompletion": completion(_object(chat_choice, list(chat_choice))),
        "Completion": completion(_object(choice, list(choice))),
        "Model": _object(model, list(model)),
        "ModelList": _object(
            {"object": {"const": "list"}, "data": {"type": "array", "items": _ref("Model")}}, ["data"]
        ),
        "Tokens": _object(
            {"count": count, "max_model_len": count, "tokens": {"type": "array", "items": count},
             "token_strs": {"type": ["array", "null"], "items": text}}, ["count", "tokens"]
        ),
        "Text": _object({"prompt": text}, ["prompt"]),
        "Status": _object({"status": text, "model": text, "error": text}, ["status"]),
        "Profile": _object({"directory": text, "seconds": {"type": "number"}}, ["directory"]),
        "Error": _object({"error": _object(error, list(error))}, ["error"]),
    }  # fmt: skip


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(fields: Schema, required: list[str], example: Any = None) -> Schema:
    made: Schema = {"type": "object", "properties": fields, "required": required}
    return made | ({"example": example} if example is not None else {})


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _number(low: float, high: float, default: float, description: str | None = None) -> Schema:
    made: Schema = {"type": "number", "minimum": low, "maximum": high, "default": default}
    return made | ({"description": description} if description else {})


def _integer(low: int, high: int, default: int | None, description: str | None = None) -> Schema:
    made: Schema = {"type": "integer", "minimum": low, "maximum": high}
    made |= {"default": default} if default is not None else {}
    return made | ({"description": description} if description else {})


def _model(served: ServedModel) -> Schema:
    return {"enum": list(served.names)}


def _token_id(served: ServedModel) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": served.vocab_size - 1}
