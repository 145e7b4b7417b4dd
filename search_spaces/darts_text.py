"""Genotypes as DARTS published them, ``Genotype(...)`` in Python, read without executing them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from nni_petridish.core.genotype import MAX_BYTES, as_list, show
from nni_petridish.errors import GenotypeError

_FORMS = {
    "recurrent": "Genotype(recurrent=[(activation, predecessor), ...], concat=range(1, n))",
    "normal": (
        "Genotype(normal=[(op, state), ...], normal_concat=[...], reduce=[(op, state), ...],"
        " reduce_concat=[...])"
    ),
}
"""The forms of a cell for text and of cells for images, by their first field."""
TEXT_FIELDS = ("recurrent", "concat")
IMAGE_FIELDS = ("normal", "normal_concat", "reduce", "reduce_concat")


def darts_fields(text: str, fields: Sequence[str]) -> dict[str, Any]:
    """Return the fields of ``Genotype(...)``; an assignment ``NAME = Genotype(...)`` is accepted.

    Parameters
    ----------
    text
        The text.
    fields
        The names of all fields, in order, for arguments without names.
    """
    problem = GenotypeError(f"DARTS's form must be {_FORMS[fields[0]]} but got {show(text)}.")
    call = _call(text)
    if call is None or len(call.args) > len(fields):
        raise problem
    try:
        result = dict(zip(fields, map(_literal, call.args), strict=False))
        result |= {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
    except (ValueError, TypeError, MemoryError, RecursionError):
        raise problem from None
    for name in fields:
        if name not in result:
            raise GenotypeError(f"{name}: is missing in {show(text)}.")
    for name in result:
        if name not in fields:
            raise GenotypeError(f"{name}: is not a field of {_FORMS[fields[0]]}.")
    return result


def concat_text(concat: Sequence[int]) -> str:
    """Return the nodes of an output, in order, as DARTS writes them: a range or a list."""
    whole = range(concat[0], concat[-1] + 1)
    return f"range({whole.start}, {whole.stop})" if [*concat] == [*whole] else f"{[*concat]}"


def check_concat(
    place: str, concat: object, allowed: Sequence[int], *, noun: str
) -> tuple[int, ...]:
    """Return the numbers of the nodes that make a cell's output, in order, each once."""
    listed = as_list(concat)
    whole = all(isinstance(i, int) and not isinstance(i, bool) for i in listed or ())
    if not listed or not whole or not set(listed) <= set(allowed):
        raise GenotypeError(
            f"{place}: must be some of the {noun}, {allowed[0]} to {allowed[-1]}, but got"
            f" {show(concat)}."
        )
    if len(set(listed)) < len(listed):
        raise GenotypeError(f"{place}: must name each node once but got {show(concat)}.")
    return tuple(sorted(listed))


def _call(text: str) -> ast.Call | None:
    """Return the call of Genotype that a text consists of."""
    try:
        if len(text) > MAX_BYTES:
            return None
        (statement,) = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, TypeError, AttributeError, MemoryError, RecursionError):
        return None
    call = getattr(statement, "value", None)
    is_genotype = isinstance(call, ast.Call) and getattr(call.func, "id", None) == "Genotype"
    return call if isinstance(call, ast.Call) and is_genotype else None


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, or ``range(...)`` of literals as a list."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "range":
        bounds = [ast.literal_eval(argument) for argument in node.args]
        if any(abs(bound) > 1000 for bound in bounds):
            raise ValueError("range out of bounds")
        return list(range(*bounds))
    return ast.literal_eval(node)
