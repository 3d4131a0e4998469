from cliff.rebate import bottle_junior, winter_alloy


def test_bottle_junior():
    assert bottle_junior([21, 56, 94, 75]) == [21, 56, 75, 94]
    assert bottle_junior([35, 53, 51, 76]) == [35, 51, 53, 76]
    assert bottle_junior([42, 95, 91, 54, 66]) == [42, 54, 66, 91, 95]
    assert bottle_junior([6, 16, 53, 20, 17, 94, 69]) == [6, 16, 17, 20, 53, 69, 94]
    assert bottle_junior([13, 99, 57]) == [13, 57, 99]


def test_winter_alloy():
    assert winter_alloy(-60, 43) == True
    assert winter_alloy(82, -34) == True
    assert winter_alloy(38, -41) == True
    assert winter_alloy(-29, 16) == True
    assert winter_alloy(54, 34) == True
