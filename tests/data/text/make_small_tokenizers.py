"""Makes small tokenizers of three kinds, and what real libraries encode with them.

    python make_small_tokenizers.py     (needs transformers, sentencepiece, llama-cpp-python, gguf)

bytes/   byte-level BPE in tokenizer.json, with special and plain added tokens; ids by transformers.
first/   sentencepiece-like BPE in tokenizer.json, a space in front of the first word only
         (Metaspace "first"), ids by transformers.
pieces/  a sentencepiece model, tokenizer.model; ids by sentencepiece, and by llama.cpp from a GGUF
         file with the same pieces (they agree, or this script ends).
small_tokens.json holds the ids.
"""

import io
import json
import shutil
import tempfile
from pathlib import Path

import gguf
import sentencepiece
from llama_cpp import Llama
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
TEXTS = json.loads((HERE / "corpus.json").read_text())
RENDERED = {
    "chat": "<|bos|><|user|>Hi  there<|end|>\n<|user|> 안녕 <unit> <think>x</think>done<|end|>",
    "start": "hello<|end|>world <|end|> x",
    "only": "<|end|><|end|>",
    **TEXTS,
}
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|bos|>", "<|end|>", "<|user|>"]
PLAIN = ["<think>", "</think>", "<unit>"]


def folder(name):
    path = HERE / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


def write(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False) + "\n")


def transformers_ids(path):
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    ids = {n: theirs(t, add_special_tokens=False).input_ids for n, t in RENDERED.items()}
    decode = {n: theirs.decode(i, skip_special_tokens=True) for n, i in ids.items()}
    # What the user spells is plain text: the same tokenizer without its markup.
    spec = json.loads((path / "tokenizer.json").read_text())
    for token in spec["added_tokens"]:
        token["special"] = token["content"] != "<unit>"
    bare = Tokenizer.from_str(json.dumps(spec))
    bare.encode_special_tokens = True
    plain = {n: bare.encode(t, add_special_tokens=False).ids for n, t in RENDERED.items()}
    return {"plain": plain, "rendered": ids, "decoded": decode}


def add(tokenizer):
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in PLAIN])
    bos = tokenizer.token_to_id("<|bos|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )


def make_bytes():
    path = folder("bytes")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS.values(), trainer)
    add(made)
    made.save(str(path / "tokenizer.json"))
    write(
        path / "tokenizer_config.json",
        {
            "bos_token": {"content": "<|bos|>"},
            "eos_token": "<|end|>",
            "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        },
    )
    user = made.token_to_id("<|user|>")
    write(path / "generation_config.json", {"eos_token_id": [made.token_to_id("<|end|>"), user]})
    return transformers_ids(path)


def make_pieces():
    path = folder("pieces")
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([t for t in TEXTS.values() if t and "\0" not in t] * 3),
        model_writer=out,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        allow_whitespace_only_pieces=True,
        character_coverage=0.98,
        control_symbols=["<|end|>"],
        user_defined_symbols=["<turn>", "<table>"],
        pad_id=3,
        minloglevel=2,
    )
    (path / "tokenizer.model").write_bytes(out.getvalue())
    pieces = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    turn = pieces.piece_to_id("<turn>")
    write(
        path / "tokenizer_config.json",
        {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "added_tokens_decoder": {str(turn): {"content": "<turn>", "special": True}},
        },
    )
    ids = {n: pieces.encode(t) for n, t in RENDERED.items()}
    with tempfile.TemporaryDirectory() as temporary:
        theirs = llama_cpp(Path(temporary) / "vocab.gguf", pieces)
    # Where a text starts with a user-defined piece, llama.cpp leaves out sentencepiece's first space.
    assert [n for n in ids if ids[n] != theirs[n]] == ["html"]
    return {"plain": ids, "decoded": {n: pieces.decode(i) for n, i in ids.items()}}, pieces


def llama_cpp(path, pieces):
    kinds, tokens, scores = [], [], []
    for i in range(pieces.get_piece_size()):
        tokens.append(pieces.id_to_piece(i))
        scores.append(pieces.get_score(i))
        kind = gguf.TokenType.NORMAL
        if pieces.is_unknown(i):
            kind = gguf.TokenType.UNKNOWN
        elif pieces.is_control(i):
            kind = gguf.TokenType.CONTROL
        elif pieces.is_byte(i):
            kind = gguf.TokenType.BYTE
        elif tokens[-1] in ("<turn>", "<table>"):
            kind = gguf.TokenType.USER_DEFINED
        kinds.append(kind)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = Llama(str(path), vocab_only=True, verbose=False)
    return {
        n: model.tokenize(t.encode(), add_bos=False, special=False) for n, t in RENDERED.items()
    }


def make_first(pieces):
    """The pieces above as transformers converts a sentencepiece model: merges out of the scores."""
    path = folder("first")
    vocab = {pieces.id_to_piece(i): i for i in range(pieces.get_piece_size())}
    merges = []
    for piece, i in vocab.items():
        cuts = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
        cuts = [(a, b) for a, b in cuts if a in vocab and b in vocab]
        merges += [(i, vocab[a], vocab[b], a, b) for a, b in cuts]
    merges = [(a, b) for *_, a, b in sorted(merges)]
    made = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    add(made)
    made.save(str(path / "tokenizer.json"))
    return transformers_ids(path)


def main():
    result = {"bytes": make_bytes()}
    result["pieces"], pieces = make_pieces()
    result["first"] = make_first(pieces)
    result["texts"] = RENDERED
    lines = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
    (HERE / "small_tokens.json").write_text(lines + "\n")


if __name__ == "__main__":
    main()
