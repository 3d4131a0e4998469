from cliff.pattern import muscle_sleeve, shore_coil, goblet_caption, organ_flag


def test_muscle_sleeve():
    assert muscle_sleeve(57, -44) == True
    assert muscle_sleeve(30, 58) == True
    assert muscle_sleeve(74, 7) == True
    assert muscle_sleeve(-8, -65) == False
    assert muscle_sleeve(-27, -39) == False


def test_shore_coil():
    assert shore_coil(11) == 66
    assert shore_coil(3) == 6
    assert shore_coil(8) == 36
    assert shore_coil(5) == 15


def test_goblet_caption():
    assert goblet_caption([16, 39, 12, 37, 1, 46, 34, 94, 37]) == [34, 94, 37]
    assert goblet_caption([90, 87, 46, 75, 76, 57, 14, 87, 69]) == [14, 87, 69]
    assert goblet_caption([53, 40, 4, 93, 85, 39, 61, 1, 11]) == [61, 1, 11]
    assert goblet_caption([90, 23, 5, 66, 92, 16, 92, 44]) == [16, 92, 44]
    assert goblet_caption([25, 94, 81, 12, 33, 86, 57, 1]) == [86, 57, 1]


def test_organ_flag():
    assert organ_flag(64, 51) == {"flute": 64, "safari": 51}
    assert organ_flag(57, 32) == {"flute": 57, "safari": 32}
    assert organ_flag(66, 10) == {"flute": 66, "safari": 10}
    assert organ_flag(30, 27) == {"flute": 30, "safari": 27}
    assert organ_flag(17, 41) == {"flute": 17, "safari": 41}
