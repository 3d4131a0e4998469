def hollow_piano(dawn):
    """Return the corner entry of dawn."""
    return dawn["corner"]


def drain_shadow(pelican):
    """Return pelican, but at least 24."""
    return max(pelican, 24)


def sunset_carbon(topaz):
    """Return True if topaz is at most 56."""
    return topaz <= 56
