"""Perplexity: each token scored once, from as much context as was promised, whatever the window."""

import dataclasses
import json
import math

import numpy as np
import pytest
import reference
import tiny

import flax_gpt as fg
from flax_gpt import data, evaluation, training
from flax_gpt.cli import main
from flax_gpt.evaluation import perplexity, score_ids, score_text, sliding_window_scores, window_scores
from flax_gpt.training.run import save_model

CONFIG = dataclasses.replace(tiny.CONFIG, n_positions=10)
IDS = np.random.default_rng(1).integers(CONFIG.vocab_size, size=20)


@pytest.fixture(scope="module")
def params():
    return tiny.random_params(CONFIG)


@pytest.fixture(scope="module")
def full_context_scores(params):
    """score(i, n): -log p(token i | the n tokens before it), from the oracle; each asked for once."""
    weights, known = tiny.to_float64(params), {}

    def score(i, n):
        if (i, n) not in known:
            logits = reference.forward(weights, IDS[None, i - n : i])["logits"]
            known[i, n] = reference.cross_entropy(logits[0, -1], IDS[i])
        return known[i, n]

    return score


@pytest.mark.parametrize(("window", "stride"), [(10, 5), (10, 10), (10, 1), (10, 7), (3, 2), (1, 1)])
def test_each_token_is_scored_once_with_the_context_that_was_promised(params, full_context_scores, window, stride):
    """20 tokens are 19 targets, in windows at 0, stride, 2 * stride and so on."""
    scores = sliding_window_scores(CONFIG, params, IDS, window=window, stride=stride, batch_size=2)
    expected = []
    for i in range(1, 20):
        start = 0 if i <= window else -(-(i - window) // stride) * stride
        expected.append(full_context_scores(i, i - start))
        assert i - start >= min(i, window - stride + 1)
    assert scores.shape == (19,)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected, atol=2e-5)
    score = score_ids(CONFIG, params, IDS, window=window, stride=stride, batch_size=2)
    assert score.tokens == 19
    assert score.perplexity == pytest.approx(math.exp(sum(expected) / 19), rel=1e-5)


def test_windows_side_by_side_are_the_plain_loss_and_stride_one_is_token_by_token(params):
    rows = np.stack([IDS[start : start + 10] for start in range(11)])
    scores = -np.asarray(fg.token_log_probs(CONFIG, params, rows))
    side_by_side = sliding_window_scores(CONFIG, params, IDS[:19], window=9)
    np.testing.assert_allclose(side_by_side, np.concatenate([scores[0], scores[9]]), atol=1e-6)
    token_by_token = sliding_window_scores(CONFIG, params, IDS, window=9, stride=1)
    np.testing.assert_allclose(token_by_token, np.concatenate([scores[0], scores[1:, -1]]), atol=1e-6)


def test_the_default_is_the_loss_that_training_reports(params):
    corpus = data.Corpus(IDS, IDS[:11], data.IdTokenizer(CONFIG.vocab_size), 10)
    reported = training.evaluate(CONFIG, params, corpus.validation_batches(1))
    assert score_ids(CONFIG, params, IDS[:11]).loss == pytest.approx(reported["loss"], rel=1e-6)


def test_a_long_text_is_read_as_it_is_scored_and_compiles_once(params, tmp_path):
    """A file of ids, mapped and not read: the text that a `np.memmap` stands for may be larger than memory."""
    ids = np.random.default_rng(3).integers(CONFIG.vocab_size, size=997, dtype=np.uint16)
    ids.tofile(tmp_path / "ids.bin")
    on_disk = np.memmap(tmp_path / "ids.bin", np.uint16, "r")
    before = perplexity._score._cache_size()
    batches = window_scores(CONFIG, params, on_disk, stride=6, batch_size=7)
    assert len(next(batches)) == 10 + 6 * 6
    pieces = list(batches)
    assert perplexity._score._cache_size() <= before + 1
    assert 46 + sum(len(piece) for piece in pieces) == 996
    done = []
    score = score_ids(CONFIG, params, on_disk, stride=6, batch_size=7, report=lambda *of: done.append(of))
    assert done[0] == (46, 996)
    assert done[-1] == (score.tokens, 996) == (996, 996)
    first = sliding_window_scores(CONFIG, params, ids[:200], stride=6, batch_size=7)
    np.testing.assert_allclose(pieces[0], first[46 : 46 + len(pieces[0])], atol=1e-6)


