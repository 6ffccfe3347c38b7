"""Tokenizers: what goes in comes out, and what cannot go in is said."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_gpt.data import ByteTokenizer, CharTokenizer, IdTokenizer, load_tokenizer, save_tokenizer

any_text = st.text(st.characters(exclude_categories=["Cs"]))


@settings(deadline=None)
@given(any_text)
def test_bytes_round_trip_any_text(text):
    ids = ByteTokenizer().encode(text)
    assert ids.tolist() == list(text.encode())
    assert ByteTokenizer().decode(ids) == text


@settings(deadline=None)
@given(any_text.filter(bool))
def test_characters_round_trip_the_text_they_come_from(text):
    tokenizer = CharTokenizer.of_text(text)
    ids = tokenizer.encode(text)
    assert [tokenizer.chars[i] for i in ids] == list(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(set(text))


def test_numbers_round_trip():
    assert IdTokenizer(7).encode("6 0\n 3").tolist() == [6, 0, 3]
    assert IdTokenizer(7).decode([6, 0, 3]) == "6 0 3"


def test_half_a_character_becomes_the_replacement_character():
    assert ByteTokenizer().decode(list("é".encode()[:1])) == "�"


def test_characters_outside_the_alphabet_are_named():
    tokenizer = CharTokenizer("abc")
    with pytest.raises(ValueError, match="outside the model's alphabet of 3: 'xé𝄞'"):
        tokenizer.encode("cxabé𝄞")


@pytest.mark.parametrize("text", ["1 7", "-1", "1 two", "1.0"])
def test_numbers_outside_the_range_are_refused(text):
    with pytest.raises(ValueError, match="expected numbers from 0 to 6"):
        IdTokenizer(7).encode(text)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("abc"), IdTokenizer(7)])
@pytest.mark.parametrize("bad", [-1, 256])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, bad):
    with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary of {tokenizer.vocab_size}"):
        tokenizer.decode([0, bad])


@pytest.mark.parametrize("chars", ["", "aba"])
def test_an_alphabet_is_distinct_characters(chars):
    with pytest.raises(ValueError, match="distinct characters"):
        CharTokenizer(chars)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer('\n"aé\u2028𝄞'), IdTokenizer(7)])
def test_files_round_trip(tmp_path, tokenizer):
    save_tokenizer(tmp_path, tokenizer)
    assert load_tokenizer(tmp_path) == tokenizer


def test_foreign_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_tokenizer(tmp_path)
    path = tmp_path / "flax_gpt_tokenizer.json"
    for text in ("{", json.dumps({"kind": "char"}), json.dumps({"kind": "bpe"}), json.dumps([1])):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a tokenizer file"):
            load_tokenizer(tmp_path)


def test_only_known_tokenizers_are_saved(tmp_path):
    class Mine:
        vocab_size = 3

        def encode(self, text):
            return np.zeros(3, np.int32)

        def decode(self, ids):
            return ""

    with pytest.raises(TypeError, match="only byte, char, id and GPT-2"):
        save_tokenizer(tmp_path, Mine())
