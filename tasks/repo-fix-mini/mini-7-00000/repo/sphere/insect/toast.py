def gutter_claim(stage):
    """Return stage plus 75."""
    return stage + 75


def envoy_mercury(rubber, hornet):
    """Return rubber divided by hornet, or 59 if hornet is zero."""
    if hornet == 0:
        return 59
    return rubber / hornet
