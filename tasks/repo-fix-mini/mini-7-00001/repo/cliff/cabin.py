def boiler_wedge(storm):
    """Return the product of the items of storm."""
    amount = 1
    for value in storm:
        amount *= value
    return amount


def apron_kernel(bench):
    """Return the last 4 items of bench."""
    return bench[-4:]
