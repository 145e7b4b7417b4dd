"""Results of the paper's ablations, as printed there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperRow:
    """One line of a table of the paper.

    Parameters
    ----------
    error
        Test error in percent.
    spread
        Its standard deviation, where it is given.
    parameters, multiply_adds
        Size of the final model, in millions.
    gpu_days
        GPU-days of the search.
    """

    error: float
    spread: float | None = None
    parameters: float | None = None
    multiply_adds: float | None = None
    gpu_days: float | None = None


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper.

    Parameters
    ----------
    title
        The comparison.
    source
        Appendix or section, and the label of the table in the paper's source.
    measure
        The meaning of its errors.
    rows
        The rows, by the names of the variants in our configurations.
    """

    title: str
    source: str
    measure: str
    rows: dict[str, PaperRow]


_ILSVRC = "top-1 test error of the best model, transferred to ILSVRC"
_CIFAR = (
    "test error on CIFAR-10, average over five searches of their most accurate models under 60M"
    " multiply-adds"
)

#: By the names that the tables have in our configurations.
PAPER: dict[str, PaperTable] = {
    "space": PaperTable(
        "Search space: direct versus proxy",
        "appendix B.2, tab:direct_vs_proxy",
        _ILSVRC,
        {
            "direct": PaperRow(26.9, None, 4.4, 583, 15.3),
            "proxy": PaperRow(26.3, None, 4.8, 598, 5),
        },
    ),
    "merge": PaperTable(
        "op_merge in cell-search: weighted sum, concatenation-projection at the end, or always",
        "appendix B.3, tab:imagenet_ws_vs_cp",
        f"{_ILSVRC}; searched directly at N=6, F=32",
        {
            "WS": PaperRow(32.7, None, 3.3, 477, 22.8),
            "CP-end": PaperRow(27.2, None, 4.7, 630, 22.8),
            "concat-project": PaperRow(26.9, None, 4.4, 583, 15.3),
        },
    ),
    "merge_macro": PaperTable(
        "op_merge in macro-search: weighted sum, concatenation-projection at the end, or always",
        "appendix B.3, tab:imagenet_ws_vs_cp",
        f"{_ILSVRC}; searched directly at N=6, F=32",
        {
            "WS": PaperRow(32.5, None, 5.9, 756, 29.5),
            "CP-end": PaperRow(29.1, None, 5.4, 680, 29.5),
            "concat-project": PaperRow(29.4, None, 4.9, 593, 27.2),
        },
    ),
    "weak_learning": PaperTable(
        "Weak learning: joint versus isolated",
        "appendix B.4, tab:imagenet_soft_vs_hard",
        f"{_ILSVRC}; searched directly at N=6, F=32",
        {
            "joint": PaperRow(32.8, None, 4.0, 546, 20.6),
            "isolated": PaperRow(26.9, None, 4.4, 583, 15.3),
        },
    ),
    "i_max": PaperTable(
        "I_max, the number of merged operations",
        "appendix B.5, tab:cifar10_search_choose_i",
        _CIFAR,
        {
            "I_max = 2": PaperRow(3.08),
            "I_max = 3": PaperRow(2.88),
            "I_max = 4": PaperRow(2.93),
        },
    ),
    "l1": PaperTable(
        "λ, the L1 regularization constant",
        "appendix B.6, tab:cifar10_search_choose_lambda",
        _CIFAR,
        {
            "λ = 0.1": PaperRow(3.02),
            "λ = 0.001": PaperRow(2.88),
            "λ = 0.00001": PaperRow(3.13),
        },
    ),
    "mode": PaperTable(
        "Cell-search versus macro-search",
        "section 5, tab:cifar10_search",
        "test error on CIFAR-10 of one model each, five final trainings; transferred to ILSVRC"
        " (tab:imagenet_compare) cell has 26.3 ± 0.20, macro 28.7 ± 0.15",
        {
            "cell": PaperRow(2.87, 0.13, 2.5, None, 5),
            "macro": PaperRow(2.85, 0.12, 2.2, None, 5),
        },
    ),
}
