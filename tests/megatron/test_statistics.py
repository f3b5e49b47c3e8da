"""`--mok-log-statistics`, under Megatron's DDP and schedules."""

import pytest

PER_LAYER = ("moe/mok_padding_percent_layer_0", "moe/mok_padding_percent_layer_1")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def assert_logged(results):
    for logged, _, expected in results:
        assert logged == pytest.approx(expected, rel=1e-5)
        assert set(PER_LAYER) <= set(logged)
    _, line, expected = results[-1]  # of the rank that prints it
    if line is not None:
        for name, value in expected.items():
            if not name.startswith("moe/"):
                assert f" {name}: {value:.2f} |" in line
        assert "mok_" not in results[0][1]


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_values(ranks, ep):
    results = ranks.run("statistics_cases.training", ep)
    assert_logged(results)
    logged = results[0][0]
    assert (logged["mok_exchanged_mb"] == 0) == (ep == 1)
    assert logged["mok_recomputed_percent"] > 0


@pytest.mark.parametrize("changes", [FULL, SELECTIVE], ids=["full", "moe"])
def test_recomputed_layers_count_once(ranks, changes):
    assert_logged(ranks.run("statistics_cases.training", 2, **changes))


def test_pipeline(ranks):
    assert_logged(ranks.run("statistics_cases.training", 2, pp=2))


def test_multi_token_prediction(ranks):
    results = ranks.run("statistics_cases.training", 2, mtp_num_layers=1)
    assert_logged(results)
    assert "moe/mok_padding_percent_layer_2" in results[0][0]


def test_mode_dispatch(ranks):
    results = ranks.run("statistics_cases.training", 2, mode="dispatch")
    assert_logged(results)
    assert "mok_recomputed_percent" not in results[0][0]


def test_nothing_without_the_flag(ranks):
    for logged, line, expected in ranks.run("statistics_cases.training", 2, log=False):
        assert expected
        assert logged == {}
        assert "mok_" not in (line or "")


def test_values_are_those_of_the_engine(ranks):
    for logged, expected in ranks.run("statistics_cases.against_the_engine"):
        assert {name: logged[name] for name in expected} == pytest.approx(expected)
        assert 0 < expected["mok_padding_percent"] < 80
        assert 0 < expected["mok_recomputed_percent"] < 80


def test_pipeline_stage_without_experts(ranks):
    results = ranks.run("statistics_cases.stage_without_experts")
    assert all(logged == results[0] for logged in results)
    # Two experts of eight get three tokens each, one of them from the other rank.
    assert results[0]["mok_expert_imbalance"] == 4
    assert results[0]["mok_tokens_per_expert_mean"] == 6 / 8
    assert results[0]["mok_exchanged_mb"] == pytest.approx(3 / 2 / 1e6)
    assert {name for name in results[0] if "padding" in name} == {
        "mok_padding_percent",
        "moe/mok_padding_percent_layer_1",
    }
