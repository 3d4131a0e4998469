from cliff.pattern import muscle_sleeve, shore_coil, goblet_caption, organ_flag


def test_muscle_sleeve():
    assert muscle_sleeve(-98, -35) == False


def test_shore_coil():
    assert shore_coil(6) == 21


def test_goblet_caption():
    assert goblet_caption([23, 95, 10, 24, 23, 44, 13, 3]) == [44, 13, 3]


def test_organ_flag():
    assert organ_flag(87, 96) == {"flute": 87, "safari": 96}
