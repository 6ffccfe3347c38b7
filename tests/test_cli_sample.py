"""`flax-gpt sample`: what it prints is what `generate` writes."""

import json

import jax
import numpy as np
import pytest
from tiny import NO_DROPOUT, random_params

import flax_gpt as fg
from flax_gpt import data
from flax_gpt.cli import main
from flax_gpt.training.run import save_model

CONFIG = fg.GPTConfig(vocab_size=256, n_positions=24, n_embd=14, n_layer=1, n_head=2, **NO_DROPOUT)
PARAMS = random_params(CONFIG)
BYTES = data.ByteTokenizer()
FLAGS = ["--max-new-tokens", "15", "--top-k", "40", "--seed", "3"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    save_model("run", CONFIG, PARAMS)
    data.save_tokenizer("run", BYTES)
    return tmp_path / "run"


def written(prompts, n=1, **options):
    options = {"temperature": 0.8, "top_k": 40, "key": jax.random.key(3), "sliding": True, **options}
    result = fg.generate(CONFIG, PARAMS, [list(p.encode()) for p in prompts], 15, num_samples=n, **options)
    return jax.tree.map(np.asarray, result)


def test_one_text_comes_as_a_stream(run, capsys):
    assert main(["sample", "run", "Once upon", *FLAGS]) == 0
    said = capsys.readouterr()
    assert said.out == "Once upon" + BYTES.decode(written(["Once upon"]).tokens[0]) + "\n"
    assert "a second after the first" in said.err
    assert main(["sample", "run", "Once upon", *FLAGS, "--quiet"]) == 0
    assert capsys.readouterr() == (said.out, "")


def test_several_prompts_from_a_file_as_json(run, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("one\n\ntwo three\n")
    assert main(["sample", "run", "--prompts", "prompts.txt", "--num-samples", "2", "--json", *FLAGS]) == 0
    said = capsys.readouterr()
    expected = written(["one", "two three"], 2)
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "one", "two three", "two three"]
    for line, tokens, log_probs in zip(lines, expected.tokens, expected.log_probs, strict=True):
        assert line["tokens"] == tokens.tolist()
        assert line["text"] == BYTES.decode(tokens)
        np.testing.assert_allclose(line["log_probs"], log_probs, atol=1e-6)
    assert "60 tokens in" in said.err
    assert main(["sample", "run", "--prompts", "prompts.txt", "--num-samples", "2", *FLAGS, "--quiet"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"--- prompt 1, 1 of 2\none{lines[0]['text']}\n")
    assert f"--- prompt 2, 2 of 2\ntwo three{lines[3]['text']}\n" in text


def test_it_stops_before_a_text(run, capsys):
    text = BYTES.decode(written(["ab"]).tokens[0])
    stop = text[6:8]
    expected = "ab" + text[: text.index(stop)]
    assert main(["sample", "run", "ab", *FLAGS, "--stop", stop]) == 0
    assert capsys.readouterr().out == expected + "\n"
    assert main(["sample", "run", "ab", *FLAGS, "--stop", stop, "--num-samples", "2"]) == 0
    assert capsys.readouterr().out.startswith(f"--- 1 of 2\n{expected}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "", *FLAGS], "the prompt is empty"),
        (["run", "--num-samples", "0"], "--num-samples must be at least 1, got 0"),
        (["run", "--prompts", "empty.txt"], "empty.txt holds no prompt; write one on each line"),
        (["run", "--prompts", "nowhere.txt"], "nowhere.txt"),
        (["run", "--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
        (["run", "--top-p", "1.5"], "top_p must be from 0 to 1, got 1.5"),
        (["run", "--min-p", "-1"], "min_p must be from 0 to 1, got -1"),
    ],
)
def test_wrong_arguments_are_refused(run, tmp_path, arguments, message, capsys):
    (tmp_path / "empty.txt").write_text("\n\n")
    assert main(["sample", *arguments]) == 1
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
