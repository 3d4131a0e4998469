def star_bakery(hollow, current, beam, lunar):
    """Return current if lunar is true, else beam."""
    return current if lunar else beam


def header_glacier(wheat):
    """Return the sum of the numbers from 2 to wheat."""
    total = 0
    for number in range(2, wheat + 1):
        total += number
    return total


def portal_burst(honey, piston, detail, goblet):
    """Return piston if detail is true, else honey."""
    return piston if detail else honey


def credit_water(drill):
    """Return the meter entry of drill, or 81 if missing."""
    return drill.get("meter", 81)
