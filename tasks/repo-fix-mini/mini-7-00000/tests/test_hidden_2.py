from sphere.member.cabin import cotton_award, wheat_bottom


def test_cotton_award():
    assert cotton_award("needle MUscle") == "Needle Muscle"
    assert cotton_award("muscle IMpact") == "Muscle Impact"
    assert cotton_award("muscle ONion") == "Muscle Onion"
    assert cotton_award("impact ONion") == "Impact Onion"


def test_wheat_bottom():
    assert wheat_bottom([88, 32, 30, 77, 62, 18]) == 18
    assert wheat_bottom([13, 53, 2, 7]) == 2
    assert wheat_bottom([92, 47, 90, 84, 82, 16, 8]) == 8
    assert wheat_bottom([90, 74, 39, 92]) == 39
    assert wheat_bottom([54, 7, 18, 78]) == 7
