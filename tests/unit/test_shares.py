"""The shares in which ``make test`` runs the files of tests."""

from pathlib import Path

import pytest

from tests.support import shares

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.glob("**/test_*.py"))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_file_is_in_one_share(count: int) -> None:
    dealt = [shares.share_of(FILES, TESTS, number, count) for number in range(1, count + 1)]
    assert sorted(file for share in dealt for file in share) == FILES


def test_no_file_that_is_gone_is_counted() -> None:
    assert [name for name in shares.SECONDS if not (TESTS / name).exists()] == []
