from __future__ import annotations

import inspect

import pytest

from nni_petridish import errors

FAMILY = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("kind", FAMILY, ids=lambda kind: kind.__name__)
def test_every_error_is_of_one_family_and_no_error_of_pythons(kind: type) -> None:
    assert issubclass(kind, errors.PetridishError)
    builtin = {base for base in kind.__mro__ if base.__module__ == "builtins"}
    assert builtin == {Exception, BaseException, object}
