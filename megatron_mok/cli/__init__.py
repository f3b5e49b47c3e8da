"""The `megatron-mok` command."""
