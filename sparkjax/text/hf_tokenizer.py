"""The tokenizer of a Hugging Face checkpoint folder.

`tokenizer.json` (the `tokenizers` library) or else `tokenizer.model` (sentencepiece). Beside them
`tokenizer_config.json`, `generation_config.json` and `config.json` name the special tokens; the
ids that end an answer are the union of what all of them say.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from sparkjax.text import sentencepiece_model as sp
from sparkjax.text.encoders import FastEncoder, PieceEncoder
from sparkjax.text.tokenizer import Tokenizer
from sparkjax.text.vocabulary import Vocabulary, is_markup
from sparkjax.weights.errors import CheckpointError


def tokenizer_from_dir(path: Path) -> Tokenizer:
    """Builds the tokenizer of a checkpoint folder.

    Raises:
      CheckpointError: there is none, it is damaged, or of a kind that is not implemented.
    """
    config = read_json(path / "tokenizer_config.json")
    if (path / "tokenizer.json").is_file():
        parts = _from_json(path / "tokenizer.json")
    elif (path / "tokenizer.model").is_file():
        parts = _from_pieces(path / "tokenizer.model", config)
    else:
        raise CheckpointError(f"{path}: has neither tokenizer.json nor tokenizer.model")
    vocabulary, encoder, swallow, writes_bos = parts
    ids = {spelling: i for i, spelling in enumerate(vocabulary.tokens) if spelling is not None}
    named = special_tokens(config)
    bos = ids.get(named.get("bos_token", ""))
    eos = [ids[named["eos_token"]]] if named.get("eos_token") in ids else []
    return Tokenizer(
        vocabulary,
        encoder,
        bos_id=bos,
        eos_ids=[*eos, *_eos_ids(path)],
        add_bos=config.get("add_bos_token", writes_bos),
        swallow=swallow,
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}; allowed: an object")
    return value


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The `*_token` entries of tokenizer_config.json as strings."""
    found = {}
    for key, value in config.items():
        if key.endswith("_token"):
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                found[key] = value
    return found


def _eos_ids(path: Path) -> Iterator[int]:
    for name in ("generation_config.json", "config.json"):
        config = read_json(path / name)
        for scope in (config, config.get("text_config") or {}):
            value = scope.get("eos_token_id")
            values = value if isinstance(value, list) else [value]
            for each in values:
                if type(each) is int:
                    yield each
                elif each is not None:
                    raise CheckpointError(f"{path / name}: eos_token_id is {value!r}; allowed: ids")


def _from_json(path: Path):
    spec = read_json(path)
    model = spec.get("model") or {}
    if model.get("type", "BPE") not in ("BPE", "Unigram"):
        raise CheckpointError(f"{path}: model.type is {model['type']!r}; allowed: BPE, Unigram")
    byte_level, strip = _layout(path, spec.get("decoder"))
    added = spec.get("added_tokens") or []
    control = {t["id"] for t in added if t["special"] or is_markup(t["content"])}
    vocabulary = Vocabulary(
        _spellings(model.get("vocab"), added),
        byte_level=byte_level,
        literal=frozenset(t["id"] for t in added),
        special=frozenset(t["id"] for t in added if t["special"]),
        control=frozenset(control),
        strip_first_space=strip,
    )
    swallow = {t["id"]: (t["lstrip"], t["rstrip"]) for t in added if t["id"] in control}
    markup = [t["content"] for t in added if t["id"] in control and not t["special"]]
    rest = _without_first_space(spec)
    try:
        first = _load(spec, markup)
        encoder = FastEncoder(first, _load(rest, markup) if rest else None)
    except Exception as error:  # `tokenizers` raises bare Exceptions
        raise CheckpointError(f"{path}: is no tokenizer: {error}") from None
    return vocabulary, encoder, swallow, _writes_bos(spec.get("post_processor"))


