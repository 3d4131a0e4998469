from counter import marker_delta, signet_brook


def test_marker_delta():
    assert marker_delta(15) == 114


def test_signet_brook():
    assert signet_brook([94, 47, 26, 48, 27, 2, 31, 35, 17]) == [94, 47, 26]
