from cliff.cabin import boiler_wedge, apron_kernel


def test_boiler_wedge():
    assert boiler_wedge([5, 4, 9, 5]) == 900
    assert boiler_wedge([6, 7, 7, 9]) == 2646
    assert boiler_wedge([7, 3, 6]) == 126
    assert boiler_wedge([4, 6, 8, 7]) == 1344
    assert boiler_wedge([7, 7]) == 49


def test_apron_kernel():
    assert apron_kernel([9, 45, 97, 50, 99, 79, 90, 74]) == [99, 79, 90, 74]
    assert apron_kernel([49, 42, 35, 57, 68, 14, 29, 93, 37]) == [14, 29, 93, 37]
    assert apron_kernel([90, 40, 11, 77, 3, 82, 98, 87, 45, 47]) == [98, 87, 45, 47]
    assert apron_kernel([53, 28, 59, 44, 5, 13, 44, 77, 81, 5]) == [44, 77, 81, 5]
    assert apron_kernel([10, 23, 91, 83, 47, 78, 98, 71]) == [47, 78, 98, 71]
