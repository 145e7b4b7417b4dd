"""The sizes of the parts of a table."""

from __future__ import annotations

from nni_petridish.errors import DataError

TEST_SHARE = 6
"""A sixth of the rows is the test set."""


def split_sizes(rows: int, validation: int | None) -> tuple[int, int]:
    """Return the numbers of training and validation rows; the rest is the test set.

    >>> split_sizes(120, None), split_sizes(120, 0)
    ((80, 20), (100, 0))
    """
    left = rows - max(1, rows // TEST_SHARE)
    if validation is None:
        validation = max(1, left // (5 if left < 500 else 10))
    if validation > left - 2:
        raise DataError(
            f"validation must leave at least 2 of the {left} training rows but got {validation}."
        )
    return left - validation, validation
