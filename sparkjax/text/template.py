"""Chat templates: messages to the text of a prompt.

Renders what transformers' `apply_chat_template` renders (transformers `utils/chat_template_utils.py`),
inside a sandbox with limits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from sparkjax.text import sandbox
from sparkjax.text.hf_tokenizer import read_json, special_tokens
from sparkjax.text.sandbox import LimitError, Limits, Sandbox
from sparkjax.text.tokenizer import Tokenizer
from sparkjax.weights.errors import CheckpointError


class TemplateError(ValueError):
    """Messages that a template refuses or cannot render; the message may be shown to the client."""


class ChatTemplate:
    """A compiled chat template.

    Args:
      source: jinja2 text.
      tokens: `bos_token`, `eos_token` and the like, which templates may print.
      tool_source: another template for requests with tools, or None.
      limits: of every rendering.
      name: of the file, for errors.

    Attributes:
      reads: what else of a request it is given, beside messages and tools.
      joiner: stands between the text parts of a message.
      keeps_tags: reasoning tags in earlier answers are tags, which templates look for.
      continues: a last message with `prefix` is an answer that goes on.
      any_arguments: arguments of earlier calls may be text that is no JSON object.

    Raises:
      CheckpointError: the source is no template.
    """

    reads: tuple[str, ...] = ()
    joiner = ""
    keeps_tags = True
    continues = False
    any_arguments = False

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str] | None = None,
        *,
        tool_source: str | None = None,
        limits: Limits = Limits(),
        name: str = "chat template",
    ):
        self.source, self.tool_source = source, tool_source
        self._tokens, self._limits = dict(tokens or {}), limits
        self._template = self._compile(source, name)
        self._tool_template = self._compile(tool_source, name) if tool_source else self._template

    @property
    def names(self) -> frozenset[str]:
        """What a template reads that a request may set: not the conversation, not tokens."""
        found: set[str] = set()
        for source in filter(None, (self.source, self.tool_source)):
            found |= jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(source))
        given = {"messages", "tools", "documents", "add_generation_prompt"}
        tokens = {name for name in found if name.endswith("_token")}
        return frozenset(found - given - tokens - self._tokens.keys() - _ENVIRONMENT.globals.keys())

    def _compile(self, source: str, name: str) -> jinja2.Template:
        try:
            # jinja evaluates constant expressions here already.
            with sandbox.running(self._limits):
                return _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{name}: line {error.lineno}: {error.message}") from None
        except (RecursionError, LimitError, jinja2.TemplateError) as error:
            raise CheckpointError(f"{name}: {type(error).__name__}: {error}") from None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], name: str = "GGUF") -> ChatTemplate | None:
        """The template in the metadata of a GGUF file, or None."""
        source = metadata.get("tokenizer.chat_template")
        if source is None:
            return None
        spellings = metadata.get("tokenizer.ggml.tokens", [])
        tokens = {}
        for ours, theirs in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("unk", "unknown"),
            ("pad", "padding"),
        ):
            token = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
            if token is not None and token < len(spellings):
                tokens[f"{ours}_token"] = spellings[token]
        tool_source = metadata.get("tokenizer.chat_template.tool_use")
        return cls(source, tokens, tool_source=tool_source, name=f"{name}: tokenizer.chat_template")

    @classmethod
    def from_dir(cls, path: str | Path) -> ChatTemplate | None:
        """The template of a checkpoint folder, or None.

        `chat_template.jinja`, else `chat_template` of tokenizer_config.json (a string, or a list
        of named ones).
        """
        path = Path(path)
        config = read_json(path / "tokenizer_config.json")
        file = path / "chat_template.jinja"
        found = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if found is None:
            return None
        named = {"default": found} if isinstance(found, str) else _named(path, found)
        extra = path / "additional_chat_templates" / "tool_use.jinja"
        tool_source = extra.read_text(encoding="utf-8") if extra.is_file() else None
        return cls(
            named["default"],
            special_tokens(config),
            tool_source=tool_source or named.get("tool_use"),
            name=str(file if file.is_file() else path / "tokenizer_config.json"),
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation.

        Args:
          messages: plain JSON values; other objects are not passed on to the template.
          add_generation_prompt: ends with the start of an assistant's turn.
          tools: tool definitions, or None.
          **kwargs: further names of the template, e.g. enable_thinking.

        Raises:
          TemplateError: the template refused, failed, or went past its limits.
        """
        template = self._tool_template if tools else self._template
        names = self._tokens | kwargs
        try:
            values = {key: _plain(value) for key, value in names.items()} | {
                "messages": [_message(m) for m in messages],
                "tools": _plain(tools),
                "documents": _plain(kwargs.get("documents")),
                "add_generation_prompt": add_generation_prompt,
            }
            with sandbox.running(self._limits):
                return _join(template.generate(**values))
        except TemplateError:
            raise
        except LimitError as error:
            raise TemplateError(f"the chat template {error}") from None
        except jinja2.TemplateError as error:
            raise TemplateError(
                f"the chat template refused the messages: {error.message}"
            ) from None
        except RecursionError:
            raise TemplateError("the messages or the chat template nest too deeply") from None
        except Exception as error:  # whatever an expression of the template raised
            raise TemplateError(
                f"the chat template failed on the messages: {type(error).__name__}: {error}"
            ) from None


def shield_messages(
    tokenizer: Tokenizer, value: Any, keep: Sequence[str] = (), tags: bool = True
) -> Any:
    """Messages or tools with every control spelling in them shielded (`Tokenizer.shield`).

    An assistant's `<think>` and `</think>` stay, with `tags`: templates look for them to find the
    reasoning of earlier turns.
    """
    if isinstance(value, str):
        return tokenizer.shield(value, keep)
    if isinstance(value, Mapping):
        if tags and value.get("role") == "assistant":
            keep = ("<think>", "</think>")
        return {
            tokenizer.shield(key): shield_messages(tokenizer, item, keep, tags)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [shield_messages(tokenizer, item, keep, tags) for item in value]
    return value


def _join(parts) -> str:
    out, size = [], 0
    for part in parts:
        out.append(part)
        size += len(part)
        sandbox.check(size)
    return "".join(out)


def _named(path: Path, entries: Any) -> dict[str, str]:
    named = {e["name"]: e["template"] for e in entries if isinstance(e, dict) and "name" in e}
    if "default" not in named:
        raise CheckpointError(
            f"{path / 'tokenizer_config.json'}: chat_template names {sorted(named)}; "
            "'default' is needed"
        )
    return named


def _plain(value: Any) -> Any:
    """A copy out of plain JSON types; nothing else gets in, for its methods would be callable."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    for kind in (str, bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"


# Names under which a message's reasoning comes. transformers reads them all, and so do we.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def _message(message: Any) -> dict[str, Any]:
    """One message as templates expect it: no empty fields, reasoning under its usual names."""
    if not isinstance(message, Mapping):
        raise TemplateError(f"a message is a {type(message).__name__}; allowed: an object")
    plain = {key: value for key, value in _plain(message).items() if value is not None}
    for name in _REASONING:
        if name in plain:
            return {"thinking": plain[name], **plain, "reasoning_content": plain[name]}
    return plain


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: no HTML escapes, characters as they are."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> Sandbox:
    made = Sandbox()
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made


_ENVIRONMENT = _environment()
