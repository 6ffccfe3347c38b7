"""GPT-2 in JAX and Flax: pure functions to jit, differentiate and vmap over anything."""

from flax_gpt import ops
from flax_gpt.accounting import count_flops, count_params
from flax_gpt.activations import SITES
from flax_gpt.config import GPTConfig
from flax_gpt.forward import forward, init_params, token_log_probs
from flax_gpt.generate import Generation, generate
from flax_gpt.model import BLOCKS, GPT, MLP, Attention, Block, Embedding, NoLNBlock, PostLNBlock
from flax_gpt.pretrained import load_pretrained, save_pretrained

__all__ = [
    "BLOCKS",
    "GPT",
    "MLP",
    "SITES",
    "Attention",
    "Block",
    "Embedding",
    "GPTConfig",
    "Generation",
    "NoLNBlock",
    "PostLNBlock",
    "count_flops",
    "count_params",
    "forward",
    "generate",
    "init_params",
    "load_pretrained",
    "ops",
    "save_pretrained",
    "token_log_probs",
]
