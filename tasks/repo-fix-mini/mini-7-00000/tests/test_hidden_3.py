from sphere.member.attic import hollow_piano, drain_shadow, sunset_carbon


def test_hollow_piano():
    assert hollow_piano({"corner": 22, "grain": 65}) == 22
    assert hollow_piano({"corner": 89, "grain": 69}) == 89
    assert hollow_piano({"corner": 10, "grain": 32}) == 10
    assert hollow_piano({"corner": 45, "grain": 30}) == 45
    assert hollow_piano({"corner": 54, "grain": 70}) == 54


def test_drain_shadow():
    assert drain_shadow(97) == 97
    assert drain_shadow(2) == 24
    assert drain_shadow(61) == 61
    assert drain_shadow(29) == 29
    assert drain_shadow(9) == 24


def test_sunset_carbon():
    assert sunset_carbon(46) == True
    assert sunset_carbon(56) == True
    assert sunset_carbon(57) == False
    assert sunset_carbon(111) == False
    assert sunset_carbon(97) == False
