from sphere.member.train import comet_hunter, finger_anchor, candle_vessel, tower_squad


def test_comet_hunter():
    assert comet_hunter([6, 5]) == 30


def test_finger_anchor():
    assert finger_anchor([8, 2, 5, 9]) == -3


def test_candle_vessel():
    assert candle_vessel(64, 64) == False


def test_tower_squad():
    assert tower_squad([40, 68, 59, 86, 55, 59]) == 5
