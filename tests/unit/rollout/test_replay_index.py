from dataclasses import replace

import pytest
import torch

from lightning_ppo.batch import PromptGroup
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.testing import make_group, make_prompt, make_trajectory


def tokens(*versions: int, generated: tuple[bool, ...] | None = None) -> object:
    """A trajectory whose tokens were sampled with these versions."""
    mask = torch.ones(len(versions), dtype=torch.bool) if generated is None else torch.tensor(generated)
    return replace(
        make_trajectory(response_ids=[6] * len(versions)), policy_versions=torch.tensor(versions), response_mask=mask
    )


@pytest.mark.parametrize(
    ("rows", "oldest"),
    [
        ([tokens(3, 4), tokens(5, 3)], 3),
        # a response kept from before a restart
        ([tokens(3), tokens(2, 2, 3)], 2),
        # the group was dispatched at 3, but every token is newer
        ([tokens(4, 4), tokens(5)], 4),
        # the version of what an environment inserted means nothing
        ([tokens(0, 5, generated=(False, True)), tokens(6)], 5),
        ([tokens(), tokens()], 3),
    ],
)
def test_oldest_version_is_that_of_the_oldest_token(rows: list, oldest: int) -> None:
    group = replace(make_group(0, version=3), trajectories=tuple(rows))
    assert group.oldest_version == oldest


def test_stale_groups_are_found_by_their_oldest_token() -> None:
    buffer = ReplayBuffer(capacity=9, group_size=1)
    for draw, versions in enumerate([(4, 5), (3, 5), (5, 5), (2, 6)]):
        buffer.commit(buffer.reserve(draw, make_prompt(), 5, None).group_id, [tokens(*versions)], 6)
    assert [group.draw for group in buffer.stale(2)] == []
    assert [group.draw for group in buffer.stale(4)] == [3, 1]
    assert [group.draw for group in buffer.stale(5)] == [3, 1, 0]
    buffer.claim([buffer.ready()[3]])
    assert [group.draw for group in buffer.stale(5)] == [1, 0], "what is being trained is no longer looked at"


def groups_of(*slots: tuple[int, int, bool]) -> ReplayBuffer:
    """Slots of (draw, start version, ready)."""
    buffer = ReplayBuffer(capacity=99, group_size=1)
    for draw, version, is_ready in slots:
        group_id = buffer.reserve(draw, make_prompt(), version, None).group_id
        if is_ready:
            buffer.commit(group_id, [make_trajectory(version=version)], version)
    return buffer


def test_lookups_by_start_version() -> None:
    # draw 1 was generated again, draw 3 twice
    index = groups_of((0, 2, True), (1, 4, True), (2, 2, True), (3, 6, True), (4, 3, False), (5, 4, True)).index

    def draws(groups: tuple[PromptGroup, ...]) -> list[int]:
        return [group.draw for group in groups]

    assert draws(index.first_ready(9, 4)) == [0, 1, 2, 5]
    assert draws(index.first_ready(2, 6)) == [0, 1]
    assert draws(index.ready_between(9, 3, 6)) == [1, 3, 5]
    assert draws(index.ready_between(2, 2, 4)) == [0, 1]
    assert draws(index.ready_between(9, 5, 4)) == []
    assert draws(index.ready_of_version(9, 4)) == [1, 5]
    assert draws(index.ready_of_version(1, 4)) == [1]
    assert draws(index.ready_started_before(4)) == [0, 2]
    assert index.ready_versions(0, 5) == (2, 4)
    assert index.live_versions(0, 5) == (2, 3, 4)
    assert index.live_versions(3, 3) == (3,)
    assert [index.has_pending_of_version(version) for version in (2, 3)] == [False, True]
    assert index.find_ready(3).start_version == 6
    assert index.find_ready(4) is None
