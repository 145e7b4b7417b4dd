"""A bar over the growths of a search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from nni_petridish.search.search import Search


class Progress:
    """A bar over the growths of a search, with the best error so far; lines where no bar fits.

    Parameters
    ----------
    total
        The largest number of models; None without a limit.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._bar = tqdm(total=total, desc="models", unit="model", disable=None)
        self._shown = -1

    def show(self, search: Search) -> None:
        """Show the present state of the search."""
        models, best = len(search.models()), search.best()
        if models == self._shown:
            return
        if self._shown < 0:
            self._bar.initial = models
        self._shown = models
        text = f"best error {best.error:.4f}" if best else "training the seed"
        if self._bar.disable:
            of = f" of at most {self._total}" if self._total else ""
            print(f"{models}{of} models, {text}", flush=True)
        else:
            self._bar.n = models
            self._bar.set_postfix_str(text)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()
