"""The Megatron-Core side of megatron_mok.

`install()` makes `--moe-token-dispatcher-type mok` known to Megatron. Call it before Megatron
parses its arguments, or start an unmodified script through
`python -m megatron_mok.megatron.launcher`.

Importing this package does not import Megatron; `install()` does.
"""

from megatron_mok.megatron.flags import MoKOptions, set_options
from megatron_mok.megatron.install import install

__all__ = ["MoKOptions", "install", "set_options"]