def _load(spec: dict[str, Any], markup: list[str]) -> tokenizers.Tokenizer:
    loaded = tokenizers.Tokenizer.from_str(json.dumps(spec))
    # Known tokens keep their ids; this only flags them as special, so that text cannot make them.
    loaded.add_special_tokens([tokenizers.AddedToken(m, normalized=False) for m in markup])
    return loaded


def _spellings(vocab: Any, added: list[dict[str, Any]]) -> tuple[str | None, ...]:
    if isinstance(vocab, dict):
        ids = {i: token for token, i in vocab.items()}
    else:
        ids = {i: token for i, (token, _) in enumerate(vocab or [])}
    ids |= {t["id"]: t["content"] for t in added}
    return tuple(ids.get(i) for i in range(max(ids, default=-1) + 1))


def _flat(node: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The steps of a decoder or pre-tokenizer, with sequences opened."""
    if node and node["type"] == "Sequence":
        for inner in node.get("decoders") or node.get("pretokenizers") or []:
            yield from _flat(inner)
    elif node:
        yield node


def _layout(path: Path, decoder: dict[str, Any] | None) -> tuple[bool, bool]:
    """(whether spellings are byte-level, whether decoding drops a first space)."""
    steps = {step["type"]: step for step in _flat(decoder)}
    if "ByteLevel" in steps:
        return True, False
    if steps.keys() & {"ByteFallback", "Metaspace", "Replace"}:
        metaspace = steps.get("Metaspace", {})
        adds = metaspace.get("prepend_scheme", "always" if metaspace else "never") != "never"
        return False, adds or steps.get("Strip", {}).get("start", 0) > 0
    raise CheckpointError(
        f"{path}: decoder is {sorted(steps)}; allowed: ByteLevel, or sentencepiece's "
        "(ByteFallback, Metaspace, Replace)"
    )


def _without_first_space(spec: dict[str, Any]) -> dict[str, Any] | None:
    """The tokenizer for what follows a control token, if it differs from the one for a start."""
    if not any(s.get("prepend_scheme") == "first" for s in _flat(spec.get("pre_tokenizer"))):
        return None
    changed = copy.deepcopy(spec)
    for step in _flat(changed["pre_tokenizer"]):
        if step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
    return changed


def _writes_bos(processor: dict[str, Any] | None) -> bool:
    """Whether the post-processor puts a special token in front of a single text."""
    for step in (processor or {}).get("processors") or [processor or {}]:
        single = step.get("single") or []
        if step.get("type") == "TemplateProcessing" and single and "SpecialToken" in single[0]:
            return True
    return False


def _from_pieces(path: Path, config: dict[str, Any]):
    raw = path.read_bytes()
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_proto=raw)
    except RuntimeError as error:
        raise CheckpointError(f"{path}: is no sentencepiece model: {error}") from None
    count = pieces.get_piece_size()
    ids = range(count)
    spellings = {i: pieces.id_to_piece(i) for i in ids}
    special = {i for i in ids if pieces.is_control(i) or pieces.is_unknown(i)}
    literal = set(special)
    added = {int(i): t for i, t in (config.get("added_tokens_decoder") or {}).items()}
    for i, token in added.items():
        spellings[i] = token["content"]
        if token.get("special") or i >= count:
            literal.add(i)
        if token.get("special"):
            special.add(i)
    control = {i for i in special if i >= count or not pieces.is_unknown(i)}
    control |= {i for i in added if i >= count or is_markup(spellings[i])}
    adds_space = pieces.encode("a", out_type=str)[:1] != ["a"]
    vocabulary = Vocabulary(
        tuple(spellings.get(i) for i in range(max(spellings) + 1)),
        byte_level=False,
        literal=frozenset(literal),
        special=frozenset(special),
        control=frozenset(control),
        strip_first_space=adds_space,
    )
    swallow = {
        i: (bool(t.get("lstrip")), bool(t.get("rstrip"))) for i, t in added.items() if i in control
    }
    return vocabulary, PieceEncoder(sp.with_control(raw, control)), swallow, True
