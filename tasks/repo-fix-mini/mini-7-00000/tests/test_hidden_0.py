from sphere.member.train import comet_hunter, finger_anchor, candle_vessel, tower_squad


def test_comet_hunter():
    assert comet_hunter([6, 7, 7, 2]) == 588
    assert comet_hunter([6, 4, 6, 2]) == 288
    assert comet_hunter([8, 5, 7]) == 280
    assert comet_hunter([8, 5, 7, 5]) == 1400
    assert comet_hunter([7, 6]) == 42


def test_finger_anchor():
    assert finger_anchor([6, 4, 6]) == 5
    assert finger_anchor([3, 4, 3, 4]) == 7
    assert finger_anchor([5, 7, 3]) == 6
    assert finger_anchor([6, 9]) == 6
    assert finger_anchor([9, 8, 3, 9]) == -8


def test_candle_vessel():
    assert candle_vessel(19, 19) == False
    assert candle_vessel(7, 35) == True
    assert candle_vessel(30, 30) == False
    assert candle_vessel(27, 26) == False
    assert candle_vessel(72, 72) == False


def test_tower_squad():
    assert tower_squad([46, 87, 54, 76, 35, 53, 80]) == 4
    assert tower_squad([54, 72, 4, 59, 59, 59, 53]) == 5
    assert tower_squad([77, 59, 90, 11, 49, 49]) == 3
    assert tower_squad([37, 68, 75, 59, 46]) == 3
    assert tower_squad([55, 59, 54, 69, 55]) == 5
