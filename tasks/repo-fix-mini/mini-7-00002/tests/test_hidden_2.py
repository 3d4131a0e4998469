from counter import marker_delta, signet_brook


def test_marker_delta():
    assert marker_delta(10) == 49
    assert marker_delta(6) == 15
    assert marker_delta(7) == 22
    assert marker_delta(11) == 60
    assert marker_delta(12) == 72


def test_signet_brook():
    assert signet_brook([74, 71, 1, 67, 29, 94, 27, 78]) == [74, 71, 1]
    assert signet_brook([1, 56, 54, 29, 44, 84, 39, 57, 80, 78]) == [1, 56, 54]
    assert signet_brook([59, 88, 12, 56, 4, 44, 16, 28]) == [59, 88, 12]
    assert signet_brook([77, 1, 14, 31, 11, 94, 59, 69]) == [77, 1, 14]
    assert signet_brook([16, 18, 48, 97, 98, 43, 47, 75]) == [16, 18, 48]
