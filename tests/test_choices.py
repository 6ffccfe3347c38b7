"""Questions with choices and last words: against log-probabilities one row at a time, and what is refused."""

import dataclasses
import json
import math

import numpy as np
import pytest
import reference
import tiny

from flax_gpt import data, evaluation
from flax_gpt.evaluation import Question, choices, read_questions, score_continuations, score_questions

CONFIG = dataclasses.replace(tiny.CONFIG, n_positions=19)
CHARS = data.CharTokenizer("abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.é")


@pytest.fixture(scope="module")
def params():
    return tiny.random_params(CONFIG)


@pytest.fixture(scope="module")
def log_prob(params):
    """The oracle's log-probabilities of a continuation's tokens, and whether each is the most likely."""
    weights = tiny.to_float64(params)

    def of(context, continuation):
        ids = np.concatenate([CHARS.encode(context), CHARS.encode(continuation)])
        n = len(continuation)
        logits = reference.forward(weights, ids[None, :-1])["logits"][0, -n:]
        values = [-reference.cross_entropy(row, target) for row, target in zip(logits, ids[-n:], strict=True)]
        return sum(values), bool((logits.argmax(-1) == ids[-n:]).all())

    return of


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(*lines):
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        (tmp_path / "q.jsonl").write_text(text, "utf-8")
        return "q.jsonl"

    return write


def random_words(rng, low, high):
    return "".join(rng.choice(list("abcdefgh"), rng.integers(low, high)))


def test_choices_are_scored_in_batches_as_each_would_be_alone(params, log_prob):
    """Lengths from both buckets (16 and n_positions); three ways to count, and every question's answer moves them."""
    rng = np.random.default_rng(0)
    questions = []
    for _ in range(13):
        options = tuple(" " + random_words(rng, 1, 8) + "é" * rng.integers(3) for _ in range(4))
        questions.append(Question(random_words(rng, 1, 9), options, int(rng.integers(4))))
    done, before = [], choices._score._cache_size()
    score = score_questions(CONFIG, params, CHARS, questions, batch_size=5, report=lambda *of: done.append(of))
    expected = []
    for divide_by in (lambda c: 1, len, lambda c: len(c.encode()) - 1):
        guesses = [np.argmax([log_prob(q.context, c)[0] / divide_by(c) for c in q.choices]) for q in questions]
        expected.append(np.mean([guess == q.answer for guess, q in zip(guesses, questions, strict=True)]))
    assert (score.accuracy, score.accuracy_per_token, score.accuracy_per_byte) == tuple(expected)
    assert len(set(expected)) > 1
    assert (score.questions, score.truncated) == (13, 0)
    assert done[-1] == (52, 52)
    assert choices._score._cache_size() <= before + 2


def test_each_way_of_counting_can_choose_differently(params, monkeypatch):
    """Log-probabilities made up so that sum, mean over tokens and mean over bytes each prefer another choice."""
    sums = np.array([-3.0, -4.0, -5.0])  # of 1, 2 and 2 tokens, 1, 2 and 4 bytes
    monkeypatch.setattr(
        choices, "score_continuations", lambda *a, **k: choices.ContinuationScores(sums, np.zeros(3, bool))
    )
    question = Question("a", ("a", "ab", "éé"), 0)
    for answer, expected in [(0, (1, 0, 0)), (1, (0, 1, 0)), (2, (0, 0, 1))]:
        asked = dataclasses.replace(question, answer=answer)
        score = score_questions(CONFIG, params, CHARS, [asked])
        assert (score.accuracy, score.accuracy_per_token, score.accuracy_per_byte) == expected


def test_the_log_probabilities_are_the_oracles(params, log_prob):
    texts = [("ab", "c"), ("a", "bcdefghabcdefghabcd"), ("hgfedcbahgfedcbahgf", "a"), ("abcdefgh", "habcdefgh")]
    pairs = [(CHARS.encode(context), CHARS.encode(continuation)) for context, continuation in texts]
    scores = score_continuations(CONFIG, params, pairs, batch_size=5)
    expected = [log_prob(*pair) for pair in texts]
    np.testing.assert_allclose(scores.log_probs, [value for value, _ in expected], rtol=2e-6)


def test_a_last_word_is_right_when_greedy_generation_would_write_it(params, log_prob, file):
    """The word that the model itself likes best, found with the oracle, and one that it does not."""
    context = "the cat"
    texts = [f"{context} xyz", "a dog  zzz"]
    for text in texts:
        split = text.rindex(" ")
        assert not log_prob(text[:split], text[split:])[1]
    greedy = next(c for c in CHARS.chars if log_prob(context, c)[1])
    half_right = next(greedy + c for c in CHARS.chars if not log_prob(context, greedy + c)[1])
    questions = [
        Question(context, (greedy,), 0),
        Question(context, (half_right,), 0),
        *read_questions(file({"text": texts[0]}, "", {"text": texts[1] + "\n"})),
    ]
    assert [q.choices for q in questions] == [(greedy,), (half_right,), (" xyz",), (" zzz",)]
    assert questions[3].context == "a dog "
    score = score_questions(CONFIG, params, CHARS, questions, batch_size=5)
    expected = np.mean([log_prob(q.context, q.choices[0])[0] for q in questions])
    assert score.accuracy == 1 / 4
    assert score.perplexity == pytest.approx(math.exp(-expected), rel=1e-5)
    assert (score.questions, score.truncated) == (4, 0)


