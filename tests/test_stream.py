"""Streams: the pieces are the text that generate writes; never half a character, never what is cut off."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import NO_DROPOUT, random_params

import flax_gpt as fg
from flax_gpt import data
from flax_gpt.generation import TextPieces

BYTES = data.ByteTokenizer()
CONFIG = fg.GPTConfig(vocab_size=259, n_positions=32, n_embd=14, n_layer=1, n_head=2, **NO_DROPOUT)
PARAMS = random_params(CONFIG)


def pieces_of(ids, tokenizer=BYTES, context=(), stop_strings=()):
    pieces = TextPieces(tokenizer, context, stop_strings)
    out = []
    for new in ids:
        out.append(pieces.feed(int(new)))
        if pieces.ended:
            return out
    return [*out, pieces.flush()]


@given(st.text())
def test_bytes_come_together_as_characters(text):
    pieces = pieces_of(text.encode())
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces if "\ufffd" not in text)


@given(st.binary())
def test_bytes_that_are_no_text_come_as_their_decoder_has_them(raw):
    assert "".join(pieces_of(raw)) == raw.decode("utf-8", errors="replace")


def test_half_a_character_is_held_until_it_is_whole_or_the_end():
    assert pieces_of("aé€".encode()) == ["a", "", "é", "", "", "€", ""]
    assert pieces_of("€".encode()[:2]) == ["", "", "\ufffd"]
    # A context that ends with half a character: the other half completes it.
    assert pieces_of("é".encode()[1:], context=list("é".encode()[:1])) == ["é", ""]
    assert pieces_of(b"b", context=list("aé".encode())) == ["b", ""]


def test_numbers_keep_their_spaces():
    assert "".join(pieces_of([3, 14, 15], data.IdTokenizer(20), [9, 2])) == " 3 14 15"
    assert "".join(pieces_of([3, 14], data.IdTokenizer(20))) == "3 14"


def test_a_text_ends_before_a_stop_string():
    assert pieces_of(b"one, two", stop_strings=["e, t"]) == ["o", "n", "", "", "", ""]
    assert "".join(pieces_of(b"one, two", stop_strings=["e, tx", "wo!", "nn"])) == "one, two"
    assert "".join(pieces_of(b"ababac", stop_strings=["abac"])) == "ab"
    assert "".join(pieces_of(b"xyz", stop_strings=["z", "yz"])) == "x"


@given(st.text("ab"), st.lists(st.text("ab", min_size=1), max_size=3))
def test_nothing_of_a_stop_string_is_ever_given_out(text, strings):
    # It ends with the first string that is complete.
    read = next((text[:n] for n in range(len(text) + 1) if any(string in text[:n] for string in strings)), text)
    cut = min((read.index(string) for string in strings if string in read), default=len(text))
    assert "".join(pieces_of(text.encode(), stop_strings=strings)) == text[:cut]


@pytest.mark.parametrize("sliding", [False, True])
def test_the_pieces_are_what_generate_writes(sliding):
    new, key = (60 if sliding else 28), jax.random.key(3)
    prompt = [97, 98, 99]
    options = {"temperature": 1.5, "top_k": 200, "key": key, "sliding": sliding}
    written = fg.generate(CONFIG, PARAMS, [prompt], new, tokenizer=BYTES, **options)
    assert max(written.tokens[0].tolist()) < 256
    text = BYTES.decode(np.asarray(written.tokens[0]))
    pieces = list(fg.stream(CONFIG, PARAMS, "abc", BYTES, new, **options))
    assert "".join(pieces) == text
    assert len(pieces) > 10
    assert all(pieces)


def test_it_ends_before_a_stop_id_or_string():
    options = {"temperature": 0.0}
    ids = fg.generate(CONFIG, PARAMS, [[1]], 28, tokenizer=BYTES, **options).tokens[0].tolist()
    at = next(i for i in range(4, 28) if ids[i] not in ids[:i])
    cut = BYTES.decode(ids[:at])
    assert "".join(fg.stream(CONFIG, PARAMS, [1], BYTES, 28, stop_ids=[ids[at]], **options)) == cut
    whole = BYTES.decode(ids)
    string = whole[5:7]
    expected = whole[: whole.index(string)]
    assert "".join(fg.stream(CONFIG, PARAMS, [1], BYTES, 28, stop_strings=[string], **options)) == expected


def test_generate_ends_a_row_with_the_token_that_completes_a_stop_string():
    prompts, tokenizer = [[1], [2, 3], [4]], data.IdTokenizer(259)
    free = jax.tree.map(np.asarray, fg.generate(CONFIG, PARAMS, prompts, 25, temperature=0.0))
    ids = free.tokens[1].tolist()
    string = f"{ids[18]} {ids[19]}"
    cut = fg.generate(CONFIG, PARAMS, prompts, 25, temperature=0.0, stop_strings=[string], tokenizer=tokenizer)
    for row in range(3):
        text = tokenizer.decode(free.tokens[row])
        expected = next((n for n in range(1, 26) if string in tokenizer.decode(free.tokens[row, :n])), 25)
        assert cut.lengths[row] == expected, text
        assert cut.tokens[row].tolist() == free.tokens[row, :expected].tolist() + [0] * (25 - expected)
        np.testing.assert_array_equal(cut.log_probs[row, :expected], free.log_probs[row, :expected])
        assert not cut.log_probs[row, expected:].any()
    assert cut.lengths[1] <= 20
    with pytest.raises(ValueError, match="stop_strings need the tokenizer"):
        fg.generate(CONFIG, PARAMS, prompts, 3, temperature=0.0, stop_strings=["x"])


def test_bad_arguments_are_refused_at_once():
    with pytest.raises(ValueError, match="needs a key"):
        fg.stream(CONFIG, PARAMS, "a", BYTES, 3)
    with pytest.raises(ValueError, match="at least one token"):
        fg.stream(CONFIG, PARAMS, "", BYTES, 3, temperature=0.0)
    with pytest.raises(ValueError, match="a prompt of 1 tokens and 32 new ones exceed n_positions=32"):
        fg.stream(CONFIG, PARAMS, "a", BYTES, 32, temperature=0.0)
