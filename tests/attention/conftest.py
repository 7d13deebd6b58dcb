"""Random rows of prefix trees, as the arrays attention reads."""

import numpy as np
import pytest


def random_row(rng, slots, used, reach=0.5):
    """Depth and subtree end of `used` nodes in depth-first order, then padding; several trees."""
    path, depth, end = [], np.zeros(slots, np.int32), np.arange(1, slots + 1, dtype=np.int32)
    for node in range(used):
        keep = len(path) if rng.random() < reach else int(rng.integers(0, len(path) + 1))
        path = path[:keep]
        depth[node] = keep
        for ancestor in path:
            end[ancestor] = node + 1
        path.append(node)
    return depth, end


@pytest.fixture(scope="session")
def row():
    """`row(seed, slots, used)` -> (depth, subtree_end)."""
    return lambda seed, slots, used, reach=0.8: random_row(np.random.default_rng(seed), slots, used, reach)