def test_a_question_that_does_not_fit_loses_the_beginning_of_its_context_and_is_counted(params, log_prob):
    fits = Question("abcdefghabcdefgh", (" ab", " abc"), 1)  # 16 + 4 tokens, of which 19 are inputs
    too_long = Question("x" * 5 + fits.context, fits.choices, 1)
    asked = []
    score = score_questions(CONFIG, params, CHARS, [fits, too_long, too_long], batch_size=5)
    assert (score.questions, score.truncated) == (3, 2)
    for question in (fits, too_long):
        pairs, cut = choices._encode(CONFIG, CHARS, question)
        asked.append(pairs)
        assert cut == (question is too_long)
    for (context, continuation), (context_cut, continuation_cut) in zip(*asked, strict=True):
        np.testing.assert_array_equal(context, context_cut)
        np.testing.assert_array_equal(continuation, continuation_cut)


def test_the_three_forms_of_a_file(file):
    hellaswag = {"ind": 3, "ctx": "A man", "endings": ["a.", "b.", "c.", "d."], "label": 2, "split": "val"}
    of_file = read_questions(file(hellaswag, {**hellaswag, "label": "3"}))
    assert [q.choices for q in of_file] == [(" a.", " b.", " c.", " d.")] * 2
    assert [(q.context, q.answer) for q in of_file] == [("A man", 2), ("A man", 3)]
    (general,) = read_questions(file({"prompt": "a ", "choices": ["b", " c"], "answer": 1}))
    assert (general.context, general.choices, general.answer) == ("a ", ("b", " c"), 1)
    (word,) = read_questions(file({"text": "he shut the door\n"}))
    assert (word.context, word.choices) == ("he shut the", (" door",))


GOOD = {"prompt": "a", "choices": ["b", "c"], "answer": 1}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((GOOD, "", "{"), "q.jsonl, line 3: not a JSON object"),
        ((GOOD, "[1]"), "q.jsonl, line 2: not a JSON object"),
        (({"question": 1, "id": 2},), "line 1: expected the keys ctx, endings, label .* got question, id"),
        ((GOOD, {"text": "a b"}), "line 2: 'prompt', 'choices', 'answer' is missing"),
        (({"ctx": "a", "endings": ["b", "c"]},), "line 1: 'label' is missing"),
        (({**GOOD, "answer": 2},), "line 1: 'answer' must be an index from 0 to 1, got 2"),
        (({**GOOD, "answer": True},), "must be an index from 0 to 1, got True"),
        (({**GOOD, "answer": "1"},), "must be an index from 0 to 1, got '1'"),
        (({**GOOD, "choices": ["b"]},), "line 1: 'choices' must be a list of at least two strings"),
        (({**GOOD, "choices": ["b", " "]},), "'choices' must be a list of at least two strings, none empty"),
        (({**GOOD, "prompt": 3},), "line 1: 'prompt' must be a string, got 3"),
        (({"text": "alone "},), "line 1: 'text' must hold at least two words with a space between, got 'alone '"),
        (("", " "), "q.jsonl holds no question"),
    ],
)
def test_a_file_that_is_not_of_its_form_is_refused_with_its_line(file, lines, message):
    with pytest.raises(ValueError, match=message):
        read_questions(file(*lines))


def test_a_file_that_is_not_there():
    with pytest.raises(FileNotFoundError, match="no such file: nowhere.jsonl"):
        read_questions("nowhere.jsonl")


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ([], "no questions"),
        (
            [Question("a", ("b", "c" * 20), 0, "f, line 4")],
            "f, line 4: a choice alone has 20 tokens, .* n_positions=19",
        ),
        ([Question("", ("b", "c"), 0, "f, line 4")], "f, line 4: the context has no tokens"),
        ([Question("a", ("b", ""), 0, "f, line 4")], "f, line 4: the choice '' has no tokens"),
        ([Question("a", ("b", "1"), 0, "f, line 4")], "f, line 4: characters outside the model's alphabet"),
        (
            [Question("a", ("b", "c"), 0), Question("a", ("b",), 0, "f, line 4")],
            "f, line 4: .* cannot be scored together",
        ),
    ],
)
def test_questions_that_cannot_be_asked_are_refused(params, questions, message):
    with pytest.raises(ValueError, match=message):
        score_questions(CONFIG, params, CHARS, questions)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (([1], []), "pair 0 has 1 and 0 tokens"),
        (([1] * 19, [1] * 2), "pair 0 has 19 and 2 tokens; .* at most n_positions \\+ 1 = 20"),
        (([61], [1]), "pair 0 has ids outside the vocabulary of 61"),
    ],
)
def test_continuations_that_cannot_be_scored_are_refused(params, pair, message):
    with pytest.raises(ValueError, match=message):
        evaluation.score_continuations(CONFIG, params, [tuple(np.array(ids, np.int32) for ids in pair)])
