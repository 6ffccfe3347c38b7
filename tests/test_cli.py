"""The command line, in this process: what it writes, says and refuses."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import flax_gpt as fg
from flax_gpt import data, training
from flax_gpt.cli import main
from flax_gpt.cli.train_args import Args, parse
from flax_gpt.training.run import load_run

TINY = (
    "--n-layer 1 --n-head 2 --n-embd 8 --batch-size 3 --steps 6 --warmup-steps 2 --eval-every 3 --log-every 2"
).split()


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "fox.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return path


def test_training_on_a_text_leaves_a_run_that_can_be_sampled_and_loaded(tmp_path, text, capsys):
    assert main(["train", "--data", str(text), *TINY, "--n-positions", "16"]) == 0
    said = capsys.readouterr().out
    run = tmp_path / "runs" / "fox"
    assert {path.name for path in run.iterdir()} == {
        "config.json", "model.safetensors", "flax_gpt_tokenizer.json", "train.json", "metrics.jsonl", "loss.png",
        "checkpoints", "samples.txt",
    }  # fmt: skip
    lines = lines_of(run)
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 3, 6]
    assert [line["step"] for line in lines if "train_loss" in line] == [2, 4, 6]
    loss = lines[-1]["val_loss"]
    assert f"validation loss {loss:.4f} nats per token, {loss / np.log(2):.4f} bits per character" in said
    assert "runs/fox/loss.png" in said
    assert [line for line in (run / "samples.txt").read_text().splitlines() if line.startswith("---")] == [
        "--- step 0", "--- step 3",
    ]  # fmt: skip
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    options = json.loads((run / "train.json").read_text())
    assert options["steps"] == 6
    assert options["versions"]["flax_gpt"]

    assert main(["sample", str(run), "the quick", "--max-new-tokens", "20", "--num-samples", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("the quick") >= 2
    assert "--- 2 of 2" in said

    config, params = fg.load_pretrained(run)
    assert config == load_run(run).config
    corpus = data.Corpus.of_text(text.read_text(), load_run(run).tokenizer, 16)
    again = training.evaluate(config, params, corpus.validation_batches(64))
    assert again["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    "block", ["pre_ln", *(pytest.param(name, marks=pytest.mark.slow) for name in ("post_ln", "no_ln"))]
)
def test_a_task_trains_with_each_block_and_loads_as_that_block(tmp_path, block, capsys):
    assert main(["train", "--task", "sort", *TINY, "--block", block, "--out", "out", "--quiet", "--lr", "0.03"]) == 0
    said = capsys.readouterr().out
    assert "of 729 questions answered exactly" in said
    assert "step" not in said.splitlines()[2:3]
    run = load_run(tmp_path / "out")
    assert run.block is fg.BLOCKS[block]
    right = training.exam_score(run.config, run.params, *data.Sort().exam(), block=run.block)
    assert f"{right} of 729" in said
    result = training.evaluate(run.config, run.params, data.Sort().validation_batches(64), block=run.block)
    assert result["loss"] == pytest.approx(lines_of(tmp_path / "out")[-1]["val_loss"], rel=1e-5)
    assert main(["sample", "out", "2 1 0 0 1 2", "--max-new-tokens", "6", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("2 1 0 0 1 2 ")
    if block != "pre_ln":
        with pytest.raises(ValueError, match="model_type='flax_gpt' is not supported"):
            fg.load_pretrained(tmp_path / "out")


@pytest.mark.slow
def test_a_byte_model_reports_bits_per_character(tmp_path, capsys):
    (tmp_path / "é.txt").write_text("é" * 800)
    assert main(["train", "--data", "é.txt", "--tokenizer", "byte", *TINY, "--n-positions", "8"]) == 0
    loss = lines_of(tmp_path / "runs" / "é")[-1]["val_loss"]
    assert f"{2 * loss / np.log(2):.4f} bits per character" in capsys.readouterr().out


@pytest.mark.slow
def test_a_second_run_of_the_same_name_takes_the_next_folder_and_a_named_one_is_never_overwritten(tmp_path, capsys):
    for expected in ("runs/sort", "runs/sort-2"):
        assert main(["train", "--task", "sort", *TINY, "--quiet"]) == 0
        assert f"-> {expected}\n" in capsys.readouterr().out
    before = (tmp_path / "runs/sort/model.safetensors").read_bytes()
    assert main(["train", "--task", "sort", *TINY, "--out", "runs/sort"]) == 1
    assert "runs/sort already holds a run; give another --out" in capsys.readouterr().err
    assert (tmp_path / "runs/sort/model.safetensors").read_bytes() == before


def interrupt_after(step, signum, monkeypatch):
    """Has the next run ask itself to stop when it reports this step."""
    from flax_gpt.training.progress import TrainingProgress

    steps = [step]

    def report(self, line):
        if line["step"] in steps:
            steps.clear()
            signal.raise_signal(signum)

    monkeypatch.setattr(TrainingProgress, "report", report)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_go_on_and_ends_as_if_nothing_had_been(tmp_path, signum, monkeypatch, capsys):
    arguments = ["train", "--task", "sort", *TINY, "--dropout", "0.1", "--out", "whole"]
    assert main(arguments) == 0
    interrupt_after(2, signum, monkeypatch)
    assert main([*arguments[:-1], "cut"]) == 128 + signum
    said = capsys.readouterr().out
    assert "interrupted after step 3 of 6; go on with  flax-gpt train --resume cut" in said
    assert load_run(tmp_path / "cut").config.n_embd == 8  # of the latest checkpoint
    assert (tmp_path / "cut/loss.png").exists()
    assert not (tmp_path / "cut/model.safetensors").exists()
    assert main(["train", "--resume", "cut", "--lr", "0.5"]) == 1
    assert "lr: 0.001 in the checkpoint, 0.5 now" in capsys.readouterr().err
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["train", "--resume", "../cut"]) == 0
    whole, cut = (tmp_path / name for name in ("whole", "cut"))
    assert (whole / "model.safetensors").read_bytes() == (cut / "model.safetensors").read_bytes()
    for line, other in zip(lines_of(whole), lines_of(cut), strict=True):
        assert {k: v for k, v in line.items() if "second" not in k} == {
            k: v for k, v in other.items() if "second" not in k
        }
    capsys.readouterr()
    assert main(["train", "--resume", "../cut"]) == 0
    assert "holds a finished run; there is nothing left to do" in capsys.readouterr().out
    assert main(["sample", "../cut", "0", "--checkpoint", "3", "--max-new-tokens", "2"]) == 0
    assert main(["sample", "../cut", "0", "--checkpoint", "4"]) == 1
    assert "no checkpoint 4; its steps are [3, 6]" in capsys.readouterr().err


def test_without_checkpoints_ctrl_c_keeps_the_model(tmp_path, monkeypatch, capsys):
    interrupt_after(2, signal.SIGINT, monkeypatch)
    assert main(["train", "--task", "sort", *TINY, "--checkpoint-every", "None", "--out", "cut"]) == 130
    assert "interrupted after step 3 of 6; what was reached is in cut" in capsys.readouterr().out
    assert load_run(tmp_path / "cut").config.n_embd == 8


@pytest.mark.slow
def test_training_starts_from_another_run_with_its_sizes_and_tokenizer(tmp_path, text, capsys):
    base = [*TINY, "--n-positions", "16", "--quiet", "--sample-tokens", "0", "--checkpoint-every", "None"]
    assert main(["train", "--data", str(text), *base, "--out", "first"]) == 0
    (tmp_path / "new.txt").write_text("a lazy fox jumps over the brown dog\n" * 40)  # without some of the letters
    fine = ["train", "--init-from", "first", "--data", "new.txt", "--steps", "4", "--warmup-steps", "1", "--quiet"]
    assert (
        main([*fine, "--n-positions", "8", "--dropout", "0.1", "--lr", "1e-9", "--min-lr", "0", "--out", "fine"]) == 0
    )
    before, after = load_run(tmp_path / "first"), load_run(tmp_path / "fine")
    assert after.tokenizer == before.tokenizer
    assert (after.config.n_layer, after.config.n_positions, after.config.attn_pdrop) == (1, 8, 0.1)
    np.testing.assert_allclose(after.params["wpe"], before.params["wpe"][:8], atol=1e-7)
    np.testing.assert_allclose(after.params["wte"], before.params["wte"], atol=1e-7)
    capsys.readouterr()
    assert main([*fine, "--n-embd", "16"]) == 1
    assert "of the model to start from, n_embd is 8, not 16; leave these flags out" in capsys.readouterr().err
    assert main([*fine, "--n-positions", "32"]) == 1
    assert "n_positions=16, fewer than 32" in capsys.readouterr().err


@pytest.mark.slow
def test_training_on_token_shards_and_on_nanogpts_files(tmp_path, text, capsys):
    assert main(["data", str(text), "--out", "shards", "--tokenizer", "char", "--quiet"]) == 0
    small = [*TINY, "--n-positions", "16", "--sample-tokens", "5", "--quiet"]
    assert main(["train", "--data", "shards", "--packed", *small, "--out", "a"]) == 0
    said = capsys.readouterr().out
    assert "bits per character" in said
    assert load_run(tmp_path / "a").tokenizer == data.CharTokenizer.of_text(text.read_text())
    assert [line["step"] for line in lines_of(tmp_path / "a") if "val_loss" in line] == [0, 3, 6]
    (tmp_path / "nano").mkdir()
    ids = data.load_tokenizer(tmp_path / "a").encode(text.read_text()).astype(np.uint16)
    for name in ("train", "val"):
        ids.tofile(tmp_path / "nano" / f"{name}.bin")
    assert main(["train", "--data", "nano", *small, "--out", "b"]) == 0
    assert load_run(tmp_path / "b").tokenizer == data.IdTokenizer(28)
    assert main(["train", "--data", "nano", "--init-from", "a", *small]) == 1
    assert "nano was made with IdTokenizer(vocab_size=28), the model to start from has Char" in capsys.readouterr().err
    assert main(["train", "--data", str(text), "--packed", *small]) == 1
    assert "--packed goes with --data and a folder of token shards" in capsys.readouterr().err


@pytest.mark.slow
def test_metrics_go_to_tensorboard_on_request(tmp_path):
    pytest.importorskip("tensorboardX")
    assert main(["train", "--task", "sort", *TINY, "--tensorboard", "--out", "out", "--quiet"]) == 0
    assert list((tmp_path / "out/tensorboard").glob("events.*"))


def test_every_hyper_parameter_has_a_flag_that_reaches_its_config():
    flags = {field.name for field in dataclasses.fields(Args)}
    model = {field.name for field in dataclasses.fields(fg.GPTConfig)} - {"vocab_size"}
    train = {field.name for field in dataclasses.fields(training.TrainConfig)}
    assert model | train <= flags
    args = parse("--n-inner 24 --no-qkv-bias --beta2 0.5 --layers scan --dropout 0.25 --compute-dtype bfloat16".split())
    config = fg.GPTConfig(vocab_size=3, **args.take(fg.GPTConfig))
    assert (config.n_inner, config.qkv_bias, config.attn_pdrop, config.embd_pdrop) == (24, False, 0.25, 0.25)
    settings = training.TrainConfig(**args.take(training.TrainConfig))
    assert (settings.beta2, settings.layers, settings.compute_dtype) == (0.5, "scan", "bfloat16")


@pytest.mark.parametrize(
    ("recipe", "named"),
    [("python", []), ("text", ["--data", "x.txt"]), *((task, ["--task", task]) for task in data.TASKS)],
)
def test_what_is_trained_on_brings_its_own_defaults_and_flags_win(recipe, named):
    recipe = training.recipes.RECIPES[recipe]
    args = parse(named)
    assert training.TrainConfig(**args.take(training.TrainConfig)) == recipe.train
    assert args.n_embd == recipe.model["n_embd"]
    assert parse([*named, "--n-embd", "48", "--lr", "0.5"]).n_embd == 48


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --task nope", "unknown task 'nope'; the tasks are sort, induction, recall, addition, markov"),
        ("train --data nowhere.txt", "no such file or folder: nowhere.txt"),
        ("train --data short.txt", "too few for a context of 64"),
        ("train --data empty.txt", "empty.txt is empty"),
        ("train --data latin.txt", "latin.txt is not UTF-8 text: byte 0xe9 at offset 3"),
        ("train --task sort --data short.txt", "not both"),
        ("train --n-head 3", "n_embd must be divisible by n_head, got n_embd=128 and n_head=3"),
        ("train --dropout 1", "must be at least 0 and below 1, got 1.0"),
        ("train --steps 5", "warmup_steps must be below steps, got warmup_steps=100 and steps=5"),
        ("train --task sort --n-positions 5", "sequences have 11 tokens, more than n_positions=5"),
        ("sample nowhere hello", "no such folder: nowhere"),
        ("train --resume nowhere", "nowhere holds no run to go on with"),
        ("train --resume nowhere --task sort", "--resume goes on with a run as it was; leave out --task"),
        ("train --init-from nowhere", "no such folder: nowhere"),
        ("train --optimizer muon --min-lr 1", "min_lr must not be above lr"),
        ("train --sample-tokens -1", "--sample-tokens must not be negative, got -1"),
        ("info gpt3", "unknown preset 'gpt3'; the presets are gpt2, gpt2-medium, gpt2-large, gpt2-xl"),
        ("info gpt2 --t 1025", "t must be from 1 to n_positions=1024, got 1025"),
        ("info gpt2 --compute-dtype int8", "must be float32 or bfloat16, got 'int8'"),
    ],
)
def test_wrong_calls_say_what_is_wrong_and_leave_nothing_behind(tmp_path, arguments, message, capsys):
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert main(arguments.split()) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_unknown_commands_and_flags_exit_with_2(capsys):
    assert main(["trian"]) == 2
    assert "unknown command 'trian'" in capsys.readouterr().err
    assert main([]) == 2
    with pytest.raises(SystemExit) as caught:
        main(["train", "--step", "5"])
    assert caught.value.code == 2
    assert main(["--help"]) == 0
    assert "train a GPT" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "sample", "convert", "info"])
def test_help_explains_every_flag(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "--" in capsys.readouterr().out


def test_info_prints_the_table(capsys):
    assert main(["info", "gpt2"]) == 0
    said = capsys.readouterr().out
    for number in ("124,439,808", "291,648,307,200", "874,944,921,600", "79,047,426,048"):
        assert number in said
    assert main(["info", "gpt2", "--no-tie-word-embeddings", "--n-layer", "1"]) == 0
    untied = fg.count_params(fg.GPTConfig.preset("gpt2", tie_word_embeddings=False, n_layer=1))
    assert f"{untied:,}" in capsys.readouterr().out


def test_sampling_refuses_what_the_run_cannot_encode(tmp_path, text, capsys):
    assert main(["train", "--data", str(text), *TINY, "--n-positions", "16", "--out", "out", "--quiet"]) == 0
    assert main(["sample", "out", "QUICK"]) == 1
    assert "characters outside the model's alphabet of 28: 'CIKQU'" in capsys.readouterr().err
    assert main(["sample", "out", ""]) == 1
    assert "the prompt is empty" in capsys.readouterr().err


def test_importing_the_package_is_light():
    """In a process of its own: neither torch nor plots nor the command line's libraries come with it."""
    program = (
        "import sys, time, jax, flax, flax.linen; before = set(sys.modules); start = time.perf_counter(); "
        "import flax_gpt; seconds = time.perf_counter() - start; new = {m.split('.')[0] for m in sys.modules}; "
        "print(seconds); "
        "print(sorted(new & {'torch', 'tensorflow', 'transformers', 'matplotlib', 'tyro', 'beartype', 'pandas'}))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines()[1] == "[]"
