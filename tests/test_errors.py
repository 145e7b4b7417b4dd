from __future__ import annotations

import inspect

import pytest

from nni_petridish import errors

FAMILY = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", FAMILY, ids=lambda kind: kind.__name__)
def test_every_error_is_of_one_family_and_no_error_of_pythons(kind: type) -> None:
    assert issubclass(kind, errors.PetridishError)
    builtin = {base for base in kind.__mro__ if base.__module__ == "builtins"}
    # Code that tries an import expects an ImportError.
    import_error = {ImportError} if kind is errors.MissingPackageError else set()
    assert builtin == {Exception, BaseException, object} | import_error
