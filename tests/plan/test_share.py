import pytest

from phalanx.plan.share import WHOLE, Share


def test_alone_a_replica_takes_everything():
    assert Share() == WHOLE
    assert list(WHOLE.slices(5)) == list(WHOLE.batches(5)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("replicas", [1, 2, 3, 6])
def test_micro_batch_a_of_replica_r_is_slice_a_r_plus_r(replicas):
    shares = [Share((replica,), replicas) for replica in range(replicas)]
    for share in shares:
        expected = [a * replicas + share.own[0] for a in range(6 // replicas)]
        assert list(share.slices(6)) == expected
    assert sorted(number for share in shares for number in share.slices(6)) == list(range(6))


def test_replicas_that_do_not_divide_a_step_are_refused():
    with pytest.raises(ValueError, match="10 micro-batches do not divide among 4 replicas"):
        Share((1,), 4).slices(10)


def test_batches_to_score_need_not_divide():
    assert [list(Share((replica,), 4).batches(6)) for replica in range(4)] == [
        [0, 4],
        [1, 5],
        [2],
        [3],
    ]
    assert list(Share((3,), 4).batches(2)) == []


@pytest.mark.parametrize("numbers", [(1, 1), (-1, 2), (0, 0), (4, 4)])
def test_a_replica_that_is_none_is_refused(numbers):
    with pytest.raises(ValueError, match=f"replica {numbers[0]} is not one of {numbers[1]}"):
        Share((numbers[0],), numbers[1])


def test_a_process_may_run_several_replicas():
    assert Share((0, 3), 4).slices(8) == [0, 3, 4, 7]
    assert Share((1, 2), 4).batches(7) == [1, 2, 5, 6]
