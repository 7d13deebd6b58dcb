import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harnessrl_jax.sampler.pages import SCRATCH, PageTable, chunk_keys


def keys(*tokens, chunk=4):
    return chunk_keys(np.array(tokens, np.int32), chunk)


def test_keys_stand_for_everything_before_the_chunks_end():
    one, two = keys(1, 2, 3, 4, 5, 6, 7, 8), keys(1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert one == two[:2]
    assert len(two) == 3
    assert keys(1, 2, 3, 4, 5, 6, 7, 9)[0] == one[0]
    assert keys(1, 2, 3, 4, 5, 6, 7, 9)[1] != one[1]
    # The second chunk is the same, what stands before it is not.
    assert keys(0, 2, 3, 4, 5, 6, 7, 8)[1] != one[1]


def test_a_short_chunk_is_not_a_full_one():
    assert keys(1, 2, 3)[0] not in keys(1, 2, 3, 0)


def test_only_a_run_from_the_start_counts():
    table = PageTable(4)
    first, second, third = keys(*range(12))
    pages = [table.claim(first), table.claim(third)]
    assert SCRATCH not in pages
    assert table.leading([first, second, third]) == pages[:1]
    assert table.leading([second, third]) == []


def test_the_chunk_used_longest_ago_goes_first():
    table = PageTable(2)
    old, young = table.claim(b"old"), table.claim(b"young")
    table.leading([b"old"])
    assert table.claim(b"new") == young
    assert table.leading([b"old"]) == [old]
    assert table.leading([b"young"]) == []


def test_the_start_of_a_prompt_outlives_its_end():
    table = PageTable(3)
    prompt = keys(*range(12))
    for key in prompt:
        table.claim(key)
    table.leading(prompt)
    table.claim(b"other")
    assert len(table.leading(prompt)) == 2


def test_a_chunk_keeps_its_page():
    table = PageTable(2)
    assert table.claim(b"a") == table.claim(b"a")
    assert len(table) == 1


def test_without_pages_nothing_is_kept():
    table = PageTable(0)
    assert table.claim(b"a") == SCRATCH
    assert table.leading([b"a"]) == []


def test_clear_forgets_everything():
    table = PageTable(3)
    for name in (b"a", b"b"):
        table.claim(name)
    table.clear()
    assert len(table) == 0
    assert table.leading([b"a"]) == []
    assert sorted(table.claim(name) for name in (b"x", b"y", b"z")) == [1, 2, 3]


@given(st.lists(st.sampled_from("abcdefgh"), max_size=60))
def test_a_page_never_holds_two_chunks(names):
    table, written = PageTable(3), {}
    for name in names:
        page = table.claim(name.encode())
        written[page] = name
        for kept in "abcdefgh":
            for found in table.leading([kept.encode()]):
                assert written[found] == kept
    assert len(table) <= 3
