def cotton_award(badge):
    """Return badge in title case."""
    return badge.title()


def wheat_bottom(blade):
    """Return the smallest item of blade."""
    return sorted(blade)
