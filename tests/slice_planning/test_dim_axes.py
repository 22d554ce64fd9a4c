"""The axis structure of dims: views, concatenations and unified dims."""

from __future__ import annotations

import pytest

from bigtrain.slice_planning.dim_axes import (
    MISFIT,
    block,
    cut,
    dim_length,
    expanded,
    joined,
    leaves,
    new_dim,
    split_outer,
    unify,
    viewed,
)


def lengths(dim):
    return [axis.length for axis in expanded(dim)]


def reasons(dim):
    return [axis.blocked for axis in leaves(dim)]


def test_a_dim_of_length_one_has_no_axes():
    assert new_dim(1) == []
    assert lengths(new_dim(6)) == [6]


def test_a_view_takes_an_axis_apart_and_puts_it_together():
    width = new_dim(12)
    (rows, heads, inner) = viewed((new_dim(5), width), (5, 3, 4))
    assert (lengths(rows), lengths(heads), lengths(inner)) == ([5], [3], [4])
    assert lengths(width) == [3, 4], "the dim itself is split"
    (flat,) = viewed((rows, heads, inner), (60,))
    assert lengths(flat) == [5, 3, 4]


def test_views_that_do_not_fit_block_the_axes_between():
    first, second, last = new_dim(6), new_dim(4), new_dim(5)
    (first_new, second_new, fitting) = viewed((first, second, last), (8, 3, 5))
    assert reasons(first) == reasons(second) == [MISFIT]
    assert reasons(first_new) == reasons(second_new) == [MISFIT]
    assert expanded(fitting) == expanded(last)
    assert reasons(last) == [""]


def test_unified_dims_are_taken_apart_alike():
    left, right = new_dim(24), new_dim(24)
    unify(left, right)
    split_outer(left, 4)
    assert lengths(right) == [4, 6]
    assert expanded(left) == expanded(right)


def test_products_of_other_factors_are_refined_to_those_that_both_have():
    left, right = new_dim(24), new_dim(24)
    split_outer(left, 2)  # 2 x 12
    split_outer(right, 8)  # 8 x 3
    unify(left, right)
    assert lengths(left) == lengths(right) == [2, 4, 3]


def test_products_that_have_no_common_factors_are_blocked():
    left, right = new_dim(6), new_dim(6)
    split_outer(left, 2)
    split_outer(right, 3)
    unify(left, right)
    assert set(reasons(left)) == {MISFIT}


def test_what_is_blocked_stays_so_when_it_is_taken_apart_or_unified():
    left, right = new_dim(12), new_dim(12)
    block(left, "why")
    unify(right, left)
    split_outer(right, 3)
    assert reasons(right) == ["why", "why"]


def test_a_sum_has_parts_of_which_each_is_taken_apart_by_itself():
    whole = new_dim(20)
    queries, keys = cut(whole, [16, 4])
    heads, _ = split_outer(queries, 4)
    assert lengths(queries) == [4, 4]
    assert lengths(keys) == [4]
    assert len(list(leaves(whole))) == 3
    assert heads[0] in list(leaves(whole))


def test_a_sum_of_products_cuts_the_outermost_axis():
    flat = viewed((new_dim(6), new_dim(4)), (24,))[0]
    first, second = cut(flat, [8, 16])
    assert (lengths(first), lengths(second)) == ([2, 4], [4, 4])
    assert expanded(first)[1] == expanded(second)[1], "both have the same inner axis"


def test_a_cut_through_the_inner_axis_blocks_what_it_cuts_through():
    flat = viewed((new_dim(6), new_dim(4)), (24,))[0]
    assert cut(flat, [6, 18]) is None
    assert all(reason for reason in reasons(flat))


def test_a_sum_is_viewed_as_a_product_where_its_parts_are():
    whole = joined([new_dim(8), new_dim(12)])
    (outer, inner) = viewed((whole,), (5, 4))
    assert (lengths(outer), lengths(inner)) == ([5], [4])
    assert [dim_length(part) for part in expanded(outer)[0].parts] == [2, 3]


def test_three_equal_parts_are_a_product_of_three():
    whole, fused = new_dim(12), new_dim(12)
    first, two, three = cut(whole, [4, 4, 4])
    unify(whole, viewed((fused,), (3, 4))[1] and fused)
    assert expanded(first) == expanded(two) == expanded(three)
    assert dim_length(first) == 4


def test_sums_cut_in_other_places_are_cut_in_all_of_them():
    left, right = new_dim(10), new_dim(10)
    cut(left, [4, 6])
    cut(right, [7, 3])
    unify(left, right)
    assert [dim_length(part) for part in expanded(left)[0].parts] == [4, 3, 3]
    assert expanded(left) == expanded(right)


@pytest.mark.parametrize("shape", [(4, 6), (24,), (4, 2, 3), (2, 2, 6), (2, 12)])
def test_a_view_and_back_is_the_same_dim(shape):
    dims = (new_dim(4), new_dim(6))
    back = viewed(viewed(dims, shape), (4, 6))
    assert [expanded(dim) for dim in back] == [expanded(dim) for dim in dims]
