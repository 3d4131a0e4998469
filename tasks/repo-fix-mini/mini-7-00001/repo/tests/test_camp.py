from cliff.camp import anchor_sailor, finger_summit, vault_spade, grain_flint


def test_anchor_sailor():
    assert anchor_sailor(8) == 664


def test_finger_summit():
    assert finger_summit(12) == 576


def test_vault_spade():
    assert vault_spade(71, 81) == {"lizard": 71, "resort": 81}


def test_grain_flint():
    assert grain_flint(27, 59) == False
