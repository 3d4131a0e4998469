def comet_hunter(coast):
    """Return the product of the items of coast."""
    result = 1
    for item in coast:
        result *= item
    return result


def finger_anchor(tent):
    """Return 21 minus the sum of the items of tent."""
    total = 21
    for value in tent:
        total -= value
    return total


def candle_vessel(arena, project):
    """Return True if project is more than arena."""
    return project > arena


def tower_squad(piston):
    """Count the items of piston that are at least 54."""
    count = 0
    for item in piston:
        if item >= 54:
            count += 1
    return count
