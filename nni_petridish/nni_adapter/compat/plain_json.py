"""Messages of NNI's manager read as plain JSON.

NNI reads them with json_tricks, by which a message can name classes to import and bytes to
unpickle. Whoever can send the manager a request could run code in the tuner and in the trials. Our
messages are plain. This module imports no torch.
"""

from __future__ import annotations

import functools
from typing import IO, Any

import nni
import nni.common
import nni.common.serializer
import nni.runtime.msg_dispatcher
import nni.runtime.msg_dispatcher_base
import nni.runtime.trial_command_channel.local_legacy

from nni_petridish._support.reading import parse_json

_READERS = (
    nni,
    nni.common,
    nni.common.serializer,
    nni.runtime.msg_dispatcher,
    nni.runtime.msg_dispatcher_base,
    nni.runtime.trial_command_channel.local_legacy,
)


@functools.cache
def read_plain_json() -> None:
    """Make this process read messages as plain JSON, for good; only for a tuner or a trial."""
    for module in _READERS:
        module.load = load


def load(string: str | None = None, *, fp: IO[str] | None = None, **options: Any) -> Any:
    """Parse JSON as `nni.load` does, but return plain data only.

    >>> load('{"__class__": 1}')
    {'__class__': 1}
    """
    text = fp.read() if fp is not None else string
    if not isinstance(text, str):
        raise TypeError(f"expected a text but got {type(text).__name__}")
    return parse_json(text)
