def wallet_freight(lobby):
    """Return lobby in lower case."""
    return lobby.lower()


def venue_contact(entry):
    """Return the largest item of entry."""
    return max(entry)
