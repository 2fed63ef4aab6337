"""Makes smollm2_tokens.json: token ids by llama.cpp and transformers for corpus.json.

Run with an interpreter that has transformers, llama-cpp-python and gguf:

    python make_tokenizer.py SmolLM2-135M-Instruct.Q4_1.gguf

transformers does not know the `smollm` pre-tokenizer of a GGUF file and takes GPT-2's, so it is
given the one of HuggingFaceTB/SmolLM2-135M-Instruct's tokenizer.json (digits are split one by one,
then bytes). With it both agree on every text, and disagreement ends this script. The other
pre-tokenizers are llama.cpp's alone: the same vocabulary, saved under another name.
"""

import json
import sys
import tempfile
from pathlib import Path

import gguf
from llama_cpp import Llama
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

HERE = Path(__file__).parent
PRES = ("smollm", "gpt-2", "llama-bpe", "qwen2", "qwen35", "default")


def llama_cpp(path, texts, special):
    model = Llama(str(path), vocab_only=True, verbose=False)
    return {
        name: model.tokenize(text.encode(), add_bos=False, special=special)
        for name, text in texts.items()
    }


def with_pre(path, pre, out):
    """The vocabulary alone, with another `tokenizer.ggml.pre`."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    field = lambda key: reader.fields[f"tokenizer.ggml.{key}"].contents()  # noqa: E731
    writer.add_token_list(field("tokens"))
    writer.add_token_merges(field("merges"))
    writer.add_token_types(field("token_type"))
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(path):
    path = Path(path)
    texts = json.loads((HERE / "corpus.json").read_text())
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    rendered = {n: theirs(t, add_special_tokens=False).input_ids for n, t in texts.items()}
    decoded = {n: theirs.decode(ids, skip_special_tokens=True) for n, ids in rendered.items()}
    plain = {
        n: theirs(t, add_special_tokens=False, split_special_tokens=True).input_ids
        for n, t in texts.items()
    }
    assert rendered == llama_cpp(path, texts, special=True)
    assert plain == llama_cpp(path, texts, special=False)
    pres = {}
    for pre in PRES:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "vocab.gguf"
            with_pre(path, pre, out)
            pres[pre] = llama_cpp(out, texts, special=False)
    assert pres["smollm"] == plain
    result = {"plain": plain, "rendered": rendered, "decoded": decoded, "pre": pres}
    lines = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
    (HERE / "smollm2_tokens.json").write_text(lines + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
