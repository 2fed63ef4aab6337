"""The OpenAPI description of the APIs beside chat and completions."""

from __future__ import annotations

from .openapi_parts import (
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
)
from .score import MOST_PAIRS
from .served import ServedModel

LARGEST = 2**31 - 1
EVENTS = {
    "text/event-stream": {"schema": {"type": "object", "properties": {"data": {"type": "string"}}}}
}


def paths() -> Schema:
    """The operations."""
    one = (400, 404, *PLAIN)
    id = {"parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]}
    listed = {"parameters": [
        *id["parameters"],
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
        {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
        {"name": "after", "in": "query", "schema": {"type": "string"}},
    ]}  # fmt: skip
    messages = (*GENERATION, 529)
    return {
        "/v1/responses": {
            "post": operation("Answer a conversation, kept for a next turn", "ResponsesRequest", "Response", GENERATION, EVENTS)
        },
        "/v1/responses/input_tokens": {
            "post": operation("Tokens of a response's prompt", "InputTokensRequest", "InputTokens", GENERATION)
        },
        "/v1/responses/{id}": {
            "get": operation("A kept response", None, "Response", one, EVENTS) | id,
            "delete": operation("Forget a response", None, "Deleted", one) | id,
        },
        "/v1/responses/{id}/cancel": {
            "post": operation("End a background response", None, "Response", (*one, 429)) | id
        },
        "/v1/responses/{id}/input_items": {
            "get": operation("What a response answered", None, "ItemList", one) | listed
        },
        "/v1/messages": {
            "post": operation("Answer a conversation, as Anthropic's API", "MessagesRequest", "MessageAnswer", messages, EVENTS,
                              error="AnthropicError", failed="AnthropicError")
        },
        "/v1/messages/count_tokens": {
            "post": operation("Tokens of a conversation", "CountRequest", "MessageTokens", messages,
                              error="AnthropicError", failed="AnthropicError")
        },
        "/tokenizer_info": {"get": operation("Special tokens and the chat template", None, "TokenizerInfo", PLAIN)},
        "/status": {"get": operation("The server's numbers", None, "ServerStatus", PLAIN)},
        "/v1/embeddings": {
            "post": operation("Texts as vectors", "EmbeddingsRequest", "Embeddings", GENERATION)
        },
        "/v1/score": {
            "post": operation("How likely one text is after another", "ScoreRequest", "Scores", GENERATION)
        },
    }  # fmt: skip


def schemas(served: ServedModel) -> Schema:
    """The schemas."""
    text, count = {"type": "string"}, {"type": "integer", "minimum": 0}
    any_object: Schema = {"type": "object"}
    texts: Schema = {"type": "array", "minItems": 1, "maxItems": MOST_PAIRS, "items": text}
    items_of_any: Schema = {"type": "array", "minItems": 1}
    flag = nullable({"type": "boolean"})
    items = {"type": "array", "items": any_object}
    error = record({"type": text, "message": text}, ["type", "message"])
    usage = {"input_tokens": count, "output_tokens": count}
    return {
        "ResponsesRequest": record(
            {"model": model(served),
             "input": {"anyOf": [text, items]},
             "instructions": nullable(text),
             "previous_response_id": nullable({"type": "string", "maxLength": 64}),
             "max_output_tokens": nullable(integer(1, served.context, None)),
             "temperature": nullable(number(0, 2, served.defaults.temperature)),
             "top_p": nullable(number(0, 1, served.defaults.top_p)),
             "top_logprobs": nullable(integer(0, 20, None)),
             "include": nullable({"type": "array"}), "tools": nullable(items),
             "tool_choice": {}, "text": {}, "reasoning": {},
             "parallel_tool_calls": flag, "store": flag, "background": flag, "stream": flag},
            ["model", "input"],
            {"model": served.id, "input": "Name three primary colors.", "max_output_tokens": 64},
        ),
        "InputTokensRequest": record(
            {"model": model(served), "input": {"anyOf": [text, items]}, "instructions": nullable(text),
             "previous_response_id": nullable({"type": "string", "maxLength": 64}),
             "tools": nullable(items), "tool_choice": {}, "reasoning": {}},
            ["model", "input"],
            {"model": served.id, "input": "Name three primary colors."},
        ),
        "Response": record(
            {"id": text, "object": {"const": "response"}, "created_at": count,
             "status": {"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
             "model": text, "output": items, "usage": {"type": ["object", "null"]},
             "error": {"type": ["object", "null"]}},
            ["id", "object", "status", "model", "output"],
        ),
        "ItemList": record({"object": {"const": "list"}, "data": items}, ["object", "data"]),
        "Deleted": record({"id": text, "deleted": {"const": True}}, ["id", "deleted"]),
        "InputTokens": record({"input_tokens": count}, ["input_tokens"]),
        "MessagesRequest": record(
            {"model": model(served),
             "max_tokens": integer(1, served.context, None, "not needed to count tokens"),
             "messages": {"type": "array", "minItems": 1, "items": record(
                 {"role": {"enum": ["user", "assistant", "system"]}, "content": {"anyOf": [text, items]}},
                 ["role", "content"])},
             "system": {"anyOf": [text, items, {"type": "null"}]},
             "stop_sequences": nullable({"type": "array", "items": text, "maxItems": 4}),
             "temperature": nullable(number(0, 1, 1)), "top_p": nullable(number(0, 1, 1)),
             "top_k": nullable(integer(0, LARGEST, None)),
             "tools": nullable(items), "tool_choice": {}, "thinking": {}, "stream": flag},
            ["model", "max_tokens", "messages"],
            {"model": served.id, "max_tokens": 64,
             "messages": [{"role": "user", "content": "Name three primary colors."}]},
        ),
        "CountRequest": record(
            {"model": model(served), "messages": {"type": "array", "minItems": 1, "items": any_object},
             "system": {"anyOf": [text, items, {"type": "null"}]},
             "tools": nullable(items), "tool_choice": {}, "thinking": {}},
            ["model", "messages"],
            {"model": served.id, "messages": [{"role": "user", "content": "Name three primary colors."}]},
        ),
        "MessageAnswer": record(
            {"id": text, "type": {"const": "message"}, "role": {"const": "assistant"}, "model": text,
             "content": items, "stop_reason": text, "stop_sequence": {"type": ["string", "null"]},
             "usage": record(usage, list(usage))},
            ["id", "type", "role", "model", "content", "stop_reason", "usage"],
        ),
        "MessageTokens": record({"input_tokens": count}, ["input_tokens"]),
        "EmbeddingsRequest": record(
            {"model": model(served), "input": {"anyOf": [text, items_of_any]},
             "encoding_format": nullable({"enum": ["float", "base64"]}),
             "dimensions": nullable(integer(1, LARGEST, None)), "user": nullable(text)},
            ["model", "input"], {"model": served.id, "input": ["a text", "another one"]},
        ),
        "Embeddings": record(
            {"object": {"const": "list"}, "model": text, "data": {
                "type": "array", "items": record(
                    {"object": {"const": "embedding"}, "index": count, "embedding": {}},
                    ["object", "index", "embedding"])}},
            ["object", "data", "model"],
        ),
        "ScoreRequest": record(
            {"model": model(served), "text_1": {"anyOf": [text, texts]}, "text_2": {"anyOf": [text, texts]}},
            ["model", "text_1", "text_2"],
            {"model": served.id, "text_1": "The sky is", "text_2": [" blue", " green"]},
        ),
        "Scores": record(
            {"id": text, "object": {"const": "list"}, "model": text, "data": {
                "type": "array", "items": record(
                    {"index": count, "object": {"const": "score"}, "score": {"type": "number"},
                     "tokens": count, "greedy": {"type": "boolean"},
                     "token_logprobs": {"type": "array", "items": {"type": "number"}}},
                    ["index", "object", "score", "tokens"])}},
            ["object", "data"],
        ),
        "TokenizerInfo": record(
            {name: {"type": ["string", "null"]} for name in
             ("bos_token", "eos_token", "pad_token", "chat_template")} | {"vocab_size": count},
            ["bos_token", "eos_token", "chat_template"],
        ),
        "ServerStatus": record(
            {"model": text, "version": text, "state": text, "time": {"type": "number"},
             **dict.fromkeys(("requests", "kv", "tokens", "first_token"), any_object),
             "ranks": items},
            ["model", "state", "requests", "kv", "tokens", "ranks"],
        ),
        "AnthropicError": {"anyOf": [
            record({"type": {"const": "error"}, "error": error}, ["type", "error"]),
            ref("Error"),
        ]},
    }  # fmt: skip
