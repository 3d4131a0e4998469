from cliff.bunker import wallet_freight, venue_contact


def test_wallet_freight():
    assert wallet_freight("catalog RIder") == "catalog rider"
    assert wallet_freight("copper TEapot") == "copper teapot"
    assert wallet_freight("catalog TEapot") == "catalog teapot"
    assert wallet_freight("teapot COpper") == "teapot copper"


def test_venue_contact():
    assert venue_contact([99, 83, 98, 70, 77, 88, 37]) == 99
    assert venue_contact([78, 68, 54]) == 78
    assert venue_contact([44, 76, 57, 11]) == 76
    assert venue_contact([39, 48, 10, 71, 50]) == 71
    assert venue_contact([35, 58, 65, 42, 47, 53, 37]) == 65
