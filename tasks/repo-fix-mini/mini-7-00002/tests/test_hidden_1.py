from pioneer import star_bakery, header_glacier, portal_burst, credit_water


def test_star_bakery():
    assert star_bakery(43, 82, 51, False) == 51
    assert star_bakery(50, 34, 93, True) == 34
    assert star_bakery(32, 75, 33, True) == 75
    assert star_bakery(25, 47, 7, True) == 47
    assert star_bakery(90, 5, 28, True) == 5


def test_header_glacier():
    assert header_glacier(7) == 27
    assert header_glacier(13) == 90
    assert header_glacier(9) == 44
    assert header_glacier(6) == 20


def test_portal_burst():
    assert portal_burst(74, 25, True, 23) == 25
    assert portal_burst(67, 62, False, 68) == 67
    assert portal_burst(48, 39, True, 44) == 39
    assert portal_burst(31, 16, True, 99) == 16
    assert portal_burst(23, 61, True, 56) == 61


def test_credit_water():
    assert credit_water({"catalog": 58}) == 81
    assert credit_water({"catalog": 22}) == 81
    assert credit_water({"meter": 40}) == 40
    assert credit_water({"catalog": 19}) == 81
    assert credit_water({"meter": 36, "catalog": 34}) == 36
