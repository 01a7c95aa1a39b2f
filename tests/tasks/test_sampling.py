import pytest

from i2cl.tasks.sampling import even_quotas, seeded

QUOTAS = [([10, 10], 6, [3, 3]), ([1, 10, 10], 7, [1, 3, 3]), ([1, 2, 10], 100, [1, 2, 10])]


@pytest.mark.parametrize(
    ("sizes", "total", "expected"), [*QUOTAS, ([0, 5], 4, [0, 4]), ([], 4, []), ([3, 3], 0, [0, 0])]
)
def test_even_quotas(sizes, total, expected):
    assert even_quotas(sizes, total, seeded(0)) == expected


def test_the_remainder_goes_to_different_groups_by_seed():
    quotas = {tuple(even_quotas([9, 9, 9], 7, seeded(seed))) for seed in range(30)}
    assert quotas == {(3, 2, 2), (2, 3, 2), (2, 2, 3)}
