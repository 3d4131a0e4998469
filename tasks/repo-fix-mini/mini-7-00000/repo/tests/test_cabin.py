from sphere.member.cabin import cotton_award, wheat_bottom


def test_cotton_award():
    assert cotton_award("onion MUscle") == "Onion Muscle"


def test_wheat_bottom():
    assert wheat_bottom([22, 77, 33, 32, 30, 47]) == 22
