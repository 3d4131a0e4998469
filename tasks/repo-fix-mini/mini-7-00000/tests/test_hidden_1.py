from sphere.insect.toast import gutter_claim, envoy_mercury


def test_gutter_claim():
    assert gutter_claim(62) == 137
    assert gutter_claim(45) == 120
    assert gutter_claim(26) == 101
    assert gutter_claim(76) == 151
    assert gutter_claim(48) == 123


def test_envoy_mercury():
    assert envoy_mercury(11, 0) == 59
    assert envoy_mercury(11, 8) == 1.375
    assert envoy_mercury(55, 2) == 27.5
    assert envoy_mercury(25, 4) == 6.25
    assert envoy_mercury(40, 10) == 4.0
