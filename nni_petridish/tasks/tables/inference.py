"""Predictions for rows of a table as users have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.core.modes import evaluation_mode
from nni_petridish.errors import ConfigError, DataError, show
from nni_petridish.tasks.plain_network import PlainNetwork, uniform
from nni_petridish.tasks.tables.table import Column

UNKNOWN_COLUMNS = "The columns of the table are unknown: the file of the model lacks them."


class RowPredictor:
    """Predictions of a classifier for rows.

    Parameters
    ----------
    net
        The network; it takes standardized features.
    facts
        The facts of its `SavedModel`, see `nni_petridish.tasks.tables.task.facts_of`.
    """

    def __init__(self, net: nn.Module, facts: Mapping[str, Any]) -> None:
        self._net, self._facts = net, facts

    def __call__(self, rows: Any, *, names: bool = False) -> Tensor | list[str]:
        """Return the class of each row.

        Parameters
        ----------
        rows
            Mappings from the names of the columns to cells, or sequences of cells in the order of
            the columns, such as an array of numbers. Cells are as in the file. A DataFrame df of
            pandas is ``df.to_dict("records")``.
        names
            Whether to return the names of the classes instead of their numbers.
        """
        features = self._features(rows)
        mean, std = normalization(self._facts)
        device = next(self._net.parameters()).device
        with torch.no_grad(), evaluation_mode(self._net):
            standard = ((features - mean) / std).nan_to_num().float()
            labels = self._net(standard.to(device)).argmax(1).cpu()
        if not names:
            return labels
        return [str(self._facts["classes"][label]) for label in labels.tolist()]

    def _features(self, rows: Any) -> Tensor:
        if "columns" not in self._facts:
            raise DataError(UNKNOWN_COLUMNS)
        columns = [
            Column(str(column["name"]), tuple(column.get("values", ())))
            for column in self._facts["columns"]
        ]
        if isinstance(rows, str | Mapping) or not hasattr(rows, "__iter__"):
            raise DataError(f"rows must be a list of rows but got {show(rows, 60)}.")
        features = [
            [
                number
                for column, cell in zip(columns, cells, strict=True)
                for number in column.features(cell)
            ]
            for cells in (self._cells(i, row, columns) for i, row in enumerate(rows))
        ]
        width = sum(column.width for column in columns)
        return torch.tensor(features, dtype=torch.float64).reshape(-1, width)

    def _cells(self, index: int, row: Any, columns: Sequence[Column]) -> list[Any]:
        if isinstance(row, Mapping):
            for column in columns:
                if column.name not in row:
                    raise DataError(f"row {index} must have the column {column.name!r}.")
            return [_plain(row[column.name]) for column in columns]
        cells = row.tolist() if hasattr(row, "tolist") else row
        if not isinstance(cells, Sequence) or isinstance(cells, str) or len(cells) != len(columns):
            raise DataError(
                f"row {index} must have {len(columns)} cells, one for each column, but got"
                f" {show(row, 60)}."
            )
        return [_plain(cell) for cell in cells]


def normalization(facts: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each feature."""
    statistics = facts.get("normalisation")
    if statistics is None:
        raise ConfigError(UNKNOWN_COLUMNS)
    mean, std = (torch.tensor(statistics[key], dtype=torch.float64) for key in ("mean", "std"))
    return mean, std


def row_classifier(
    net: nn.Module, space: Mapping[str, Any], facts: Mapping[str, Any], raw: bool
) -> PlainNetwork:
    """Return a network that takes the features of rows, raw or standardized.

    Parameters
    ----------
    net
        The network, in eval mode.
    space
        All options of its space.
    facts
        The facts of its `SavedModel`; ``columns`` says which features a row has.
    raw
        Whether the network standardizes the features itself.
    """
    width = int(space["num_features"])
    if not raw:
        return PlainNetwork(net, net, lambda n: (uniform(n, width),), ("input",), ("logits",))
    mean, std = (value.float() for value in normalization(facts))
    whole = _Standardized(net, mean, std).eval()

    def features(n: int) -> tuple[Tensor]:
        return (mean + std * (4 * uniform(n, width) - 2),)

    return PlainNetwork(whole, whole, features, ("features",), ("logits",))


class _Standardized(nn.Module):
    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.net = net

    def forward(self, features: Tensor) -> Tensor:
        result: Tensor = self.net((features - self.mean) / self.std)
        return result


def _plain(cell: Any) -> Any:
    """Return a cell with nothing for None, as in the file."""
    return "" if cell is None else cell
