"""Standard output that may be closed, or know fewer characters than what is written has."""

from __future__ import annotations

import contextlib
import os
import sys

__all__ = ["no_more_output", "printed"]


def printed(text: object) -> None:
    """Print ``text`` for whoever reads it; that nobody does, or not all of it can be shown, is no error.

    A character that the encoding of the output lacks becomes a question mark.
    """
    out = sys.stdout
    if out is None:  # of a process without a console
        return
    try:
        try:
            print(text)
        except UnicodeEncodeError:
            encoding = getattr(out, "encoding", None) or "ascii"
            print(str(text).encode(encoding, "replace").decode(encoding))
        out.flush()
    except BrokenPipeError:
        no_more_output()
    except (OSError, ValueError):  # a full disk; a file that is closed
        return


def no_more_output() -> None:
    """Leave what is still to be written to nobody: the reader has gone, which Python would complain of at its end."""
    with contextlib.suppress(OSError, ValueError):  # a stand-in has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
