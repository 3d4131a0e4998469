from hornet import syrup_rope, cotton_needle, arrow_monitor, coral_factor


def test_syrup_rope():
    assert syrup_rope([20, 34, 61, 50, 48, 21, 20, 40]) == [20, 34, 61, 50, 48, 21]
    assert syrup_rope([58, 35, 42, 59, 87, 85, 85, 1, 80, 33]) == [58, 35, 42, 59, 87, 85]
    assert syrup_rope([99, 35, 58, 20, 49, 70, 16, 61, 73, 89]) == [99, 35, 58, 20, 49, 70]
    assert syrup_rope([32, 47, 88, 96, 18, 17, 5, 15, 6, 57]) == [32, 47, 88, 96, 18, 17]
    assert syrup_rope([16, 60, 48, 72, 57, 92, 43, 32]) == [16, 60, 48, 72, 57, 92]


def test_cotton_needle():
    assert cotton_needle(12) == 75
    assert cotton_needle(7) == 25
    assert cotton_needle(11) == 63
    assert cotton_needle(8) == 33
    assert cotton_needle(6) == 18


def test_arrow_monitor():
    assert arrow_monitor([59, 25, 30, 26]) == 0
    assert arrow_monitor([25, 24, 26, 30]) == 1
    assert arrow_monitor([24, 26, 91]) == 1
    assert arrow_monitor([81, 26, 76, 57, 25, 25, 25]) == 0
    assert arrow_monitor([25, 25, 61, 30, 39, 50]) == 0


def test_coral_factor():
    assert coral_factor(15) == 99
    assert coral_factor(16) == 115
    assert coral_factor(19) == 169
    assert coral_factor(13) == 70
    assert coral_factor(18) == 150
