import pytest

from tests.megatron.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks():
    """Four Megatron ranks: enough for expert parallelism 2 x expert data parallelism 2."""
    pool = RankPool(4)
    yield pool
    pool.close()
