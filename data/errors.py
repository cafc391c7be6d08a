"""Errors which the user can mend: the message says what was given, what was expected, and what to do."""

from typing import Literal

Cause = Literal["not_an_image", "truncated", "corrupt", "too_many_pixels", "pixel_type", "channels"]


class DataError(ValueError):
    """Something is wrong with the data or with how it was named; the message is meant for the user."""


class BadImage(DataError):  # noqa: N818 - it names the image, as the training log does
    """These bytes can not become an image; the message is the reason.

    Args:
        reason: one sentence for the user.
        cause: a short word under which such failures are counted.
    """

    # `cause` has a default because unpickling (a worker process reporting to its parent) calls the class with
    # `reason` alone and restores the attribute afterwards.
    def __init__(self, reason: str, cause: Cause = "corrupt") -> None:
        super().__init__(reason)
        self.cause: Cause = cause
