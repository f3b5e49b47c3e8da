"""Timing of one MoE layer against other implementations (`megatron-mok bench`).

Presets name layers of known models and routing draws the routes; each arm is one implementation
over the same inputs. The runner checks every arm against the reference, times them in shuffled
blocks (timing), and hands rows to report and plot.
"""
