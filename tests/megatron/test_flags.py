"""The plugin's flags: parsing, defaults, derived sizes."""

import argparse
from types import SimpleNamespace

import pytest

from megatron_mok.megatron import MoKOptions, flags, set_options
from megatron_mok.megatron.errors import MoKConfigError


def parse(*argv):
    return flags.add_mok_arguments(argparse.ArgumentParser()).parse_args(argv)


def test_defaults_are_those_of_the_dataclass():
    assert MoKOptions.from_args(parse()) == MoKOptions()


def test_every_flag_reaches_its_option():
    args = parse(
        *("--mok-mode", "dispatch", "--mok-max-tokens-per-rank", "96"),
        *("--mok-saved-rows-factor", "0.5", "--mok-inner-timeout-s", "7"),
        *("--mok-host-threads", "3", "--mok-peer-memory", "symm_mem", "--mok-log-statistics"),
    )
    expected = MoKOptions("dispatch", 96, 0.5, 7.0, 3, "symm_mem", log_statistics=True)
    assert MoKOptions.from_args(args) == expected


def test_first_timeout_follows_megatron():
    args = SimpleNamespace(distributed_timeout_minutes=2)
    assert MoKOptions.from_args(args).first_timeout_s == 120.0


def test_unknown_mode_is_a_usage_error(capsys):
    with pytest.raises(SystemExit):
        parse("--mok-mode", "both")
    assert "invalid choice: 'both'" in capsys.readouterr().err


def test_all_wrong_values_in_one_error():
    with pytest.raises(MoKConfigError) as caught:
        MoKOptions("both", 0, -1.0, 0.0, -1, "nvshmem", float("inf"), 1)
    assert len(caught.value.problems) == 8


@pytest.mark.parametrize(
    "value",
    [
        {"max_tokens_per_rank": 1.5},
        {"saved_rows_factor": "1"},
        {"host_threads": True},
        {"log_statistics": "yes"},
    ],
)
def test_wrong_types_from_yaml(value):
    with pytest.raises(MoKConfigError, match=next(iter(value)).replace("_", "-")):
        MoKOptions(**value)


SIZES = {
    "seq_length": 4096,
    "micro_batch_size": 2,
    "eval_micro_batch_size": 1,
    "context_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
}


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, 8192),
        ({"eval_micro_batch_size": 3}, 12288),
        ({"eval_micro_batch_size": None}, 8192),
        ({"context_parallel_size": 4}, 2048),
        ({"tensor_model_parallel_size": 2}, 8192),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 4096),
        ({"context_parallel_size": 3}, 2731),
        ({"hybrid_context_parallel": True}, None),
        ({"seq_length": None}, None),
    ],
)
def test_tokens_per_rank(changes, tokens):
    assert flags.tokens_per_rank(SimpleNamespace(**SIZES | changes)) == tokens


def test_tokens_per_rank_of_a_yaml_config():
    nested = SimpleNamespace(context_parallel_size=2, sequence_parallel=False)
    args = SimpleNamespace(seq_length=64, micro_batch_size=1, model_parallel=nested)
    assert flags.tokens_per_rank(args) == 32


def test_given_size_wins_over_the_derived_one():
    args = SimpleNamespace(**SIZES, mok_max_tokens_per_rank=9000)
    assert MoKOptions.from_args(args).max_tokens_per_rank == 9000


@pytest.mark.parametrize(
    ("factor", "rows"), [(0.0, 0), (0.5, 400), (1.25, 1000), (1.001, 801), (100.0, 3200)]
)
def test_saved_rows(factor, rows):
    options = MoKOptions(saved_rows_factor=factor)
    assert options.saved_rows(max_tokens=100, topk=8, ep_size=4, local_experts=16) == rows


def test_saved_rows_never_exceed_the_local_experts():
    options = MoKOptions(saved_rows_factor=100.0)
    assert options.saved_rows(max_tokens=100, topk=8, ep_size=4, local_experts=2) == 800


def test_set_options_wins_until_it_is_undone():
    try:
        set_options(MoKOptions(host_threads=5))
        assert flags.get_options().host_threads == 5
    finally:
        set_options(None)
    assert flags.get_options() == MoKOptions()
    with pytest.raises(TypeError, match="MoKOptions"):
        set_options({"host_threads": 5})
