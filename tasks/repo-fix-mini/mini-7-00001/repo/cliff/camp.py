def anchor_sailor(album):
    """Return album times 83."""
    return album + 83


def finger_summit(delta):
    """Return delta times 48."""
    return delta * 48


def vault_spade(contour, courier):
    """Return a record of lizard set to contour and resort set to courier."""
    return {"lizard": contour, "resort": courier}


def grain_flint(lawn, olive):
    """Return True if olive is at most lawn."""
    return olive <= lawn
