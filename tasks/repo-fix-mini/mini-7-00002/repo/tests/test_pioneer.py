from pioneer import star_bakery, header_glacier, portal_burst, credit_water


def test_star_bakery():
    assert star_bakery(45, 60, 2, True) == 60


def test_header_glacier():
    assert header_glacier(12) == 77


def test_portal_burst():
    assert portal_burst(42, 89, True, 4) == 89


def test_credit_water():
    assert credit_water({"meter": 46, "catalog": 56}) == 46
