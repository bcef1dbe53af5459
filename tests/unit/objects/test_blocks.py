"""Page-aligned blocks: alignment, copies, and the pool that reuses them."""

from __future__ import annotations

import pytest

from holdfast.objects.blocks import PAGE_BYTES, BlockPool, GrowingBlock, copy_bytes, is_aligned, new_block


@pytest.mark.parametrize("huge", [False, True])
def test_a_new_block_is_aligned_writable_and_zero(huge: bool) -> None:
    block = new_block(3 * PAGE_BYTES, huge=huge)
    assert bytes(block) == bytes(3 * PAGE_BYTES)
    block[:3] = b"abc"
    assert is_aligned(block, 0)


@pytest.mark.parametrize(("skipped", "start", "aligned"), [(0, PAGE_BYTES, True), (0, 1, False), (1, 0, False)])
def test_memory_and_offset_must_both_be_aligned(skipped: int, start: int, aligned: bool) -> None:
    assert is_aligned(new_block(2 * PAGE_BYTES)[skipped:], start) is aligned


def test_read_only_memory_counts_as_not_aligned() -> None:
    assert not is_aligned(new_block(PAGE_BYTES).toreadonly(), 0)


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 20])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_copy_has_the_same_bytes(size: int, read_only: bool) -> None:
    source = memoryview(bytearray(number % 251 for number in range(size)))
    target = memoryview(bytearray(size))
    copy_bytes(target, source.toreadonly() if read_only else source)
    assert target == source


def test_a_pool_lends_a_block_again_and_keeps_only_so_many() -> None:
    pool = BlockPool(PAGE_BYTES, kept=1)
    with pool.lend() as first:
        with pool.lend() as second:
            assert first is not second
    # The inner block was returned first, so it is the one that is kept.
    assert pool.take() is second
    other = pool.take()
    assert other is not first
    assert other is not second


def test_a_block_is_returned_after_an_error() -> None:
    pool = BlockPool(PAGE_BYTES, kept=1)
    with pytest.raises(ZeroDivisionError), pool.lend() as block:
        raise ZeroDivisionError
    assert pool.take() is block


@pytest.mark.parametrize("expected_bytes", [1, 10 << 20])
def test_appended_bytes_are_copied_and_kept_in_order(expected_bytes: int) -> None:
    block, all_bytes = GrowingBlock(expected_bytes), bytearray()
    for number, size in enumerate((0, 5, 100_000, 3 << 20, 1, 9 << 20, 4 << 20)):
        data = bytearray([number + 1]) * size
        block.append(memoryview(data))
        all_bytes += data
        data[:] = bytes(size)

    assert block.find() == all_bytes
