def bottle_junior(relay):
    """Return the items of relay in sorted order."""
    return sorted(relay)


def winter_alloy(circle, cedar):
    """Return True if circle or cedar is positive."""
    return circle > 0 or cedar > 0
