"""Counts of parameters, operations and bytes: against published numbers and against what the compiler counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, NO_DROPOUT, random_params, random_tokens

from flax_gpt import BLOCKS, GPTConfig, forward, ops
from flax_gpt.accounting import (
    count_flops,
    count_params,
    flops_by_part,
    flops_utilisation,
    memory_by_use,
    palm_flops,
    params_by_group,
)

# (tied, qkv bias), (untied, qkv bias), (tied, no qkv bias), (untied, no qkv bias), one block.
COUNTS = {
    "gpt2": (124_439_808, 163_037_184, 124_412_160, 163_009_536, 7_087_872),
    "gpt2-medium": (354_823_168, 406_286_336, 354_749_440, 406_212_608, 12_596_224),
    "gpt2-large": (774_030_080, 838_359_040, 773_891_840, 838_220_800, 19_677_440),
    "gpt2-xl": (1_557_611_200, 1_638_022_400, 1_557_380_800, 1_637_792_000, 30_740_800),
}


@pytest.mark.parametrize("name", COUNTS)
def test_published_sizes_have_their_published_counts(name):
    counts = [
        count_params(GPTConfig.preset(name, tie_word_embeddings=tied, qkv_bias=bias))
        for bias in (True, False)
        for tied in (True, False)
    ]
    config = GPTConfig.preset(name)
    blocks = sum(count for group, count in params_by_group(config).items() if group.startswith("blocks."))
    assert blocks % config.n_layer == 0
    assert (*counts, blocks // config.n_layer) == COUNTS[name]


def test_groups_are_the_parts_of_the_tree():
    assert params_by_group(GPTConfig.preset("gpt2")) == {
        "wte": 50257 * 768,
        "wpe": 1024 * 768,
        "blocks.ln_1": 12 * 2 * 768,
        "blocks.attn": 12 * (4 * 768 * 768 + 4 * 768),
        "blocks.ln_2": 12 * 2 * 768,
        "blocks.mlp": 12 * (8 * 768 * 768 + 5 * 768),
        "ln_f": 2 * 768,
    }


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("tied", [True, False])
def test_the_count_is_the_size_of_the_tree(block, tied):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    params = random_params(config, block=BLOCKS[block])
    assert count_params(config, BLOCKS[block]) == sum(x.size for x in jax.tree.leaves(params))
    assert sum(params_by_group(config, BLOCKS[block]).values()) == count_params(config, BLOCKS[block])


@pytest.mark.parametrize("tied", [True, False])
def test_gpt2s_operations_are_those_of_nanogpts_notebook(tied):
    config = GPTConfig.preset("gpt2", tie_word_embeddings=tied)
    parts = flops_by_part(config, 1024)
    head = parts.pop("head")
    assert sum(parts.values()) == 12 * 17_716_740_096
    assert head == 79_047_426_048
    assert count_flops(config, 1024) == 291_648_307_200
    assert 3 * count_flops(config, 1024) == 874_944_921_600


def test_the_rule_of_thumb_is_palms():
    assert palm_flops(GPTConfig.preset("gpt2"), 1024) == 875_062_886_400


def test_utilisation_is_the_share_of_the_peak():
    config = GPTConfig.preset("gpt2")
    assert flops_utilisation(config, 1024, 1024.0, 4.0 * 874_944_921_600) == 0.25  # one sequence a second


@pytest.mark.parametrize("t", [0, -1, 1025])
def test_a_length_that_the_model_does_not_take_is_refused(t):
    with pytest.raises(ValueError, match=f"n_positions=1024, got {t}"):
        count_flops(GPTConfig.preset("gpt2"), t)


# Wide enough for the matrix products to be nearly all there is to do.
MEASURED = GPTConfig(vocab_size=499, n_positions=128, n_embd=128, n_layer=2, n_head=4, **NO_DROPOUT)
BATCH = 4


@pytest.fixture(scope="module")
def compiled():
    """The compiled forward pass, and the compiled gradient of its loss."""
    params, tokens = random_params(MEASURED), random_tokens(MEASURED, (BATCH, 128))

    def logits(params):
        return forward(MEASURED, params, tokens, layers="unroll")

    def loss(params):
        return ops.cross_entropy(logits(params), tokens).mean()

    return [jax.jit(f).lower(params).compile() for f in (logits, jax.grad(loss))]


def test_the_count_is_nearly_what_the_compiler_counts(compiled):
    forward_pass, gradient = (x.cost_analysis()["flops"] for x in compiled)
    # What is not counted here (LayerNorm, softmax, GELU, biases, loss) is a few operations an entry.
    counted = BATCH * count_flops(MEASURED, 128)
    assert 1 < forward_pass / counted < 1.08
    assert 1 < gradient / (3 * counted) < 1.08


def test_memory_of_the_parameters_is_exact():
    for param_dtype, size in ((jnp.float32, 4), (jnp.bfloat16, 2)):
        memory = memory_by_use(CONFIG, 2, 11, param_dtype=param_dtype)
        n = count_params(CONFIG)
        assert (memory["params"], memory["grads"], memory["adam"]) == (n * size, n * size, 2 * n * size)
    params = random_params()
    assert memory_by_use(CONFIG, 2, 11)["params"] == sum(x.nbytes for x in jax.tree.leaves(params))


def test_memory_of_the_logits_is_float32_whatever_the_compute_dtype():
    memory = memory_by_use(CONFIG, 2, 11, compute_dtype=jnp.bfloat16)
    assert memory["logits"] == 2 * (2 * 11 * 61 * 4)


def test_activations_grow_as_they_should():
    def activations(batch_size=2, t=11, **kwargs):
        return memory_by_use(CONFIG, batch_size, t, **kwargs)["activations"]

    assert activations(batch_size=6) == 3 * activations()
    pattern = 2 * 2 * 3 * 11 * 11 * 4  # of two layers; float32 in either dtype
    assert activations(compute_dtype=jnp.bfloat16) - pattern == (activations() - pattern) / 2
    assert np.diff(np.diff([activations(t=t) for t in (10, 11, 12)])) == 2 * (2 * 2 * 3 * 4)


def test_the_estimate_is_of_the_size_of_what_the_compiler_takes(compiled):
    memory = memory_by_use(MEASURED, BATCH, 128)
    estimate = memory["activations"] + memory["logits"]
    taken = compiled[1].memory_analysis().temp_size_in_bytes
    assert 0.5 < taken / estimate < 2  # 1.8 here: gradients, room to work in, arrays kept twice
