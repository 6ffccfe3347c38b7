"""GPT-2 in JAX and Flax: pure functions to jit, differentiate and vmap over anything."""

from flax_gpt import export, ops
from flax_gpt.accounting import count_flops, count_params
from flax_gpt.activations import SITES
from flax_gpt.config import GPTConfig
from flax_gpt.forward import forward, init_params, token_log_probs
from flax_gpt.generation import Beams, Cache, Generation, beam_search, forward_cached, generate, init_cache, stream
from flax_gpt.model import BLOCKS, GPT, MLP, Attention, Block, Embedding, NoLNBlock, PostLNBlock
from flax_gpt.pretrained import load_pretrained, save_pretrained

__all__ = [
    "BLOCKS",
    "GPT",
    "MLP",
    "SITES",
    "Attention",
    "Beams",
    "Block",
    "Cache",
    "Embedding",
    "GPTConfig",
    "Generation",
    "NoLNBlock",
    "PostLNBlock",
    "beam_search",
    "count_flops",
    "count_params",
    "export",
    "forward",
    "forward_cached",
    "generate",
    "init_cache",
    "init_params",
    "load_pretrained",
    "ops",
    "save_pretrained",
    "stream",
    "token_log_probs",
]
