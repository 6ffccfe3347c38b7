"""A text as batches: what is read, how it is split, which windows come out."""

import numpy as np
import pytest

from flax_gpt import data


@pytest.fixture(scope="module")
def corpus():
    # Ids that tell their own place: the i-th token is i % 251 in base 256.
    text = "".join(chr(i % 251) for i in range(1009))
    return data.Corpus.of_text(text, data.CharTokenizer("".join(map(chr, range(251)))), t=13)


def test_a_file_is_read_as_it_is(tmp_path):
    (tmp_path / "a.txt").write_bytes("é\r\nb\n".encode())
    assert data.read_text(tmp_path / "a.txt") == "é\r\nb\n"


def test_a_folder_is_read_in_the_order_of_its_paths_without_what_is_hidden(tmp_path):
    for name, text in {"b/2.txt": "2", "a.txt": "1", "c.md": "3", ".git/x": "no", "b/.y": "no"}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert data.read_text(tmp_path) == "123"
    hidden = tmp_path / ".git"
    assert data.read_text(hidden) == "no"  # asked for by name


def test_unreadable_texts_say_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder: .*nowhere"):
        data.read_text(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no files in"):
        data.read_text(tmp_path)
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match="empty is empty"):
        data.read_text(tmp_path / "empty")
    (tmp_path / "latin").write_bytes(b"caf\xe9s")
    with pytest.raises(ValueError, match="latin is not UTF-8 text: byte 0xe9 at offset 3"):
        data.read_text(tmp_path / "latin")


def test_the_built_in_text_is_the_standard_library():
    text = data.stdlib_text()
    assert len(text) > 1_000_000
    assert text.isascii()
    assert "def dataclass(" in text


def test_the_first_nine_tenths_are_to_train_on(corpus):
    assert len(corpus.train) == 908
    assert len(corpus.validation) == 101
    np.testing.assert_array_equal(np.concatenate([corpus.train, corpus.validation]), np.arange(1009) % 251)
    assert corpus.vocab_size == 251


def test_training_windows_are_consecutive_and_reach_both_ends(corpus):
    starts = set()
    for step in range(120):
        batch = corpus.training_batch(0, step, 29)
        assert batch.tokens.shape == (29, 13)
        np.testing.assert_array_equal((batch.tokens + 1) % 251, batch.targets)
        assert batch.scored.all()
        starts |= set(batch.tokens[:, 0].tolist())
    assert len(starts) == 251  # every residue occurs as a start
    small = data.Corpus(np.arange(15), np.arange(15), data.ByteTokenizer(), t=13)
    assert {int(row[0]) for step in range(9) for row in small.training_batch(0, step, 5).tokens} == {0, 1}


def test_training_batches_are_a_function_of_seed_and_step(corpus):
    batch = corpus.training_batch(1, 2, 5)
    np.testing.assert_array_equal(batch.tokens, corpus.training_batch(1, 2, 5).tokens)
    for other in (corpus.training_batch(1, 3, 5), corpus.training_batch(2, 2, 5), corpus.training_batch(2, 1, 5)):
        assert not np.array_equal(batch.tokens, other.tokens)


def test_validation_scores_each_token_once(corpus):
    scored = [b.targets[b.scored] for b in corpus.validation_batches(3)]
    assert [len(b.tokens) for b in corpus.validation_batches(3)] == [3, 3, 3]
    np.testing.assert_array_equal(np.concatenate(scored), corpus.validation[1 : 1 + 7 * 13])


def test_a_limit_spreads_the_windows_over_the_validation_part(corpus):
    (batch,) = corpus.validation_batches(3, limit=1)
    assert batch.tokens[:, 0].tolist() == [corpus.validation[0], corpus.validation[39], corpus.validation[78]]
    assert batch.scored.all()


def test_a_text_shorter_than_the_context_is_refused_with_both_lengths():
    tokenizer = data.ByteTokenizer()
    with pytest.raises(ValueError, match="training part of the text has 9 tokens, too few for a context of 13"):
        data.Corpus.of_text("0123456789", tokenizer, t=13)
    with pytest.raises(ValueError, match="validation part of the text has 10 tokens, too few for a context of 13"):
        data.Corpus.of_text("0123456789" * 10, tokenizer, t=13)
    data.Corpus.of_text("0123456789" * 14, tokenizer, t=13)


def test_characters_per_token_counts_the_validation_part():
    corpus = data.Corpus.of_text("a" * 90 + "é" * 10, data.ByteTokenizer(), t=13)
    assert corpus.characters_per_token == 0.5
