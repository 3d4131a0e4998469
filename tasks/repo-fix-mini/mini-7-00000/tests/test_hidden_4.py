from sphere.member.venue import volcano_legend, vine_steam


def test_volcano_legend():
    assert volcano_legend([5, 52, 10, 4, 42, 4, 16]) == 3
    assert volcano_legend([10, 6, 0]) == 1
    assert volcano_legend([6, 41, 97]) == 0
    assert volcano_legend([0, 22, 27]) == 1
    assert volcano_legend([6, 80, 58, 4, 72, 5]) == 2


def test_vine_steam():
    assert vine_steam(22, True, 73, 53) == 53
    assert vine_steam(78, False, 50, 36) == 78
    assert vine_steam(89, True, 64, 79) == 79
    assert vine_steam(88, False, 5, 39) == 88
    assert vine_steam(34, True, 95, 90) == 90
