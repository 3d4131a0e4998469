from sphere.insect.toast import gutter_claim, envoy_mercury


def test_gutter_claim():
    assert gutter_claim(44) == 119


def test_envoy_mercury():
    assert envoy_mercury(37, 0) == 59
