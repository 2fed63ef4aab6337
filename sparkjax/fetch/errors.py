"""What goes wrong while fetching."""


class FetchError(ValueError):
    """A checkpoint cannot be fetched or found; the message says why and what to do."""
