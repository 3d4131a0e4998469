from sphere.member.venue import volcano_legend, vine_steam


def test_volcano_legend():
    assert volcano_legend([21, 6, 17]) == 0


def test_vine_steam():
    assert vine_steam(59, True, 58, 38) == 38
