"""Comparison of Megatron token dispatchers in real training runs (`megatron-mok compare`).

From a YAML file (config) to Megatron's arguments (args) for each of the arms; the runner starts a
worker per rank and arm (launch), reads what they recorded (history), and the results are
summarised (summary) and shown (report, plot).
"""
