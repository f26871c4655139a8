import random

import numpy as np
import pytest

from lightning_ppo.rollout.local.packing import PromptPacker


def _prompts(count: int, longest: int, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    lengths = [rng.choice((2, 3, 9, 17, 18, rng.randint(2, longest))) for _ in range(count)]
    return [tuple(rng.randrange(1, 1000) for _ in range(length)) for length in lengths]


@pytest.mark.parametrize("slots", [1, 20, 64, 128])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
@pytest.mark.parametrize("longest", [8, 40, 200])
def test_every_prompt_is_laid_out_once_and_its_copies_lead_back(slots, count, longest) -> None:
    prompts = _prompts(count, longest, seed=count)
    packs = PromptPacker(slots).pack(prompts)
    assert sorted(prompt for pack in packs for prompt in pack.prompts) == sorted(prompts)
    for pack in packs:
        used = np.zeros(len(pack.token_ids), dtype=int)
        padded = np.split(pack.sources, np.cumsum([count * width for count, width in pack.calls])[:-1])
        assert [len(part) for part in padded] == [count * width for count, width in pack.calls]
        for prompt, start in zip(pack.prompts, pack.starts, strict=True):
            known = len(prompt) - 1
            rows = np.arange(start, start + known)
            used[rows] += 1
            assert tuple(pack.token_ids[rows]) == prompt[:-1]
            assert pack.positions[rows].tolist() == list(range(known))
            # Where the rows' results come from is where their copies went, at the start of a padded prompt.
            assert (pack.sources[pack.targets[rows]] == rows).all()
            assert (np.diff(pack.targets[rows]) == 1).all()
            ends = np.cumsum([size for n, width in pack.calls for size in [width] * n])
            first = int(np.searchsorted(ends, pack.targets[start], side="right"))
            end = int(ends[first])
            assert pack.targets[start] == (ends[first - 1] if first else 0)
            # The padding repeats the prompt's own last token.
            assert (pack.sources[pack.targets[start] + known : end] == start + known - 1).all()
        assert used.max() == 1
        assert (pack.token_ids[used == 0] == 0).all()


@pytest.mark.parametrize("slots", [1, 20, 128])
@pytest.mark.parametrize("length", [2, 17, 18, 33, 60, 65, 66, 120])
def test_the_shapes_a_prompt_goes_through_do_not_depend_on_the_others(slots, length) -> None:
    packer = PromptPacker(slots)
    prompt = tuple(range(length))
    (alone,) = packer.pack([prompt])
    (call,) = alone.calls
    for seed in range(20):
        others = _prompts(30, 100, seed)
        (pack,) = [pack for pack in packer.pack([*others[:15], prompt, *others[15:]]) if prompt in pack.prompts]
        assert len(pack.token_ids) == len(alone.token_ids)
        width = call[1]
        assert [n for n, w in pack.calls if w == width] == [call[0]]
        members = [p for p in pack.prompts if -(-(len(p) - 1) // 16) * 16 == width]
        assert prompt in members
        assert len(members) <= call[0]


def test_short_prompts_share_a_pack() -> None:
    prompts = [(i, *range(10)) for i in range(11)]
    assert [len(pack.prompts) for pack in PromptPacker(128).pack(prompts)] == [6, 5]
    assert len(PromptPacker(128).pack([(i, 1) for i in range(8)])) == 1


def test_few_slots_make_small_packs() -> None:
    assert [PromptPacker(slots).least_rows for slots in (1, 16, 17, 48, 64, 1000)] == [16, 16, 32, 48, 64, 64]
