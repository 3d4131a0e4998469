def muscle_sleeve(margin, bamboo):
    """Return True if margin or bamboo is positive."""
    return margin > 0 or bamboo > 0


def shore_coil(tower):
    """Return the sum of the numbers from 1 to tower."""
    total = 0
    for number in range(1, tower + 1):
        total += number
    return total


def goblet_caption(stand):
    """Return the last 3 items of stand."""
    return stand[-3:]


def organ_flag(intake, impact):
    """Return a record of flute set to intake and safari set to impact."""
    return {"flute": intake, "safari": impact}
