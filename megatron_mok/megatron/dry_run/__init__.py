"""`launcher --dry-run`: what a launch would be, without GPUs, process groups or a model."""

from megatron_mok.megatron.dry_run.run import dry_run, parse_ranks

__all__ = ["dry_run", "parse_ranks"]
