import dataclasses
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from draws import train
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ppo.batch import PromptGroup, Trajectory
from lightning_ppo.errors import CheckpointError
from lightning_ppo.rollout.group_codec import encode_group
from lightning_ppo.rollout.prompts import PromptSet
from lightning_ppo.rollout.restore import RestorePlan, plan_restore
from lightning_ppo.rollout.saved_rollouts import PendingDraw, SavedRollouts, decode_rollouts, encode_rollouts
from lightning_ppo.rollout.stream import PromptStream
from lightning_ppo.rollout.windows import VersionWindow
from lightning_ppo.testing import char_tokenizer, make_group, make_trajectory

G = 2
PROMPTS = PromptSet([{"prompt": "^a="} for _ in range(60)], char_tokenizer(), 8)


def group(draw: int, target: int | None = None, version: int | Sequence[int] = 5, size: int = G) -> PromptGroup:
    """Build a group whose trajectories have these versions; several: token by token (three tokens each)."""
    versions = [version] * 3 if isinstance(version, int) else list(version)
    whole = make_group(draw, size=size, version=versions[0], target_step=target)
    rows = [dataclasses.replace(row, policy_versions=torch.tensor(versions)) for row in whole.trajectories]
    return dataclasses.replace(whole, trajectories=tuple(rows), end_version=versions[-1])


def sibling(draw: int, index: int, version: int = 5) -> Trajectory:
    return make_trajectory(f"draw{draw}_g{index}", version=version)


def pending(draw: int, target: int | None = None, version: int = 5, **finished: int) -> PendingDraw:
    """Build a draw in flight; `g1=3`: trajectory 1 is finished, version 3."""
    done = {int(name[1:]): sibling(draw, int(name[1:]), at) for name, at in finished.items()}
    return PendingDraw(draw, draw, target, version, done)


def plan(
    saved: Sequence[PromptGroup] = (),
    journal: Sequence[PromptGroup] = (),
    in_flight: Sequence[PendingDraw] = (),
    *,
    done: Iterable[int] = (),
    **settings: Any,
) -> RestorePlan:
    defaults: dict[str, Any] = {
        "ppo_step": 5,
        "policy_version": 5,
        "window": VersionWindow(1, 1),
        "is_on_policy": False,
        "mode": "fill",
        "groups_per_step": 2,
        "capacity": 6,
        "group_size": G,
    }
    return plan_restore(saved, journal, in_flight, is_done=set(done).__contains__, **(defaults | settings))


def ready_of(result: RestorePlan) -> list[tuple[int, int | None]]:
    return [(item.draw, item.target_step) for item in result.ready]


def pending_of(result: RestorePlan) -> list[tuple[int, int | None, int, list[int]]]:
    return [(item.draw, item.target_step, item.start_version, sorted(item.finished)) for item in result.pending]


