"""Mixture-of-Kittens for Megatron-Core: a fused, deterministic MoE dispatcher and expert layer."""

__version__ = "0.1.0"
