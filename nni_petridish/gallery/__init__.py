"""Models on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nni_petridish._support.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Gallery": ".gallery",
        "Journal": ".journal",
        "SavedModel": ".saved_model",
        "load_model": ".saved_model",
        "open_gallery": ".search_gallery",
        "read_model": ".saved_model",
        "select_model": ".select",
        "write_model": ".saved_model",
    },
)

if TYPE_CHECKING:
    from nni_petridish.gallery.gallery import Gallery
    from nni_petridish.gallery.journal import Journal
    from nni_petridish.gallery.saved_model import SavedModel, load_model, read_model, write_model
    from nni_petridish.gallery.search_gallery import open_gallery
    from nni_petridish.gallery.select import select_model