def test_options_reach_the_model(params):
    plain = sliding_window_scores(CONFIG, params, IDS)
    rough = sliding_window_scores(CONFIG, params, IDS, compute_dtype="bfloat16")
    assert 1e-4 < np.abs(plain - rough).max() < 0.3


class Halves:
    """A tokenizer of bytes, of "é" and "a" alone, so that it has few ids."""

    vocab_size = 3

    def encode(self, text):
        return np.array([b"\xc3\xa9a".index(byte) for byte in text.encode()])

    def decode(self, ids):
        return bytes(b"\xc3\xa9a"[i] for i in ids).decode(errors="replace")


def test_bits_are_of_the_part_that_was_scored(params):
    """Of the text without its first token; of half a character, the rest of its bytes is scored."""
    chars = data.CharTokenizer("aé\n")
    score = score_text(CONFIG, params, chars, "éaé\nééa")
    assert (score.tokens, score.characters, score.bytes) == (6, 6, 9)
    assert score.bits_per_token == pytest.approx(score.loss / math.log(2))
    assert score.bits_per_character == pytest.approx(score.nats / 6 / math.log(2))
    assert score.bits_per_byte == pytest.approx(score.nats / 9 / math.log(2))
    cut = score_text(CONFIG, params, chars, "éaé\nééa", limit=4)
    assert (cut.tokens, cut.characters, cut.bytes) == (3, 3, 4)
    assert cut.nats == pytest.approx(score_ids(CONFIG, params, chars.encode("éaé\n")).nats)
    half = score_text(CONFIG, params, Halves(), "éa")
    assert (half.tokens, half.characters, half.bytes) == (2, 2, 2)
    assert score_ids(CONFIG, params, IDS).bits_per_byte is None


def test_a_hopeless_loss_is_an_infinite_perplexity():
    assert evaluation.TextScore(1e6, 10).perplexity == math.inf
    assert evaluation.TextScore(10 * math.log(7), 10).perplexity == pytest.approx(7)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (IDS, {"window": 11}, "window must be from 1 to n_positions=10, got 11"),
        (IDS, {"window": 0}, "window must be from 1 to n_positions=10, got 0"),
        (IDS, {"stride": 11}, "stride must be from 1 to window=10, got 11"),
        (IDS, {"window": 5, "stride": 6}, "stride must be from 1 to window=5, got 6"),
        (IDS, {"stride": 0}, "stride must be from 1 to window=10, got 0"),
        (IDS, {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        (IDS[:1], {}, "at least 2 tokens, one to predict the next from; got 1"),
        (
            np.where(np.arange(20) == 15, 61, IDS),
            {},
            "token id 61 at position 15 of the text is outside the vocabulary",
        ),
        (np.where(np.arange(20) == 3, -1, IDS), {}, "token id -1 at position 3 of the text is outside the vocabulary"),
    ],
)
def test_what_cannot_be_scored_is_refused(params, ids, options, message):
    with pytest.raises(ValueError, match=message):
        sliding_window_scores(CONFIG, params, ids, **options)


@pytest.fixture
def run(params, tmp_path, monkeypatch, capsys):
    """Writes the folder of a run that nothing was trained in; calls `flax-gpt eval` on it."""
    monkeypatch.chdir(tmp_path)

    def call(tokenizer, arguments, block=fg.Block):
        config = dataclasses.replace(CONFIG, vocab_size=max(tokenizer.vocab_size, 61))
        weights = tiny.random_params(config, block=block)
        save_model("run", config, weights, block)
        data.save_tokenizer("run", tokenizer)
        status = main(["eval", "run", *arguments.split()])
        said = capsys.readouterr()
        return config, weights, status, said.out if status == 0 else said.err

    (tmp_path / "run").mkdir()
    return call


LETTERS = data.CharTokenizer("abcdefgh é\n")


