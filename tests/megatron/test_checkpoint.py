"""Checkpoints written under one dispatcher load under the other."""


def test_alltoall_to_mok_and_back(ranks, tmp_path):
    for differences in ranks.run("checkpoint_cases.round_trip", str(tmp_path)):
        assert max(differences) <= 1e-5


def test_other_ep_size(ranks, tmp_path):
    assert max(ranks.run("checkpoint_cases.other_ep_size", str(tmp_path / "ep2"))) <= 1e-5
