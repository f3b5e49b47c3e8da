"""Distributed checkpoints written under one dispatcher and EP size load under others."""


def test_checkpoints_change_dispatcher_and_ep_size(ranks, tmp_path):
    for found in ranks.run("checkpoint_cases.journey", str(tmp_path)):
        assert found["same_logits"]
        assert found["logits"] <= 1e-5
        assert max(found["steps"].values()) <= 1e-5, found["steps"]
        assert found["same_places"]
        assert found["logits_back"]
        assert found["steps_back"]
        # Without the optimizer's state it would be seen.
        assert found["model_alone"] > 1e-3
