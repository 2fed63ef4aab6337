"""A toy tokenizer with everything that is awkward in real ones, and a model card over it."""

from __future__ import annotations

from sparkjax.api.served import SamplingDefaults, ServedModel
from sparkjax.text.template import ChatTemplate
from sparkjax.text.tokenizer import Tokenizer
from sparkjax.text.vocabulary import Vocabulary, byte_characters

BYTES = {byte: char for char, byte in byte_characters().items()}


def spell(raw: bytes) -> str:
    return "".join(BYTES[b] for b in raw)


# Beside the 256 bytes: words, pieces that cut characters in two, one spelling twice.
WORDS = [
    b" the", b"Hello", b" world", b"ABC", b"DEF", b"GHI", b"J\n", b"\n", b"text\nmore", b"hi",
    "😀".encode()[:2], "😀".encode()[2:], "é".encode(), "한".encode()[:1], "한국".encode()[1:],
]  # fmt: skip
CONTROL = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
TOKENS = [spell(bytes([b])) for b in range(256)] + [spell(w) for w in WORDS] + CONTROL
BOS, START, END, PAD = range(len(TOKENS) - len(CONTROL), len(TOKENS))
SPECIAL = frozenset([BOS, START, END, PAD])


class Longest:
    """An Encoder: always the longest word that fits."""

    def __init__(self) -> None:
        self.ids = {w: 256 + i for i, w in enumerate(WORDS)}
        self.sizes = sorted({len(w) for w in WORDS}, reverse=True)

    def encode(self, text: str, first: bool) -> list[int]:
        raw, at, found = text.encode(), 0, []
        while at < len(raw):
            for size in self.sizes:
                if (word := self.ids.get(raw[at : at + size])) is not None:
                    found.append(word)
                    at += size
                    break
            else:
                found.append(raw[at])
                at += 1
        return found


def make_tokenizer(add_bos: bool = False) -> Tokenizer:
    vocabulary = Vocabulary(
        tuple(TOKENS), byte_level=True, literal=SPECIAL, special=SPECIAL, control=SPECIAL
    )
    return Tokenizer(vocabulary, Longest(), bos_id=BOS, eos_ids=[END], add_bos=add_bos)


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message must come first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_served(
    add_bos: bool = False, context: int = 512, template: bool = True, **more
) -> ServedModel:
    more = {"defaults": SamplingDefaults(temperature=0.7, top_p=0.9)} | more
    return ServedModel(
        id="toy",
        tokenizer=make_tokenizer(add_bos),
        template=ChatTemplate(TEMPLATE) if template else None,
        context=context,
        vocab_size=len(TOKENS),
        stop_ids=(END,),
        aliases=("org/toy-alias",),
        **more,
    )
