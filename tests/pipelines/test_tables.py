from pipelines.tables import moment, size, table


def test_numbers_stand_right_and_words_left() -> None:
    assert table(["name", "n"], [["a", 1], ["bbbbb", 200]]) == "name     n\na        1\nbbbbb  200"


def test_a_table_of_nothing_is_its_head() -> None:
    assert table(["name", "n"], []) == "name  n"


def test_sizes_and_times_are_short() -> None:
    assert (size(1_500_000), size(900)) == ("1.5 MB", "0.9 kB")
    assert moment(0) == "1970-01-01 00:00"
