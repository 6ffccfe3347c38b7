"""GPT-2 in JAX and Flax: pure functions to jit, differentiate and vmap over anything."""

from flax_gpt import ops
from flax_gpt.activations import SITES
from flax_gpt.config import GPTConfig
from flax_gpt.forward import forward, init_params, token_log_probs
from flax_gpt.model import BLOCKS, GPT, MLP, Attention, Block, Embedding, NoLNBlock, PostLNBlock

__all__ = [
    "BLOCKS",
    "GPT",
    "MLP",
    "SITES",
    "Attention",
    "Block",
    "Embedding",
    "GPTConfig",
    "NoLNBlock",
    "PostLNBlock",
    "forward",
    "init_params",
    "ops",
    "token_log_probs",
]
