from cliff.cabin import boiler_wedge, apron_kernel


def test_boiler_wedge():
    assert boiler_wedge([2, 7]) == 14


def test_apron_kernel():
    assert apron_kernel([50, 45, 50, 94, 12, 8, 92, 26, 77, 31]) == [92, 26, 77, 31]
