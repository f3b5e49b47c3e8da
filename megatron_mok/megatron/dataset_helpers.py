"""Megatron's dataset helpers, a small C++ module, where Megatron-Core comes as a wheel."""

from importlib.util import find_spec
from pathlib import Path


def use_built_helpers() -> None:
    """Keep Megatron from compiling helpers that a wheel has built already.

    Megatron runs `make` for them at start. In a wheel there is no Makefile, and the run would end
    there. Nothing changes in a checkout.
    """
    from megatron.core.datasets import utils

    built = find_spec("megatron.core.datasets.helpers_cpp") is not None
    if built and not Path(utils.__file__).with_name("Makefile").exists():
        utils.compile_helpers = lambda: None
