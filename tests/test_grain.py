"""Grain's datasets as a source of batches, and token shards as a dataset's source."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

grain = pytest.importorskip("grain")

from flax_gpt import data  # noqa: E402
from flax_gpt.data.grain_source import GrainSource, ShardWindows  # noqa: E402

T = 13


def stream(first, n, ends=None):
    """Ids that tell their own place, in two shards."""
    ids = np.arange(first, first + n, dtype=np.uint16)
    return data.TokenStream((Path("a"), Path("b")), (ids[:50], ids[50:]), ends)


def make_source(ends=None, **changes):
    train = grain.MapDataset.source(ShardWindows(stream(0, 160, ends), T))
    validation = grain.MapDataset.source(ShardWindows(stream(500, 80, ends), T))
    return GrainSource(train, validation, **{"vocab_size": 1000, "t": T, **changes})


def test_windows_lie_side_by_side():
    windows = ShardWindows(stream(0, 160), T)
    assert len(windows) == 12
    assert [len(ShardWindows(stream(0, n), T)) for n in (156, 157)] == [11, 12]
    assert set(windows[3]) == {"ids"}
    np.testing.assert_array_equal(windows[3]["ids"], np.arange(39, 53))
    assert windows[3]["ids"].dtype == np.int32
    assert windows[11]["ids"][-1] == 156
    for index in (-1, 12):
        with pytest.raises(IndexError, match=f"there are 12 windows, got index {index}"):
            windows[index]


def test_an_epoch_visits_each_row_once_in_an_order_of_its_own():
    source = make_source()
    assert isinstance(source, data.Source)
    epochs = [[source.training_batch(0, 3 * epoch + i, 4) for i in range(3)] for epoch in range(3)]
    orders = [[int(start) for batch in batches for start in batch.tokens[:, 0]] for batches in epochs]
    assert [sorted(order) for order in orders] == [list(range(0, 156, T))] * 3
    assert len({tuple(order) for order in orders}) == 3
    batch = epochs[0][0]
    np.testing.assert_array_equal(batch.targets, batch.tokens + 1)
    assert batch.scored.all()
    assert batch.segment_ids is None


def test_batches_need_no_iterator():
    """A source made anew, as by a run that is resumed, gives the batch of any step."""
    np.testing.assert_array_equal(
        make_source().training_batch(3, 7, 5).tokens, make_source().training_batch(3, 7, 5).tokens
    )
    assert not np.array_equal(
        make_source().training_batch(3, 7, 5).tokens, make_source().training_batch(4, 7, 5).tokens
    )


def test_documents_are_told_apart():
    ends = (np.array([20]), np.array([5, 30]))
    source = make_source(ends)
    batch = source.training_batch(0, 0, 12)
    document = np.searchsorted([20, 55, 80], np.arange(160), side="right")
    of = document[batch.tokens]
    np.testing.assert_array_equal(batch.segment_ids, of - of[:, :1])
    np.testing.assert_array_equal(batch.scored, document[batch.targets] == of)
    assert not batch.scored.all()


def test_validation_scores_each_row_once():
    source = make_source()
    batches = list(source.validation_batches(4))
    assert [batch.tokens.shape for batch in batches] == [(4, T)] * 2
    np.testing.assert_array_equal(np.concatenate([b.targets[b.scored] for b in batches]), np.arange(501, 501 + 6 * T))
    (batch,) = source.validation_batches(2, limit=1)
    assert batch.tokens[:, 0].tolist() == [500, 565]


def test_the_rows_of_all_processes_are_the_batch_of_one():
    whole = make_source()
    each = [dataclasses.replace(whole, process_index=i, process_count=2) for i in range(2)]
    pairs = [(whole.training_batch(0, 2, 4), [source.training_batch(0, 2, 4) for source in each])]
    pairs += zip(
        whole.validation_batches(4), zip(*[source.validation_batches(4) for source in each], strict=True), strict=True
    )
    assert len(pairs) == 3
    for batch, parts in pairs:
        np.testing.assert_array_equal(batch.tokens, np.concatenate([part.tokens for part in parts]))
        np.testing.assert_array_equal(batch.scored, np.concatenate([part.scored for part in parts]))


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="it has 12 rows, a batch 13"):
        make_source().training_batch(0, 0, 13)
    with pytest.raises(ValueError, match="a row holds ids from 0 to 156, the vocabulary has 156"):
        make_source(vocab_size=156).training_batch(0, 0, 12)
    with pytest.raises(ValueError, match=r"a row's ids must be 15 integers, got shape \(14,\)"):
        make_source(t=14).training_batch(0, 0, 2)
    source = make_source()
    with pytest.raises(ValueError, match="a row was filtered out"):
        dataclasses.replace(source, train=source.train.filter(lambda row: row["ids"][0] > 50)).training_batch(0, 0, 12)
    with pytest.raises(ValueError, match="the training dataset has no rows"):
        dataclasses.replace(source, train=source.train[:0])
