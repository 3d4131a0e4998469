from cliff.bunker import wallet_freight, venue_contact


def test_wallet_freight():
    assert wallet_freight("rider CAtalog") == "rider catalog"


def test_venue_contact():
    assert venue_contact([5, 93, 79]) == 93
