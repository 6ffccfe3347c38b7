"""Weights to and from Hugging Face's own loader: equal to the byte, equal in the logits, opened without a warning."""

import dataclasses
import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import flax_gpt as fg
from flax_gpt.data import GPT2Tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MODELS = [
    {"n_layer": 1, "n_head": 1, "n_embd": 7},
    {"n_layer": 2, "n_head": 3, "n_embd": 33, "n_inner": 31, "activation_function": "gelu"},
    {"n_layer": 5, "n_head": 4, "n_embd": 20, "n_inner": 37, "activation_function": "relu"},
    {"n_layer": 2, "n_head": 3, "n_embd": 39, "activation_function": "gelu_pytorch_tanh", "tie_word_embeddings": False},
    {"n_layer": 1, "n_head": 4, "n_embd": 28, "n_inner": 9, "activation_function": "linear"},
    {"n_layer": 2, "n_head": 1, "n_embd": 13, "layer_norm_epsilon": 0.03, "tie_word_embeddings": False},
    {"n_layer": 2, "n_head": 3, "n_embd": 21, "reorder_and_upcast_attn": True, "attn_implementation": "eager"},
]


@pytest.fixture
def warned():
    """What transformers has logged as a warning or worse."""
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def random_model(**fields):
    """A GPT2LMHeadModel in float32 whose every weight and bias is drawn: fresh ones have biases of zero."""
    # Its default ids would be warned of, once a process, as outside the vocabulary.
    config = transformers.GPT2Config(vocab_size=43, n_positions=19, bos_token_id=None, eos_token_id=None, **fields)
    model = transformers.GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


@pytest.mark.parametrize("fields", MODELS, ids=lambda fields: "-".join(str(value) for value in fields.values()))
def test_a_model_comes_and_goes_unchanged(tmp_path, fields, warned):
    model = random_model(**fields)
    # The odd ones in shards.
    model.save_pretrained(tmp_path / "theirs", max_shard_size="8KB" if fields["n_embd"] % 2 else "1GB")
    config, params = fg.load_pretrained(tmp_path / "theirs")
    assert (config.n_layer, config.n_head, config.n_embd) == (fields["n_layer"], fields["n_head"], fields["n_embd"])
    tokens = np.random.default_rng(0).integers(43, size=(2, 19))
    expected = logits_of(model, tokens)
    np.testing.assert_allclose(fg.forward(config, params, tokens), expected, rtol=1e-5, atol=1e-5)

    fg.save_pretrained(tmp_path / "ours", config, params)
    theirs = {}
    for file in (tmp_path / "theirs").glob("*.safetensors"):
        theirs |= load_file(file)
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype == np.float32
        assert tensor.tobytes() == theirs[name].tobytes(), name

    again, info = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation=model.config._attn_implementation
    )
    assert not any(info.values()), info
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    # Not to the bit: at odd widths PyTorch's kernels round according to where in memory a matrix happens to lie.
    np.testing.assert_allclose(logits_of(again.eval(), tokens), expected, rtol=1e-5, atol=1e-5)
    assert not warned, [record.getMessage() for record in warned]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_kept(tmp_path, dtype, warned):
    config = fg.GPTConfig(vocab_size=43, n_positions=19, n_embd=12, n_layer=2, n_head=3)
    params = fg.init_params(config, jax.random.key(0), dtype)
    fg.save_pretrained(tmp_path / "ours", config, params)
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    assert str(model.dtype) == f"torch.{jnp.dtype(dtype)}"
    model.save_pretrained(tmp_path / "theirs")
    chex.assert_trees_all_equal(fg.load_pretrained(tmp_path / "theirs")[1], params)
    assert not warned, [record.getMessage() for record in warned]


@pytest.mark.slow
def test_with_gpt2s_tokenizer_the_folder_opens_with_the_auto_classes(tmp_path, warned):
    pytest.importorskip("tiktoken")
    tokenizer = GPT2Tokenizer()
    config = fg.GPTConfig(vocab_size=50304, n_positions=32, n_embd=8, n_layer=1, n_head=2)
    params = fg.init_params(config, jax.random.key(0))
    fg.save_pretrained(tmp_path / "ours", config, params, tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert isinstance(model, transformers.GPT2LMHeadModel)
    assert (model.config.bos_token_id, model.generation_config.eos_token_id) == (50256, 50256)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert (theirs.model_max_length, theirs.eos_token_id, len(theirs)) == (32, 50256, 50257)
    for text in ("Hello, I am", "it's  2019,\n\n ñ 𝄞 ", "<|endoftext|>a<|endoftext|>"):
        assert theirs(text)["input_ids"] == tokenizer.encode(text, allow_special=True).tolist()
    assert not warned, [record.getMessage() for record in warned]
    # And back: Hugging Face writes a tokenizer.json alone.
    theirs.save_pretrained(tmp_path / "theirs")
    assert not (tmp_path / "theirs" / "merges.txt").exists()
    assert GPT2Tokenizer.of_file(tmp_path / "theirs") == tokenizer


def test_a_bias_that_hugging_face_trained_is_not_dropped(tmp_path):
    """A model without a bias on queries, keys and values has one of zeros there, which training changes."""
    config = fg.GPTConfig(vocab_size=43, n_positions=19, n_embd=12, n_layer=2, n_head=3, qkv_bias=False)
    fg.save_pretrained(tmp_path, config, fg.init_params(config, jax.random.key(0)))
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.bias[3] = 0.5
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the config has qkv_bias=False"):
        fg.load_pretrained(tmp_path)
    changed = dataclasses.replace(config, qkv_bias=True)
    changed.to_json(tmp_path / "config.json")
    assert fg.load_pretrained(tmp_path)[1]["blocks"]["attn"]["qkv"]["bias"][1, 0, 0, 3] == 0.5
