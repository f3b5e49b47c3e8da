"""What results of rank pools must satisfy, on either device."""

FP32, BF16 = 1e-5, 1e-2


def assert_close(results, bound):
    """Relative differences between mok and alltoall, per rank, are within `bound`."""
    for rank, differences in enumerate(results):
        bad = {name: d for name, d in differences.items() if not d <= bound}
        assert not bad, f"rank {rank}, bound {bound}: {bad}"


def assert_no_worse(results):
    """Errors of a layer under mok are at most 1.1 times those of alltoall, and small."""
    for rank, errors in enumerate(results):
        bad = {name: e for name, e in errors.items() if not e[1] <= min(1.1 * e[0], BF16)}
        assert not bad, f"rank {rank}, (alltoall, mok): {bad}"


def assert_same_training(results, bound=FP32):
    """Differences of `train_cases.compare`, per rank, are within `bound`."""
    for rank, differences in enumerate(results):
        # Adam divides small gradients by small moments: parameters drift apart faster than losses.
        limits = {"parameters": 100 * bound}
        bad = {name: d for name, d in differences.items() if not d <= limits.get(name, bound)}
        assert not bad, f"rank {rank}: {bad}"
