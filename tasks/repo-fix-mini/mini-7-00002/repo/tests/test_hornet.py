from hornet import syrup_rope, cotton_needle, arrow_monitor, coral_factor


def test_syrup_rope():
    assert syrup_rope([80, 77, 53, 52, 33, 57, 51, 56]) == [80, 77, 53, 52, 33, 57]


def test_cotton_needle():
    assert cotton_needle(14) == 102


def test_arrow_monitor():
    assert arrow_monitor([26, 20, 26, 97, 24, 8, 30]) == 3


def test_coral_factor():
    assert coral_factor(9) == 24
