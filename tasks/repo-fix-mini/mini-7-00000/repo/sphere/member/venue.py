def volcano_legend(circuit):
    """Count the items of circuit that are at most 5."""
    count = 0
    for entry in circuit:
        if entry <= 5:
            count += 1
    return count


def vine_steam(domain, canyon, bucket, brick):
    """Return brick if canyon is true, else domain."""
    return brick if canyon else domain
