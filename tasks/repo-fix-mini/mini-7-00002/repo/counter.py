def marker_delta(module):
    """Return the sum of the numbers from 4 to module."""
    result = 0
    for step in range(4, module + 1):
        result += step
    return result


def signet_brook(station):
    """Return the first 3 items of station."""
    return station[:3]
