"""What all tests share: annotations enforced, float64 on request."""

import importlib.util
import os
from pathlib import Path

import jaxtyping

# Before anything imports the package: from here on each call in it is checked against its annotations. The two `config`
# modules are left out, since they check their fields themselves and the tests read what they say.
_package = Path(importlib.util.find_spec("flax_gpt").origin).parent
_modules = [
    ".".join(("flax_gpt", *path.relative_to(_package).with_suffix("").parts))
    for path in _package.rglob("*.py")
    if path.stem not in ("__init__", "config")
]
jaxtyping.install_import_hook(_modules, "beartype.beartype")

# Nearly all of the tests' time is compilation, and half of that is LLVM polishing loops that run once. XLA's own passes
# stay as they are. Set XLA_FLAGS to run the tests with other flags.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# Many tests compile what another has compiled, or what the last run of the tests did.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import jax  # noqa: E402
import pytest  # noqa: E402

# Whatever spreads work over devices does so in the tests.
jax.config.update("jax_num_cpu_devices", 2)


@pytest.fixture
def x64():
    """Float64 for the length of one test."""
    with jax.enable_x64(True):
        yield