# name -> arguments, expected ready, expected pending
TABLE: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "nothing saved": ({}, [], []),
    "all is kept": (
        {"saved": [group(0, 5), group(1, 5, 4)], "in_flight": [pending(2, 6)]},
        [(0, 5), (1, 5)],
        [(2, 6, 5, [])],
    ),
    "trained and skipped draws are out": (
        {"saved": [group(0, 5)], "journal": [group(1, 5)], "in_flight": [pending(2, 5)], "done": [0, 1, 2]},
        [],
        [],
    ),
    "a target that passed is out, its draw gets a new one": (
        {"saved": [group(0, 4)], "journal": [group(1, 4)], "in_flight": [pending(2, 4)]},
        [],
        [],
    ),
    "the journal finishes what was in flight": (
        {"journal": [group(2, 5), group(3, 6)], "in_flight": [pending(2, 5), pending(3, 6)]},
        [(2, 5), (3, 6)],
        [],
    ),
    "the journal brings what was drawn after the checkpoint": ({"journal": [group(7, 6)]}, [(7, 6)], []),
    "one token of a newer policy is too many": (
        {"saved": [group(0, 5, (4, 5, 6))], "journal": [group(1, 5, (5, 5, 6))], "in_flight": [pending(1, 5)]},
        [],
        [(0, 5, 5, []), (1, 5, 5, [])],
    ),
    "newer groups of the journal alone are drawn again": ({"journal": [group(7, 6, 6)]}, [], []),
    "a newer record does not hide the allowed one before it": (
        {"journal": [group(2, 5, 4), group(2, 5, 6)], "in_flight": [pending(2, 5)]},
        [(2, 5)],
        [],
    ),
    "the checkpoint knows the target better than the journal": (
        {"journal": [group(2, 7)], "in_flight": [pending(2, 5)]},
        [(2, 5)],
        [],
    ),
    "too old for its own step, though not for this one": (
        {"saved": [group(0, 5, 4), group(2, 6, 4), group(3, 6, 5)]},
        [(0, 5), (3, 6)],
        [(2, 6, 5, [])],
    ),
    "the oldest token counts": ({"saved": [group(0, 5, (3, 5, 5))]}, [], [(0, 5, 5, [])]),
    "unstamped: too old for the present step": (
        {"saved": [group(0, None, 3), group(1, None, 4)], "journal": [group(2, None, 3)]},
        [(1, None)],
        [(0, None, 5, []), (2, None, 5, [])],
    ),
    "frozen versions of the warm-up do not count": (
        {
            "saved": [group(0, 5, 0)],
            "in_flight": [pending(1, 5, 0, g0=1)],
            "window": VersionWindow(1, 1, warmup_steps=4, warmup_lead=4),
        },
        [(0, 5)],
        [(1, 5, 0, [0])],
    ),
    "but end with it": (
        {"saved": [group(0, 6, 0)], "window": VersionWindow(1, 1, warmup_steps=4, warmup_lead=4)},
        [],
        [(0, 6, 5, [])],
    ),
    "on policy nothing of an older one is kept": (
        {
            "saved": [group(0, 5), group(1, 5, 4)],
            "journal": [group(2, 5, (4, 5, 5))],
            "in_flight": [pending(3, 5, 4, g0=4, g1=5)],
            "window": VersionWindow(0, 1),
            "is_on_policy": True,
            "groups_per_step": 4,
        },
        [(0, 5)],
        [(1, 5, 5, []), (2, 5, 5, []), (3, 5, 4, [1])],
    ),
    "on policy, unstamped: neither": (
        {"saved": [group(0), group(1, None, 4)], "window": VersionWindow(0, 1), "is_on_policy": True},
        [(0, None)],
        [(1, None, 5, [])],
    ),
    "on policy the frozen versions of the warm-up are one": (
        {"saved": [group(0, 5, 1)], "window": VersionWindow(0, 1, warmup_steps=5), "is_on_policy": True},
        [(0, 5)],
        [],
    ),
    "finished siblings are kept with their start version": (
        {"in_flight": [pending(2, 5, 4, g1=4)]},
        [],
        [(2, 5, 4, [1])],
    ),
    "siblings too old or too new are generated again": (
        {"in_flight": [pending(1, 5, 3, g0=3), pending(2, 5, 3, g0=3, g1=5), pending(3, 6, 6, g0=6)]},
        [],
        [(1, 5, 5, []), (2, 5, 3, [1]), (3, 6, 5, [])],
    ),
    "never more groups than a step takes": (
        {"journal": [group(1, 5), group(0, 5)], "in_flight": [pending(2, 5), pending(4, 6)]},
        [(0, 5)],
        [(2, 5, 5, []), (4, 6, 5, [])],
    ),
    "drop_incomplete generates the rest of a step's groups again too": (
        {
            "saved": [group(0, 5), group(2, 6), group(3, 6)],
            "in_flight": [pending(1, 5, 4, g0=4)],
            "mode": "drop_incomplete",
        },
        [(2, 6), (3, 6)],
        [(0, 5, 5, []), (1, 5, 5, [])],
    ),
    "staleness comes before completeness": (
        {"saved": [group(2, 6, 4), group(3, 6, 5)], "mode": "drop_incomplete"},
        [],
        [(2, 6, 5, []), (3, 6, 5, [])],
    ),
    "unstamped drop_incomplete keeps whole batches": (
        {"saved": [group(draw) for draw in range(5)], "mode": "drop_incomplete"},
        [(draw, None) for draw in range(4)],
        [(4, None, 5, [])],
    ),
    "none keeps nothing": (
        {"saved": [group(0, 5)], "journal": [group(1, 5)], "in_flight": [pending(2, 5)], "mode": "none"},
        [],
        [],
    ),
    "a lower lead does not dispatch beyond its gate": (
        {
            "saved": [group(4, 7)],
            "in_flight": [pending(2, 5), pending(3, 6), pending(5, 7)],
            "window": VersionWindow(0, 2),
        },
        [(4, 7)],
        [(2, 5, 5, [])],
    ),
    "a smaller buffer keeps low targets": (
        {"saved": [group(2, 6), group(0, 5)], "in_flight": [pending(1, 5), pending(3, 6)], "capacity": 3},
        [(0, 5), (2, 6)],
        [(1, 5, 5, [])],
    ),
    "with room for what earlier steps lack": (
        {"saved": [group(1, 5), group(2, 6), group(3, 6)], "capacity": 3},
        [(1, 5), (2, 6)],
        [],
    ),
    "unstamped: the oldest draws": (
        {"saved": [group(9), group(1)], "in_flight": [pending(4)], "capacity": 2},
        [(1, None)],
        [(4, None, 5, [])],
    ),
    "groups of another size are generated again": (
        {"journal": [group(2, 5, size=3), group(3, 6, size=3)], "in_flight": [pending(2, 5)]},
        [],
        [(2, 5, 5, [])],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_rules(case: str) -> None:
    arguments, ready, again = TABLE[case]
    result = plan(**arguments)
    assert (ready_of(result), pending_of(result)) == (ready, again)


def test_the_last_allowed_record_of_a_draw_wins() -> None:
    records = [
        dataclasses.replace(group(2, 5, version), generation_s=float(number))
        for number, version in enumerate((5, 4, 5, 6))
    ]
    saved = dataclasses.replace(group(2, 5), generation_s=9.0)
    assert plan([saved], records).ready[0].generation_s == 2.0
    assert plan([saved], records[3:]).ready[0].generation_s == 9.0


# Pitfall 98: what is finished at the kill is what is short.
@pytest.mark.parametrize("mode", ["fill", "drop_incomplete"])
def test_the_first_step_after_a_resume_consists_of_the_prompts_it_was_drawn_with(mode: str) -> None:
    lengths = {draw: 3 + 10 * (draw % 3 == 0) for draw in range(12)}
    short = [draw for draw in range(12) if lengths[draw] == 3]
    result = plan(
        saved=[group(draw, 5 + draw // 6) for draw in short],
        in_flight=[pending(draw, 5 + draw // 6) for draw in range(12) if draw not in short],
        mode=mode,
        groups_per_step=6,
        capacity=18,
    )
    draws = {item.draw: item.target_step for item in (*result.ready, *result.pending)}
    assert draws == {draw: 5 + draw // 6 for draw in range(12)}
    assert sum(lengths[draw] for draw, target in draws.items() if target == 5) == 6 * 3 + 2 * 10
    # nothing that was fast is kept from a step that was not complete
    assert len(result.ready) == (len(short) if mode == "fill" else 0)


@st.composite
def situations(draw: Any) -> dict[str, Any]:
    stamped = draw(st.booleans())
    warmup = draw(st.integers(0, 4))
    age = draw(st.integers(0, 3))
    lead = draw(st.none() | st.integers(age, 5)) if warmup else None
    window = VersionWindow(draw(st.integers(0, age)), age, warmup, lead)
    step = draw(st.integers(0, 8))
    target = st.integers(max(0, step - 1), step + 4) if stamped else st.none()
    version = st.integers(0, step + 2)
    numbers = st.integers(0, 19)

    def one() -> st.SearchStrategy[PromptGroup]:
        tokens = st.lists(version, min_size=3, max_size=3).map(sorted)
        return st.builds(group, numbers, target, tokens, st.sampled_from([G, G, G, 3]))

    saved = {item.draw: item for item in draw(st.lists(one(), max_size=8)) if len(item.trajectories) == G}
    flying = st.builds(pending, numbers, target, version, g0=version, g1=version) | st.builds(
        pending, numbers, target, version
    )
    in_flight = {item.draw: item for item in draw(st.lists(flying, max_size=8)) if item.draw not in saved}
    per_step = draw(st.integers(1, 3))
    return {
        "saved": list(saved.values()),
        "journal": draw(st.lists(one(), max_size=10)),
        "in_flight": list(in_flight.values()),
        "done": draw(st.sets(numbers, max_size=6)),
        "ppo_step": step,
        "policy_version": step,
        "window": window,
        "mode": draw(st.sampled_from(["fill", "fill", "drop_incomplete", "none"])),
        "groups_per_step": per_step,
        "capacity": draw(st.integers(per_step, 12)),
    }


@settings(deadline=None, max_examples=120)
@given(situations())
def test_no_draw_is_lost_and_every_bound_holds(situation: dict[str, Any]) -> None:
    result = plan(**situation)
    step, window = situation["ppo_step"], situation["window"]
    items = [*result.ready, *result.pending]
    # every draw that is not done comes up exactly once: restored, or from the stream
    stream = PromptStream(7, seed=0)
    trained = sorted(situation["done"])
    for draw in trained:
        stream.take(draw)
    train(stream.ledger, trained)
    resumed = PromptStream(7, seed=0)
    resumed.load_state_dict(stream.state_dict())
    for item in items:
        resumed.take(item.draw)
    coming = [item.draw for item in items] + [resumed.next_draw() for _ in range(25 - len(items))]
    assert len(coming) == len(set(coming))
    assert set(range(20)) - set(trained) <= set(coming)
    assert not set(coming) & set(trained)
    assert len(items) <= situation["capacity"]
    targets = [item.target_step for item in items if item.target_step is not None]
    for target in set(targets):
        assert step <= target
        assert targets.count(target) <= situation["groups_per_step"]
    for item in result.ready:
        assert item.newest_version <= situation["policy_version"]
        trained_at = step if item.target_step is None else item.target_step
        assert window.policy_age(trained_at, item.oldest_version) <= window.max_age
        assert len(item.trajectories) == G
    for waiting in result.pending:
        trained_at = step if waiting.target_step is None else waiting.target_step
        assert waiting.start_version <= situation["policy_version"]
        assert trained_at <= situation["policy_version"] + window.lead(situation["policy_version"])
        for row in waiting.finished.values():
            assert int(row.policy_versions.max()) <= situation["policy_version"]
            assert window.policy_age(trained_at, int(row.policy_versions.min())) <= window.max_age
    # steps that come first can always be completed: the later ones leave room for them
    for target in set(targets):
        lacking = sum(situation["groups_per_step"] - targets.count(before) for before in range(step, target))
        below = sum(before <= target for before in targets)
        assert below + lacking <= situation["capacity"]


@settings(deadline=None, max_examples=50)
@given(situations())
def test_the_plan_does_not_depend_on_the_order_of_what_was_saved(situation: dict[str, Any]) -> None:
    turned = situation | {"saved": situation["saved"][::-1], "in_flight": situation["in_flight"][::-1]}
    one, other = plan(**situation), plan(**turned)
    assert (ready_of(one), pending_of(one)) == (ready_of(other), pending_of(other))


def rollouts() -> dict[str, Any]:
    ready = [group(4, 5), group(1, 5, 4)]
    flying = [pending(2, 6, 4, g1=4), pending(3, None)]
    return encode_rollouts(ready, flying, PROMPTS, G, [["a", 4], ["b", None]])


def decode(state: Any, prompts: PromptSet = PROMPTS, size: int = G, row_of: Callable[[int], int] = int) -> Any:
    return decode_rollouts(state, prompts, size, row_of)


def test_rollouts_go_through_a_checkpoint_with_weights_only() -> None:
    file = io.BytesIO()
    torch.save(rollouts(), file)
    file.seek(0)
    found = decode(torch.load(file, weights_only=True))
    assert [encode_group(item) for item in found.ready] == [encode_group(group(4, 5)), encode_group(group(1, 5, 4))]
    assert pending_of(RestorePlan((), found.in_flight)) == [(2, 6, 4, [1]), (3, None, 5, [])]
    assert found.in_flight[0].finished[1].sample_id == "draw2_g1"
    assert found.lineage == [["a", 4], ["b", None]]


def test_no_rollouts_are_rollouts_too() -> None:
    assert decode(encode_rollouts([], [], PROMPTS, G)) == SavedRollouts()


def refuse(state: Any, match: str, **arguments: Any) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        decode(state, **arguments)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("key", sorted(rollouts()))
def test_a_missing_key_is_refused(key: str) -> None:
    state = rollouts()
    del state[key]
    refuse(state, f"damaged: they lack {key}")


@pytest.mark.parametrize("key", sorted(rollouts().keys() - {"payload", "checksum"}))
def test_any_changed_value_is_refused(key: str) -> None:
    state = rollouts()
    state[key] = [*state[key], 0] if isinstance(state[key], list) else state[key] + 1
    refuse(state, "their checksum is wrong")


def test_any_changed_byte_of_the_payload_is_refused() -> None:
    for place in range(0, len(rollouts()["payload"]), 7):
        state = rollouts()
        state["payload"][place] ^= 1
        refuse(state, "their checksum is wrong")
    state = rollouts()
    refuse(state | {"payload": state["payload"][:-1]}, "their checksum is wrong")
    refuse(state | {"payload": [1, 2]}, "their payload is not a uint8 tensor")
    refuse(None, "they lack checksum")


def signed(**changes: Any) -> dict[str, Any]:
    """Change values under a checksum that fits: what a faulty writer would leave."""
    from lightning_ppo.rollout import saved_rollouts

    state = rollouts() | changes
    plain = {key: value for key, value in state.items() if key not in ("payload", "checksum")}
    return state | {"checksum": saved_rollouts._checksum(plain, state["payload"].numpy().tobytes())}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": 9}, "have format 9, not 1"),
        ({"group_size": 3}, "num_generations_per_prompt=2 differs from the saved rollouts' 3"),
        ({"draws": [4, 1, 2]}, "their columns differ in length"),
        ({"draws": [4, 1, 2, 4]}, "a draw stands there twice"),
        ({"draws": [1, 4, 2, 3]}, "draw 1 has the payload of draw 4"),
        ({"draws": (4, 1, 2, 3)}, "a column is not a list"),
        ({"targets": [5, 6, 6, None]}, "draw 1 has the payload"),
        ({"targets": [5, 5, -1, None]}, "negative or no whole number"),
        ({"start_versions": [5, 4, True, 5]}, "negative or no whole number"),
        ({"start_versions": [5, 3, 4, 5]}, "draw 1 has the payload"),
        ({"sizes": [1, 1, 1, 1]}, "their payload has"),
        ({"lineage": ["a"]}, "their lineage is no list of pairs"),
        ({"num_ready": 5}, "their payload has"),
        ({"num_ready": 1}, "saved rollout is damaged"),
    ],
)
def test_what_does_not_fit_together_is_refused_even_with_a_right_checksum(changes: dict[str, Any], match: str) -> None:
    refuse(signed(**changes), match)


def test_groups_and_siblings_beyond_the_group_size_are_refused() -> None:
    refuse(encode_rollouts([group(4, 5, size=3)], [], PROMPTS, G), "draw 4 has 3 of 2 trajectories")
    refuse(encode_rollouts([], [pending(2, 5, g2=5)], PROMPTS, G), r"draw 2 has trajectories \[2\] of 2")


def test_rows_of_other_draws_or_of_no_prompt_are_refused() -> None:
    refuse(rollouts(), "row 4 instead of 5", row_of=lambda draw: draw + 1)
    fewer = PromptSet([{"prompt": "^a="}] * 2, char_tokenizer(), 8)
    refuse(rollouts(), "is of row 4, the data set has 2", prompts=fewer)
