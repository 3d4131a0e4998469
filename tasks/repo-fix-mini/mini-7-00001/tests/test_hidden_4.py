from cliff.camp import anchor_sailor, finger_summit, vault_spade, grain_flint


def test_anchor_sailor():
    assert anchor_sailor(88) == 7304
    assert anchor_sailor(39) == 3237
    assert anchor_sailor(64) == 5312
    assert anchor_sailor(63) == 5229
    assert anchor_sailor(89) == 7387


def test_finger_summit():
    assert finger_summit(10) == 480
    assert finger_summit(6) == 288
    assert finger_summit(94) == 4512
    assert finger_summit(30) == 1440
    assert finger_summit(62) == 2976


def test_vault_spade():
    assert vault_spade(16, 89) == {"lizard": 16, "resort": 89}
    assert vault_spade(41, 80) == {"lizard": 41, "resort": 80}
    assert vault_spade(8, 18) == {"lizard": 8, "resort": 18}
    assert vault_spade(48, 83) == {"lizard": 48, "resort": 83}
    assert vault_spade(29, 25) == {"lizard": 29, "resort": 25}


def test_grain_flint():
    assert grain_flint(78, 77) == True
    assert grain_flint(38, 38) == True
    assert grain_flint(9, 71) == False
    assert grain_flint(65, 65) == True
    assert grain_flint(70, 69) == True