def test_the_command_scores_a_text(run, tmp_path):
    text = "abc déf gh\nabc"
    (tmp_path / "text.txt").write_text(text, "utf-8")
    config, weights, status, said = run(LETTERS, "--data text.txt --window 7 --stride 3 --batch-size 2 --json")
    assert status == 0
    options = {"window": 7, "stride": 3, "batch_size": 2, "compute_dtype": "float32", "block": fg.Block}
    score = score_text(config, weights, LETTERS, text, **options)
    expected = {"loss", "perplexity", "bits_per_token", "bits_per_character", "bits_per_byte", "tokens"}
    assert json.loads(said) == {name: pytest.approx(getattr(score, name), rel=1e-6) for name in expected}
    assert (score.tokens, score.characters, score.bytes) == (13, 13, 14)

    *_, table = run(LETTERS, "--data text.txt --window 7 --stride 3 --batch-size 2 --tokens-limit 9 --quiet")
    limited = score_text(config, weights, LETTERS, text[:9], **options)
    rows = dict(line.rsplit(maxsplit=1) for line in table.splitlines())
    assert rows["perplexity"] == f"{limited.perplexity:.4f}"
    assert rows["bits per byte"] == f"{limited.bits_per_byte:.4f}"
    assert rows["tokens"] == "8"


def test_the_command_takes_a_task_and_a_block(run, tmp_path):
    """Numbers with spaces between, and the run's own kind of block."""
    (tmp_path / "ids.txt").write_text(" ".join(map(str, IDS)))
    config, weights, _, said = run(data.IdTokenizer(61), "--data ids.txt --json", fg.NoLNBlock)
    score = score_ids(config, weights, IDS, compute_dtype="float32", block=fg.NoLNBlock)
    assert json.loads(said)["loss"] == pytest.approx(score.loss, rel=1e-6)
    *_, rough = run(data.IdTokenizer(61), "--data ids.txt --json --compute-dtype bfloat16", fg.NoLNBlock)
    assert json.loads(rough)["loss"] == pytest.approx(json.loads(said)["loss"], rel=0.02)
    assert rough != said


def test_the_command_asks_questions(run, tmp_path):
    lines = [{"prompt": "abc", "choices": ["d", "ef"], "answer": i % 2} for i in range(3)]
    lines.append({"prompt": "abcdefgh" * 3, "choices": ["d", "ef"], "answer": 0})
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config, weights, _, said = run(LETTERS, "--choices q.jsonl --json")
    options = {"batch_size": 8, "compute_dtype": "float32", "block": fg.Block}
    score = evaluation.score_questions(config, weights, LETTERS, evaluation.read_questions("q.jsonl"), **options)
    assert json.loads(said) == dataclasses.asdict(score)
    assert score.truncated == 1
    *_, table = run(LETTERS, "--choices q.jsonl")
    assert "accuracy per byte" in table
    assert "lost the beginning of theirs" in table
    (tmp_path / "words.jsonl").write_text('{"text": "abc de"}\n')
    *_, said = run(LETTERS, "--choices words.jsonl --json")
    assert set(json.loads(said)) == {"questions", "accuracy", "perplexity", "truncated"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give one thing to evaluate on: --data with a text, or --choices with a file of questions"),
        ("--data text.txt --choices q.jsonl", "give one thing to evaluate on"),
        ("--data nowhere.txt", "no such file or folder: nowhere.txt"),
        ("--data text.txt", "characters outside the model's alphabet of 11: 'xyz'"),
        ("--data one.txt", "a text to score needs at least 2 tokens"),
        ("--data one.txt --stride 11", "stride must be from 1 to window=10, got 11"),
        ("--data one.txt --tokens-limit 1", "--tokens-limit must be at least 2, got 1"),
        ("--choices nowhere.jsonl", "no such file: nowhere.jsonl"),
        ("--choices q.jsonl --stride 3", "--stride goes with --data"),
    ],
)
def test_wrong_calls_say_what_is_wrong(run, tmp_path, arguments, message):
    (tmp_path / "text.txt").write_text("xyz")
    (tmp_path / "one.txt").write_text("a")
    *_, status, said = run(LETTERS, arguments)
    assert status == 1
    assert message in said


def test_weights_without_a_tokenizer_are_refused(params, tmp_path, capsys):
    save_model(tmp_path, CONFIG, params)
    assert main(["eval", str(tmp_path), "--data", "text.txt"]) == 1
    assert "holds a model and no tokenizer (neither" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "nowhere"), "--data", "text.txt"]) == 1
    assert "no such folder: " in capsys.readouterr().err
