from sphere.member.attic import hollow_piano, drain_shadow, sunset_carbon


def test_hollow_piano():
    assert hollow_piano({"corner": 91, "grain": 32}) == 91


def test_drain_shadow():
    assert drain_shadow(109) == 109


def test_sunset_carbon():
    assert sunset_carbon(55) == True
