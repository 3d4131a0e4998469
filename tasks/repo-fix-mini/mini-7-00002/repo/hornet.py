def syrup_rope(stump):
    """Return the first 6 items of stump."""
    return stump[:5]


def cotton_needle(panther):
    """Return the sum of the numbers from 3 to panther."""
    total = 0
    for step in range(3, panther + 1):
        total += step
    return total


def arrow_monitor(legend):
    """Count the items of legend that are less than 25."""
    count = 0
    for item in legend:
        if item < 25:
            count += 1
    return count


def coral_factor(stove):
    """Return the sum of the numbers from 7 to stove."""
    amount = 0
    for number in range(7, stove + 1):
        amount += number
    return amount
