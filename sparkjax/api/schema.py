"""The OpenAPI description, written by hand: it says what the parsers accept."""

from __future__ import annotations

import sparkjax

from . import chat, chat_schema, completions, messages, options
from . import surface_schema as surfaces
from .admin import LONGEST
from .openapi_parts import (
    DESCRIPTIONS,
    GENERATION,
    PLAIN,
    Schema,
    integer,
    model,
    nullable,
    number,
    operation,
    record,
    ref,
    token_id,
)
from .served import ServedModel


def openapi(served: ServedModel) -> Schema:
    """The description of the API of one model, OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "sparkjax",
            "version": sparkjax.__version__,
            "description": f"The OpenAI API over {served.id}.",
        },
        "paths": _paths(served) | surfaces.paths(),
        "components": {
            "schemas": _schemas(served) | surfaces.schemas(served),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # An empty alternative: without http.api_keys no key is asked for.
        "security": [{"key": []}, {}],
    }


def _paths(served: ServedModel) -> Schema:
    event = {"type": "object", "properties": {"data": {"type": "string"}}}
    stream = {"text/event-stream": {"schema": event}}
    return {
        "/v1/chat/completions": {
            "post": operation("Answer a conversation", "ChatRequest", "ChatCompletion", GENERATION, stream)
        },
        "/v1/completions": {
            "post": operation("Continue a text", "CompletionRequest", "Completion", GENERATION, stream)
        },
        "/v1/models": {"get": operation("The served model under all its ids", None, "ModelList", PLAIN)},
        "/v1/models/{model}": {
            "get": operation("The served model", None, "Model", (*PLAIN, 404))
            | {"parameters": [{"name": "model", "in": "path", "required": True,
                               "schema": {"type": "string"}, "example": served.id}]}
        },
        "/tokenize": {"post": operation("Token ids of a text or conversation", "TokenizeRequest",
                                         "Tokens", GENERATION)},
        "/detokenize": {"post": operation("The text of token ids", "DetokenizeRequest", "Text", GENERATION)},
        "/health": {"get": operation("Liveness; needs no key", None, "Status", (503,), failed="Status")
                    | {"security": [{}], "parameters": [
                        {"name": "deep", "in": "query", "schema": {"type": "string"}, "example": "1",
                         "description": "Compare the weights on the devices with what was read"}]}},
        "/ready": {"get": operation("Readiness", None, "Status", PLAIN, failed="Status")},
        "/metrics": {"get": _metrics()},
        "/admin/profile": {
            "post": operation("Record a JAX profiler trace; from this host only", "ProfileRequest",
                               "Profile", (400, 401, 403, 408, 409, 413, 415, 429, 503))
        },
    }  # fmt: skip


def _metrics() -> Schema:
    error = {"application/json": {"schema": ref("Error")}}
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
        "Message": chat_schema.message(),
        "CompletionRequest": _completion_request(served),
        "TokenizeRequest": _tokenize_request(served),
        "DetokenizeRequest": record(
            {"model": nullable(model(served)),
             "tokens": {"type": "array", "items": token_id(served)}}, ["tokens"]
        ),
        "ProfileRequest": record(
            {"directory": {"type": "string", "description": "absolute path on the server"},
             "seconds": nullable({"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST})},
            ["directory"],
        ),
        **_responses(),
    }  # fmt: skip


def _common(served: ServedModel) -> Schema:
    defaults = served.defaults
    stop = {"type": "string", "minLength": 1, "maxLength": options.LONGEST_STOP}
    fields: Schema = {
        "temperature": number(0, 2, defaults.temperature, "0 is greedy"),
        "top_p": number(0, 1, defaults.top_p),
        "top_k": integer(-1, options.LARGEST, defaults.top_k, "0 and -1 keep all tokens"),
        "min_p": number(0, 1, defaults.min_p),
        "presence_penalty": number(-2, 2, 0),
        "frequency_penalty": number(-2, 2, 0),
        "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 100,
                               "default": defaults.repetition_penalty},
        "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1,
                 "description": "choice i uses seed + i; without it a random one"},
        "n": integer(1, options.MOST_CHOICES, 1, "choices for each prompt"),
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": 4}]},
        "stop_token_ids": {"type": "array", "items": token_id(served),
                           "maxItems": options.most_stop_ids(served)},
        "ignore_eos": {"type": "boolean", "default": False},
        "prompt_logprobs": integer(0, options.MOST_PROMPT_LOGPROBS, None, "not with stream"),
        "logit_bias": {"type": "object", "maxProperties": options.MOST_BIASES,
                       "propertyNames": {"enum": [str(i) for i in range(min(served.vocab_size, 100))]},
                       "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                       "description": "decimal token ids to biases"},
        "stream": {"type": "boolean", "default": False},
        "user": {"type": "string"},
        "safety_identifier": {"type": "string", "maxLength": 64},
        "prompt_cache_key": {"type": "string", "maxLength": 1024},
        "prefix_cache": {"type": "boolean", "default": True},
        "service_tier": {"enum": ["auto", "default"]},
        "sse_ping_interval": integer(1, options.LARGEST, None, "seconds, with stream; -1 for never"),
        "metadata": {"type": "object", "maxProperties": 16, "propertyNames": {"maxLength": 64},
                     "additionalProperties": {"type": "string", "maxLength": 512}},
        **_structured(),
    }  # fmt: skip
    return {
        "model": model(served),
        **{name: nullable(field) for name, field in fields.items()},
        # Allowed with stream only, which a schema of plain fields cannot say.
        "stream_options": {
            "type": ["object", "null"],
            "properties": {name: {"type": "boolean"} for name in options.STREAM_OPTIONS},
        },
    }


def _structured() -> Schema:
    """The fields of structured output; a request has one of them at most."""
    text = {"type": "string", "minLength": 1}
    any_schema = {"type": "object", "description": "a JSON Schema"}
    named = record({"name": nullable({"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}),
                     "description": nullable({"type": "string"}),
                     "schema": nullable(any_schema), "strict": nullable({"type": "boolean"})}, [])  # fmt: skip
    kinds = [
        record({"type": {"enum": ["text", "json_object"]}}, ["type"]),
        record({"type": {"const": "json_schema"}, "json_schema": named}, ["type", "json_schema"]),
        record({"type": {"const": "regex"}, "pattern": text}, ["type", "pattern"]),
        record({"type": {"const": "lark"}, "grammar": text}, ["type", "grammar"]),
    ]
    choice = {"type": "array", "items": text, "minItems": 1}
    return {
        "response_format": {"anyOf": kinds},
        "guided_json": any_schema,
        "guided_regex": text,
        "guided_choice": choice,
        "guided_grammar": text | {"description": "in Lark's notation, or in GBNF"},
        "structured_outputs": {
            "type": "object",
            "properties": {"json": nullable(any_schema), "regex": nullable(text), "choice": nullable(choice),
                           "grammar": nullable(text), "json_object": nullable({"const": True})},
            "minProperties": 1, "description": "one of them",
        },
        "grammar": text | {"description": "as guided_grammar"},
        "json_schema": any_schema | {"description": "as guided_json"},
    }  # fmt: skip


def _chat_request(served: ServedModel) -> Schema:
    fields = _common(served) | {
        "messages": {"type": "array", "minItems": 1, "maxItems": messages.MOST_MESSAGES,
                     "items": ref("Message")},
        "max_completion_tokens": nullable(integer(1, served.context, None, "not with max_tokens")),
        "max_tokens": nullable(integer(1, served.context, None, "its older name")),
        "logprobs": nullable({"type": "boolean", "default": False}),
        "top_logprobs": nullable(integer(0, chat.MOST_TOP_LOGPROBS, None, "needs logprobs")),
        **chat_schema.tool_fields(),
        **chat_schema.thinking_fields(served),
    }  # fmt: skip
    example = {
        "model": served.id,
        "messages": [{"role": "user", "content": "Name three primary colors."}],
        "temperature": 0,
        "max_tokens": 64,
    }
    return record(fields, ["model", "messages"], example)


def _completion_request(served: ServedModel) -> Schema:
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "items": token_id(served), "minItems": 1, "maxItems": served.context}
    several = {"minItems": 1, "maxItems": completions.MOST_PROMPTS}
    fields = _common(served) | {
        "prompt": {"anyOf": [text, ids,
                             {"type": "array", "items": text, **several},
                             {"type": "array", "items": ids, **several}]},
        "max_tokens": nullable(
            integer(0, served.context, completions.DEFAULT_MAX_TOKENS, "0 with echo scores the prompt")
        ),
        "logprobs": nullable(integer(0, completions.MOST_LOGPROBS, None)),
        "echo": nullable({"type": "boolean", "default": False}),
    }  # fmt: skip
    example = {"model": served.id, "prompt": "The capital of France is", "max_tokens": 8}
    return record(fields, ["model", "prompt"], example)


def _tokenize_request(served: ServedModel) -> Schema:
    flag = nullable({"type": "boolean"})
    common = {"model": nullable(model(served)), "return_token_strs": flag}
    return {
        "anyOf": [
            record({"prompt": {"type": "string"}, "add_special_tokens": flag} | common, ["prompt"]),
            record(
                {"messages": {"type": "array", "minItems": 1, "items": ref("Message")},
                 "add_generation_prompt": flag, **chat_schema.tool_fields(),
                 **chat_schema.thinking_fields(served)} | common,
                ["messages"],
            ),
        ]
    }  # fmt: skip


def _responses() -> Schema:
    text, count = {"type": "string"}, {"type": "integer", "minimum": 0}
    finish = {"enum": ["stop", "length"]}
    any_object: Schema = {"type": ["object", "null"]}
    usage = record(
        {"prompt_tokens": count, "completion_tokens": count, "total_tokens": count,
         "completion_tokens_details": record({"reasoning_tokens": count}, ["reasoning_tokens"]),
         "prompt_tokens_details": record({"cached_tokens": count}, ["cached_tokens"])},
        ["prompt_tokens", "completion_tokens", "total_tokens"],
    )  # fmt: skip

    def completion(choice: Schema) -> Schema:
        fields = {"id": text, "object": text, "created": count, "model": text,
                  "choices": {"type": "array", "items": choice}, "usage": usage}  # fmt: skip
        return record(fields, list(fields))

    chat_choice = {
        "index": count,
        "message": chat_schema.answer(),
        "logprobs": any_object,
        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
    }
    choice = {"index": count, "text": text, "logprobs": any_object, "finish_reason": finish}
    error = {"message": text, "type": text, "param": {"type": ["string", "null"]},
             "code": {"type": ["string", "null"]}}  # fmt: skip
    model = {"id": text, "object": {"const": "model"}, "created": count, "owned_by": text,
             "max_model_len": count, "context": {"type": "object"}}  # fmt: skip
    return {
        "ChatCompletion": completion(record(chat_choice, list(chat_choice))),
        "Completion": completion(record(choice, list(choice))),
        "Model": record(model, list(model)),
        "ModelList": record(
            {"object": {"const": "list"}, "data": {"type": "array", "items": ref("Model")}}, ["data"]
        ),
        "Tokens": record(
            {"count": count, "max_model_len": count, "tokens": {"type": "array", "items": count},
             "token_strs": {"type": ["array", "null"], "items": text}}, ["count", "tokens"]
        ),
        "Text": record({"prompt": text}, ["prompt"]),
        "Status": record({"status": text, "model": text, "error": text, "weights": text}, ["status"]),
        "Profile": record({"directory": text, "seconds": {"type": "number"}}, ["directory"]),
        "Error": record({"error": record(error, list(error))}, ["error"]),
    }  # fmt: skip
