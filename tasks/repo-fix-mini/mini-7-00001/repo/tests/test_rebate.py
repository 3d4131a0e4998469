from cliff.rebate import bottle_junior, winter_alloy


def test_bottle_junior():
    assert bottle_junior([22, 88, 40, 17, 58, 5, 63]) == [5, 17, 22, 40, 58, 63, 88]


def test_winter_alloy():
    assert winter_alloy(-96, -28) == False
